"""Dependencies between tasks, derived from the modes of their accesses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

UNORDERED = ("R", "COMMUTE", "REDUX")  # consecutive accesses of one of these modes do not wait for each other


class TileUse(NamedTuple):
    """An access of a task: key of the tile, resolved mode, and whether the kernel adds to the tile's contents."""

    tile: Hashable
    mode: str
    adds: bool = False


def dependencies(tasks: Iterable[Sequence[TileUse]]) -> list[list[int]]:
    """Return the direct predecessors of each task, in submission order, under StarPU's sequential consistency."""
    # {tile: (mode of the last accesses, the tasks with these accesses, the predecessors of these tasks)}
    last: dict[Hashable, tuple[str, list[int], list[int]]] = {}
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
    """Return the chain of dependent tasks with the longest total time, first task first."""
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
