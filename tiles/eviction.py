"""Which tiles should leave a device's memory, and after which task, where a program needs more of it than there is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence

from .tasklist import Task, TaskList, Tile

FULL = 0.97  # of a device's memory: tiles that take more have no room for all of them
SHARE = 7 / 8  # of a device's memory that tiles may take in turn; the rest is for those on their way
MOST_ROUNDS = 12


def room_in_turn(lists: Sequence[TaskList], memory: float) -> float:
    """Bytes of so much memory that tiles of these lists may take in turn; 0: all fit."""
    fit = not _evictions([task for one in lists for task in one.tasks], FULL * memory, first=True)
    return 0 if fit else SHARE * memory


def mark_evictions(lists: Sequence[TaskList], room: float) -> bool:
    """Set `Task.evicts` of resolved lists that one worker runs in turn, again and again; whether any tile has to leave.

    It has `room` bytes, and runs the tasks in their order. As in Belady's algorithm (IBM Systems Journal 5(2), 1966)
    the tile whose next use is the furthest leaves, and it does so when its last use before that has ended: by the time
    that its room is wanted it is written back. Tiles that outlive their list are the same in all lists by tensor and
    index.
    """
    tasks = [task for one in lists for task in one.tasks]
    uses = _evictions(tasks, room, first=False)
    for task in tasks:
        task.evicts = []
    for number, tile in uses:
        tasks[number].evicts.append(tile)
    return bool(uses)


def _evictions(tasks: list[Task], room: float, first: bool) -> list[tuple[int, Tile]]:
    """After which task which tile leaves. `first`: one of them, if any, is enough."""
    if sum({a.tile.key: a.tile.bytes for t in tasks for a in t.accesses}.values()) <= room:
        return []
    count = len(tasks)
    used = [{a.tile.key: a.tile for a in t.accesses} for t in tasks]
    after = _next_uses(used, [{tile.key for tile in t.clears} for t in tasks])
    held: dict[Hashable, int] = {}  # the turn of its last use
    by_use: list[tuple[int, int, Hashable]] = []  # the furthest first
    order, taken = itertools.count(), 0
    marked: set[tuple[int, Hashable]] = set()
    before = 0
    # In the first round memory fills. What is marked later leaves in every round, until a round finds no more to mark.
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
                if first:
                    return [(last % count, used[last % count][key])]
        for entry in own:
            heapq.heappush(by_use, entry)
        gone = [*(tile.key for tile in task.frees), *(key for key in tiles if (number, key) in marked)]
        for key in gone:
            taken -= tiles[key].bytes if held.pop(key, None) is not None else 0
    uses = ((number, key) for number, tiles in enumerate(used) for key in tiles)
    return [(number, used[number][key]) for number, key in uses if (number, key) in marked]


def _next_uses(used: list[dict[Hashable, Tile]], cleared: list[set[Hashable]]) -> list[dict[Hashable, int]]:
    """Of each task and each of its tiles: how many tasks later it is used again, or goes, in this round or the next."""
    found: list[dict[Hashable, int]] = [{} for _ in used]
    upcoming: dict[Hashable, int] = {}
    for turn in reversed(range(2 * len(used))):
        for key in used[turn % len(used)]:
            if turn < len(used):
                found[turn][key] = upcoming[key] - turn
            upcoming[key] = turn
        upcoming.update(dict.fromkeys(cleared[turn % len(used)], turn))
    return found
