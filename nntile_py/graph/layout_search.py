"""The layout of each edge of a graph: the cheapest choice for all operators together, by what each took in each layout.

As in Ivanov et al. 2021 ("Data movement is all you need", section VI.A), but for forward and backward together, with
residual connections: of a chain of operators it is the shortest path over (operator, layout); where an edge is read by
several, edges are eliminated one by one (Bertele and Brioschi 1972, "Nonserial dynamic programming"), which is exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError, say_once
from nntile_py.graph.costs import Costs, Table, Variable
from nntile_py.graph.edges import Edge, edges_of
from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Layout, Order, groups_of, layout_of, on, tensors_of
from nntile_py.graph.timings import Timings
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Rename, Transpose
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling


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
    measured, by the texts of `described`; only without any are times true. program: a digest of the graph and of all
    that was chosen for it; None: that is the default. refused: whole steps of it were slower than in the default."""

    orders: dict[Tensor, Order]
    layouts: dict[Op, Layout]
    widths: dict[Op, int | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    missing: dict[tuple[str, str], Op] = field(default_factory=dict)
    program: str | None = None
    refused: bool = False

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


def search(
    graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain", *, weights: bool = True, careful: bool = True
) -> Chosen:
    """Choose a layout for each edge of a graph that is fused. Nothing is changed.

    weights: for these, too. careful: what is not the default has to gain more than the noise of its times, so that it
    is not slower; otherwise no choice adds up to less."""
    edges = edges_of(graph, weights=weights)
    ops = [op for op in graph.ops if groups_of(op) and not isinstance(op, Rename)]
    costs = Costs(timings, tiling, policy, edges, ops, careful=careful)
    values = _least(costs, ops)
    chosen = Chosen({t: edge.of(t, values.get(edge, 0)) for t, edge in edges.items()}, {}, missing=costs.missing)
    turned = set[tuple[Tensor, Order, str]]()  # copies, which the first that reads one pays
    for op in ops:
        layout = costs.layout(op, values)
        timing, default = costs.timing(op, layout), costs.default(op)
        least = timings.least(timing.operator) if timing.layout else 0.0  # one that goes takes no time
        turning = 0.0
        for tensor, order in zip(tensors_of(op), layout, strict=True):
            if (copy := (tensor, order, op.phase)) not in turned:
                turning += costs.turn(tensor, chosen.orders[tensor], order)
                turned |= {copy} if tensor in op.inputs else set()
        chosen.layouts[op], chosen.widths[op] = layout, timing.width
        chosen.rows.append(Row(op, timing.operator, timing.layout, timing.seconds, default.layout, default.seconds,
                               least, turning))  # fmt: skip
    if not chosen.missing:
        chosen.program = _program(graph, chosen, tiling, policy)
    return chosen


def _program(graph: Graph, chosen: Chosen, tiling: Tiling, policy: str) -> str | None:
    """See Chosen; the same in every process."""
    numbers: dict[Tensor, int] = {}
    parts: list[object] = [sorted(tiling.tiles.items()), policy]
    changed = False
    for op in graph.ops:
        tensors = [*op.inputs, *op.outputs]
        told = [(numbers.setdefault(t, len(numbers)), t.axes, t.shape, t.dtype, t.kind, chosen.orders[t])
                for t in tensors]  # fmt: skip
        layout, width = chosen.layouts.get(op), chosen.widths.get(op)
        parts.append((op.title, op.phase, told, layout, width))
        changed |= any(t.axes != chosen.orders[t] for t in tensors) or layout not in (None, layout_of(op))
        changed |= bool(width)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16] if changed else None


def _least(costs: Costs, ops: Sequence[Op]) -> dict[Variable, int]:
    """The cheapest choice for these operators together."""
    terms = costs.terms(ops)
    every = dict.fromkeys(v for of, _ in terms for v in of)
    variables = sorted(every, key=lambda v: isinstance(v, Edge))  # of equal choices those that leave edges as they are
    at = {v: number for number, v in enumerate(variables)}
    factors = [([at[v] for v in of], table) for of, table in terms]
    kept = _useful(factors, [len(v.orders) for v in variables])
    small = [(of, table[np.ix_(*(kept[v] for v in of))]) for of, table in factors]
    found = cheapest(small, [len(of) for of in kept])
    return {v: kept[number][found[number]] for v, number in at.items()}


def arrange(
    graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain", kept: Mapping[str, Order] | None = None
) -> Chosen:
    """Give each edge of a graph that is fused the layout that was searched. In place.

    It keeps the default ones where a verdict says that searched ones are slower. kept: the orders of weights by name,
    where they are not to be chosen. ConfigError: the timings lack some that this needs."""
    if kept is not None:
        keep_in(graph, kept)
    chosen = search(graph, timings, tiling, policy, weights=kept is None)
    if chosen.missing:
        first, layout = next(iter(chosen.missing))
        raise ConfigError(
            f"layout: got searched; allowed: default, as {timings.path or 'the database'} lacks {len(chosen.missing)}"
            f" timings, the first of {first}, {layout}; `nntile layouts tune` with the same keys measures them,"
            f" {timings.workers}"
        )
    verdict = timings.verdicts.get(chosen.program or "")
    if verdict and verdict.slower:
        chosen.refused = True
        say_once(f"layout: searched takes the default layouts here: {verdict}")
        return chosen
    if chosen.program and not verdict and timings.path and kept is None:
        say_once("layout: searched was not yet compared with default in whole steps; `nntile layouts tune` with the"
                 " same keys does that")  # fmt: skip
    _Arranged(chosen).change(graph)
    return chosen


def keep_in(graph: Graph, kept: Mapping[str, Order]) -> None:
    """Give the weights of a graph, and their gradients with all parts, these orders, by name. In place."""
    weights = {name: t for name, t in graph.tensors.items() if t.kind == "param" and name in kept}
    turned = {t: kept[name] for name, param in weights.items() for t in (param, graph.grads.get(param)) if t}
    every = [t for op in graph.ops for t in tensors_of(op)]
    orders = {t: turned.get(t.storage if t.storage.kind == "grad" else t, t.axes) for t in every} | turned
    layouts = {op: tuple(orders[t] if isinstance(op, Contract) else t.axes for t in tensors_of(op)) for op in graph.ops}
    _Arranged(Chosen(orders, layouts)).change(graph)


# -- the search


Factor = tuple[Sequence[int], Table]  # some variables, and a cost for each choice of their values


def _useful(factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[int]]:
    """Of each variable its first value, and those that are better for some values of the others: no more are needed."""
    gains = [np.zeros(size) for size in sizes]  # at most
    for variables, table in factors:
        for place, v in enumerate(variables):
            with np.errstate(invalid="ignore"):
                gain = np.moveaxis(table.take([0], place) - table, place, -1).reshape(-1, sizes[v])
            gains[v] += np.where(np.isnan(gain), -np.inf, gain).max(0)  # of two impossible ones neither is better
    return [[0, *(k for k in range(1, len(of)) if not of[k] <= 0)] for of in gains]


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

    def change(self, graph: Graph) -> None:
        graph.ops = list(self._ops(graph))
        new = {old: made for old, made in self.made.items() if made is not old and old.kind != "temp"}
        graph.tensors = {name: new.get(t, t) for name, t in graph.tensors.items()}
        graph.grads = {new.get(param, param): new.get(grad, grad) for param, grad in graph.grads.items()}
        params = [param.on(new[t]) if t in new else param for t, param in graph.params.items()]
        graph.params = {param.tensor: param for param in params}

    def _ops(self, graph: Graph) -> Iterator[Op]:
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
            self.made[tensor] = tensor if same else _turned(tensor, order, owner, tensor.kind)
        return self.made[tensor]


def _turned(tensor: Tensor, order: Order, owner: Tensor | None = None, kind: str = "temp") -> Tensor:
    """owner: whose tiles it takes, if not its own."""
    owner, shape = None if owner is tensor else owner, [tensor.size(axis) for axis in order]
    made = Tensor(tensor.name, order, shape, tensor.dtype, kind, monoid=tensor.monoid, storage=owner, band=tensor.band)
    made.requires_grad = tensor.requires_grad
    return made


def _transpose(beside: Op, x: Tensor, y: Tensor) -> Transpose:
    made = Transpose(x, y)
    made.name, made.phase = f"{beside.name.rpartition('.')[0] or 'model'}.Transpose", beside.phase
    return made
