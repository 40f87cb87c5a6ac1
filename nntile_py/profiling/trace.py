"""Trace of a run: tasks with their workers, dates and dependencies. Plain data, without StarPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from nntile_py.tiles.dependencies import TileUse, dependencies

Ints = np.ndarray[Any, np.dtype[np.int64]]
REDUCTION = "reduction"  # operator of the tasks that StarPU itself submits


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """Description of a task, the same in every step.

    Attributes:
        tiles: access mode, name and index of each tile.
        uses: accesses to tiles, from which dependencies follow.
        parts: if the task is a fused group: the tasks of the group, in order.
        estimated: the task is part of a fused group, so that its time is an estimate.
    """

    layer: str
    operator: str
    phase: str
    kernel: str
    tiles: str
    flop: float
    bytes: int
    uses: tuple[TileUse, ...] = ()
    parts: tuple[TaskInfo, ...] = ()
    estimated: bool = False

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.layer, self.operator, self.phase)))

    @property
    def group(self) -> tuple[str, str]:
        """Return (operator, phase), equal for all layers: `*` replaces the layer's number. Updates name no layer."""
        where = "" if self.phase == "update" else re.sub(r"\d+", "*", self.layer)
        return " ".join(filter(None, (where, self.operator))), self.phase


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker.

    Attributes:
        kind: CPU or CUDA.
        node: number of its memory node.
        counters: StarPU's own sums of the worker's seconds.
    """

    name: str
    kind: str
    node: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Bus:
    """Sums over all transfers from one memory node to another."""

    source: int
    target: int
    bytes: int
    transfers: int


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """The send or the receive of a message between ranks.

    Dates are in ns, on the rank's own clock; in a merged trace, on rank 0's clock.

    Attributes:
        sends: True for the send, False for the receive.
        peer: the other rank.
        name: name of the tile.
        posted, ended: dates at which the send or receive was started and had ended.
        before, after: tasks of the rank that precede, or follow, this send or receive.
        relays: numbers of the rank's sends and receives that precede this one, such as the receive of a tile that this
            send forwards.
    """

    sends: bool
    peer: int
    tag: int
    bytes: int
    name: str
    step: int
    posted: int
    ended: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    relays: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """A message between ranks.

    Attributes:
        source, target: ranks.
        ready: date (ns) at which the tile was complete on the sender.
        open: date (ns) from which the receiver's tile could be overwritten.
    """

    source: int
    target: int
    send: MessageEnd
    receive: MessageEnd
    ready: int
    open: int

    @property
    def way(self) -> tuple[int, int]:
        """Return start and end (ns) of the transit. It starts when both the sender and the receiver are ready."""
        return min(max(self.ready, self.open), self.receive.ended), self.receive.ended


@dataclass
class Trace:
    """Trace of a run. Each array has an entry for each task, in the order of submission; dates are in ns.

    StarPU's own tasks come last, and access no tiles. A merged trace has the tasks of all ranks, on the clock of rank
    0, each task after its predecessors.

    Attributes:
        info: index of the task's description in `infos`.
        step: number of the task's step, from 1; 0: the task belongs to no step.
        replay: number of the submission of the task's program, from 1; 0: StarPU's own task.
        worker: index of the task's worker in `workers`.
        pop: date at which the worker got the task.
        fetch, fetched: start and end of allocation and transfer of the task's data.
        start, end: start and end of the task's kernels.
        released: date at which the runtime had finished with the task.
        memory, main_memory: bytes in use at the end of the task, on the worker's node and in main memory.
        light: only submit, start and end were recorded; `pop` is an estimate, and other dates equal one of these three.
        mains: for each rank the number of the memory node that is its main memory.
        ends: sends and receives of one rank, before the merge.
        messages: messages between ranks, after the merge.
        clock: offsets, drift and error of the ranks' clocks.
    """

    infos: list[TaskInfo]
    workers: list[Worker]
    nodes: list[str]
    buses: list[Bus]
    info: Ints
    step: Ints
    replay: Ints
    worker: Ints
    submit: Ints
    pop: Ints
    fetch: Ints
    fetched: Ints
    start: Ints
    end: Ints
    released: Ints
    memory: Ints
    main_memory: Ints
    light: bool = False
    mains: list[int] = field(default_factory=lambda: [0])
    hosts: list[str] = field(default_factory=list)
    ends: list[MessageEnd] = field(default_factory=list)
    messages: list[TracedMessage] = field(default_factory=list)
    clock: dict[str, Any] | None = None
    _before: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.info)

    def info_of(self, task: int) -> TaskInfo:
        return self.infos[int(self.info[task])]

    @property
    def window(self) -> tuple[int, int]:
        """Return start and end of the trace: first submission and last end, of tasks and messages."""
        first = min((m.posted for both in self.messages for m in (both.send, both.receive)), default=self.submit.min())
        last = max((m.ended for both in self.messages for m in (both.send, both.receive)), default=self.released.max())
        begin = int(min(first, self.submit.min()))
        return begin, max(int(max(last, self.released.max())), begin + 1)  # not empty, as figures are shares of it

    @property
    def rank(self) -> Ints:
        """Return the rank of each task."""
        return np.array([worker.rank for worker in self.workers], np.int64)[self.worker]

    @property
    def ranks(self) -> int:
        return len(self.mains)

    @property
    def seconds(self) -> Any:
        return (self.end - self.start) * 1e-9

    def column(self, name: str) -> Any:
        """Return a numeric field of TaskInfo, such as `flop`, for each task."""
        return np.array([getattr(info, name) for info in self.infos], np.float64)[self.info]

    def on_kind(self, kind: str) -> Any:
        """Return for each task whether its worker is of the kind `kind`."""
        return np.isin(self.worker, [number for number, worker in enumerate(self.workers) if worker.kind == kind])

    @property
    def before(self) -> list[list[int]]:
        """Return the direct predecessors of each task."""
        if self._before is None:
            self._before = dependencies(self.infos[i].uses for i in self.info)
        return self._before


def by_parts(trace: Trace, floors: Callable[[TaskInfo, Worker], float]) -> Trace:
    """Return a trace in which each fused group is replaced by its tasks, for figures by operator.

    Only start and end of a group are known. Each task of the group gets a share of this time, in proportion to the
    task's least possible time.

    Args:
        floors: returns the least possible time of a task on a worker.
    """
    if not any(info.parts for info in trace.infos):
        return trace
    infos = [part for info in trace.infos for part in info.parts or (info,)]
    counts = np.array([len(info.parts) or 1 for info in trace.infos], np.int64)
    # The end of each part as a share of its group's time, by (index of the group's TaskInfo, kind of worker).
    ends: dict[tuple[int, str], Any] = {}
    for which, worker in np.unique(np.stack((trace.info, trace.worker)), axis=1).T.tolist():
        on = trace.workers[worker]
        if (which, on.kind) not in ends:
            ends[which, on.kind] = _ends([floors(part, on) for part in trace.infos[which].parts] or [1.0])
    kinds = [worker.kind for worker in trace.workers]
    upto = [
        ends[which, kinds[worker]] for which, worker in zip(trace.info.tolist(), trace.worker.tolist(), strict=True)
    ]
    repeat = counts[trace.info]
    columns: dict[str, Any] = {
        f.name: np.repeat(getattr(trace, f.name), repeat) for f in fields(trace) if f.type == "Ints"
    }
    first = np.cumsum(repeat) - repeat  # for each task: index of its first part in the new trace
    number = np.arange(repeat.sum()) - np.repeat(first, repeat)
    columns["info"] = np.repeat((np.cumsum(counts) - counts)[trace.info], repeat) + number
    length = columns["end"] - columns["start"]
    columns["end"] = columns["start"] + np.rint(length * np.concatenate([*upto, []])).astype(np.int64)
    columns["start"] = np.where(number == 0, columns["start"], np.roll(columns["end"], 1))
    return replace(trace, infos=infos, _before=None, **columns)


def _ends(floors: Sequence[float]) -> Any:
    total = np.cumsum(floors)
    return total / total[-1] if total[-1] else np.arange(1, len(floors) + 1) / len(floors)


def accumulating(trace: Trace, path: Sequence[int]) -> list[int]:
    """Return the tasks of a path that add to a tile which the path's previous task has written or added to."""
    added = [{use.tile for use in trace.info_of(task).uses if use.adds} for task in path]
    outputs = [{use.tile for use in trace.info_of(task).uses if use.adds or use.mode == "W"} for task in path]
    return [path[k] for k in range(1, len(path)) if added[k] & outputs[k - 1]]


def stream_starts(start: Ints, end: Ints) -> Ints:
    """Return the true start of each task of a CUDA stream. StarPU records the launch, when earlier tasks still run."""
    order = np.argsort(end, kind="stable")
    result = start.copy()
    result[order[1:]] = np.maximum(start[order[1:]], end[order[:-1]])
    return result


def merge(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the union of intervals: starts and ends of sorted disjoint intervals."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(end) - 1]))
    return start[first], end[last]


def common(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> int:
    """Return the length of the intersection of two sets of intervals, ns."""
    return length(one) + length(other) - length(one, other)


def intervals(pairs: Iterable[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return the union of (start, end) pairs: starts and ends of sorted disjoint intervals."""
    table = np.array([*pairs], np.int64).reshape(-1, 2)
    return merge(table[:, 0], table[:, 1])


def length(*parts: tuple[Ints, Ints]) -> int:
    """Return the length of the union of several sets of intervals, ns."""
    start, end = merge(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    return int((end - start).sum())
