"""What is counted of an operator: its flop, and the words of the tiles that its own tasks read and write."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Lowering, Op
from nntile_py.tiles import TaskList, Tiling
from nntile_py.tiles.dtypes import DTYPES


@dataclass(frozen=True, kw_only=True)
class Counts:
    """read, written: words that tasks move; least: each operand once; bytes, least_bytes: the same in bytes."""

    flop: float
    read: int
    written: int
    least: int
    bytes: int
    least_bytes: float

    @classmethod
    def total(cls, parts: Iterable[tuple[Counts, int]]) -> dict[str, Any]:
        """Of parts, each so many times: by the names of the fields."""
        known = [(vars(part), times) for part, times in parts]
        return {of.name: sum(counts[of.name] * times for counts, times in known) for of in fields(Counts)}


def alone(op: Op, cuts: Tiling, policy: str) -> Lowering:
    """The tasks of an operator by itself; what it reads is there before, what it makes is written anew."""
    low = Lowering(cuts, TaskList(policy))
    for tensor in dict.fromkeys(t.storage for t in op.inputs):
        low.tasks.initialised.update(low.tile(tensor, index) for index in low.indices(tensor))
    low.op = op.name
    op.lower(low)
    low.tasks.resolve()
    return low


@dataclass
class Fact:
    """What is counted of one operator; `place`: its number in the graph."""

    op: Op
    phase: str
    place: int
    times: int
    counts: Counts
    group: Fact | None = None  # after fusion
    members: list[Fact] = field(default_factory=list)  # of one after fusion


class Counter:
    """Counts operators; those that look alike, as of all layers, once."""

    def __init__(self, cuts: Tiling, policy: str, repeats: int) -> None:
        self.cuts, self.policy, self.repeats = cuts, policy, repeats
        self._known: dict[Hashable, tuple[int, int, int]] = {}

    def facts(self, graph: Graph, number: int) -> dict[int, Fact]:
        """By place, of the operators that have tasks. `number` 0: what each micro-batch runs, 1: the update."""
        for op in graph.ops:
            op.fit(self.cuts)
        found = (self._fact(op, place, number) for place, op in enumerate(graph.ops))
        return {fact.place: fact for fact in found if fact.counts.bytes}

    def _fact(self, op: Op, place: int, number: int) -> Fact:
        key = looks(op)
        if key not in self._known:
            accesses = [a for task in alone(op, self.cuts, self.policy).tasks.tasks for a in task.accesses]
            read, written = ([a.tile for a in accesses if a.mode != other] for other in ("W", "R"))
            size = sum(tile.bytes for tile in (*read, *written))
            self._known[key] = sum(map(_words, read)), sum(map(_words, written)), size
        read_words, written_words, size = self._known[key]
        times, phase = (1, "update") if number else (self.repeats, _phase(op))
        counts = Counts(
            flop=op.computed(self.cuts), read=read_words, written=written_words, least=op.words(), bytes=size,
            least_bytes=least_bytes(op),
        )  # fmt: skip
        return Fact(op, phase, place, times, counts)


def least_bytes(op: Op) -> float:
    """Of its least words, each as wide as they are on average."""
    tensors = {*op.inputs, *op.outputs}
    words = sum(t.words for t in tensors)
    return op.words() * sum(t.words * DTYPES[t.dtype].bytes for t in tensors) / max(words, 1)


def _words(tile: Any) -> int:
    return math.prod(tile.shape)


def looks(op: Op) -> Hashable:
    """The same for operators that are the same work."""
    tensors = tuple((t.axes, t.shape, t.dtype, t.band) for t in (*op.inputs, *op.outputs))
    return op.kind, op.title, op.phase, tensors


def _phase(op: Op) -> str:
    if op.phase == "forward":
        return "forward"
    weights = [t.storage.kind == "grad" for t in op.outputs]
    return " ".join([*(["dX"] if not all(weights) else []), *(["dW"] if any(weights) else [])])
