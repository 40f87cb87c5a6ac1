"""What operators take for each order of their edges: their own time, and that of transpositions beside them."""

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
class Copied:
    """A tensor that is turned once for all products of a phase that want it so; orders: none, and what they want."""

    tensor: Tensor
    orders: list[Order | None]


Variable = Edge | Copied  # its value is the number of one of its orders
Values = Mapping[Variable, int]
Term = tuple[Sequence[Variable], Table]  # seconds by the values of some variables


class Costs:
    """In seconds. careful: an operator in another layout than the default one, or as another kernel, counts as more by
    the noise of its times. missing: what was not measured, by the texts of `described`."""

    def __init__(
        self, timings: Timings, tiling: Tiling, policy: str, edges: dict[Tensor, Edge], ops: Sequence[Op], *,
        careful: bool,
    ) -> None:  # fmt: skip
        self.timings, self.tiling, self.policy, self.edges = timings, tiling, policy, edges
        self.missing: dict[tuple[str, str], Op] = {}
        self._known: dict[Hashable, Timing] = {}
        self._tables: dict[Hashable, Table] = {}
        self._paid: dict[Hashable, Term] = {}
        self._alike = functools.cache(_alike)
        self._choices = functools.cache(_choices)
        self._noise = functools.cache(timings.noise if careful else lambda operator: 0.0)
        self._copied = _copied(ops)

    def timing(self, op: Op, layout: Layout) -> Timing:
        """One of no seconds where it was not measured, which is noted."""
        if isinstance(op, Transpose) and layout[0] == layout[-1]:  # of two orders that became one: it goes
            return Timing("Transpose", "", 0.0)
        key = self._alike(op), layout
        if key not in self._known:
            told = self._described(op, layout)
            known = self.timings.best(*told)
            if known is None and told not in self.missing:
                self.missing[told] = laid(op, layout)
            self._known[key] = known or Timing(*told, 0.0)
        return self._known[key]

    def _described(self, op: Op, layout: Layout) -> tuple[str, str]:
        """The texts of an operator in a layout; of products, which have many, as a search by these timings found it."""
        if not isinstance(op, Contract | Transpose):
            return described(laid(op, layout), self.tiling, self.policy)
        cuts = tuple(self.tiling.tile(axis, size) for t in tensors_of(op) for axis, size in t.sizes.items())
        key = self._alike(op), layout, cuts, self.policy
        if key not in self.timings.texts:
            self.timings.texts[key] = described(laid(op, layout), self.tiling, self.policy)
        return self.timings.texts[key]

    def default(self, op: Op) -> Timing:
        """As it is without any search."""
        best = self.timing(op, layout_of(op))
        return self.timings.plain(best.operator, best.layout) or best

    def cost(self, op: Op, layout: Layout) -> float:
        timing, default = self.timing(op, layout), self.default(op)
        same = (timing.layout, timing.width) == (default.layout, default.width)
        return timing.seconds if same else timing.seconds * (1 + self._noise(timing.operator))

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

    # -- by the values of variables

    def terms(self, ops: Sequence[Op]) -> list[Term]:
        """What all of them take: the sum of these."""
        def paid(copied: Copied) -> Term:
            return self._term(copied.tensor, copied, lambda now, then: self.turn(copied.tensor, now, then or now))

        return [*map(paid, dict.fromkeys(self._copied.values())), *map(self.table, ops)]

    def _term(self, tensor: Tensor, copied: Copied | None, of: Callable[[Order, Order | None], float]) -> Term:
        """By the order that a tensor has, and that of its copy."""
        edge = self.edges[tensor]
        copies = copied.orders if copied else [None]
        table = np.array([[of(now, copy) for copy in copies] for now in self._orders(tensor)])
        both: list[tuple[Variable, int]] = [(v, k) for k, v in enumerate((edge, copied)) if v and len(v.orders) > 1]
        return [v for v, _ in both], table[tuple(slice(None) if k in [k for _, k in both] else 0 for k in range(2))]

    def _orders(self, tensor: Tensor) -> list[Order]:
        """Those that its edge may have."""
        edge = self.edges[tensor]
        return [edge.of(tensor, number) for number in range(len(edge.orders))]

    def _product(self, op: Contract, layout: Layout) -> list[Term]:
        """Of a product in this layout."""
        terms: list[Term] = [((), np.asarray(self.cost(op, layout)))]
        for tensor, wanted in zip(tensors_of(op), layout, strict=True):
            copied = self._copied.get((tensor, op.phase)) if tensor in (op.a, op.b) else None
            lasts = tensor in op.outputs and tensor.storage.kind != "temp"
            key = tensor, copied, lasts, wanted  # many layouts want a tensor in the same order
            if key not in self._paid:
                paid = partial(_read, wanted) if copied else partial(self._turned, lasts, tensor, wanted)
                self._paid[key] = self._term(tensor, copied, paid)
            terms.append(self._paid[key])
        return terms

    def _turned(self, lasts: bool, tensor: Tensor, wanted: Order, now: Order, _: Order | None) -> float:
        """What outlives the program is written as it is kept; a transposition would not add to it either."""
        return math.inf if lasts and now != wanted else self.turn(tensor, now, wanted)

    def table(self, op: Op) -> Term:
        """Of an operator, in the layout that is best for these values."""
        tensors = tensors_of(op)
        copies = [self._copied.get((t, op.phase)) for t in (op.a, op.b)] if isinstance(op, Contract) else []
        every: list[Variable] = [*(self.edges[t] for t in tensors), *(copied for copied in copies if copied)]
        mine = list(dict.fromkeys(v for v in every if len(v.orders) > 1))
        places = tuple(mine.index(v) if v in mine else -1 for v in every)
        orders = tuple(tuple(self._orders(t)) for t in tensors), tuple(tuple(c.orders) for c in copies if c)
        key = self._alike(op), orders, places
        if key not in self._tables:
            made = np.full([len(v.orders) for v in mine], math.inf)
            if isinstance(op, Contract):
                for layout in self._choices(op):
                    terms = [_placed(term, mine) for term in self._product(op, layout)]
                    np.minimum(made, functools.reduce(operator.add, sorted(terms, key=np.size)), out=made)
            else:
                for numbers in itertools.product(*map(range, made.shape)):
                    layout = self.layout(op, dict(zip(mine, numbers, strict=True)))
                    made[numbers] = math.inf if _left_out(op, layout) else self.cost(op, layout)
            self._tables[key] = made
        return mine, self._tables[key]

    def layout(self, op: Op, values: Values) -> Layout:
        """In which it runs."""
        if not isinstance(op, Contract):
            return tuple(self.edges[t].of(t, values.get(self.edges[t], 0)) for t in tensors_of(op))

        def seconds(layout: Layout) -> float:
            return sum(float(table[tuple(values[v] for v in of)]) for of, table in self._product(op, layout))

        return min(self._choices(op), key=seconds)


def _read(wanted: Order, *has: Order | None) -> float:
    return 0.0 if wanted in has else math.inf


def _copied(ops: Sequence[Op]) -> dict[tuple[Tensor, str], Copied]:
    """Of what products read: by tensor and phase."""
    wanted: dict[tuple[Tensor, str], dict[Order | None, None]] = {}
    for op in ops:
        if not isinstance(op, Contract):
            continue
        for tensor in (op.a, op.b):
            place = tensors_of(op).index(tensor)
            wanted.setdefault((tensor, op.phase), {None: None}).update({x[place]: None for x in _choices(op)})
    return {key: Copied(key[0], list(orders)) for key, orders in wanted.items()}


def _choices(op: Contract) -> list[Layout]:
    """The default, and all products."""
    return list(dict.fromkeys([layout_of(op), *products(op)]))


def _placed(term: Term, variables: Sequence[Variable]) -> Table:
    """Its table with an axis for each of these variables."""
    of, table = term
    places = [variables.index(v) for v in of]
    shape = [len(v.orders) if v in of else 1 for v in variables]
    return np.asarray(table.transpose(sorted(range(len(of)), key=places.__getitem__)).reshape(shape))


def _left_out(op: Op, layout: Layout) -> bool:
    """Whether it transposes between two orders neither of which is the default: there are too many."""
    now = layout_of(op)
    return isinstance(op, Transpose) and layout[0] != layout[1] and all(map(operator.ne, layout, now))


def _alike(op: Op) -> Hashable:
    """The same for operators that take the same time in the same layout."""
    tensors = tuple((t.axes, t.shape, t.dtype, t.storage.kind == "temp", t.band) for t in (*op.inputs, *op.outputs))
    return op.title, len(op.inputs), tensors, op.definition.axes if isinstance(op, Generated) else ()
