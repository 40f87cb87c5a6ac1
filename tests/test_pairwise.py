"""The covering arrays of pairwise.py."""

import itertools
from pathlib import Path

import pytest
from pairwise import covering, spread

pytest_plugins = ["pytester"]


def test_each_pair_occurs() -> None:
    for sizes in ((3, 4, 3), (2, 2, 2, 2), (7, 5, 2), (1, 3, 2)):
        rows = covering(sizes)
        for (a, size), (b, other) in itertools.combinations(enumerate(sizes), 2):
            assert len({(row[a], row[b]) for row in rows}) == size * other
        assert len(rows) < 2 * max(a * b for a, b in itertools.combinations(sizes, 2))


def test_as_many_values_as_possible_occur() -> None:
    cases = [{"name": name, "tiles": tiles} for name in "abc" for tiles in (None, 1, 2)]
    assert spread(cases, 3) == [0, 4, 8]  # each name, and each of the tiles
    assert spread(cases, 4) == [0, 1, 4, 8] and spread(cases, 20) == [*range(9)] and spread(cases, 0) == []


def test_few_cases_are_not_long(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNTILE_TORTURE", raising=False)
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makepyfile("""
        import pytest

        @pytest.mark.few(2)
        @pytest.mark.parametrize("b", "xy")
        @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.long), 3])
        def test_some(a, b):
            pass

        def test_other():
            pass
    """)
    few, long = ["-m", "not long"], ["-m", "long"]
    for options, torture, count in ((few, "", 3), (long, "", 4), (few, "1", 5), (long, "1", 2)):
        monkeypatch.setenv("NNTILE_TORTURE", torture)
        assert pytester.inline_run("-p", "no:cacheprovider", *options).countoutcomes() == [count, 0, 0]
