"""Placement: chooses the worker of each task before the program runs, for workers that are alike (the GPUs of a node).

A scheduler sees ready tasks one by one and moves tiles to any idle worker. Placement keeps tiles where they are:

* If there are at least as many batch tiles as workers, all tasks on a batch tile run on one worker. Neighbouring batch
  tiles share a worker, so a sum over the batch, which adds in the order of batch tiles, visits each worker once.
* Every other task goes to the worker with the least time to move the task's tiles plus time of work already assigned.
  Tasks are placed in the list's order. With few batch tiles, the parts of a layer spread over GPUs, and optimizer
  states stay on their GPU.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, get_args

from .dtypes import is_scaled
from .task import Access, Task, Tile, merge
from .tasklist import TaskList

GOOD = 20  # a task should last this many times its runtime overhead; overhead is then 5 % of a worker's time
Placement = Literal["scheduler", "planned"]  # the scheduler, or a plan, chooses the worker of a task
PLACEMENTS: tuple[str, ...] = get_args(Placement)


@dataclass(frozen=True)
class Speed:
    """The speed of one worker.

    Attributes:
        flop_s: flop/s.
        bytes_s: bytes/s of the worker's memory.
        link_s: bytes/s between two workers.
        latency: seconds of a transfer in addition to the time for its bytes.
        overhead: seconds of the runtime for each task.
        launch: seconds to start a kernel, also for each task of a task group.
        submit: seconds of the submitting thread for each task.
        host_s: bytes/s from main memory, and as many to main memory at the same time.
        fp8: factor of flop_s for products of operands in 8 bits.
    """

    flop_s: float
    bytes_s: float
    link_s: float
    latency: float = 15e-6
    overhead: float = 0.0
    launch: float = 0.0
    submit: float = 0.0
    host_s: float = math.inf
    fp8: float = 1.0

    def seconds(self, task: Task) -> float:
        """Return the seconds of the task's kernel: time for its flop or for its bytes, whichever is longer."""
        in_8_bits = any(access.mode == "R" and is_scaled(access.tile.dtype) for access in task.accesses)
        return max(task.flop / self.flop_s / (self.fp8 if in_8_bits else 1), task.bytes / self.bytes_s)

    @property
    def beside(self) -> float:
        """Seconds per task besides the kernel: overhead of the runtime, plus launch."""
        return self.overhead + self.launch

    @property
    def good(self) -> float:
        """Seconds that tasks should last on average to make the runtime's overhead negligible."""
        return GOOD * self.overhead


Residency = dict[Hashable, set[int]]


def place(tasks: TaskList, workers: int, speed: Speed, residency: Residency | None = None) -> TaskList:
    """Return a resolved list in which each task has a worker, counted from 0. Results stay the same to the bit.

    Args:
        residency: by tile key, the workers that hold each persistent tile. This function updates it.
    """
    residency = {} if residency is None else residency
    later: dict[Tile, int] = {}  # number of accesses of tasks that have no worker yet
    for task in tasks.tasks:
        for access in task.accesses:
            later[access.tile] = later.get(access.tile, 0) + 1
    copies: dict[Tile, set[int]] = {tile: set(residency.get(tile.key, ())) for tile in later}
    parts = batch_parts(later)
    away: set[Tile] = set()  # sums that moved from the worker that began them
    load = _Load(workers)
    result = TaskList(tasks.policy, tasks.initialised, tasks.live)
    for task in tasks.tasks:
        own, merges, uses = own_worker(task, parts, workers), list[Task](), task.accesses
        chosen = task.worker
        if own >= 0:
            if chosen < 0:
                chosen = _own_or_holder(task, own, workers, copies, later, speed)
            sums = [a for a in _side_sums(task) if a.tile in away or chosen not in copies[a.tile]]
            away.update(access.tile for access in sums)
            task, merges = _split(task, sums)
        elif chosen < 0:
            chosen = _cheapest(task, load, copies, later, speed)
        for one in (task, *merges):
            load.add(chosen, speed.seconds(one))
            for access in one.accesses:
                if access.mode == "R":
                    copies.setdefault(access.tile, set()).add(chosen)
                else:
                    copies[access.tile] = {chosen}
            result.tasks.append(replace(one, worker=chosen))
        for access in uses:
            later[access.tile] -= 1
    residency.update({tile.key: held for tile, held in copies.items() if tile.persistent})
    return result


def delay(lists: Sequence[TaskList], workers: int) -> None:
    """Schedule each weight update as late as possible: shortly before the next step's first task that reads the weight.

    Workers then compute with the weights of the first layers while the weights of later layers are updated and moved.
    The tasks have workers, and the lists run one after the other. A delayed update runs `2 * workers` tasks of the list
    before its reader.
    """
    if workers == 1:
        return
    every = [task for one in lists for task in one.tasks]
    after: dict[Hashable, int] = {}  # by tile key: position of the next task that uses it, in this run or the next
    for place, task in reversed([*enumerate(every + every)]):
        weights = [a.tile.key for a in task.accesses if a.mode != "R" and a.tile.kind == "param"]
        if weights and place < len(every):
            waits = min(after[key] for key in weights)
            task.delay = max(0, waits - place - 2 * workers) if waits >= len(every) else 0
        after.update((access.tile.key, place) for access in task.accesses)


def batch_parts(tiles: Iterable[Tile]) -> int:
    """Return the number of parts into which the batch is cut."""
    return 1 + max((part for tile in tiles for part in tile.part("batch")), default=-1)


def own_worker(task: Task, parts: int, workers: int) -> int:
    """Return the worker of the task's batch part.

    Returns -1 if the task has no batch part, or there are fewer parts than workers.
    """
    return _worker_of_part(task, 0, parts, workers) if parts >= workers else -1


def _worker_of_part(task: Task, first: int, parts: int, workers: int) -> int:
    """Return the worker of the task's batch part; -1 if the task has no batch part, or several.

    Args:
        first: Number of the task list's first batch part among all parts.
        parts: Number of all parts.
    """
    batch = {part for access in task.accesses for part in access.tile.part("batch")}
    return (first + batch.pop()) * workers // parts if len(batch) == 1 else -1


def assign_parts(tasks: TaskList, first: int, parts: int, workers: int) -> None:
    """Assign a worker to each task on a batch tile. Call it before `place`.

    Several programs, each with some parts of the batch, then run the same part on the same worker.

    Args:
        first: Number of the task list's first batch part among all parts.
        parts: Number of all parts, in all programs together.
    """
    for task in tasks.tasks:
        task.worker = _worker_of_part(task, first, parts, workers)


class _Load:
    """Seconds of work assigned to each worker so far, with a heap that finds the least loaded one."""

    def __init__(self, workers: int) -> None:
        self.seconds = [0.0] * workers
        self._heap = [(0.0, worker) for worker in range(workers)]  # outdated entries are skipped when they come up

    def add(self, worker: int, seconds: float) -> None:
        self.seconds[worker] += seconds
        heapq.heappush(self._heap, (self.seconds[worker], worker))

    def idlest(self, but: Set[int] = frozenset()) -> int:
        """Return the least loaded worker that is not in `but`, the first of equally loaded ones; -1: there is none."""
        skipped, idlest = [], -1
        while self._heap and idlest < 0:
            seconds, worker = self._heap[0]
            if seconds == self.seconds[worker] and worker not in but:
                idlest = worker
            else:
                entry = heapq.heappop(self._heap)
                skipped += [entry] if seconds == self.seconds[worker] else []
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return idlest


def _cheapest(task: Task, load: _Load, copies: dict[Tile, set[int]], later: dict[Tile, int], speed: Speed) -> int:
    """Return the worker with the least sum of waiting time and time to move the task's tiles.

    If several workers have the same sum, the worker with the least work is chosen.

    The waiting time is capped in proportion to the task: a short task ends soon however much its worker has to do.
    Without the cap, many short tasks and their tiles would spread over all workers.
    """
    work, workers = load.seconds, len(load.seconds)
    least, most = work[load.idlest()], workers * speed.seconds(task)
    # `apart`: workers that need other transfers than most workers do. Among all other workers, only the least loaded
    # worker can be the best.
    apart: set[int] = set()
    for held in (copies[access.tile] for access in task.accesses if access.mode != "W"):
        few = 2 * len(held) <= workers
        apart |= held if few else set(range(workers)) - held if len(held) < workers else set()
    other = load.idlest(apart)
    if other >= 0 and work[other] - least >= most:  # the cap makes all of them equal: take the first
        other = next(worker for worker in range(workers) if worker not in apart)
    costs = [
        (min(work[worker] - least, most) + _travel(task, worker, copies, later, speed), work[worker], worker)
        for worker in (apart if other < 0 else apart | {other})
    ]
    return min(costs)[-1]


def _own_or_holder(task: Task, own: int, workers: int, copies: dict[Tile, set[int]], later: dict[Tile, int],
                   speed: Speed) -> int:  # fmt: skip
    """Return the worker of the task's batch part, or the worker that holds the sum if moving the inputs is cheaper.

    A short task that adds to a large sum thus runs on the worker that holds the sum. Example: the gradients of a batch
    part's embeddings move to the gradient of the embedding table. Otherwise the table's gradient would move to the
    worker of each batch part in turn.
    """
    sums = [a.tile for a in task.accesses if a.mode != "R"]
    if len(sums) != 1 or sums[0].part("batch") or len(copies[sums[0]]) != 1:
        return own
    (holder,) = copies[sums[0]]
    there, here = (_travel(task, worker, copies, later, speed) for worker in (holder, own))
    return holder if there + workers * speed.seconds(task) < here else own


def _travel(task: Task, worker: int, copies: dict[Tile, set[int]], later: dict[Tile, int], speed: Speed) -> float:
    """Return the seconds to move all tiles that the task needs to a worker."""
    seconds = 0.0
    for access in task.accesses:
        held = copies[access.tile]
        if access.mode != "W" and held and worker not in held:
            # Later readers use the copy too, so each pays a share.
            share = later[access.tile] if access.mode == "R" else 1
            seconds += (speed.latency + access.tile.bytes / speed.link_s) / share
    return seconds


def _side_sums(task: Task) -> list[Access]:
    """Return the sums over the batch that a task adds to beside its main result: gradients of norm weights, the loss.

    The kernel adds its own total to such a sum once. A separate task that adds the total gives the same bits.
    """
    if all(access.mode != "W" for access in task.accesses):
        return []
    adds = [a for a in task.accesses if a.mode == "RW" and a.accumulate and a.tile.monoid == "sum"]
    return [a for a in adds if not a.tile.part("batch") and a.tile not in task.frees]


def _split(task: Task, sums: list[Access]) -> tuple[Task, list[Task]]:
    """Return the task with its contributions to `sums` in tiles of their own, and tasks that add these to the sums.

    The task then does not wait for the running sums.
    """
    parts = {
        a.tile: Tile(f"{a.tile.tensor}.part", a.tile.index, a.tile.shape, a.tile.dtype, axes=a.tile.axes) for a in sums
    }
    accesses = [Access(parts[a.tile], "W") if a.tile in parts else a for a in task.accesses]
    merges = [replace(merge(tile, part, task.op), priority=task.priority) for tile, part in parts.items()]
    for one, part in zip(merges, parts.values(), strict=True):
        one.frees.append(part)
    return replace(task, accesses=accesses), merges
