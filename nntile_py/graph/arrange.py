"""The layout of each edge of a graph: the cheapest choice for all operators together, by what each took in each layout.

As in Ivanov et al. 2021 ("Data movement is all you need", section VI.A), but for forward and backward together, with
residual connections: of a chain of operators it is the shortest path over (operator, layout); where an edge is read by
several, edges are eliminated one by one (Bertele and Brioschi 1972, "Nonserial dynamic programming"), which is exact.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.edges import Edge, edges_of
from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Layout, Order, described, groups_of, laid, layout_of, on, products, tensors_of
from nntile_py.graph.timings import Timing, Timings
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Rename, Transpose
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling

Costs = np.ndarray[Any, np.dtype[np.float64]]
KEPT = 12  # orders of an edge that the search goes through: those whose operators could be fastest


@dataclass(frozen=True)
class Row:
    """An operator: its layout that was chosen and the default one, with their seconds; those of its best layout; of the
    transpositions that it takes."""

    op: Op
    operator: str
    layout: str
    seconds: float
    default: str
    default_seconds: float
    least: float
    turning: float


@dataclass
class Chosen:
    """orders: of each tensor; layouts: in which each operator runs; widths: of generated kernels. missing: what was not
    measured, by the texts of `described`; only without any are times true."""

    orders: dict[Tensor, Order]
    layouts: dict[Op, Layout]
    widths: dict[Op, int | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    missing: dict[tuple[str, str], Op] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return math.fsum(row.seconds + row.turning for row in self.rows)

    @property
    def default(self) -> float:
        return math.fsum(row.default_seconds for row in self.rows)

    @property
    def least(self) -> float:
        """The sum of the operators' optima, whatever layouts they need."""
        return math.fsum(row.least for row in self.rows)


def search(graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain") -> Chosen:
    """Choose a layout for each edge of a graph that is fused. Nothing is changed."""
    costs, edges = _Costs(timings, tiling, policy), edges_of(graph)
    ops = [op for op in graph.ops if groups_of(op) and not isinstance(op, Rename)]
    mine = {op: _edges(op, edges) for op in ops}
    tables = {op: costs.table(op, edges, mine[op]) for op in ops}
    variables = list({id(edge): edge for edge in edges.values() if len(edge.orders) > 1}.values())
    at = {id(edge): number for number, edge in enumerate(variables)}
    factors = [([at[id(e)] for e in mine[op]], tables[op]) for op in ops]
    kept = _kept(factors, [len(edge.orders) for edge in variables])
    small = [(of, table[np.ix_(*(kept[v] for v in of))]) for of, table in factors]
    found = cheapest(small, [len(of) for of in kept])
    number = {id(edge): kept[at[id(edge)]][found[at[id(edge)]]] for edge in variables}
    chosen = Chosen({t: edge.of(t, number.get(id(edge), 0)) for t, edge in edges.items()}, {}, missing=costs.missing)
    for op in ops:
        layout = costs.layout(op, edges, number)
        timing, default = costs.timing(op, layout), costs.timing(op, layout_of(op))
        turning = sum(costs.turn(t, chosen.orders[t], of) for t, of in zip(tensors_of(op), layout, strict=True))
        chosen.layouts[op], chosen.widths[op] = layout, timing.width
        chosen.rows.append(Row(op, timing.operator, timing.layout, timing.seconds, default.layout, default.seconds,
                               _least(timings, timing), turning))  # fmt: skip
    return chosen


def arrange(graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain") -> Chosen:
    """Give each edge of a graph that is fused the layout that was searched. In place.

    ConfigError: the timings lack some that this needs."""
    chosen = search(graph, timings, tiling, policy)
    if chosen.missing:
        first, layout = next(iter(chosen.missing))
        raise ConfigError(
            f"layout: got searched; allowed: default, as {timings.path or 'the database'} lacks {len(chosen.missing)}"
            f" timings, the first of {first}, {layout}; `nntile layouts tune` with the same keys measures them"
        )
    graph.ops = list(_Arranged(chosen).ops(graph))
    return chosen


def _edges(op: Op, edges: dict[Tensor, Edge]) -> list[Edge]:
    """Those of an operator that have a choice."""
    return list({id(e): e for e in (edges[t] for t in tensors_of(op)) if len(e.orders) > 1}.values())


# -- what an operator takes, for each order of its edges


class _Costs:
    def __init__(self, timings: Timings, tiling: Tiling, policy: str) -> None:
        self.timings, self.tiling, self.policy = timings, tiling, policy
        self.missing: dict[tuple[str, str], Op] = {}
        self._known: dict[Hashable, Timing] = {}
        self._tables: dict[Hashable, Costs] = {}

    def timing(self, op: Op, layout: Layout) -> Timing:
        """One of no seconds where it was not measured, which is noted."""
        if isinstance(op, Transpose) and layout[0] == layout[-1]:  # of two orders that became one: it goes
            return Timing("Transpose", "", 0.0)
        key = _alike(op), layout
        if key not in self._known:
            made = laid(op, layout)
            told = described(made, self.tiling, self.policy)
            known = self.timings.best(*told)
            if known is None:
                self.missing.setdefault(told, made)
            self._known[key] = known or Timing(*told, 0.0)
        return self._known[key]

    def turn(self, tensor: Tensor, now: Order, then: Order) -> float:
        """Of a transposition; infinite between two orders neither of which is the default: those are not searched."""
        if now == then:
            return 0.0
        if tensor.axes not in (now, then):
            return math.inf
        x, y = (Tensor(tensor.name, order, [tensor.size(a) for a in order], tensor.dtype, band=tensor.band)
                for order in (now, then))  # fmt: skip
        op = Transpose(x, y)
        return self.timing(op, layout_of(op)).seconds

    def table(self, op: Op, edges: dict[Tensor, Edge], mine: Sequence[Edge]) -> Costs:
        """Seconds by the numbers of its edges' orders."""
        tensors = tensors_of(op)
        orders = tuple(tuple(edges[t].of(t, k) for k in range(len(edges[t].orders))) for t in tensors)
        key = _alike(op), orders, tuple(mine.index(edges[t]) if edges[t] in mine else -1 for t in tensors)
        if key not in self._tables:
            self._tables[key] = self._table(op, edges, mine)
        return self._tables[key]

    def _table(self, op: Op, edges: dict[Tensor, Edge], mine: Sequence[Edge]) -> Costs:
        shape = [len(edge.orders) for edge in mine]
        if not isinstance(op, Contract):
            made = np.empty(shape)
            for numbers in itertools.product(*map(range, shape)):
                of = {id(edge): number for edge, number in zip(mine, numbers, strict=True)}
                layout = self._implied(op, edges, of)
                made[numbers] = math.inf if _left_out(op, layout) else self.timing(op, layout).seconds
            return made
        return np.asarray(self._products(op, edges, mine, _choices(op)).min(-1))

    def _products(self, op: Op, edges: dict[Tensor, Edge], mine: Sequence[Edge], choices: Sequence[Layout]) -> Costs:
        """Seconds by the numbers of its edges' orders and the layout that it runs in, transpositions included."""
        total: Any = np.array([self.timing(op, layout).seconds for layout in choices])
        tensors = tensors_of(op)
        for place, edge in enumerate(mine):
            own = np.zeros((len(edge.orders), len(choices)))
            for k, tensor in enumerate(tensors):
                if edges[tensor] is edge:
                    orders = [edge.of(tensor, number) for number in range(len(edge.orders))]
                    own += [[self.turn(tensor, order, layout[k]) for layout in choices] for order in orders]
            total = total + own.reshape([-1 if k == place else 1 for k in range(len(mine))] + [len(choices)])
        for k, tensor in enumerate(tensors):
            if edges[tensor] not in mine:
                total = total + np.array([self.turn(tensor, tensor.axes, layout[k]) for layout in choices])
        return np.asarray(total)

    def layout(self, op: Op, edges: dict[Tensor, Edge], number: dict[int, int]) -> Layout:
        """In which it runs where the edges have the orders of these numbers."""
        if not isinstance(op, Contract):
            return self._implied(op, edges, number)
        choices, mine = _choices(op), _edges(op, edges)
        totals = self._products(op, edges, mine, choices)[tuple(number[id(edge)] for edge in mine)]
        return choices[int(totals.argmin())]

    @staticmethod
    def _implied(op: Op, edges: dict[Tensor, Edge], number: dict[int, int]) -> Layout:
        return tuple(edges[t].of(t, number.get(id(edges[t]), 0)) for t in tensors_of(op))


def _choices(op: Contract) -> list[Layout]:
    """The default, and all products; weights and what else outlives the program stay as they are."""
    tensors = tensors_of(op)

    def possible(layout: Layout) -> bool:
        return all(order == t.axes for t, order in zip(tensors, layout, strict=True) if t.kind != "temp")

    return list(dict.fromkeys([layout_of(op), *filter(possible, products(op))]))


def _left_out(op: Op, layout: Layout) -> bool:
    """Whether it transposes between two orders neither of which is the default: there are too many."""
    now = layout_of(op)
    return isinstance(op, Transpose) and layout[0] != layout[1] and all(map(operator.ne, layout, now))


def _least(timings: Timings, timing: Timing) -> float:
    """Of its operator; one that goes takes no time."""
    return timings.least(timing.operator) if timing.layout else 0.0


def _alike(op: Op) -> Hashable:
    """The same for operators that take the same time in the same layout."""
    tensors = tuple((t.axes, t.shape, t.dtype, t.kind == "temp", t.band) for t in (*op.inputs, *op.outputs))
    return op.title, len(op.inputs), tensors, op.form.axes if isinstance(op, Generated) else ()


# -- the search


Factor = tuple[Sequence[int], Costs]  # some variables, and a cost for each choice of their values


def _kept(factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[int]]:
    """Of each variable the values to go through: the present one, and those with the lowest bounds."""
    bounds = [np.zeros(size) for size in sizes]
    for variables, table in factors:
        for place, v in enumerate(variables):
            bounds[v] += table.min(tuple(k for k in range(table.ndim) if k != place))
    return [sorted(dict.fromkeys([0, *np.argsort(of, kind="stable")[:KEPT].tolist()])) for of in bounds]


def cheapest(factors: Sequence[Factor], sizes: Sequence[int]) -> list[int]:
    """The value of each variable for which the sum of all factors is least. Of equal ones that with the lower numbers.

    A variable is eliminated by the table of its best value for all values of its neighbours: first those with few."""
    left, todo = list(factors), set(range(len(sizes)))
    steps: list[tuple[int, list[int], np.ndarray[Any, Any]]] = []
    while todo:
        near = {v: sorted({w for of, _ in left if v in of for w in of} - {v}) for v in todo}
        v = min(todo, key=lambda v: (math.prod(sizes[w] for w in near[v]), v))
        axes = [*near[v], v]
        table = np.zeros([sizes[w] for w in axes])
        for of, costs in (factor for factor in left if v in factor[0]):
            order = sorted(range(len(of)), key=lambda k: axes.index(of[k]))
            table += costs.transpose(order).reshape([sizes[w] if w in of else 1 for w in axes])
        left = [factor for factor in left if v not in factor[0]] + [(near[v], table.min(-1))]
        steps.append((v, near[v], table.argmin(-1)))
        todo.remove(v)
    values = [0] * len(sizes)
    for v, others, best in reversed(steps):
        values[v] = int(best[tuple(values[w] for w in others)])
    return values


# -- the graph in the layouts that were chosen


class _Arranged:
    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.made: dict[Tensor, Tensor] = {}
        self._copies: dict[Hashable, Tensor] = {}

    def ops(self, graph: Graph) -> Iterator[Op]:
        for op in graph.ops:
            if isinstance(op, Transpose) and self._same(op):
                continue
            layout = self.chosen.layouts.get(op) or tuple(self.chosen.orders[t] for t in tensors_of(op))
            other, after = dict[Tensor, Tensor](), list[Op]()
            for tensor, order in zip(tensors_of(op), layout, strict=True):
                mine = self._in_order(tensor)
                other[tensor] = mine
                if mine.axes == order:
                    continue
                if tensor in op.inputs:
                    key = mine, order, op.phase
                    if key not in self._copies:
                        self._copies[key] = _turned(mine, order)
                        yield _transpose(op, mine, self._copies[key])
                    other[tensor] = self._copies[key]
                else:
                    other[tensor] = _turned(mine, order)
                    after.append(_transpose(op, other[tensor], mine))
            width = self.chosen.widths.get(op)
            changed = any(old is not new for old, new in other.items())
            new = on(op, other) if changed else op
            if width and isinstance(new, Generated):
                new = new.on(new.inputs, new.outputs, width)
                new.name, new.phase = op.name, op.phase
            yield new
            yield from after

    def _same(self, op: Transpose) -> bool:
        """Whether both have one order now: then readers take the first in the place of the second."""
        x, y = self._in_order(op.inputs[0]), op.output
        if y.kind != "temp" or y.storage is not y or self.chosen.orders[y] != x.axes:
            return False
        self.made[y] = x
        return True

    def _in_order(self, tensor: Tensor) -> Tensor:
        """The tensor in the order of its edge; one that shares another's tiles shares those of what takes its place."""
        if tensor not in self.made:
            order = self.chosen.orders.get(tensor, tensor.axes)
            owner = tensor.storage if tensor.storage is tensor else self._in_order(tensor.storage)
            same = order == tensor.axes and owner is tensor.storage
            self.made[tensor] = tensor if same else _turned(tensor, order, None if owner is tensor else owner)
        return self.made[tensor]


def _turned(tensor: Tensor, order: Order, owner: Tensor | None = None) -> Tensor:
    shape = [tensor.size(axis) for axis in order]
    made = Tensor(tensor.name, order, shape, tensor.dtype, monoid=tensor.monoid, storage=owner, band=tensor.band)
    made.requires_grad = tensor.requires_grad
    return made


def _transpose(beside: Op, x: Tensor, y: Tensor) -> Transpose:
    made = Transpose(x, y)
    made.name, made.phase = f"{beside.name.rpartition('.')[0] or 'model'}.Transpose", beside.phase
    return made
