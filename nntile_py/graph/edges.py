"""Edges of a graph for the layout search: tensors that share one order of axes, and the orders that they may have.

If an operator needs its inputs and outputs in the same axis order, they share one edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Group, Order, fits, groups_of, products, tensors_of
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Rename
from nntile_py.tasks.op import Op, Tensor

TensorAxis = tuple[Tensor, str]


@dataclass(eq=False)
class Edge:
    """Tensors that share one order of axes.

    Attributes:
        names: the axes of each tensor by the edge's own names, in their present order; axes that are always the last
            ones are left out.
        orders: the possible orders, the present one first.
        searchable: whether the edge may have another order.
    """

    names: dict[Tensor, Order]
    orders: list[Order] = field(default_factory=list)
    searchable: bool = False

    def of(self, tensor: Tensor, number: int) -> Order:
        """Return the axes of a tensor if the edge has the order with this number."""
        names = self.names[tensor]
        axes = dict(zip(names, tensor.axes, strict=False))
        moved = tuple(axes[name] for name in self.orders[number] if name in axes)
        return (*moved, *tensor.axes[len(names) :])


class _Sets:
    """Union-find over axes of tensors that are one axis, and over tensors that are one edge."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def find(self, x: object) -> object:
        while (up := self.parent.setdefault(x, x)) != x:
            self.parent[x] = x = self.parent[up]
        return x

    def join(self, a: object, b: object) -> None:
        self.parent[self.find(a)] = self.find(b)


def edges_of(graph: Graph, *, weights: bool = True) -> dict[Tensor, Edge]:
    """Return the edge of each tensor; an edge that is not searchable has the present order only.

    Args:
        weights: weights may have other orders too.
    """
    sets, fixed, trailing = _Sets(), set[Tensor](), set[TensorAxis]()
    for op in graph.ops:
        groups = groups_of(op)
        for group in groups:
            _tie(group, sets, trailing)
        movable = {t for group in groups for t in group.names}
        fixed |= {t for t in tensors_of(op) if t not in movable or not _free(t, op, weights)}
    for param, grad in graph.grads.items():  # optimizer states take the order of the gradient
        _tie(Group({param: param.axes, grad: param.axes}), sets, trailing)
    # A weight with several readers has a gradient in parts.
    for part in (t for op in graph.ops for t in op.outputs if t.storage.kind == "grad"):
        _tie(Group({part.storage: part.storage.axes, part: part.storage.axes}), sets, trailing)
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
    """Whether a tensor may have another order.

    A temporary tensor may, as only operators of this program write and read it. A weight, its gradient and parts of the
    gradient in the same tiles may if only products use them.
    """
    if tensor.kind == "param" or tensor.storage.kind == "grad":
        return weights and isinstance(op, Contract) and (tensor.storage is tensor or tensor in op.outputs)
    alias = tensor.storage is not tensor and not isinstance(op, Rename) and tensor in op.outputs
    return tensor.kind == "temp" and tensor.storage.kind == "temp" and not alias


def _tie(group: Group, sets: _Sets, trailing: set[TensorAxis]) -> None:
    """Join the tensors of a group into one edge, and their axes by name."""
    first: dict[str, TensorAxis] = {}
    for tensor, names in group.names.items():
        sets.join(tensor, next(iter(group.names)))
        for axis, name in zip(tensor.axes, names, strict=True):
            if name:
                sets.join((tensor, axis), first.setdefault(name, (tensor, axis)))
            else:
                trailing.add((tensor, axis))


def _edge(tensors: list[Tensor], sets: _Sets, trailing: set[TensorAxis]) -> Edge:
    """Return the edge of these tensors, without any order if the present orders of the tensors disagree."""
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
    """Add to each edge the orders in which a product takes one of its tensors and which all operators allow."""
    rules: dict[int, list[Group]] = {}
    for op in graph.ops:
        for group in groups_of(op):
            if group.names:
                rules.setdefault(id(edges[next(iter(group.names))]), []).append(group)
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
                if all(_allowed(edge, whole, group) for group in rules[id(edge)]):
                    edge.orders.append(whole)


def _asked(op: Contract) -> Iterator[tuple[Tensor, Order]]:
    """Yield each tensor of a product with each order that one of its layouts uses."""
    tensors = tensors_of(op)
    yield from dict.fromkeys(pair for layout in products(op) for pair in zip(tensors, layout, strict=True))


def _whole(edge: Edge, tensor: Tensor, order: Order) -> Order | None:
    """Return the order of the edge in which the tensor has this order; axes that the tensor lacks come first."""
    name_of = dict(zip(tensor.axes, edge.names[tensor], strict=False))
    if any(axis not in name_of for axis in order):
        return None
    here = tuple(name_of[axis] for axis in order)
    return (*(name for name in edge.orders[0] if name not in here), *here)


def _allowed(edge: Edge, order: Order, group: Group) -> bool:
    """Whether the tensors of an operator's group may have this order of the edge."""
    here: dict[str, str] = {}  # the group's name of each of the edge's
    for tensor, names in group.names.items():
        own = [name for name in names if name]
        here |= dict(zip(edge.names[tensor], own, strict=False))
    return fits(group, tuple(here[name] for name in order if name in here))
