"""The layout search: choose a layout for each edge of a graph so that all operators together take the least time.

Source: Ivanov et al. 2021 ("Data movement is all you need", section VI.A), which finds a shortest path over (operator,
layout). A graph with a backward pass and residual connections is no path, so this search uses nonserial dynamic
programming (Bertele and Brioschi 1972): it eliminates one edge after the other, and the result is exact.
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
from nntile_py.graph.layouts import Layout, Order, layout_of, on, same_orders_of, tensors_of
from nntile_py.graph.timings import Timings
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Rename, Transpose
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling


@dataclass(frozen=True)
class LayoutChoice:
    """The layout chosen for an operator, with times in seconds.

    Attributes:
        operator: text that identifies the operator, see layouts.described.
        layout: the chosen layout, as text; the operator takes `seconds` in this layout.
        default: the default layout, as text; the operator takes `default_seconds` in this layout.
        least: the operator's time in its fastest layout.
        transposes: the time of the transposes that the chosen layout needs.
    """

    op: Op
    operator: str
    layout: str
    seconds: float
    default: str
    default_seconds: float
    least: float
    transposes: float


@dataclass
class SearchedLayouts:
    """The result of a layout search.

    Attributes:
        orders: order of axes in which each tensor is stored.
        layouts: layout in which each operator runs. If it differs from the stored orders, transposes are added.
        widths: width of each operator's generated kernel; None: the default width.
        rows: the choice for each operator.
        missing: operators in layouts without a measured time; the keys are their texts, see layouts.described. If there
            are any, `rows` is not valid.
        program: a digest of the graph and of the chosen layouts; None if all chosen layouts are default.
        refused: True: whole steps were measured to be slower than in the default layouts.
    """

    orders: dict[Tensor, Order]
    layouts: dict[Op, Layout]
    widths: dict[Op, int | None] = field(default_factory=dict)
    rows: list[LayoutChoice] = field(default_factory=list)
    missing: dict[tuple[str, str], Op] = field(default_factory=dict)
    program: str | None = None
    refused: bool = False

    @property
    def seconds(self) -> float:
        return math.fsum(row.seconds + row.transposes for row in self.rows)

    @property
    def default(self) -> float:
        return math.fsum(row.default_seconds for row in self.rows)

    @property
    def least(self) -> float:
        """The sum of the operators' times in their fastest layouts, without transposes."""
        return math.fsum(row.least for row in self.rows)


def search(
    graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain", *, weights: bool = True, careful: bool = True
) -> SearchedLayouts:
    """Choose a layout for each edge of a fused graph, without changing the graph.

    Args:
        policy: accumulation policy.
        weights: True: choose orders of axes for weights too.
        careful: True: choose another layout than the default only if it gains more than the noise of its times.
    """
    edges = edges_of(graph, weights=weights)
    ops = [op for op in graph.ops if same_orders_of(op) and not isinstance(op, Rename)]
    costs = Costs(timings, tiling, policy, edges, ops, careful=careful)
    values = _least(costs, ops)
    chosen = SearchedLayouts(
        {t: edge.of(t, values.get(edge, 0)) for t, edge in edges.items()}, {}, missing=costs.missing
    )
    copied = set[tuple[Tensor, Order, str]]()  # a copy's time is counted for its first reader
    for op in ops:
        layout = costs.layout(op, values)
        timing, default = costs.timing(op, layout), costs.default(op)
        least = timings.least(timing.operator) if timing.layout else 0.0  # a removed transpose takes no time
        transposes = 0.0
        for tensor, order in zip(tensors_of(op), layout, strict=True):
            if (copy := (tensor, order, op.phase)) not in copied:
                transposes += costs.transpose_seconds(tensor, chosen.orders[tensor], order)
                copied |= {copy} if tensor in op.inputs else set()
        chosen.layouts[op], chosen.widths[op] = layout, timing.width
        times = timing.seconds, default.layout, default.seconds, least, transposes
        chosen.rows.append(LayoutChoice(op, timing.operator, timing.layout, *times))
    if not chosen.missing:
        chosen.program = _program(graph, chosen, tiling, policy)
    return chosen


def _program(graph: Graph, chosen: SearchedLayouts, tiling: Tiling, policy: str) -> str | None:
    """Return the digest SearchedLayouts.program of the graph and the chosen layouts, the same in every process."""
    numbers: dict[Tensor, int] = {}
    parts: list[object] = [sorted(tiling.tiles.items()), policy]
    changed = False
    for op in graph.ops:
        tensors = [*op.inputs, *op.outputs]
        tensor_texts = [(numbers.setdefault(t, len(numbers)), t.axes, t.shape, t.dtype, t.kind, chosen.orders[t])
                for t in tensors]  # fmt: skip
        layout, width = chosen.layouts.get(op), chosen.widths.get(op)
        parts.append((op.title, op.phase, tensor_texts, layout, width))
        changed |= any(t.axes != chosen.orders[t] for t in tensors) or layout not in (None, layout_of(op))
        changed |= bool(width)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16] if changed else None


def _least(costs: Costs, ops: Sequence[Op]) -> dict[Variable, int]:
    """Return the value of each variable with which all operators together have the least cost."""
    terms = costs.terms(ops)
    every = dict.fromkeys(v for of, _ in terms for v in of)
    variables = sorted(every, key=lambda v: isinstance(v, Edge))  # at equal cost, edges keep their present order
    at = {v: number for number, v in enumerate(variables)}
    factors = [([at[v] for v in of], table) for of, table in terms]
    kept = _useful(factors, [len(v.orders) for v in variables])
    small = [(of, table[np.ix_(*(kept[v] for v in of))]) for of, table in factors]
    best = cheapest(small, [len(of) for of in kept])
    return {v: kept[number][best[number]] for v, number in at.items()}


def arrange(
    graph: Graph, timings: Timings, tiling: Tiling, policy: str = "chain", kept: Mapping[str, Order] | None = None
) -> SearchedLayouts:
    """Search the layouts of a fused graph and change the graph, in place, to the layouts that were found.

    The graph keeps the default layouts if whole steps were measured to be slower in the searched layouts.

    Args:
        kept: {weight: order of axes}, fixed orders of weights; None: the search chooses the orders of weights too.

    Raises:
        ConfigError: an operator has no measured time.
    """
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
    comparison = timings.comparisons.get(chosen.program or "")
    if comparison and comparison.slower:
        chosen.refused = True
        say_once(f"layout: searched takes the default layouts here: {comparison}")
        return chosen
    if chosen.program and not comparison and timings.path and kept is None:
        say_once("layout: searched was not yet compared with default in whole steps; `nntile layouts tune` with the"
                 " same keys does that")  # fmt: skip
    _Rearranged(chosen).change(graph)
    return chosen


def keep_in(graph: Graph, kept: Mapping[str, Order]) -> None:
    """Reorder the axes of weights and of their gradients, in place. kept: {name of a weight: order of axes}."""
    weights = {name: t for name, t in graph.tensors.items() if t.kind == "param" and name in kept}
    moved = {t: kept[name] for name, param in weights.items() for t in (param, graph.grads.get(param)) if t}
    every = [t for op in graph.ops for t in tensors_of(op)]
    orders = {t: moved.get(t.storage if t.storage.kind == "grad" else t, t.axes) for t in every} | moved
    layouts = {op: tuple(orders[t] if isinstance(op, Contract) else t.axes for t in tensors_of(op)) for op in graph.ops}
    _Rearranged(SearchedLayouts(orders, layouts)).change(graph)


# -- the search


Factor = tuple[Sequence[int], Table]  # indices of variables, and a cost for each combination of their values


def _useful(factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[int]]:
    """Return, for each variable, the values that the search must consider.

    These are value 0, and each value that can cost less than value 0 for some values of the other variables.

    Args:
        sizes: the number of values of each variable.
    """
    gains = [np.zeros(size) for size in sizes]  # upper bounds
    for variables, table in factors:
        for place, v in enumerate(variables):
            with np.errstate(invalid="ignore"):
                gain = np.moveaxis(table.take([0], place) - table, place, -1).reshape(-1, sizes[v])
            # NaN is infinity minus infinity: both values are impossible.
            gains[v] += np.where(np.isnan(gain), -np.inf, gain).max(0)
    return [[0, *(k for k in range(1, len(of)) if not of[k] <= 0)] for of in gains]


def cheapest(factors: Sequence[Factor], sizes: Sequence[int]) -> list[int]:
    """Return the value of each variable so that the sum of all factors is least; at equal sums the lower values.

    The search eliminates one variable after the other: it tabulates the variable's best value for each combination of
    the values of its neighbours, the variables with which it shares a factor. Variables with small tables come first.

    Args:
        sizes: the number of values of each variable.
    """
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


# -- the graph in the chosen layouts


class _Rearranged:
    """Rewrites a graph in the chosen layouts. Adds a transpose where an operator needs another order than its edge."""

    def __init__(self, chosen: SearchedLayouts) -> None:
        self.chosen = chosen
        self.new_tensors: dict[Tensor, Tensor] = {}
        self._copies: dict[Hashable, Tensor] = {}

    def change(self, graph: Graph) -> None:
        graph.ops = list(self._ops(graph))
        new = {old: tensor for old, tensor in self.new_tensors.items() if tensor is not old and old.kind != "temp"}
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
                        self._copies[key] = _reordered(mine, order)
                        yield _transpose(op, mine, self._copies[key])
                    other[tensor] = self._copies[key]
                else:
                    other[tensor] = _reordered(mine, order)
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
        """Return whether a transpose's input and output have the same order now, so the transpose can be removed.

        If so, record that the readers of the output read the input instead.
        """
        x, y = self._in_order(op.inputs[0]), op.output
        if y.kind != "temp" or y.storage is not y or self.chosen.orders[y] != x.axes:
            return False
        self.new_tensors[y] = x
        return True

    def _in_order(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its axes in the chosen order. Tensors that shared tiles still share them."""
        if tensor not in self.new_tensors:
            order = self.chosen.orders.get(tensor, tensor.axes)
            owner = tensor.storage if tensor.storage is tensor else self._in_order(tensor.storage)
            same = order == tensor.axes and owner is tensor.storage
            self.new_tensors[tensor] = tensor if same else _reordered(tensor, order, owner, tensor.kind)
        return self.new_tensors[tensor]


def _reordered(tensor: Tensor, order: Order, owner: Tensor | None = None, kind: str = "temp") -> Tensor:
    """Return a copy of a tensor with its axes in another order.

    owner: the tensor whose tiles the copy shares; None: the copy has its own tiles.
    """
    owner, shape = None if owner is tensor else owner, [tensor.size(axis) for axis in order]
    monoid, band = tensor.monoid, tensor.band
    new = Tensor(tensor.name, order, shape, tensor.dtype, kind, monoid=monoid, storage=owner, band=band)
    new.requires_grad = tensor.requires_grad
    return new


def _transpose(beside: Op, x: Tensor, y: Tensor) -> Transpose:
    """Return a transpose from x to y, with the scope and the phase of the operator `beside`."""
    new = Transpose(x, y)
    new.name, new.phase = f"{beside.name.rpartition('.')[0] or 'model'}.Transpose", beside.phase
    return new
