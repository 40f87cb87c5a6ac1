"""What ran where and when, and what must run after what: pure data, testable without StarPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from nntile_py.tiles.dependencies import TileUse, dependencies

Ints = np.ndarray[Any, np.dtype[np.int64]]
REDUCTION = "reduction"  # the operator of tasks that StarPU makes itself


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What a task is, whenever it runs. `tiles` names them with their indices.

    `parts`: of a group, the tasks that it stands for, in order; `estimated`: it is such a part."""

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
        """Operator and phase; the same place of all layers is one operator, and so are all updates."""
        where = "" if self.phase == "update" else re.sub(r"\d+", "*", self.layer)
        return " ".join(filter(None, (where, self.operator))), self.phase


@dataclass(frozen=True, slots=True)
class Worker:
    """`node`: its memory node. `counters`: StarPU's own account of its time, seconds."""

    name: str
    kind: str
    node: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Bus:
    """What went from one memory node to another."""

    source: int
    target: int
    bytes: int
    transfers: int


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One end of a message between ranks, as its rank saw it; dates in ns.

    before, after: tasks of that rank that it waits for, and that wait for it; relays: ends of that rank that it waits
    for, by their numbers, such as the receive of what it sends on."""

    sends: bool
    peer: int
    tag: int
    bytes: int
    name: str  # of the tile
    step: int
    posted: int
    ended: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    relays: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """A tile on its way from one rank to another; `ready`: the tile was there, `open`: there was a place for it, ns."""

    source: int
    target: int
    send: MessageEnd
    receive: MessageEnd
    ready: int
    open: int

    @property
    def way(self) -> tuple[int, int]:
        """When it was on its way: from when both ranks were ready until it had arrived."""
        return min(max(self.ready, self.open), self.receive.ended), self.receive.ended


@dataclass
class Trace:
    """Tasks in the order of submission, a column each; dates in ns. StarPU's own are last, without uses.

    Of several ranks: those of all of them, on the clock of the first, in an order that they could have been submitted
    in; `mains` are the main memories among the nodes, by rank, `messages` what went between them. Before ranks are put
    together each has the `ends` of messages that it saw."""

    infos: list[TaskInfo]
    workers: list[Worker]
    nodes: list[str]
    buses: list[Bus]
    info: Ints  # index into infos
    step: Ints
    replay: Ints  # a program that was submitted once more
    worker: Ints
    submit: Ints
    pop: Ints  # a worker asked for a task and got this one
    fetch: Ints  # its data is allocated and brought to the worker ...
    fetched: Ints  # ... until here
    start: Ints
    end: Ints
    released: Ints
    memory: Ints  # bytes on the worker's node when the task ended
    main_memory: Ints
    light: bool = (
        False  # only submit, start and end were dated; pop is when the task was ready, the others one of these
    )
    mains: list[int] = field(default_factory=lambda: [0])
    hosts: list[str] = field(default_factory=list)
    ends: list[MessageEnd] = field(default_factory=list)
    messages: list[TracedMessage] = field(default_factory=list)
    clock: dict[str, Any] | None = None  # how far the ranks' clocks were apart, and how well that is known
    _before: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.info)

    def info_of(self, task: int) -> TaskInfo:
        return self.infos[int(self.info[task])]

    @property
    def window(self) -> tuple[int, int]:
        """From the first submission to the last end, messages included."""
        first = min((m.posted for both in self.messages for m in (both.send, both.receive)), default=self.submit.min())
        last = max((m.ended for both in self.messages for m in (both.send, both.receive)), default=self.released.max())
        begin = int(min(first, self.submit.min()))
        return begin, max(int(max(last, self.released.max())), begin + 1)  # shares of it are told

    @property
    def rank(self) -> Ints:
        """Of each task."""
        return np.array([worker.rank for worker in self.workers], np.int64)[self.worker]

    @property
    def ranks(self) -> int:
        return len(self.mains)

    @property
    def seconds(self) -> Any:
        return (self.end - self.start) * 1e-9

    def column(self, name: str) -> Any:
        """Return a field of each task's info as numbers."""
        return np.array([getattr(info, name) for info in self.infos], np.float64)[self.info]

    def on_kind(self, kind: str) -> Any:
        """Return for each task whether its worker is of this kind."""
        return np.isin(self.worker, [number for number, worker in enumerate(self.workers) if worker.kind == kind])

    @property
    def before(self) -> list[list[int]]:
        """The direct predecessors of each task."""
        if self._before is None:
            self._before = dependencies(self.infos[i].uses for i in self.info)
        return self._before


def by_parts(trace: Trace, floors: Callable[[TaskInfo, Worker], float]) -> Trace:
    """The parts of groups as tasks of their own, for figures by operator: nobody dates them, so each has its group's
    time in proportion to its floor, the least time that it needs on that worker."""
    if not any(info.parts for info in trace.infos):
        return trace
    infos = [part for info in trace.infos for part in info.parts or (info,)]
    counts = np.array([len(info.parts) or 1 for info in trace.infos], np.int64)
    # Where each part ends, in parts of its group's time; by info and kind of worker.
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
    first = np.cumsum(repeat) - repeat  # of each task: where its parts begin
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
    """Tasks of the path that wait for their predecessor there only to add to the same tile after it."""
    added = [{use.tile for use in trace.info_of(task).uses if use.adds} for task in path]
    outputs = [{use.tile for use in trace.info_of(task).uses if use.adds or use.mode == "W"} for task in path]
    return [path[k] for k in range(1, len(path)) if added[k] & outputs[k - 1]]


def one_after_the_other(start: Ints, end: Ints) -> Ints:
    """When each task of a stream really began: StarPU dates its launch, which may be while others still run."""
    order = np.argsort(end, kind="stable")
    result = start.copy()
    result[order[1:]] = np.maximum(start[order[1:]], end[order[:-1]])
    return result


def merge(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The union of intervals, as intervals that are in order and apart."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(end) - 1]))
    return start[first], end[last]


def common(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> int:
    """The time that is in both of two sets of intervals, ns."""
    return length(one) + length(other) - length(one, other)


def intervals(pairs: Iterable[tuple[int, int]]) -> tuple[Ints, Ints]:
    """The union of (start, end)."""
    table = np.array([*pairs], np.int64).reshape(-1, 2)
    return merge(table[:, 0], table[:, 1])


def length(*parts: tuple[Ints, Ints]) -> int:
    """Of the union of several sets of intervals, ns."""
    start, end = merge(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    return int((end - start).sum())
