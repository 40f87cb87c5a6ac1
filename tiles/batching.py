"""Groups of tasks that a worker runs as one: for programs whose tasks are short beside the runtime's own time.

On a CUDA worker a task whose predecessor has just ended waits about 10 us for StarPU to notice it; inside a group the
stream orders the kernels by itself.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .tasklist import Access, Task, TaskList, Tile

GROUP_SECONDS = 1.5e-3  # how long a group may last; 11 groups a step are no faster than 117, and hold more memory
MOST_PARTS, MOST_TILES = 32, 160
EXPORT_SECONDS = 200e-6  # how much longer a group may last than its first task that another worker waits for
TINY = 15e-6  # seconds: independent tasks as short as this share a group


def grouped(
    tasks: TaskList, flop_s: float, bytes_s: float, most_seconds: float, most_bytes: float = math.inf,
    alone: bool = False,
) -> TaskList:  # fmt: skip
    """A resolved list with the same tasks, in the same order on every tile, some of them as parts of groups.

    A task joins the newest group of its worker, if that is known (`alone`: there is one worker only), or else the group
    that ends its dependencies; but only if it depends on nothing of other workers that the group did not wait for
    already, nor the group on what the task does not: what could run side by side still can. (Where workers are not
    known a tiny task may wait.) A group that has made what another worker waits for ends soon. flop_s, bytes_s: of a
    worker, to estimate durations; no group lasts longer than most_seconds, or has more than most_bytes of tiles.
    """
    groups: list[list[Task]] = []
    held: list[_Held] = []
    seconds: list[float] = []
    before: list[int] = []  # bit mask of the groups that one waits for, directly or not
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    exported = _exported(tasks.tasks)
    until: list[float] = []  # how long a group may last
    newest: dict[int, int] = {}  # the newest group of each worker, of tiny tasks where workers are not known
    own: dict[int, int] = {}  # bit mask of the groups of each worker that is known
    for position, task in enumerate(tasks.tasks):
        direct = set()
        for access in task.accesses:
            tile = id(access.tile)
            if tile in writer:
                direct.add(writer[tile])
            if access.mode != "R":
                direct.update(readers.get(tile, []))
        waits = 0
        for group in direct:
            waits |= before[group] | 1 << group
        time = max(task.flop / flop_s, task.bytes / bytes_s)
        latest = max(direct, default=-1)
        chosen = None
        known, mine = alone or task.worker >= 0, own.get(task.worker, 0)
        for number in (newest.get(task.worker) if known or time < TINY else None, latest):
            if number is None or number < max(latest, 0) or waits & ~(before[number] | 1 << number | mine):
                continue
            if (known or time >= TINY) and before[number] & ~(waits | mine):  # it would wait for what others do
                continue
            if seconds[number] + time <= until[number] and _fits(groups[number], held[number], task, most_bytes):
                chosen = number
                break
        if chosen is None:
            chosen = len(groups)
            groups.append([])
            held.append(_Held())
            seconds.append(0.0)
            until.append(most_seconds)
            before.append(waits)
            if known:
                own[task.worker] = own.get(task.worker, 0) | 1 << chosen
            if known or time < TINY:
                newest[task.worker] = chosen
        before[chosen] |= waits & ~(1 << chosen)
        groups[chosen].append(task)
        held[chosen].add(task)
        seconds[chosen] += time
        if position in exported:
            until[chosen] = min(until[chosen], seconds[chosen] + EXPORT_SECONDS)
        for access in task.accesses:
            tile = id(access.tile)
            if access.mode == "R":
                readers.setdefault(tile, []).append(chosen)
            else:
                writer[tile], readers[tile] = chosen, []
    result = TaskList(tasks.policy, tasks.initialised, tasks.live)
    result.tasks = [_as_one(group) for group in groups]
    # A tile's last reader may have joined a group that runs before another reader's.
    last = {id(access.tile): number for number, task in enumerate(result.tasks) for access in task.accesses}
    frees: list[list[Tile]] = [[] for _ in groups]
    for gone in (gone for task in tasks.tasks for gone in task.frees):
        frees[last[id(gone)]].append(gone)
    result.tasks = [replace(task, frees=tiles) for task, tiles in zip(result.tasks, frees, strict=True)]
    return result


def _exported(tasks: list[Task]) -> set[int]:
    """Tasks that make what another worker uses next, by their place in the list."""
    maker: dict[int, int] = {}
    found: set[int] = set()
    for position, task in enumerate(tasks):
        for access in task.accesses:
            before = maker.get(id(access.tile))
            if before is not None and tasks[before].worker != task.worker:
                found.add(before)
        maker.update((id(access.tile), position) for access in task.accesses if access.mode != "R")
    return found


class _Held:
    """Tiles of a group."""

    def __init__(self) -> None:
        self.accesses, self.bytes, self.plain = 0, 0, True
        self.tiles: set[int] = set()

    def more(self, task: Task) -> int:
        """Bytes that the task would add."""
        new = {id(a.tile): a.tile for a in task.accesses if id(a.tile) not in self.tiles}
        return sum(tile.bytes for tile in new.values())

    def add(self, task: Task) -> None:
        self.bytes += self.more(task)
        self.accesses += len(task.accesses)
        self.plain &= _plain(task)
        self.tiles.update(id(a.tile) for a in task.accesses)


def _plain(task: Task) -> bool:
    return all(a.mode in ("R", "W", "RW") for a in task.accesses)


def _fits(group: list[Task], held: _Held, task: Task, most_bytes: float) -> bool:
    if len(group) >= MOST_PARTS or held.accesses + len(task.accesses) > MOST_TILES or task.clears:
        return False
    return held.plain and _plain(task) and group[0].worker == task.worker and held.bytes + held.more(task) <= most_bytes


def _as_one(tasks: list[Task]) -> Task:
    if len(tasks) == 1:
        return tasks[0]
    merged: dict[int, Access] = {}
    for access in (a for t in tasks for a in t.accesses):
        seen = merged.setdefault(id(access.tile), Access(access.tile, access.mode))
        if access.mode != "R" and seen.mode == "R":
            seen.mode = "RW"
    name, dot, phase = tasks[0].op.rpartition(".")
    if phase not in ("backward", "update"):
        name, dot, phase = tasks[0].op, "", ""
    return Task(
        "group", list(merged.values()), op=f"{name} + {len(tasks) - 1}{dot}{phase}", flop=sum(t.flop for t in tasks),
        priority=max(t.priority for t in tasks), clears=tasks[0].clears, parts=tasks, worker=tasks[0].worker,
    )  # fmt: skip
