"""What is counted of an operator: its flop, and the words of the tiles that its own tasks read and write."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from nntile_py.config.builders import default_layouts, step_spec
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import check_count
from nntile_py.tasks.op import Lowering, Op
from nntile_py.tiles import TaskList, Tiling
from nntile_py.tiles.dtypes import DTYPES

if TYPE_CHECKING:
    from nntile_py.analysis.workloads import Work
    from nntile_py.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Counts:
    """read, written: words that tasks move; least: each operand once; bytes, least_bytes: the same in bytes."""

    flop: float
    read: int
    written: int
    least: int
    bytes: int
    least_bytes: float

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Flop a word."""
        return self.flop / self.moved if self.moved else 0.0

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> dict[str, Any]:
        """Of all parts: by the names of the fields."""
        known = list(map(vars, parts))
        return {of.name: sum(counts[of.name] for counts in known) for of in fields(Counts)}


HELD = ("grad", "scalar")  # kinds of tensors that all micro-batches of a step add to: gradients of weights, the loss


def alone(op: Op, cuts: Tiling, policy: str, *, again: bool = False) -> Lowering:
    """The tasks of an operator by itself; what it reads, and what is tied, is there before, all else it writes anew.

    again: after a micro-batch that did so."""
    low = Lowering(cuts, TaskList(policy))
    sums = {t.storage for t in op.outputs if again and t.storage.kind in HELD}
    low.tasks.sums = {low.tile(tensor, index) for tensor in sums for index in low.indices(tensor)}
    low.tasks.initialised |= low.tasks.sums
    for tensor in dict.fromkeys(t.storage for t in [*op.inputs, *op.tied]):
        low.tasks.initialised.update(low.tile(tensor, index) for index in low.indices(tensor))
    low.op = op.name
    op.lower(low)
    low.tasks.resolve()
    return low


@dataclass
class Fact:
    """What is counted of one operator, in all micro-batches; `times`: how many; `place`: its number in the graph."""

    op: Op
    phase: str
    place: int
    times: int
    counts: Counts
    group: Fact | None = None  # after fusion
    members: list[Fact] = field(default_factory=list)  # of one after fusion


class Tally:
    """Counts operators of a workload; those that look alike, as of all layers, once. repeats: micro-batches."""

    def __init__(self, config: RunConfig, work: Work) -> None:
        self.cuts, self.policy = step_spec(default_layouts(config)).cuts, config.accumulate
        self.repeats = config.train.grad_accumulation if work == "train" else 1
        self._known: dict[Hashable, tuple[int, int, int]] = {}  # words read and written, bytes

    def facts(self, graph: Graph, number: int) -> dict[int, Fact]:
        """By place, of the operators that have tasks. `number` 0: what each micro-batch runs, 1: the update."""
        for op in graph.ops:
            op.fit(self.cuts)
        check_count(graph, self.cuts, self.policy)
        found = (self._fact(graph, place, number) for place in range(len(graph.ops)))
        return {fact.place: fact for fact in found if fact.counts.bytes}

    def _fact(self, graph: Graph, place: int, number: int) -> Fact:
        op = graph.ops[place]
        times, phase = (1, "update") if number else (self.repeats, _phase(op))
        runs = [self._moved(op, again=n > 0) for n in range(times)]
        read, written, size = map(sum, zip(*runs, strict=True))
        held = sum(t.elements for t in op.outputs if t.storage.kind in HELD and t not in op.tied)  # read to be added to
        least = times * op.elements() + (times - 1) * held
        counts = Counts(
            flop=times * graph.computed(op, self.cuts), read=read, written=written, least=least, bytes=size,
            least_bytes=least * _width(op),
        )  # fmt: skip
        return Fact(op, phase, place, times, counts)

    def _moved(self, op: Op, again: bool) -> tuple[int, int, int]:
        key = looks(op), len(op.tied), again
        if key not in self._known:
            tasks = alone(op, self.cuts, self.policy, again=again).tasks.tasks
            accesses = [a for task in tasks for a in task.accesses]
            read, written = ([a.tile for a in accesses if a.mode != other] for other in ("W", "R"))
            size = sum(tile.bytes for tile in (*read, *written))
            self._known[key] = sum(map(_words, read)), sum(map(_words, written)), size
        return self._known[key]


def _width(op: Op) -> float:
    """Bytes of a word, as they are on average."""
    tensors = {*op.inputs, *op.outputs}
    words = sum(t.elements for t in tensors)
    return sum(t.elements * DTYPES[t.dtype].bytes for t in tensors) / max(words, 1)


def _words(tile: Any) -> int:
    return math.prod(tile.shape)


def looks(op: Op) -> Hashable:
    """The same for operators that are the same work."""
    tensors = tuple((t.axes, t.shape, t.dtype, t.band) for t in (*op.inputs, *op.outputs))
    mask = getattr(getattr(op, "forward", op), "mask", None)  # of attention, which has no scores
    return op.kind, op.title, op.phase, tensors, mask and mask.band


def _phase(op: Op) -> str:
    if op.phase == "forward":
        return "forward"
    weights = [t.storage.kind == "grad" for t in op.outputs]
    return " ".join([*(["dX"] if not all(weights) else []), *(["dW"] if any(weights) else [])])
