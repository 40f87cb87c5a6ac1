"""Costs for the layout search: measured seconds of operators and transposes, for each order of their tensors' axes."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nntile_py.graph.edges import Edge
from nntile_py.graph.layouts import Layout, Order, described, laid, layout_of, products, tensors_of
from nntile_py.graph.timings import Timing, Timings
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Transpose
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling

Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(eq=False)
class SharedCopy:
    """A transposed copy of a tensor, shared by all products of a phase.

    Attributes:
        orders: the orders of axes that the products can use, and None, which stands for no copy.
    """

    tensor: Tensor
    orders: list[Order | None]


Variable = Edge | SharedCopy  # the search chooses the variable's value: an index into its `orders`
Values = Mapping[Variable, int]
Term = tuple[Sequence[Variable], Table]  # seconds for each combination of the values of some variables


class Costs:
    """Seconds of operators and transposes, from measured times.

    Args:
        careful: add the noise of an operator's times to its cost if the layout or the kernel width is not the default.

    Attributes:
        missing: operators in layouts without a measured time; the keys are their texts, see layouts.described.
    """

    def __init__(
        self, timings: Timings, tiling: Tiling, policy: str, edges: dict[Tensor, Edge], ops: Sequence[Op], *,
        careful: bool,
    ) -> None:  # fmt: skip
        self.timings, self.tiling, self.policy, self.edges = timings, tiling, policy, edges
        self.missing: dict[tuple[str, str], Op] = {}
        self._known: dict[Hashable, Timing] = {}
        self._tables: dict[Hashable, Table] = {}
        self._operand_terms: dict[Hashable, Term] = {}
        self._alike = functools.cache(_alike)
        self._choices = functools.cache(_choices)
        self._noise = functools.cache(timings.noise if careful else lambda operator: 0.0)
        self._copied = _copied(ops)

    def timing(self, op: Op, layout: Layout) -> Timing:
        """Return the measured timing of an operator in a layout.

        If there is none, return a timing of zero seconds and add the operator to `missing`.
        """
        if isinstance(op, Transpose) and layout[0] == layout[-1]:  # both orders are equal now: no task
            return Timing("Transpose", "", 0.0)
        key = self._alike(op), layout
        if key not in self._known:
            texts = self._described(op, layout)
            known = self.timings.best(*texts)
            if known is None and texts not in self.missing:
                self.missing[texts] = laid(op, layout)
            self._known[key] = known or Timing(*texts, 0.0)
        return self._known[key]

    def _described(self, op: Op, layout: Layout) -> tuple[str, str]:
        """Return the texts that identify an operator in a layout (layouts.described).

        The texts are cached for contractions, which have many layouts, and for transposes.
        """
        if not isinstance(op, Contract | Transpose):
            return described(laid(op, layout), self.tiling, self.policy)
        cuts = tuple(self.tiling.tile(axis, size) for t in tensors_of(op) for axis, size in t.sizes.items())
        key = self._alike(op), layout, cuts, self.policy
        if key not in self.timings.texts:
            self.timings.texts[key] = described(laid(op, layout), self.tiling, self.policy)
        return self.timings.texts[key]

    def default(self, op: Op) -> Timing:
        """Return the timing of an operator in its default layout and kernel width."""
        best = self.timing(op, layout_of(op))
        return self.timings.plain(best.operator, best.layout) or best

    def cost(self, op: Op, layout: Layout) -> float:
        """Return the seconds of an operator in a layout; noise is added if layout or width is not the default."""
        timing, default = self.timing(op, layout), self.default(op)
        same = (timing.layout, timing.width) == (default.layout, default.width)
        return timing.seconds if same else timing.seconds * (1 + self._noise(timing.operator))

    def transpose_seconds(self, tensor: Tensor, now: Order, then: Order) -> float:
        """Return the cost of transposing a tensor from the order `now` to the order `then`; 0 if they are equal.

        The cost is infinite if neither order is the default: the search leaves such transposes out.
        """
        if now == then:
            return 0.0
        if tensor.axes not in (now, then):
            return math.inf
        x, y = (Tensor(tensor.name, order, [tensor.size(a) for a in order], tensor.dtype, band=tensor.band)
                for order in (now, then))  # fmt: skip
        op = Transpose(x, y)
        return self.timing(op, layout_of(op)).seconds

    # -- costs as tables over the values of variables

    def terms(self, ops: Sequence[Op]) -> list[Term]:
        """Return terms whose sum is the cost of all operators and of all shared copies."""

        def of_copy(copied: SharedCopy) -> Term:
            tensor = copied.tensor
            return self._term(tensor, copied, lambda now, then: self.transpose_seconds(tensor, now, then or now))

        return [*map(of_copy, dict.fromkeys(self._copied.values())), *map(self.table, ops)]

    def _term(self, tensor: Tensor, copied: SharedCopy | None, of: Callable[[Order, Order | None], float]) -> Term:
        """Return a cost as a Term. of: function that returns the cost for (order of the tensor, order of its copy)."""
        edge = self.edges[tensor]
        copies = copied.orders if copied else [None]
        table = np.array([[of(now, copy) for copy in copies] for now in self._orders(tensor)])
        both: list[tuple[Variable, int]] = [(v, k) for k, v in enumerate((edge, copied)) if v and len(v.orders) > 1]
        return [v for v, _ in both], table[tuple(slice(None) if k in [k for _, k in both] else 0 for k in range(2))]

    def _orders(self, tensor: Tensor) -> list[Order]:
        """Return the tensor's order of axes for each order of its edge."""
        edge = self.edges[tensor]
        return [edge.of(tensor, number) for number in range(len(edge.orders))]

    def _product(self, op: Contract, layout: Layout) -> list[Term]:
        """Return terms whose sum is the cost of a product in a layout, with the transposes of its operands."""
        terms: list[Term] = [((), np.asarray(self.cost(op, layout)))]
        for tensor, wanted in zip(tensors_of(op), layout, strict=True):
            copied = self._copied.get((tensor, op.phase)) if tensor in (op.a, op.b) else None
            lasts = tensor in op.outputs and tensor.storage.kind != "temp"
            key = tensor, copied, lasts, wanted  # many layouts use the same order of a tensor
            if key not in self._operand_terms:
                of_product = partial(_read, wanted) if copied else partial(self._operand_seconds, lasts, tensor, wanted)
                self._operand_terms[key] = self._term(tensor, copied, of_product)
            terms.append(self._operand_terms[key])
        return terms

    def _operand_seconds(self, lasts: bool, tensor: Tensor, wanted: Order, now: Order, _: Order | None) -> float:
        """Return the cost of a transpose between the order `now` of a product's tensor and the order `wanted`.

        Used for tensors without a shared copy.

        Args:
            lasts: True: the product writes or adds to a persistent tensor. No transpose is possible then, so the cost
                of different orders is infinite.
        """
        return math.inf if lasts and now != wanted else self.transpose_seconds(tensor, now, wanted)

    def table(self, op: Op) -> Term:
        """Return the cost of an operator in its best layout, for all values of its variables."""
        tensors = tensors_of(op)
        copies = [self._copied.get((t, op.phase)) for t in (op.a, op.b)] if isinstance(op, Contract) else []
        every: list[Variable] = [*(self.edges[t] for t in tensors), *(copied for copied in copies if copied)]
        mine = list(dict.fromkeys(v for v in every if len(v.orders) > 1))
        places = tuple(mine.index(v) if v in mine else -1 for v in every)
        orders = tuple(tuple(self._orders(t)) for t in tensors), tuple(tuple(c.orders) for c in copies if c)
        key = self._alike(op), orders, places
        if key not in self._tables:
            table = np.full([len(v.orders) for v in mine], math.inf)
            if isinstance(op, Contract):
                for layout in self._choices(op):
                    terms = [_placed(term, mine) for term in self._product(op, layout)]
                    np.minimum(table, functools.reduce(operator.add, sorted(terms, key=np.size)), out=table)
            else:
                for numbers in itertools.product(*map(range, table.shape)):
                    layout = self.layout(op, dict(zip(mine, numbers, strict=True)))
                    table[numbers] = math.inf if _left_out(op, layout) else self.cost(op, layout)
            self._tables[key] = table
        return mine, self._tables[key]

    def layout(self, op: Op, values: Values) -> Layout:
        """Return the cheapest layout of an operator if the variables have these values."""
        if not isinstance(op, Contract):
            return tuple(self.edges[t].of(t, values.get(self.edges[t], 0)) for t in tensors_of(op))

        def seconds(layout: Layout) -> float:
            return sum(float(table[tuple(values[v] for v in of)]) for of, table in self._product(op, layout))

        return min(self._choices(op), key=seconds)


def _read(wanted: Order, *has: Order | None) -> float:
    """Return the cost 0 if `has`, the orders of a tensor and its copy, contains `wanted`, else infinity."""
    return 0.0 if wanted in has else math.inf


def _copied(ops: Sequence[Op]) -> dict[tuple[Tensor, str], SharedCopy]:
    """Return {(tensor, phase): shared copy} for each operand of a product, with all orders that products can use."""
    wanted: dict[tuple[Tensor, str], dict[Order | None, None]] = {}
    for op in ops:
        if not isinstance(op, Contract):
            continue
        for tensor in (op.a, op.b):
            place = tensors_of(op).index(tensor)
            wanted.setdefault((tensor, op.phase), {None: None}).update({x[place]: None for x in _choices(op)})
    return {key: SharedCopy(key[0], list(orders)) for key, orders in wanted.items()}


def _choices(op: Contract) -> list[Layout]:
    """Return a contraction's default layout, then all layouts that need one call of a (batched) matrix product."""
    return list(dict.fromkeys([layout_of(op), *products(op)]))


def _placed(term: Term, variables: Sequence[Variable]) -> Table:
    """Return the table of a term, reshaped to one axis for each of `variables`."""
    of, table = term
    places = [variables.index(v) for v in of]
    shape = [len(v.orders) if v in of else 1 for v in variables]
    return np.asarray(table.transpose(sorted(range(len(of)), key=places.__getitem__)).reshape(shape))


def _left_out(op: Op, layout: Layout) -> bool:
    """Return whether neither tensor of a transpose has its default order; the search leaves such transposes out."""
    now = layout_of(op)
    return isinstance(op, Transpose) and layout[0] != layout[1] and all(map(operator.ne, layout, now))


def _alike(op: Op) -> Hashable:
    """Return a key that is equal for operators that take the same time in the same layout."""
    tensors = tuple((t.axes, t.shape, t.dtype, t.storage.kind == "temp", t.band) for t in (*op.inputs, *op.outputs))
    return op.title, len(op.inputs), tensors, op.definition.axes if isinstance(op, Generated) else ()
