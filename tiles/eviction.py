"""Planned eviction: which tiles leave a device's memory, and after which task, if a program does not fit into it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence

from .tasklist import Task, TaskList, Tile

FULL = 0.97  # tiles all fit, without a plan, if they need at most this share of a device's memory
SHARE = 7 / 8  # share of a device's memory for the plan's tiles; the rest is for tiles in transfer
MOST_ROUNDS = 12  # bound on the simulated repetitions of the lists


def room_in_turn(lists: Sequence[TaskList], memory: float) -> float:
    """Return how many bytes of `memory` an eviction plan may use for lists that run in turn.

    Returns 0 if all tiles fit and no plan is needed.
    """
    fit = not _evictions([task for one in lists for task in one.tasks], FULL * memory, first_only=True)
    return 0 if fit else SHARE * memory


def mark_evictions(lists: Sequence[TaskList], room: float) -> bool:
    """Set `Task.evicts` for lists that one worker repeats in order. Return whether any tile must leave the memory.

    Belady's algorithm (IBM Systems Journal 5(2), 1966): the tile whose next use is the latest leaves. The tile leaves
    right after its last use before then, so it has been written back when the memory is needed.

    Args:
        lists: resolved lists; persistent tiles with equal keys are the same tile.
        room: bytes of device memory.
    """
    tasks = [task for one in lists for task in one.tasks]
    uses = _evictions(tasks, room, first_only=False)
    for task in tasks:
        task.evicts = []
    for number, tile in uses:
        tasks[number].evicts.append(tile)
    return bool(uses)


def _evictions(tasks: list[Task], room: float, first_only: bool) -> list[tuple[int, Tile]]:
    """Return (task number, tile that leaves after it) pairs; `first_only` stops at the first pair."""
    if sum({a.tile.key: a.tile.bytes for t in tasks for a in t.accesses}.values()) <= room:
        return []
    count = len(tasks)
    used = [{a.tile.key: a.tile for a in t.accesses} for t in tasks]
    after = _next_uses(used, [{tile.key for tile in t.clears} for t in tasks])
    held: dict[Hashable, int] = {}  # tiles in memory, with the turn of their last use
    by_use: list[tuple[int, int, Hashable]] = []  # heap of tiles in memory, the furthest next use first
    order, taken = itertools.count(), 0
    marked: set[tuple[int, Hashable]] = set()
    before = 0
    # Memory fills in the first round. A tile marked in a later round leaves in every round, until a round marks none.
    for turn in range(MOST_ROUNDS * count):
        if turn % count == 0:
            if turn > count and len(marked) == before:
                break
            before = len(marked)
        number = turn % count
        task, tiles = tasks[number], used[number]
        for tile in task.clears:
            taken -= tile.bytes if held.pop(tile.key, None) is not None else 0
        for key, tile in tiles.items():
            taken += 0 if key in held else tile.bytes
            held[key] = turn
            heapq.heappush(by_use, (-turn - after[number][key], next(order), key))
        own = []
        while taken > room and by_use:
            entry = heapq.heappop(by_use)
            upcoming, _, key = entry
            last = held.get(key)
            if last is None or last + after[last % count][key] != -upcoming:
                continue
            if key in tiles:
                own.append(entry)
                continue
            taken -= used[last % count][key].bytes
            del held[key]
            if turn >= count:
                marked.add((last % count, key))
                if first_only:
                    return [(last % count, used[last % count][key])]
        for entry in own:
            heapq.heappush(by_use, entry)
        removed = [*(tile.key for tile in task.frees), *(key for key in tiles if (number, key) in marked)]
        for key in removed:
            taken -= tiles[key].bytes if held.pop(key, None) is not None else 0
    uses = ((number, key) for number, tiles in enumerate(used) for key in tiles)
    return [(number, used[number][key]) for number, key in uses if (number, key) in marked]


def _next_uses(used: list[dict[Hashable, Tile]], cleared: list[set[Hashable]]) -> list[dict[Hashable, int]]:
    """Return for each task and each of its tiles the number of tasks until the tile is used again or discarded."""
    distance: list[dict[Hashable, int]] = [{} for _ in used]
    upcoming: dict[Hashable, int] = {}
    for turn in reversed(range(2 * len(used))):
        for key in used[turn % len(used)]:
            if turn < len(used):
                distance[turn][key] = upcoming[key] - turn
            upcoming[key] = turn
        upcoming.update(dict.fromkeys(cleared[turn % len(used)], turn))
    return distance
