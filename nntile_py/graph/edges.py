"""Edges of a graph for the layout search: tensors that share one order of axes, and the orders that they may have.

If an operator needs its inputs and outputs in the same axis order, these tensors share one edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Order, SameOrder, fits, products, same_orders_of, tensors_of
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Rename
from nntile_py.tasks.op import Op, Tensor

TensorAxis = tuple[Tensor, str]


@dataclass(eq=False)
class Edge:
    """Tensors that share one order of axes.

    Attributes:
        names: for each tensor, the edge's names of the tensor's axes in their present order, without axes that always
            stay last.
        orders: the possible orders of these names; the first is the present order.
        searchable: True: the search may choose another order than the present order.
    """

    names: dict[Tensor, Order]
    orders: list[Order] = field(default_factory=list)
    searchable: bool = False

    def of(self, tensor: Tensor, number: int) -> Order:
        """Return the tensor's order of axes if the edge has its order `number`."""
        names = self.names[tensor]
        axes = dict(zip(names, tensor.axes, strict=False))
        moved = tuple(axes[name] for name in self.orders[number] if name in axes)
        return (*moved, *tensor.axes[len(names) :])


class _Sets:
    """Union-find with two kinds of sets: tensors of one edge, and (tensor, axis) pairs that are one axis of an edge."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def find(self, x: object) -> object:
        while (up := self.parent.setdefault(x, x)) != x:
            self.parent[x] = x = self.parent[up]
        return x

    def join(self, a: object, b: object) -> None:
        self.parent[self.find(a)] = self.find(b)


def edges_of(graph: Graph, *, weights: bool = True) -> dict[Tensor, Edge]:
    """Return {tensor: edge} for all tensors of a graph. An edge that is not searchable has only the present order.

    weights: True: the search may also change the orders of weights.
    """
    sets, fixed, trailing = _Sets(), set[Tensor](), set[TensorAxis]()
    for op in graph.ops:
        ties = same_orders_of(op)
        for tie in ties:
            _tie(tie, sets, trailing)
        movable = {t for tie in ties for t in tie.names}
        fixed |= {t for t in tensors_of(op) if t not in movable or not _free(t, op, weights)}
    for param, grad in graph.grads.items():  # optimizer states take the order of the gradient
        _tie(SameOrder({param: param.axes, grad: param.axes}), sets, trailing)
    # If several operators read a weight, its gradient has several contributions, which need the same order.
    for part in (t for op in graph.ops for t in op.outputs if t.storage.kind == "grad"):
        _tie(SameOrder({part.storage: part.storage.axes, part: part.storage.axes}), sets, trailing)
    members: dict[object, list[Tensor]] = {}
    for tensor in dict.fromkeys(t for op in graph.ops for t in tensors_of(op)):
        members.setdefault(sets.find(tensor), []).append(tensor)
    edges: dict[Tensor, Edge] = {}
    for tensors in members.values():
        edge = _edge(tensors, sets, trailing)
        if fixed.isdisjoint(tensors) and edge.orders:
            edge.searchable = True
            edges |= dict.fromkeys(tensors, edge)
        else:
            edges |= {t: Edge({t: t.axes}, [t.axes]) for t in tensors}
    _add_orders(graph, edges)
    return edges


def _free(tensor: Tensor, op: Op, weights: bool) -> bool:
    """Return whether the search may change the order of a tensor, as far as the operator `op` is concerned.

    A temporary tensor may change, because only operators of this program use it. If `weights` is set, a weight and its
    gradient may change too if `op` is a product. The same holds for contributions to the gradient that share the
    gradient's tiles and are outputs of `op`.
    """
    if tensor.kind == "param" or tensor.storage.kind == "grad":
        return weights and isinstance(op, Contract) and (tensor.storage is tensor or tensor in op.outputs)
    alias = tensor.storage is not tensor and not isinstance(op, Rename) and tensor in op.outputs
    return tensor.kind == "temp" and tensor.storage.kind == "temp" and not alias


def _tie(tie: SameOrder, sets: _Sets, trailing: set[TensorAxis]) -> None:
    """Record that the tensors of `tie` belong to one edge, and which of their axes are the same axis of the edge.

    The axes that always stay last are added to `trailing`.
    """
    first: dict[str, TensorAxis] = {}
    for tensor, names in tie.names.items():
        sets.join(tensor, next(iter(tie.names)))
        for axis, name in zip(tensor.axes, names, strict=True):
            if name:
                sets.join((tensor, axis), first.setdefault(name, (tensor, axis)))
            else:
                trailing.add((tensor, axis))


def _edge(tensors: list[Tensor], sets: _Sets, trailing: set[TensorAxis]) -> Edge:
    """Return the edge of these tensors. The edge has no order if the present orders of the tensors disagree."""
    numbers: dict[object, str] = {}
    names: dict[Tensor, Order] = {}
    for t in sorted(tensors, key=lambda t: -len(t.axes)):
        own = [axis for axis in t.axes if (t, axis) not in trailing]
        for a in own:
            numbers.setdefault(sets.find((t, a)), a if a not in numbers.values() else f"{a}'")
        names[t] = tuple(numbers[sets.find((t, a))] for a in own)
        if len({*names[t]}) < len(own) or list(t.axes[: len(own)]) != own:
            return Edge({})
    present = next(iter(names.values()))
    agree = all([name for name in present if name in of] == [*of] for of in names.values())
    return Edge(names, [present] if agree else [])


def _add_orders(graph: Graph, edges: dict[Tensor, Edge]) -> None:
    """Add to each edge the orders that a product can use for one of its tensors, if all operators allow them."""
    rules: dict[int, list[SameOrder]] = {}
    for op in graph.ops:
        for tie in same_orders_of(op):
            if tie.names:
                rules.setdefault(id(edges[next(iter(tie.names))]), []).append(tie)
    known: dict[int, set[Order]] = {}
    for op in graph.ops:
        if not isinstance(op, Contract):
            continue
        for tensor, order in _asked(op):
            edge = edges[tensor]
            if not edge.searchable:
                continue
            tried = known.setdefault(id(edge), set(edge.orders))
            whole = _whole(edge, tensor, order)
            if whole and whole not in tried:
                tried.add(whole)
                if all(_allowed(edge, whole, tie) for tie in rules[id(edge)]):
                    edge.orders.append(whole)


def _asked(op: Contract) -> Iterator[tuple[Tensor, Order]]:
    """Yield each tensor of a product with each order that the product's layouts use for it."""
    tensors = tensors_of(op)
    yield from dict.fromkeys(pair for layout in products(op) for pair in zip(tensors, layout, strict=True))


def _whole(edge: Edge, tensor: Tensor, order: Order) -> Order | None:
    """Return the edge's order in which `tensor` has the order `order`. Axes that the tensor lacks come first.

    None: the order would move an axis that always stays last.
    """
    name_of = dict(zip(tensor.axes, edge.names[tensor], strict=False))
    if any(axis not in name_of for axis in order):
        return None
    here = tuple(name_of[axis] for axis in order)
    return (*(name for name in edge.orders[0] if name not in here), *here)


def _allowed(edge: Edge, order: Order, tie: SameOrder) -> bool:
    """Return whether an operator allows this order of the edge for the tensors of `tie`."""
    here: dict[str, str] = {}  # {the edge's name of an axis: the axis's name in `tie`}
    for tensor, names in tie.names.items():
        own = [name for name in names if name]
        here |= dict(zip(edge.names[tensor], own, strict=False))
    return fits(tie, tuple(here[name] for name in order if name in here))
