"""Task batching: several short tasks become one StarPU task, so the runtime's time for a task is spent only once.

On a CUDA worker, StarPU needs about 10 us to notice that a task has ended and to start the next task. Inside a batch,
the CUDA stream orders the kernels without StarPU. A batch of tasks is called a group here; its kernel is "group".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace

from .rank_tasks import SEND, MessageTask
from .task import Access, Task, Tile
from .tasklist import TaskList

GROUP_SECONDS = 1.5e-3  # longest group. A step in 11 longer groups instead of 117 is no faster, and needs more memory
# Enough for an optimizer's 200 tasks. With groups of 32 tasks, the GPU would wait for the host.
MOST_PARTS, MOST_TILES = 256, 1536
# Largest number of tiles of a group if there are several workers. StarPU needs 2 to 3 us to fetch and release a tile,
# and other workers wait meanwhile.
TILES_OF_OTHERS = 96
# If another worker waits for the result of a task, the group ends at most this many seconds after this task.
EXPORT_SECONDS = 200e-6
EXPORT_TIMES = 20  # and at most this many times the task's own length after it, so that a short result is sent soon
TINY = 15e-6  # seconds; independent tasks this short may share a group
SCRATCH_BYTES = 1 << 18  # largest sum of the bytes of a group's scratch tiles


def grouped(
    tasks: TaskList, flop_s: float, bytes_s: float, most_seconds: float, most_bytes: float = math.inf,
    one_worker: bool = False, scratch: bool = True, residents: Collection[Hashable] = (),
) -> TaskList:  # fmt: skip
    """Return a resolved list with the same tasks, in the same order on every tile, some of them as parts of groups.

    A task joins the newest group of its worker, or, where workers are not known, the group of its last predecessor. It
    joins only if this adds no dependency to the task or to the group: tasks that could run in parallel still can. (A
    tiny task without a known worker may wait.) A group with a result that another worker waits for ends soon. Messages
    to and from other ranks stay outside of groups and count as tasks of another worker. Small temporary tiles that only
    one group uses become its scratch tiles, which StarPU does not manage.

    Args:
        flop_s: flop/s of a worker, to estimate durations.
        bytes_s: bytes/s of the worker's memory, to estimate durations.
        most_seconds: estimated seconds of the longest group.
        most_bytes: largest number of bytes of a group's tiles.
        one_worker: there is only one worker.
        scratch: groups may have scratch tiles.
        residents: keys of tiles for which StarPU needs no time, see residents.py. They do not count for `most_bytes`.
    """
    groups = _Groups(most_seconds, most_bytes, one_worker, scratch, residents)
    exported = set() if one_worker else _exported(tasks.tasks)
    for position, task in enumerate(tasks.tasks):
        groups.take(task, max(task.flop / flop_s, task.bytes / bytes_s), position in exported)
    result = TaskList(tasks.policy, tasks.initialised, tasks.live)
    result.tasks = [_as_one(group, held.scratch) for group, held in zip(groups.groups, groups.held, strict=True)]
    # Free a tile in the last group that uses the tile. The last task that uses the tile may be in an earlier group than
    # another reader of the tile. `last` holds the uses before the release: a tile may be used again after its release.
    last: dict[int, int] = {}
    frees: list[list[Tile]] = [[] for _ in groups.groups]
    for task, number in zip(tasks.tasks, groups.chosen, strict=True):
        last.update((id(access.tile), max(number, last.get(id(access.tile), 0))) for access in task.accesses)
        for gone in task.frees:
            if gone not in result.tasks[last[id(gone)]].scratch:
                frees[last[id(gone)]].append(gone)
    result.tasks = [replace(task, frees=tiles) for task, tiles in zip(result.tasks, frees, strict=True)]
    return result


class _Groups:
    """The groups so far, by number. A set of groups is a bit mask."""

    def __init__(
        self, most_seconds: float, most_bytes: float, one_worker: bool, scratch: bool, residents: Collection[Hashable]
    ) -> None:
        self._most_seconds, self._most_bytes, self._one_worker = most_seconds, most_bytes, one_worker
        self._scratch, self._residents = scratch, residents
        self._most_tiles = MOST_TILES if one_worker else TILES_OF_OTHERS
        self.groups: list[list[Task]] = []
        self.chosen: list[int] = []  # number of the group of each task
        self._freed: set[int] = set()  # ids of tiles that a task of some group freed
        self.held: list[_Held] = []
        self._only_user: dict[int, int] = {}  # the group that uses each tile; -1: several groups
        self._seconds: list[float] = []
        self._until: list[float] = []  # largest seconds of each group
        self._before: list[int] = []  # all predecessors of each group, direct or not, as a bit mask
        self._writer: dict[int, int] = {}  # number of the group that wrote each tile last
        self._readers: dict[int, list[int]] = {}
        self._newest: dict[int, int] = {}  # newest group of each worker; where workers are not known, of tiny tasks
        self._own: dict[int, int] = {}  # the groups of each known worker, as a bit mask

    def take(self, task: Task, time: float, exported: bool) -> None:
        """Put the next task of the list into a group; `exported`: another worker waits for the task's result."""
        direct = self._direct(task)
        waits = 0
        for group in direct:
            waits |= self._before[group] | 1 << group
        chosen = self._chosen(task, time, waits, max(direct, default=-1))
        if chosen is None:
            chosen = self._begin(task, time, waits)
        self._before[chosen] |= waits & ~(1 << chosen)
        self.groups[chosen].append(task)
        self.chosen.append(chosen)
        self._freed.update(id(tile) for tile in task.frees)
        self.held[chosen].add(task)
        self._seconds[chosen] += time
        if exported:
            longer = min(EXPORT_SECONDS, EXPORT_TIMES * time)
            self._until[chosen] = min(self._until[chosen], self._seconds[chosen] + longer)
        for access in task.accesses:
            tile = id(access.tile)
            if access.mode == "R":
                self._readers.setdefault(tile, []).append(chosen)
            else:
                self._writer[tile], self._readers[tile] = chosen, []
            if self._only_user.setdefault(tile, chosen) != chosen:
                self._only_user[tile] = -1
        if self._scratch:
            self.held[chosen].add_scratch(tile for tile in task.frees if self._only_user.get(id(tile)) == chosen)

    def _direct(self, task: Task) -> set[int]:
        """Return the groups that wrote tiles of the task, or read tiles that the task overwrites."""
        predecessors, writer, readers = set(), self._writer, self._readers
        for access in task.accesses:
            tile = id(access.tile)
            if tile in writer:
                predecessors.add(writer[tile])
            if access.mode != "R" and tile in readers:
                predecessors.update(readers[tile])
        return predecessors

    def _chosen(self, task: Task, time: float, waits: int, latest: int) -> int | None:
        """Return the group that the task joins, or None for a new group.

        Args:
            waits: bit mask of all groups on which the task depends.
            latest: the newest group on which the task depends directly; -1 if there is none.
        """
        if isinstance(task, MessageTask) or any(id(access.tile) in self._freed for access in task.accesses):
            return None
        if task.kind == "cpu":  # a CPU task has less overhead, and separate short tasks keep many workers busy
            return None
        known, mine, before = self._known(task), self._own.get(task.worker, 0), self._before
        for number in (self._newest.get(task.worker) if known or time < TINY else None, latest):
            if number is None or number < max(latest, 0) or waits & ~(before[number] | 1 << number | mine):
                continue
            if (known or time >= TINY) and before[number] & ~(waits | mine):  # the task would wait for other workers
                continue
            in_time = self._seconds[number] + time <= self._until[number]
            if in_time and self._fits(self.groups[number], self.held[number], task):
                return number
        return None

    def _fits(self, group: list[Task], held: _Held, task: Task) -> bool:
        """Whether a task fits into a group by number of tasks, tiles, bytes and kinds of access."""
        if (
            len(group) >= MOST_PARTS
            or task.clears
            or isinstance(group[0], MessageTask)
            or (group[0].worker, group[0].kind) != (task.worker, task.kind)
        ):
            return False
        more = held.more(task)
        few = len(held.tiles) + len(more) <= self._most_tiles
        small = held.bytes + sum(tile.bytes for tile in more.values()) <= self._most_bytes
        return few and small and held.plain and _plain(task)

    def _begin(self, task: Task, time: float, waits: int) -> int:
        """Begin a group for the task; return the number of the group."""
        number = len(self.groups)
        self.groups.append([])
        self.held.append(_Held(self._residents))
        self._seconds.append(0.0)
        self._until.append(self._most_seconds)
        self._before.append(waits)
        if self._known(task):
            self._own[task.worker] = self._own.get(task.worker, 0) | 1 << number
        if (self._known(task) or time < TINY) and task.kind != "cpu":
            self._newest[task.worker] = number
        return number

    def _known(self, task: Task) -> bool:
        """Whether the worker of the task is known."""
        return (self._one_worker or task.worker >= 0) and not isinstance(task, MessageTask)


def _exported(tasks: list[Task]) -> set[int]:
    """Return the positions of tasks with a result that another worker or rank uses next.

    Tasks that change weights count too: all workers use the new weights in the next step.
    """
    maker: dict[int, int] = {}
    exported: set[int] = set()
    for position, task in enumerate(tasks):
        for access in task.accesses:
            before = maker.get(id(access.tile))
            if before is not None and (tasks[before].worker != task.worker or task.kernel == SEND):
                exported.add(before)
            if access.mode != "R" and access.tile.kind == "param":
                exported.add(position)
        maker.update((id(access.tile), position) for access in task.accesses if access.mode != "R")
    return exported


class _Held:
    """The tiles of a group.

    `plain` is False once an access has another mode than R, W or RW. `tiles`: ids of the tiles for which StarPU needs
    time. `scratch`: small temporary tiles that only this group uses. Residents are in neither.
    """

    def __init__(self, residents: Collection[Hashable]) -> None:
        self.bytes, self.plain = 0, True
        self._residents = residents
        self.tiles: set[int] = set()
        self.scratch: dict[Tile, None] = {}
        self._scratch_bytes = 0

    def more(self, task: Task) -> dict[int, Tile]:
        """Return the tiles that the task would add."""
        return {
            id(a.tile): a.tile
            for a in task.accesses
            if id(a.tile) not in self.tiles and not (self._residents and a.tile.key in self._residents)
        }

    def add(self, task: Task) -> None:
        """Add the tiles of a task."""
        more = self.more(task)
        self.bytes += sum(tile.bytes for tile in more.values())
        self.plain &= _plain(task)
        self.tiles.update(more)

    def add_scratch(self, tiles: Iterable[Tile]) -> None:
        """Move tiles that no task uses any more, and that only this group has used, to `scratch`, if they are small."""
        for tile in tiles:
            if not tile.persistent and self.plain and self._scratch_bytes + tile.bytes <= SCRATCH_BYTES:
                self._scratch_bytes += tile.bytes
                self.scratch[tile] = None
                self.tiles.discard(id(tile))


def _plain(task: Task) -> bool:
    return all(a.mode in ("R", "W", "RW") for a in task.accesses)


def _as_one(tasks: list[Task], scratch: Iterable[Tile]) -> Task:
    """Return a group as one task: the sum of the flop, and the union of the accesses to all but scratch tiles."""
    if len(tasks) == 1:
        return tasks[0]
    merged: dict[int, Access] = {}
    own = {*scratch}
    for access in (a for t in tasks for a in t.accesses if a.tile not in own):
        seen = merged.setdefault(id(access.tile), Access(access.tile, access.mode))
        if access.mode != "R" and seen.mode == "R":
            seen.mode = "RW"
    name, dot, phase = tasks[0].op.rpartition(".")
    if phase not in ("backward", "recompute", "update"):
        name, dot, phase = tasks[0].op, "", ""
    return Task(
        "group", list(merged.values()), op=f"{name} + {len(tasks) - 1}{dot}{phase}", flop=sum(t.flop for t in tasks),
        priority=max(t.priority for t in tasks), clears=tasks[0].clears, parts=tasks, worker=tasks[0].worker,
        kind=tasks[0].kind, scratch=[*scratch],
    )  # fmt: skip
