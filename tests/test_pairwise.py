"""The covering arrays of pairwise.py."""

import itertools

from pairwise import covering


def test_each_pair_occurs() -> None:
    for sizes in ((3, 4, 3), (2, 2, 2, 2), (7, 5, 2), (1, 3, 2)):
        rows = covering(sizes)
        for (a, size), (b, other) in itertools.combinations(enumerate(sizes), 2):
            assert len({(row[a], row[b]) for row in rows}) == size * other
        assert len(rows) < 2 * max(a * b for a, b in itertools.combinations(sizes, 2))
