"""Rules for ATen operators. A rule says which dimensions are the same axis, and adds the graph's operators.

The first pass (AxisFinder) calls `dims` of each rule in the module's order; the second (GraphBuilder) calls `build`,
when all axes have names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node

from nntile_py.capture.axis_groups import Atom, AxisGroups, Dim, Mismatch
from nntile_py.capture.export import HOST, TASKS, CapturedModule, args_of, name_of, shape_of
from nntile_py.tasks.op import Tensor

Names = tuple[str, ...]


class NotSupported(ValueError):
    """A rule cannot build this call; it runs as one ATen task."""


@dataclass
class Value:
    """A torch value in the graph: a tensor, and for each of torch's dimensions the names of its axes.

    The tensor may have its axes in another order, and may lack axes along which the value is repeated.
    """

    tensor: Tensor
    dims: list[Names]

    @property
    def axes(self) -> Names:
        return tuple(axis for dim in self.dims for axis in dim)


class AxisRule(Protocol):
    """The methods of a rule for ATen operators."""

    def dims(self, find: AxisFinder, node: Node) -> Any:
        """Return the dimensions of the result; a list of results for an operator that has several."""
        ...

    def build(self, made: Any, node: Node) -> Any:
        """Add operators to the graph and return the Value; a list for several results."""
        ...


RULES: dict[str, AxisRule] = {}


def rule(*names: str) -> Callable[[type[Any]], type[Any]]:
    """Class decorator: register the rule for ATen operators by their names."""

    def register(cls: type[Any]) -> type[Any]:
        one = cls()
        for name in names:
            RULES[name] = one
        return cls

    return register


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by its place or by its name."""
    if len(node.args) > place:
        return args_of(node)[place]
    return node.kwargs.get(name, default)


def each(value: Any, count: int) -> list[int]:
    """Return an option of a convolution, an integer or a list, for each of `count` spatial dimensions."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values


@dataclass
class AxisFinder:
    """The first pass: the dimensions of each node's value, and which axes a call reads under other names.

    Attributes:
        fallback: the rule of calls that no other rule supports.
        found: {node: dimensions of its value}; for several results a list of these.
        renames: {(call, operand): pairs (axis of the operand, axis under whose name the call reads this axis)}.
        rules: the rule of each call.
    """

    captured: CapturedModule
    fallback: AxisRule
    groups: AxisGroups = field(default_factory=AxisGroups)
    found: dict[Node, Any] = field(default_factory=dict)
    renames: dict[tuple[Node, Node], list[tuple[Atom, Atom]]] = field(default_factory=dict)
    rules: dict[Node, AxisRule] = field(default_factory=dict)

    def of(self, node: Any) -> list[Dim]:
        """Return the axes of each dimension of a value, after all unions and splits so far; [] if it is no Node."""
        if not isinstance(node, Node):
            return []
        if node not in self.found:
            dims = self.fresh(shape_of(node))
            if self.captured.where.get(node) != TASKS:
                dims = [dim if size > 1 else () for dim, size in zip(dims, shape_of(node), strict=True)]
            self.result(node, dims)
            if self.captured.where.get(node) == HOST:
                self._as_inputs(node)
        return [self.groups.leaves(dim) for dim in self.found[node]]

    def _as_inputs(self, node: Node) -> None:
        """Unite the first dimension of a value that the host computes with the first of an input, if sizes are equal.

        If the value has integers and the input's two dimensions, both are united."""
        shape, integers = shape_of(node), not node.meta["val"].dtype.is_floating_point
        for given in self.captured.given.values():
            if given is not node and shape and shape[0] == shape_of(given)[0]:
                count = 2 if integers and len(shape) == 2 and shape == shape_of(given) else 1
                for dim, like in list(zip(self.of(node), self.of(given), strict=False))[:count]:
                    for a, b in zip(dim, like, strict=True) if len(dim) == len(like) else ():
                        self.groups.unite(b, a)

    def fresh(self, shape: Sequence[int]) -> list[Dim]:
        return [(Atom(int(size)),) if size > 1 else () for size in shape]

    def result(self, node: Node, dims: Any) -> None:
        several = bool(dims) and isinstance(dims[0], list)
        for one in dims if several else [dims]:
            self.groups.tensor(one)
        self.found[node] = dims

    def same(self, call: Node, operand: Any, at: int, dim: Dim) -> None:
        """Unite the axes of an operand's dimension `at` with `dim`.

        Two axes that one tensor has stay two: the call then reads the operand's axis under the name of the other."""
        for axis, wanted in self.groups.align(self.of(operand)[at], dim):
            if not self.groups.unite(wanted, axis):
                self.read_as(call, operand, axis, wanted)

    def contracted(self, call: Node, a: Any, b: Any, at: int) -> None:
        """Make the last dimension of `a` and dimension `at` of `b` the axes over which a product sums."""
        taken = {atom for dim in self.under(call, a) for atom in dim}
        for x, y in self.groups.align(self.of(a)[-1], self.of(b)[at]):
            if self.groups.unite(x, y):
                continue
            if self.groups.root(y) in taken:
                self.read_as(call, b, y, x)
            else:
                self.read_as(call, a, x, y)

    def read_as(self, call: Node, operand: Node, axis: Atom, wanted: Atom | None = None) -> Atom:
        """Let a call read an operand's axis under the name of another axis `wanted`; None: of a new axis. Return it.

        Both axes have tiles of the same size."""
        wanted = wanted or Atom(axis.size)
        self.renames.setdefault((call, operand), []).append((axis, wanted))
        self.groups.cut_alike(self.groups.root(axis), self.groups.root(wanted))
        return wanted

    def under(self, call: Node, operand: Any) -> list[Dim]:
        """Return the dimensions of an operand under the names by which the call reads it."""
        pairs: dict[Atom, Atom] = {}
        for old, new in self.renames.get((call, operand), []):
            pairs |= dict(zip(self.groups.leaves([old]), self.groups.leaves([new]), strict=True))
        return [tuple(pairs.get(atom, atom) for atom in dim) for dim in self.of(operand)]

    def propose(self, dim: Dim, role: str) -> None:
        """Propose a name for a dimension that is one axis."""
        axes = self.groups.leaves(dim)
        if len(axes) == 1:
            axes[0].roles.append(role)

    def run(self) -> None:
        for node in self.captured.calls:
            for operand in node.all_input_nodes:
                if isinstance(operand.meta.get("val"), torch.Tensor):
                    self.of(operand)
            chosen = RULES.get(name_of(node), self.fallback)
            try:
                dims = chosen.dims(self, node)
            except (Mismatch, NotSupported):
                for operand in node.all_input_nodes:
                    self.renames.pop((node, operand), None)
                chosen = self.fallback
                dims = chosen.dims(self, node)
            self.rules[node] = chosen
            self.result(node, dims)
