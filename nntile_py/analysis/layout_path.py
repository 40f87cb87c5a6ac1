"""Layout selection as a shortest path, as in figure 6 of Ivanov et al. 2021 ("Data movement is all you need").

A node is a tensor in an order of its axes. An edge is an operator that reads one tensor and writes the next one; its
length is the operator's time in the fastest layout with these two orders. The path ignores all other tensors, such as
residuals; the search of nntile_py (graph/layout_search.py) takes them into account.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nntile_py.graph.costs import Costs, SharedCopy, Table
from nntile_py.graph.edges import Edge, edges_of
from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Order, same_orders_of
from nntile_py.graph.timings import Timings
from nntile_py.tasks.elementwise import Rename
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling


@dataclass(frozen=True)
class Stage:
    """An operator of the chain with the seconds for each pair of orders.

    Attributes:
        source: the tensor that the operator reads; target: the tensor that it writes.
        sources: the possible orders of axes of the source; targets: those of the target. The first is the default.
        seconds: table [order of the source, order of the target]; infinite if the operator cannot have these orders.
    """

    op: Op
    source: Tensor
    target: Tensor
    sources: list[Order]
    targets: list[Order]
    seconds: Table


def chain(graph: Graph) -> list[tuple[Tensor, Op, Tensor]]:
    """Return the longest chain of operators from an input to a result: (tensor read, operator, tensor written)."""
    longest: dict[Tensor, list[tuple[Tensor, Op, Tensor]]] = {}
    for op in graph.ops:
        source = max(op.inputs, key=lambda tensor: len(longest.get(tensor, ())))
        if source.storage.kind == "param":
            continue
        longest[op.output] = [*longest.get(source, []), (source, op, op.output)]
    return max(longest.values(), key=len, default=[])


def stages(graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain") -> list[Stage]:
    """Return the stages of a graph's longest chain. All operators must have timings in all layouts."""
    edges = edges_of(graph)
    ops = [op for op in graph.ops if same_orders_of(op) and not isinstance(op, Rename)]
    costs = Costs(timings, tiling, policy, edges, ops, careful=False)
    result = []
    for source, op, target in chain(graph):
        first, last = edges[source], edges[target]
        if isinstance(op, Rename):  # it has no task
            seconds: Table = np.zeros([len(first.orders)])
            mine = [first] if len(first.orders) > 1 else []
        else:
            variables, seconds = costs.table(op)
            mine = [edge for edge in variables if edge in (first, last) and isinstance(edge, Edge)]
            for place, variable in reversed([*enumerate(variables)]):
                if isinstance(variable, SharedCopy):
                    seconds = np.asarray(seconds.take(0, axis=place))  # without a copy, which would be another edge
                elif variable not in mine:
                    seconds = np.asarray(seconds.min(axis=place))
        count = len(first.orders), len(last.orders)
        if first is last:
            table = np.full(count, math.inf)
            np.fill_diagonal(table, seconds)
        else:
            if mine == [last, first]:
                seconds = seconds.T
            shape = [len(edge.orders) if edge in mine else 1 for edge in (first, last)]
            table = np.broadcast_to(seconds.reshape(shape), count)
        result.append(Stage(op, source, target, _orders(first, source), _orders(last, target), table))
    return result


def _orders(edge: Edge, tensor: Tensor) -> list[Order]:
    return [edge.of(tensor, number) for number in range(len(edge.orders))]


def shortest(of: Sequence[Stage]) -> tuple[list[int], float]:
    """Return the shortest path through the stages: the number of each tensor's order, and the seconds of the path."""
    before: Table = np.zeros(len(of[0].sources))
    choices = []
    for stage in of:
        lengths = before[:, None] + stage.seconds
        choices.append(lengths.argmin(axis=0))
        before = lengths.min(axis=0)
    path = [int(before.argmin())]
    for choice in reversed(choices):
        path.append(int(choice[path[-1]]))
    return path[::-1], float(before.min())


def length(of: Sequence[Stage], path: Sequence[int]) -> float:
    """Return the seconds of a path."""
    return math.fsum(float(stage.seconds[path[k], path[k + 1]]) for k, stage in enumerate(of))
