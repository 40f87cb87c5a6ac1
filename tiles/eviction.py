"""Eviction plan and offload: which tiles leave a device's memory, and after which task."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Literal, NamedTuple

from nntile_py.errors import ConfigError

from .task import Task, Tile
from .tasklist import TaskList

FULL = 0.97  # tiles all fit, without a plan, if they need at most this share of a device's memory
SHARE = 7 / 8  # share of a device's memory for the plan's tiles; the rest is for tiles in transfer
MOST_ROUNDS = 12  # bound on the simulated repetitions of the lists
SOON = 32  # an offloaded tile stays in a device's memory if one of the next SOON tasks uses it
Offloaded = Literal["weights", "gradients", "optimizer", "activations"]  # kinds of tensors, as users name them
OFFLOADED: dict[Offloaded, str] = {  # kinds of their tiles
    "weights": "param", "gradients": "grad", "optimizer": "state", "activations": "temp",
}  # fmt: skip
OFFLOAD_WORDS = f"a list of {', '.join(OFFLOADED)}"


def as_offload(value: Any) -> tuple[Offloaded, ...] | None:
    """Return the value of the key `offload` without duplicates, or None if it is not a list of keys of OFFLOADED."""
    kinds = isinstance(value, list | tuple) and all(kind in [*OFFLOADED] for kind in value)
    return tuple(dict.fromkeys(value)) if kinds else None


def check_disk(disk: object, memory: int | None) -> None:
    """Raise ConfigError if `runtime.disk` is given without `runtime.memory`."""
    if disk and memory is None:
        need = "only with runtime.memory, the bytes beyond which tiles go to the disk"
        raise ConfigError(f"runtime.disk: got a disk; allowed: {need}")


def is_planned(gpus: int, cpus: int, disk: object) -> bool:
    """Return whether evictions are planned: the order of all tasks is known, and tiles leave only for main memory."""
    return gpus == 1 and not (cpus or disk)


def share_inside(memory: int, peak: int, planned: bool) -> int:
    """Return how many of the bytes at a step's peak may be in the memory of GPUs. The other bytes are in main memory.

    Args:
        memory: bytes of the GPUs.
        peak: bytes of the step at its peak.
        planned: True: evictions are planned, if tiles do not fit.
    """
    return int(SHARE * memory) if planned and peak > FULL * memory else memory


def room_in_turn(lists: Sequence[TaskList], memory: float) -> float:
    """Return how many bytes of `memory` an eviction plan may use for lists that run one after the other.

    Returns 0 if all tiles fit and no plan is needed.
    """
    fit = not _evictions(_in_turn(lists), FULL * memory, first_only=True)
    return 0 if fit else SHARE * memory


def mark_evictions(lists: Sequence[TaskList], room: float, offload: Collection[Offloaded] = ()) -> bool:
    """Set `Task.evicts` for lists that one worker repeats in order. Return whether any tile must leave the memory.

    Belady's algorithm (IBM Systems Journal 5(2), 1966): the tile whose next use is the latest leaves. The tile leaves
    right after its previous use, so it has been written back before the memory is needed.

    Args:
        lists: resolved lists in the order in which they run; persistent tiles with equal keys are the same tile. A list
            that runs several times occurs several times. A tile that leaves after a task leaves in all of these runs.
        room: bytes of device memory.
        offload: kinds of tensors whose tiles leave between uses even if there is room for them.
    """
    tasks = _in_turn(lists)
    uses = _evictions(tasks, room, first_only=False, offload=offload)
    for task in tasks:
        task.evicts = []
    for number, tile in uses:
        tasks[number].evicts.append(tile)
    return bool(uses)


def _in_turn(lists: Sequence[TaskList]) -> list[Task]:
    """Return the tasks of all lists. Of a list that runs more than twice in a row, two runs show what follows a run."""
    shown = (one for k, one in enumerate(lists) if k < 2 or not one is lists[k - 1] is lists[k - 2])
    return [task for one in shown for task in one.tasks]


def outside_peak(lists: Sequence[TaskList]) -> int:
    """Return the most bytes of tiles that are not in a device's memory at once, if `Task.evicts` is set.

    One worker repeats the lists in order. A tile that leaves after a task counts from the end of this task to its next
    use or to `Task.clears`. The initial values of tiles do not count: they are outside only until their first use.
    """
    tasks = _in_turn(lists)
    outside: dict[Hashable, int] = {}
    taken, peak = 0, 0
    for number in range(2 * len(tasks)):  # the first round only finds the tiles that are outside when a round begins
        task = tasks[number % len(tasks)]
        for tile in (*task.clears, *(a.tile for a in task.accesses)):
            taken -= outside.pop(tile.key, 0)
        if number >= len(tasks):
            peak = max(peak, taken)
        for tile in task.evicts:
            outside[tile.key] = tile.bytes
            taken += tile.bytes
    return peak


class Evicted(NamedTuple):
    """The bytes that a step on one GPU evicts to main memory and fetches again.

    Attributes:
        bytes: the evicted bytes, without the tiles that StarPU chooses.
        dropped: main memory has no room for the tiles of the eviction plan, so StarPU chooses the tiles to evict.
        outside: most bytes that the plan evicts at once, see `outside_peak`.
    """

    bytes: int
    dropped: bool
    outside: int


def evicted(
    lists: Sequence[TaskList], room: float, offload: Collection[Offloaded] = (), at_rest: float = math.inf
) -> Evicted:
    """Return the bytes that a step on one GPU evicts. Sets `Task.evicts` to the tiles that leave the GPU in a run.

    Args:
        room: result of `room_in_turn`.
        offload: as for `mark_evictions`.
        at_rest: bytes of main memory for evicted tiles.
    """
    mark_evictions(lists, room or math.inf, offload)
    outside = outside_peak(lists)
    if dropped := bool(room) and outside > at_rest:
        mark_evictions(lists, math.inf, offload)
    return Evicted(sum(tile.bytes for one in lists for task in one.tasks for tile in task.evicts), dropped, outside)


def _evictions(
    tasks: list[Task], room: float, first_only: bool, offload: Collection[Offloaded] = ()
) -> list[tuple[int, Tile]]:
    """Return (task number, tile) pairs: the tile leaves the memory after the task.

    first_only: True: stop at the first pair.
    """
    fits = sum({a.tile.key: a.tile.bytes for t in tasks for a in t.accesses}.values()) <= room
    if fits and not offload:
        return []
    count, first = len(tasks), dict[int, int]()
    mark_of = [first.setdefault(id(task), number) for number, task in enumerate(tasks)]  # in a later run, of the first
    used = [{a.tile.key: a.tile for a in t.accesses} for t in tasks]
    cleared = [{tile.key for tile in t.clears} for t in tasks]
    after = _next_uses(used, cleared)
    held: dict[Hashable, int] = {}  # {tile in memory: turn of its last use}; turn: tasks simulated before
    by_use: list[tuple[int, int, Hashable]] = []  # heap of tiles in memory, the furthest next use first
    order, taken = itertools.count(), 0
    offloaded = _offloaded(tasks, used, after, cleared, {OFFLOADED[name] for name in offload})
    marked = {(mark_of[number], key) for number, key in offloaded}
    before = 0
    # Each round simulates all tasks once. The first round fills the memory and marks no tile. A mark, a pair (task
    # number, key), holds for all later rounds. The simulation ends with a round that adds no mark.
    for turn in range(0 if fits else MOST_ROUNDS * count):
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
                marked.add((mark_of[last % count], key))
                if first_only:
                    return [(last % count, used[last % count][key])]
        for entry in own:
            heapq.heappush(by_use, entry)
        removed = [*(tile.key for tile in task.frees), *(key for key in tiles if (mark_of[number], key) in marked)]
        for key in removed:
            taken -= tiles[key].bytes if held.pop(key, None) is not None else 0
    uses = ((number, key) for number, tiles in enumerate(used) for key in tiles)
    return [(number, used[number][key]) for number, key in uses if (number, key) in marked]


def _offloaded(
    tasks: Sequence[Task], used: Sequence[dict[Hashable, Tile]], after: Sequence[dict[Hashable, int]],
    cleared: Sequence[set[Hashable]], kinds: Collection[str],
) -> set[tuple[int, Hashable]]:  # fmt: skip
    """Return (task number, key) pairs of the tiles of some kinds that no task uses soon after the task.

    Tiles that are freed or discarded before their next use are left out: their contents are not needed again.
    """
    marked, ends = set(), [0, *itertools.accumulate(len(task.parts) or 1 for task in (*tasks, *tasks))]
    for number, tiles in enumerate(used if kinds else ()):
        freed = {tile.key for tile in tasks[number].frees}
        for key, tile in tiles.items():
            distance = after[number][key]
            between = ends[number + distance] - ends[number + 1]  # tasks
            needed = key not in freed and key not in cleared[(number + distance) % len(used)]
            if needed and between >= SOON and (tile.kind if tile.persistent else "temp") in kinds:
                marked.add((number, key))
    return marked


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
