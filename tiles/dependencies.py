"""Which tasks wait for which, by the modes of their accesses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

UNORDERED = ("R", "COMMUTE", "REDUX")  # accesses of one of these modes in a row have no order among themselves


class Use(NamedTuple):
    """An access of a task: the tile's key, the resolved mode, whether the kernel adds to what the tile holds."""

    tile: Hashable
    mode: str
    adds: bool = False


def dependencies(tasks: Iterable[Sequence[Use]]) -> list[list[int]]:
    """For each task, in order of submission, the tasks that StarPU's sequential consistency puts directly before it."""
    last: dict[Hashable, tuple[str, list[int], list[int]]] = {}  # mode, tasks of that access, those before them
    result = []
    for number, uses in enumerate(tasks):
        before: set[int] = set()
        for tile, mode, _ in uses:
            group = last.get(tile)
            if group and mode in UNORDERED and group[0] == mode:
                before.update(group[2])
                group[1].append(number)
            else:
                previous = group[1] if group else []
                before.update(previous)
                last[tile] = (mode, [number], previous)
        before.discard(number)
        result.append(sorted(before))
    return result


def critical_path(before: list[list[int]], seconds: Sequence[float]) -> list[int]:
    """The chain of dependent tasks that takes longest, first task first."""
    total, parent = [0.0] * len(before), [-1] * len(before)
    lengths = [float(s) for s in seconds]
    for number, previous in enumerate(before):
        if previous:
            best = max(previous, key=total.__getitem__)
            parent[number], total[number] = best, total[best]
        total[number] += lengths[number]
    path = []
    at = max(range(len(total)), key=total.__getitem__, default=-1)
    while at >= 0:
        path.append(at)
        at = parent[at]
    return path[::-1]
