"""Covering arrays: few combinations of parameters in which each pair of values of two parameters occurs.

Also the choice of the few cases of a parametrized test that "make test" runs, see `spread` and conftest.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return combinations of one value per parameter, as numbers, with each pair of values of two parameters.

    Greedy: the next combination has the most pairs that no combination before it has.

    Args:
        sizes: Number of values of each parameter.
    """

    def pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    rest = list(itertools.product(*map(range, sizes)))
    missing, chosen = set().union(*map(pairs, rest)), []
    while missing:
        best = max(rest, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return sorted(chosen)


def pairwise(**values: Sequence[Any]) -> Callable[[Any], Any]:
    """Parametrize a test over three or more parameters, {name: values}, so that each pair of values occurs."""
    rows = covering([len(of) for of in values.values()])
    params = [tuple(of[number] for of, number in zip(values.values(), row, strict=True)) for row in rows]
    ids = ["-".join(map(str, row)) for row in params]
    return pytest.mark.parametrize(tuple(values), params, ids=ids)


def spread(cases: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Return the numbers of `count` of these cases, {parameter: value}, in which as many values as possible occur.

    Greedy: the next case has the most values that no case before it has, and of equals the first is taken.
    """

    def values(case: Mapping[str, Any]) -> set[Hashable]:
        plain = (bool, int, float, str, type(None))
        return {(name, value if isinstance(value, plain) else id(value)) for name, value in case.items()}

    of, seen, chosen = [values(case) for case in cases], set[Hashable](), list[int]()
    while len(chosen) < min(count, len(cases)):
        best = max(set(range(len(of))).difference(chosen), key=lambda number: (len(of[number] - seen), -number))
        seen |= of[best]
        chosen.append(best)
    return sorted(chosen)
