"""The edges of a graph that can have another layout: tensors that lie alike, and the orders that they may have.

Tensors that an operator takes in one order only, whatever order that is, are one edge with those that it makes so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Group, Order, fits, groups_of, products, tensors_of
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Rename
from nntile_py.tasks.op import Op, Tensor

Place = tuple[Tensor, str]  # an axis of a tensor


@dataclass(eq=False)
class Edge:
    """names: for each tensor its axes as the edge calls them, in the order that they have now; those that always stay
    behind the others are left out. orders: what the edge may have, the present one first."""

    names: dict[Tensor, Order]
    orders: list[Order] = field(default_factory=list)
    turns: bool = False  # whether it may have others

    def of(self, tensor: Tensor, number: int) -> Order:
        """The order of a tensor's axes where the edge has the order of that number."""
        names = self.names[tensor]
        axes = dict(zip(names, tensor.axes, strict=False))
        moved = tuple(axes[name] for name in self.orders[number] if name in axes)
        return (*moved, *tensor.axes[len(names) :])


class _Sets:
    """Places that are one axis; tensors that are one edge."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def find(self, x: object) -> object:
        while (up := self.parent.setdefault(x, x)) != x:
            self.parent[x] = x = self.parent[up]
        return x

    def join(self, a: object, b: object) -> None:
        self.parent[self.find(a)] = self.find(b)


def edges_of(graph: Graph, *, weights: bool = True) -> dict[Tensor, Edge]:
    """The edge of each tensor; one that cannot be turned has the present order alone. weights: those may be turned."""
    sets, fixed, behind = _Sets(), set[Tensor](), set[Place]()
    for op in graph.ops:
        groups = groups_of(op)
        for group in groups:
            _tie(group, sets, behind)
        turned = {t for group in groups for t in group.names}
        fixed |= {t for t in tensors_of(op) if t not in turned or not _free(t, op, weights)}
    for param, grad in graph.grads.items():  # and its optimizer's averages, which are made beside it
        _tie(Group({param: param.axes, grad: param.axes}), sets, behind)
    for part in (t for op in graph.ops for t in op.outputs if t.storage.kind == "grad"):  # of a weight read repeatedly
        _tie(Group({part.storage: part.storage.axes, part: part.storage.axes}), sets, behind)
    members: dict[object, list[Tensor]] = {}
    for tensor in dict.fromkeys(t for op in graph.ops for t in tensors_of(op)):
        members.setdefault(sets.find(tensor), []).append(tensor)
    found: dict[Tensor, Edge] = {}
    for tensors in members.values():
        edge = _edge(tensors, sets, behind)
        if fixed.isdisjoint(tensors) and edge.orders:
            edge.turns = True
            found |= dict.fromkeys(tensors, edge)
        else:
            found |= {t: Edge({t: t.axes}, [t.axes]) for t in tensors}
    _add_orders(graph, found)
    return found


def _free(tensor: Tensor, op: Op, weights: bool) -> bool:
    """Whether its tiles are made and read within the program, by operators that are all here; or it is a weight, or the
    gradient of one, or a part of that in its tiles, that products alone take."""
    if tensor.kind == "param" or tensor.storage.kind == "grad":
        return weights and isinstance(op, Contract) and (tensor.storage is tensor or tensor in op.outputs)
    alias = tensor.storage is not tensor and not isinstance(op, Rename) and tensor in op.outputs
    return tensor.kind == "temp" and tensor.storage.kind == "temp" and not alias


def _tie(group: Group, sets: _Sets, behind: set[Place]) -> None:
    first: dict[str, Place] = {}
    for tensor, names in group.names.items():
        sets.join(tensor, next(iter(group.names)))
        for axis, name in zip(tensor.axes, names, strict=True):
            if name:
                sets.join((tensor, axis), first.setdefault(name, (tensor, axis)))
            else:
                behind.add((tensor, axis))


def _edge(tensors: list[Tensor], sets: _Sets, behind: set[Place]) -> Edge:
    """With the present order; with none where the tensors' own do not agree."""
    numbers: dict[object, str] = {}
    names: dict[Tensor, Order] = {}
    for t in sorted(tensors, key=lambda t: -len(t.axes)):
        own = [axis for axis in t.axes if (t, axis) not in behind]
        for a in own:
            numbers.setdefault(sets.find((t, a)), a if a not in numbers.values() else f"{a}'")
        names[t] = tuple(numbers[sets.find((t, a))] for a in own)
        if len({*names[t]}) < len(own) or list(t.axes[: len(own)]) != own:
            return Edge({})
    present = next(iter(names.values()))
    agree = all([name for name in present if name in of] == [*of] for of in names.values())
    return Edge(names, [present] if agree else [])


def _add_orders(graph: Graph, edges: dict[Tensor, Edge]) -> None:
    """To each edge the orders in which a product takes one of its tensors, as far as all operators take them."""
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
            if not edge.turns:
                continue
            tried = known.setdefault(id(edge), set(edge.orders))
            whole = _whole(edge, tensor, order)
            if whole and whole not in tried:
                tried.add(whole)
                if all(_allowed(edge, whole, group) for group in rules[id(edge)]):
                    edge.orders.append(whole)


def _asked(op: Contract) -> Iterator[tuple[Tensor, Order]]:
    """What its products take: each tensor with each of its orders."""
    tensors = tensors_of(op)
    yield from dict.fromkeys(pair for layout in products(op) for pair in zip(tensors, layout, strict=True))


def _whole(edge: Edge, tensor: Tensor, order: Order) -> Order | None:
    """The order of the whole edge in which the tensor has this one: an axis that it lacks lies first."""
    name_of = dict(zip(tensor.axes, edge.names[tensor], strict=False))
    if any(axis not in name_of for axis in order):
        return None
    here = tuple(name_of[axis] for axis in order)
    return (*(name for name in edge.orders[0] if name not in here), *here)


def _allowed(edge: Edge, order: Order, group: Group) -> bool:
    """Whether an operator's group may lie so."""
    here: dict[str, str] = {}  # the group's name of each of the edge's
    for tensor, names in group.names.items():
        own = [name for name in names if name]
        here |= dict(zip(edge.names[tensor], own, strict=False))
    return fits(group, tuple(here[name] for name in order if name in here))
