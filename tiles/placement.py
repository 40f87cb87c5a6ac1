"""Which worker each task runs on, decided before the program runs, for workers that are alike (the GPUs of a node).

A scheduler that sees ready tasks one by one moves tiles to whoever is idle. Where there is a batch tile for each
worker, all that is done to one stays with it, and each worker has neighbours in the batch: a sum over the batch, which
is a chain in their order, does not come and go. Every other task, in the list's order, goes where the least has to
travel, against the work that the workers were given so far: parts of a layer spread over GPUs where there are fewer
batch tiles, optimizer states stay where they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, get_args

from .tasklist import Access, Task, TaskList, Tile, merge

GOOD = 20  # a task should last so many times what the runtime needs for one: 5 % of a worker's time then
Placement = Literal["scheduler", "planned"]  # who chooses the worker of a task
PLACEMENTS: tuple[str, ...] = get_args(Placement)


@dataclass(frozen=True)
class Speed:
    """Of one worker: flop/s, bytes/s of its memory; bytes/s between two workers, seconds of each transfer beside.

    overhead: seconds of the runtime for each task, launch: to start a kernel, of each part of a group too. submit: of
    the one thread that submits, for each task. host_s: bytes/s from main memory, and at the same time to it.
    """

    flop_s: float
    bytes_s: float
    link_s: float
    latency: float = 15e-6
    overhead: float = 0.0
    launch: float = 0.0
    submit: float = 0.0
    host_s: float = math.inf

    def seconds(self, task: Task) -> float:
        return max(task.flop / self.flop_s, task.bytes / self.bytes_s)

    @property
    def beside(self) -> float:
        """Seconds of a worker for each task beside its work."""
        return self.overhead + self.launch

    @property
    def good(self) -> float:
        """Seconds that tasks should last on average, so that the runtime's own time for them hardly shows."""
        return GOOD * self.overhead


Residency = dict[Hashable, set[int]]


def place(tasks: TaskList, workers: int, speed: Speed, residency: Residency | None = None) -> TaskList:
    """A resolved list that computes the same to the bit, each task with its worker, from 0; some may have theirs.

    residency: the workers that hold a copy of each tile that outlives the program, by its key; updated.
    A tile without an entry is taken to be wherever it is wanted.
    """
    residency = {} if residency is None else residency
    readers: dict[Tile, int] = {}
    for task in tasks.tasks:
        for access in task.accesses:
            readers[access.tile] = readers.get(access.tile, 0) + 1
    copies: dict[Tile, set[int]] = {tile: set(residency.get(tile.key, ())) for tile in readers}
    parts = batch_parts(readers)
    away: set[Tile] = set()  # sums that have left the worker that began them
    load = _Load(workers)
    result = TaskList(tasks.policy, tasks.initialised, tasks.live)
    for task in tasks.tasks:
        own, merges = own_worker(task, parts, workers), list[Task]()
        chosen = task.worker
        if own >= 0:
            if chosen < 0:
                chosen = _beside_its_sum(task, own, workers, copies, readers, speed)
            sums = [a for a in _aside(task) if a.tile in away or chosen not in copies[a.tile]]
            away.update(access.tile for access in sums)
            task, merges = _apart(task, sums)
        elif chosen < 0:
            chosen = _cheapest(task, load, copies, readers, speed)
        for one in (task, *merges):
            load.add(chosen, speed.seconds(one))
            for access in one.accesses:
                if access.mode == "R":
                    copies.setdefault(access.tile, set()).add(chosen)
                else:
                    copies[access.tile] = {chosen}
            result.tasks.append(replace(one, worker=chosen))
    residency.update({tile.key: held for tile, held in copies.items() if tile.persistent})
    return result


def delay(lists: Sequence[TaskList], workers: int) -> None:
    """Delay what makes weights for the next run of placed lists that run in turn, until a worker's last task but one
    before the first that waits for them: it computes with those of the first layers while others are made and move."""
    if workers == 1:
        return
    every = [task for one in lists for task in one.tasks]
    after: dict[Hashable, int] = {}  # the place of the next task that uses a tile, in this run or the next one
    for place, task in reversed([*enumerate(every + every)]):
        weights = [a.tile.key for a in task.accesses if a.mode != "R" and a.tile.kind == "param"]
        if weights and place < len(every):
            waits = min(after[key] for key in weights)
            task.delay = max(0, waits - place - 2 * workers) if waits >= len(every) else 0
        after.update((access.tile.key, place) for access in task.accesses)


def batch_parts(tiles: Iterable[Tile]) -> int:
    """Into how many parts the batch is cut."""
    return 1 + max((part for tile in tiles for part in tile.part("batch")), default=-1)


def own_worker(task: Task, parts: int, workers: int) -> int:
    """That of the task's part of the batch; -1: it has none, or there are fewer parts than workers."""
    batch = {part for access in task.accesses for part in access.tile.part("batch")}
    return batch.pop() * workers // parts if len(batch) == 1 and parts >= workers else -1


class _Load:
    """Seconds of work that each worker was given so far; tells the least without a look at all of them."""

    def __init__(self, workers: int) -> None:
        self.seconds = [0.0] * workers
        self._heap = [(0.0, worker) for worker in range(workers)]  # with entries of before, which are left out later

    def add(self, worker: int, seconds: float) -> None:
        self.seconds[worker] += seconds
        heapq.heappush(self._heap, (self.seconds[worker], worker))

    def idlest(self, but: Set[int] = frozenset()) -> int:
        """The first of the workers with the least to do, apart from some; -1: there are no others."""
        aside, found = [], -1
        while self._heap and found < 0:
            seconds, worker = self._heap[0]
            if seconds == self.seconds[worker] and worker not in but:
                found = worker
            else:
                entry = heapq.heappop(self._heap)
                aside += [entry] if seconds == self.seconds[worker] else []
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found


def _cheapest(task: Task, load: _Load, copies: dict[Tile, set[int]], readers: dict[Tile, int], speed: Speed) -> int:
    # What is short is soon done, however much its worker has to do: many such tasks would else spread, and their tiles.
    workers = len(load.seconds)
    least, most = load.seconds[load.idlest()], workers * speed.seconds(task)
    # Workers for which as much would travel as for most others; of them only the one with the least to do counts.
    apart: set[int] = set()
    for held in (copies[access.tile] for access in task.accesses if access.mode != "W"):
        few = 2 * len(held) <= workers
        apart |= held if few else set(range(workers)) - held if len(held) < workers else set()
    other = load.idlest(apart)
    if other >= 0 and load.seconds[other] - least >= most:  # as much as any
        other = next(worker for worker in range(workers) if worker not in apart)
    found = [
        (min(load.seconds[worker] - least, most) + _travel(task, worker, copies, readers, speed), worker)
        for worker in (apart if other < 0 else apart | {other})
    ]
    return min(found)[1]


def _beside_its_sum(task: Task, own: int, workers: int, copies: dict[Tile, set[int]], readers: dict[Tile, int],
                    speed: Speed) -> int:  # fmt: skip
    """The worker of its part of the batch; or, if it is short and adds to a large sum, the one that holds that.

    So the gradients of a part's embeddings travel to that of the vocabulary, not this to each of them in turn.
    """
    sums = [a.tile for a in task.accesses if a.mode != "R"]
    if len(sums) != 1 or sums[0].part("batch") or len(copies[sums[0]]) != 1:
        return own
    (holder,) = copies[sums[0]]
    there, here = (_travel(task, worker, copies, readers, speed) for worker in (holder, own))
    return holder if there + workers * speed.seconds(task) < here else own


def _travel(
    task: Task, worker: int, copies: dict[Tile, set[int]], readers: dict[Tile, int], speed: Speed
) -> float:
    """Seconds until the task's tiles are with a worker."""
    seconds = 0.0
    for access in task.accesses:
        held = copies[access.tile]
        if access.mode != "W" and held and worker not in held:
            # A copy that is only read serves later readers too.
            share = readers[access.tile] if access.mode == "R" else 1
            seconds += (speed.latency + access.tile.bytes / speed.link_s) / share
    return seconds


def _aside(task: Task) -> list[Access]:
    """Sums over the batch that a task adds to beside its own work: gradients of a LayerNorm's weights, the loss.

    The kernels add to each what they have summed up, once: to add that by a task of its own gives the same bits.
    """
    if all(access.mode != "W" for access in task.accesses):
        return []
    adds = [a for a in task.accesses if a.mode == "RW" and a.accumulate and a.tile.monoid == "sum"]
    return [a for a in adds if not a.tile.part("batch") and a.tile not in task.frees]


def _apart(task: Task, sums: list[Access]) -> tuple[Task, list[Task]]:
    """The task with its contributions to `sums` in tiles of their own, and what adds those: it waits for no sum."""
    parts = {
        a.tile: Tile(f"{a.tile.tensor}.part", a.tile.index, a.tile.shape, a.tile.dtype, axes=a.tile.axes) for a in sums
    }
    accesses = [Access(parts[a.tile], "W") if a.tile in parts else a for a in task.accesses]
    merges = [replace(merge(tile, part, task.op), priority=task.priority) for tile, part in parts.items()]
    for one, part in zip(merges, parts.values(), strict=True):
        one.frees.append(part)
    return replace(task, accesses=accesses), merges
