"""How many tasks a graph becomes under a tiling, told without making them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping

from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Lowering, Op, Tensor
from nntile_py.tiles import Part, TaskList, Tiling

FEW = 2  # tiles of each axis in a corner
A_FEW = 8  # tasks of an operator for a tile of each of its axes: more than any has


def count_tasks(graph: Graph, tiling: Tiling, policy: str = "chain") -> int:
    """The tasks that `lower` would make, in a time that does not grow with their number.

    The operators lower themselves to a corner: a few tiles of each axis. The number of tasks of one kernel of one
    operator is a product of polynomials in the numbers of tiles of the axes, of degree one, or two in seq, where
    attention takes pairs; corners with more tiles of one axis tell these. Exact but for sums in trees, groups of heads,
    wide attention windows, and tensors that differ in the size of an axis.
    """
    for op in graph.ops:
        op.fit(tiling)
    ops = _distinct(graph)
    number = {axis: -(-size // tiling.tile(axis, size)) for axis, size in graph.sizes().items()}
    number["seq"] = max(number.get(axis, 1) for axis in ("seq", "key"))
    base = _tally(ops, tiling, policy, {})
    counts: dict[Hashable, float] = dict(base)
    for axis, tiles in number.items():
        if tiles <= FEW or axis == "key":
            continue
        one = _tally(ops, tiling, policy, {axis: FEW + 1})
        two = _tally(ops, tiling, policy, {axis: FEW + 2}) if axis == "seq" else None
        steps = tiles - FEW
        for key, at in base.items():
            first = one[key] - at
            second = two[key] - 2 * one[key] + at if two else 0
            counts[key] *= (at + steps * first + steps * (steps - 1) / 2 * second) / at
    return round(sum(counts.values()))


def most_tasks(graph: Graph, tiling: Tiling) -> int:
    """More tasks than `lower` makes, in a time that hardly counts: of each operator a few for all tiles of its axes.

    Attention takes pairs of tiles of seq, which may stand for both axes."""
    number = {axis: -(-size // tiling.tile(axis, size)) for axis, size in graph.sizes().items()}
    found = 0
    for op in graph.ops:
        axes = {axis for t in (*op.inputs, *op.outputs) for axis in t.axes}
        pairs = "seq" in axes and "key" not in axes
        found += A_FEW * math.prod(number.get(axis, 1) for axis in axes) * (number["seq"] if pairs else 1)
    return found


def _distinct(graph: Graph) -> list[tuple[Op, int]]:
    """Operators that lower alike, as those of all layers do: the first of them, and how many they are."""
    found: dict[Hashable, tuple[Op, int]] = {}
    for op in graph.ops:
        sizes = tuple((t.axes, t.shape) for t in (*op.inputs, *op.outputs))
        key = re.sub(r"\d+", "*", op.name), op.phase, op.title, sizes
        first, times = found.get(key, (op, 0))
        found[key] = first, times + 1
    return list(found.values())


def _tally(ops: list[tuple[Op, int]], tiling: Tiling, policy: str, more: Mapping[str, int]) -> Counter[Hashable]:
    """The tasks of a corner, by operator, kernel, and the tensors of the first two tiles."""
    low, found = _Corner(tiling, policy, more), Counter[Hashable]()
    for number, (op, times) in enumerate(ops):
        low.tasks.tasks = []
        op.lower(low)
        for task in low.tasks.tasks:
            found[number, task.kernel, *(access.tile.tensor for access in task.accesses[:2])] += times
        if policy == "tree":  # each contribution to a tile but the first is merged by a task of its own
            added = [access.tile for task in low.tasks.tasks for access in task.accesses if access.mode == "ACC"]
            found[number, "combine"] += times * (len(added) - len(set(added)))
    return +found


class _Corner(Lowering):
    """Each axis in its first tiles and one that stands for all others: FEW in all, or as many as `more` says."""

    def __init__(self, tiling: Tiling, policy: str, more: Mapping[str, int]) -> None:
        super().__init__(tiling, TaskList(policy))
        self.more = more
        self._known: dict[tuple[str, int], list[Part]] = {}

    def parts(self, tensor: Tensor, axis: str) -> list[Part]:
        size = tensor.size(axis)
        if (axis, size) not in self._known:
            tile, most = self.tiling.tile(axis, size), self.more.get("seq" if axis == "key" else axis, FEW)
            ends = [*range(tile, size, tile)[: most - 1], size]
            self._known[axis, size] = [Part(a, b - a) for a, b in zip([0, *ends], ends, strict=False)]
        return self._known[axis, size]
