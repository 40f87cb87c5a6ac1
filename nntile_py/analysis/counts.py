"""Count the flop of operators, and the elements that their tasks read and write."""

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
    """Counts of one operator, or sums over several.

    Attributes:
        read, written: elements that the tasks read and write.
        least: elements that would be moved if each operand were moved only once.
        bytes: bytes that the tasks read and write together.
        least_bytes: `least` in bytes.
    """

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
        """Flop per moved element."""
        return self.flop / self.moved if self.moved else 0.0

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> dict[str, Any]:
        """Return {name of a field of Counts: sum over `parts`}."""
        known = list(map(vars, parts))
        return {of.name: sum(counts[of.name] for counts in known) for of in fields(Counts)}


HELD = ("grad", "scalar")  # kinds of tensors to which all micro-batches of a step add: gradients of weights, the loss


def lower_single(op: Op, cuts: Tiling, policy: str, *, again: bool = False) -> Lowering:
    """Return the tasks of a single operator, whose inputs and tied outputs have values already.

    Args:
        cuts: the tiles.
        policy: how tasks add partial sums, as `accumulate` of the config.
        again: for a micro-batch after the first, which adds to the results of the first micro-batch.
    """
    lowering = Lowering(cuts, TaskList(policy))
    sums = {t.storage for t in op.outputs if again and t.storage.kind in HELD}
    lowering.tasks.sums = {lowering.tile(tensor, index) for tensor in sums for index in lowering.indices(tensor)}
    lowering.tasks.initialised |= lowering.tasks.sums
    for tensor in dict.fromkeys(t.storage for t in [*op.inputs, *op.tied]):
        lowering.tasks.initialised.update(lowering.tile(tensor, index) for index in lowering.indices(tensor))
    lowering.op = op.name
    op.lower(lowering)
    lowering.tasks.resolve()
    return lowering


@dataclass
class Fact:
    """Counts of one operator over all micro-batches.

    Attributes:
        phase: forward, dX (gradients of inputs), dW (gradients of weights), dX dW, or update.
        place: the operator's position in the graph's list of operators.
        times: number of runs in a step.
        group: the fused operator that includes this operator.
        members: for a fused operator, the operators that it includes.
    """

    op: Op
    phase: str
    place: int
    times: int
    counts: Counts
    group: Fact | None = None
    members: list[Fact] = field(default_factory=list)


class Tally:
    """Counts the operators of a workload; equal operators, such as those of all layers, are counted once."""

    def __init__(self, config: RunConfig, work: Work) -> None:
        self.cuts, self.policy = step_spec(default_layouts(config)).cuts, config.accumulate
        self.repeats = config.train.grad_accumulation if work == "train" else 1  # micro-batches
        self._known: dict[Hashable, tuple[int, int, int]] = {}  # elements read, elements written, bytes

    def facts(self, graph: Graph, number: int) -> dict[int, Fact]:
        """Return {position in the graph: Fact} for all operators of the graph that have tasks.

        Args:
            number: 0 if each micro-batch runs the graph, 1 if the graph is the update.
        """
        for op in graph.ops:
            op.fit(self.cuts)
        check_count(graph, self.cuts, self.policy)
        facts = (self._fact(graph, place, number) for place in range(len(graph.ops)))
        return {fact.place: fact for fact in facts if fact.counts.bytes}

    def _fact(self, graph: Graph, place: int, number: int) -> Fact:
        op = graph.ops[place]
        times, phase = (1, "update") if number else (self.repeats, _phase(op))
        runs = [self._moved(op, again=n > 0) for n in range(times)]
        read, written, size = map(sum, zip(*runs, strict=True))
        # Later micro-batches read these tensors and add to them.
        held = sum(t.elements for t in op.outputs if t.storage.kind in HELD and t not in op.tied)
        least = times * op.elements() + (times - 1) * held
        counts = Counts(
            flop=times * graph.computed(op, self.cuts), read=read, written=written, least=least, bytes=size,
            least_bytes=least * _element_bytes(op),
        )  # fmt: skip
        return Fact(op, phase, place, times, counts)

    def _moved(self, op: Op, again: bool) -> tuple[int, int, int]:
        key = looks(op), len(op.tied), again
        if key not in self._known:
            tasks = lower_single(op, self.cuts, self.policy, again=again).tasks.tasks
            accesses = [a for task in tasks for a in task.accesses]
            read, written = ([a.tile for a in accesses if a.mode != other] for other in ("W", "R"))
            size = sum(tile.bytes for tile in (*read, *written))
            self._known[key] = sum(map(_numel, read)), sum(map(_numel, written)), size
        return self._known[key]


def _element_bytes(op: Op) -> float:
    """Return the mean bytes of an element of the operator's tensors."""
    tensors = {*op.inputs, *op.outputs}
    total = sum(t.elements for t in tensors)
    return sum(t.elements * DTYPES[t.dtype].bytes for t in tensors) / max(total, 1)


def _numel(tile: Any) -> int:
    return math.prod(tile.shape)


def looks(op: Op) -> Hashable:
    """Return a key that is the same for all operators that do the same work."""
    tensors = tuple((t.axes, t.shape, t.dtype, t.band) for t in (*op.inputs, *op.outputs))
    mask = getattr(getattr(op, "forward", op), "mask", None)  # an attention's band is in its mask, not in its tensors
    return op.kind, op.title, op.phase, tensors, mask and mask.band


def _phase(op: Op) -> str:
    if op.phase == "forward":
        return "forward"
    weights = [t.storage.kind == "grad" for t in op.outputs]
    return " ".join([*(["dX"] if not all(weights) else []), *(["dW"] if any(weights) else [])])
