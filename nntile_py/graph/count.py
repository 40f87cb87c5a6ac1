"""The number of tasks of a graph under a tiling, counted without lowering the whole graph."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping

from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Lowering, Op, Tensor
from nntile_py.tiles import TaskList, TileRange, Tiling

FEW = 2  # number of tiles of each axis in a sample, from which `count_tasks` extrapolates
A_FEW = 8  # upper bound on the tasks of any operator for one combination of tiles of its axes


def count_tasks(graph: Graph, tiling: Tiling, policy: str = "chain") -> int:
    """Return the number of tasks that `lower` would list. The time does not grow with this number.

    For each operator and kernel, the number of tasks is a product of polynomials, one for each axis, in the axis's
    number of tiles. The degree is one; for seq it is two, because attention works on pairs of tiles. The coefficients
    come from samples: the operators are lowered for FEW tiles of each axis, then for one or two more tiles of one axis.
    The count is exact except for tree sums, shared key heads, wide attention windows, and tensors that differ in the
    size of an axis.
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
    """Return an upper bound on the tasks that `lower` would list, at almost no cost.

    Each operator counts A_FEW tasks for each combination of the tiles of its axes. An operator with the axis seq but
    without key counts pairs of tiles of seq, because attention works on such pairs.
    """
    number = {axis: -(-size // tiling.tile(axis, size)) for axis, size in graph.sizes().items()}
    bound = 0
    for op in graph.ops:
        axes = {axis for t in (*op.inputs, *op.outputs) for axis in t.axes}
        pairs = "seq" in axes and "key" not in axes
        bound += A_FEW * math.prod(number.get(axis, 1) for axis in axes) * (number["seq"] if pairs else 1)
    return bound


def _distinct(graph: Graph) -> list[tuple[Op, int]]:
    """Group the operators that lower to equal tasks, such as those of equal layers.

    Return one operator of each group, with the number of operators in the group.
    """
    distinct: dict[Hashable, tuple[Op, int]] = {}
    for op in graph.ops:
        sizes = tuple((t.axes, t.shape) for t in (*op.inputs, *op.outputs))
        key = re.sub(r"\d+", "*", op.name), op.phase, op.title, sizes
        first, times = distinct.get(key, (op, 0))
        distinct[key] = first, times + 1
    return list(distinct.values())


def _tally(ops: list[tuple[Op, int]], tiling: Tiling, policy: str, more: Mapping[str, int]) -> Counter[Hashable]:
    """Return the number of tasks of a sample by operator, kernel, and the tensors of a task's first two tiles.

    Args:
        ops: operators, each with the number of equal operators that it stands for.
        more: number of tiles of an axis, if it is not FEW.
    """
    lowering, counts = _Corner(tiling, policy, more), Counter[Hashable]()
    for number, (op, times) in enumerate(ops):
        lowering.tasks.tasks = []
        op.lower(lowering)
        for task in lowering.tasks.tasks:
            counts[number, task.kernel, *(access.tile.tensor for access in task.accesses[:2])] += times
        if policy == "tree":  # a merge for each contribution to a tile except the first
            added = [access.tile for task in lowering.tasks.tasks for access in task.accesses if access.mode == "ACC"]
            counts[number, "combine"] += times * (len(added) - len(set(added)))
    return +counts


class _Corner(Lowering):
    """A lowering in which each axis has only a few tiles: the last of them holds the rest of the axis.

    more: number of tiles of an axis, if it is not FEW.
    """

    def __init__(self, tiling: Tiling, policy: str, more: Mapping[str, int]) -> None:
        super().__init__(tiling, TaskList(policy))
        self.more = more
        self._known: dict[tuple[str, int], list[TileRange]] = {}

    def parts(self, tensor: Tensor, axis: str) -> list[TileRange]:
        size = tensor.size(axis)
        if (axis, size) not in self._known:
            tile, most = self.tiling.tile(axis, size), self.more.get("seq" if axis == "key" else axis, FEW)
            ends = [*range(tile, size, tile)[: most - 1], size]
            self._known[axis, size] = [TileRange(a, b - a) for a, b in zip([0, *ends], ends, strict=False)]
        return self._known[axis, size]
