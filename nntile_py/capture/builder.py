"""The second pass of a capture: adds the module's operators to a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from nntile_py.capture.aten_task import AtenCall, Gathered, Scattered
from nntile_py.capture.axis_groups import Atom, Dim
from nntile_py.capture.export import CapturedModule, name_of, shape_of
from nntile_py.capture.rules import AxisFinder, Names, NotSupported, Value
from nntile_py.capture.statistics import statistics, update
from nntile_py.capture.weight_source import source_of_part
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import Normal
from nntile_py.graph.params import Source
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.elementwise import Rename, transpose
from nntile_py.tasks.formula import ONE, Formula, converted, element, spread_over
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.scalar import expression as ex

LOSS_SCALE = "loss_scale"  # slot: 1 / (number of labels of a step that count)


class GraphBuilder:
    """Adds a captured module to a graph.

    Attributes:
        fallbacks: the calls that run as one ATen task each.
    """

    def __init__(self, captured: CapturedModule, find: AxisFinder, names: Mapping[Atom, str], g: Graph) -> None:
        self.captured, self.find, self.g = captured, find, g
        self._names, self._values = names, dict[Node, Any]()
        self._narrowed: dict[Node, Tensor] = {}
        self._sizes = {name: atom.size for atom, name in names.items()}
        self.prefix = ""  # of the names of weights
        self.fallbacks: list[AtenCall] = []
        self.labels: dict[Node, int] = {}  # {labels of the loss: number of classes}

    # -- names

    def dims(self, node: Node) -> Any:
        """Return for each dimension of a node's value the names of its axes; for several results, a list of these."""
        found: Any = self.find.found[node] if node in self.find.found else self.find.of(node)
        if found and isinstance(found[0], list):
            return [[self._named(dim) for dim in one] for one in found]
        return [self._named(dim) for dim in found]

    def names(self, node: Node) -> Names:
        return tuple(axis for dim in self.dims(node) for axis in dim)

    def _named(self, dim: Dim) -> Names:
        return tuple(self._names[atom] for atom in self.find.groups.leaves(dim))

    def size(self, axis: str) -> int:
        return self._sizes[axis]

    # -- values

    def value(self, node: Node) -> Any:
        if node not in self._values:
            self._values[node] = self._weight(node) if node in self.captured.weights else self._input(node)
        return self._values[node]

    def read(self, call: Node, operand: Any, *, wide: bool = False) -> Value:
        """Return an operand's value with the names under which the call reads its axes.

        wide: Leave values in the dtype of accumulation, such as sums, as they are. False: convert to the graph's dtype.
        """
        value: Value = self.value(operand)
        if not wide and value.tensor.dtype != self.g.dtype and operand in self.find.rules:
            value = self._narrow(operand, value)
        names: dict[str, str] = {}
        for old, new in self.find.renames.get((call, operand), []):
            names |= dict(zip(self._named((old,)), self._named((new,)), strict=True))
        return self.renamed(value, names)

    def _narrow(self, node: Node, value: Value) -> Value:
        """Return a call's result in the graph's dtype, which products and norms need; integers stay unchanged."""
        x = value.tensor
        if x.dtype.startswith("int") and not node.meta["val"].dtype.is_floating_point:
            return value
        if node not in self._narrowed:
            self._narrowed[node] = converted(self.g, x, self.g.dtype)
        return Value(self._narrowed[node], value.dims)

    def renamed(self, value: Value, names: Mapping[str, str]) -> Value:
        """Return a value with other names for some axes."""
        changed = {old: new for old, new in names.items() if old != new and old in value.axes}
        if not changed:
            return value
        dims = [tuple(changed.get(axis, axis) for axis in dim) for dim in value.dims]
        own = {old: new for old, new in changed.items() if old in value.tensor.axes}
        if not own:
            return Value(value.tensor, dims)
        for old, new in own.items():
            size = value.tensor.size(old)
            if self.g.cuts.tile(old, size) != self.g.cuts.tile(new, size):
                raise NotSupported(f"{old} and {new} are cut into different tiles")
        return Value(self.g.add(Rename(value.tensor, own)).output, dims)

    def _weight(self, node: Node) -> Value:
        name, shape, dims = self.captured.weights[node].removeprefix(self.prefix), shape_of(node), self.dims(node)
        axes = [axis for dim in dims for axis in dim] or [ONE]
        sizes = {axis: self._sizes[axis] if axis != ONE else 1 for axis in axes}
        if self.captured.weights[node] in self.captured.statistics:
            return Value(statistics(self.g, name, sizes, Source(name, shape, tuple(sizes.values()))), dims)
        part = self.captured.parts.get(node)
        if part is None:
            source = Source(name, shape, tuple(sizes.values()))
            return Value(self.g.param(name, sizes, Normal(0.02), source), dims)
        source = source_of_part(name, self.captured.whole[self.prefix + name], dims, part, self._sizes)
        return Value(self.g.param(f"{name}.{part.start}", sizes, Normal(0.02), source), dims)

    def _input(self, node: Node) -> Value:
        """Declare an input for a value that is constant, or that the host computes from the step's inputs."""
        dims = self.dims(node)
        constant = self.captured.constants.get(node)
        full = shape_of(node)
        # Along dimensions in which all entries of a constant are equal, the tensor has no axis.
        same = [at for at, n in enumerate(full) if constant is not None and n > 1 and _repeats(constant, at)]
        axes = [axis for at, dim in enumerate(dims) if at not in same for axis in dim]
        order = sorted(range(len(axes)), key=lambda k: axes[k] != "batch")  # batch first: micro-batches split it
        sizes = {axes[k]: self._sizes[axes[k]] for k in order} or {ONE: 1}
        view = [self._sizes[axis] for axis in axes]
        integers = not node.meta["val"].dtype.is_floating_point
        kind = torch.float64 if self.g.dtype == "fp64" else torch.float32

        def as_array(value: torch.Tensor) -> Any:
            value = value[tuple(slice(0, 1) if at in same else slice(None) for at in range(value.dim()))]
            array = value.detach().to(torch.int64 if integers else kind).numpy()
            if not integers and array.size and array.min() == -np.inf:
                array = np.where(np.isneginf(array), array.dtype.type(-1e30), array)
            return np.ascontiguousarray(array.reshape(view).transpose(order) if axes else array.reshape(1))

        options: dict[str, Any] = {}
        rows, batched = self._rows(), next(iter(sizes)) == "batch"
        if constant is not None and not batched:
            options["default"] = as_array(constant)
        else:
            named = ", ".join(self.captured.inputs_of(node)) if constant is None else node.name
            classes = self.labels.get(node)

            def checked(array: Any) -> Any:
                counted = array[array != IGNORED] if classes else array[:0]
                if counted.size and not 0 <= counted.min() <= counted.max() < (classes or 0):
                    limits = f"{counted.min()} to {counted.max()}"
                    need = f"0 to {(classes or 0) - 1} and {IGNORED}"
                    raise ValueError(f"{named}: values go from {limits}; allowed: {need}")
                return array

            compute = (lambda _: constant) if constant is not None else self.captured.on_host(node)

            def derived(given: Mapping[str, Any]) -> Any:
                inputs = {name: given[name] for name in self.captured.given}
                count = next(iter(inputs.values())).shape[0] // rows if batched else 1
                parts = [{name: x[k * rows : (k + 1) * rows] for name, x in inputs.items()} for k in range(count)]
                arrays = [as_array(compute(part)) for part in parts]
                return checked(arrays[0] if count == 1 else np.concatenate(arrays))

            options["default"] = derived
        if node in self.labels:
            options |= {"scale": LOSS_SCALE, "ignored": IGNORED}
        # Training and evaluation are captured separately: in both, different nodes may have the same name.
        name = f"{node.name}." if self.g.training else f"{node.name}.evaluated"
        tensor = self.g.input(name, sizes, "int64" if integers else None, **options)
        return Value(tensor, dims)

    def shared(self, name: str, sizes: Mapping[str, int], value: Any, dtype: str | None = None) -> Tensor:
        """Return a constant input; calls with the same name share it."""
        if name not in self.g.tensors:
            self.g.input(name, dict(sizes), dtype, default=value)
        return self.g.tensors[name]

    def declare(self, name: str, node: Node) -> None:
        """Declare an input whose array each step passes."""
        dims, shape = self.dims(node), shape_of(node)
        integers = not node.meta["val"].dtype.is_floating_point
        labels = node in self.labels or (integers and "label" in name)
        options: dict[str, Any] = {"ignored": IGNORED} if labels else {}
        if all(len(dim) == 1 for dim in dims):
            options |= {"scale": LOSS_SCALE, "below": self.labels[node]} if node in self.labels else {}
            sizes = {dim[0]: self._sizes[dim[0]] for dim in dims}
            self._values[node] = Value(self.g.input(name, sizes, "int64" if integers else None, **options), dims)
            return
        # Steps pass an array with torch's dimensions. `_input` declares a second input with the axes of the tensor; its
        # array is computed from the array that steps pass.
        whole = {f"{name}.{at}": size for at, size in enumerate(shape)}
        if dims[0] == ("batch",):
            whole = {"batch": shape[0]} | {axis: size for axis, size in whole.items() if axis != f"{name}.0"}
        self.g.input(name, whole, "int64" if integers else None, **options)
        self._values[node] = self._input(node)

    def _rows(self) -> int:
        return shape_of(next(iter(self.captured.given.values())))[0]

    # -- shapes

    def with_axes(self, value: Value, axes: Collection[str]) -> Value:
        """Return a value whose tensor has all of `axes`. Along an axis that was missing, entries are repeated."""
        lacks = [axis for axis in value.axes if axis in axes and axis not in value.tensor.axes]
        if not lacks:
            return value
        sizes = {axis: self._sizes[axis] for axis in value.axes if axis in value.tensor.axes or axis in lacks}
        return Value(spread_over(self.g, value.tensor, sizes), value.dims)

    def as_keys(self, x: Tensor) -> Tensor:
        """Return keys or values with the axis key in the place of seq."""
        return self.g.add(Rename(x, {"seq": "key"})).output

    def spread(self, value: Value) -> Value:
        """Return a value whose tensor has all axes of the value."""
        return self.with_axes(value, value.axes)

    def ordered(self, value: Value) -> Value:
        """Return a value whose tensor has all axes, in the order of torch's dimensions."""
        value = self.spread(value)
        if value.tensor.axes == value.axes or value.tensor.axes == (ONE,):
            return value
        return Value(transpose(self.g, value.tensor, value.axes), value.dims)

    def formula(self, node: Node, function: Callable[..., ex.Expression]) -> Value:
        """Return the value of a point-wise call: `function` takes the call's arguments, tensors as expressions."""
        dims = self.dims(node)
        operands = list(dict.fromkeys(one for one in node.all_input_nodes))
        inputs: list[Tensor] = []
        terms: dict[Node, Any] = {}
        for one in operands:
            constant = self.captured.constants.get(one)
            if isinstance(constant, torch.Tensor) and constant.numel() == 1:
                terms[one] = ex.ScalarConstant(float(constant))
            elif not isinstance(one.meta["val"], torch.Tensor):
                terms[one] = constant
            else:
                x = self.read(node, one, wide=True).tensor
                terms[one] = element(len(inputs), x)
                inputs.append(x)
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: terms[one])
        value = function(*args, **{name: arg for name, arg in kwargs.items() if arg is not None})
        present = {axis for x in inputs for axis in x.axes if axis != ONE}
        axes = [axis for dim in dims for axis in dim if axis in present] or [ONE]
        first = next((x for x in inputs if {*x.axes} == {*axes}), None)
        axes = list(first.axes) if first else axes  # the order of the first input with all axes: it is not transposed
        # The dtype that all inputs share, if they do: statistics stay in the dtype of accumulation.
        kinds = {x.dtype for x in inputs if not x.dtype.startswith("int")}
        dtype = kinds.pop() if len(kinds) == 1 else self.g.dtype
        out = self.g.temp(name_of(node), axes, [1 if axis == ONE else self._sizes[axis] for axis in axes], dtype)
        return Value(self.g.add(Formula(inputs, out, value, name_of(node))).output, dims)

    def combined(self, values: Sequence[Value], function: Callable[..., ex.Expression], label: str) -> Value:
        """Return function(values), point by point; the first value's tensor has all axes."""
        tensors = [value.tensor for value in values]
        out = self.g.temp(label, tensors[0].axes, tensors[0].shape, tensors[0].dtype)
        formula = function(*(element(k, one) for k, one in enumerate(tensors)))
        return Value(self.g.add(Formula(tensors, out, formula, label)).output, values[0].dims)

    def scaled(self, value: Value, factor: float) -> Value:
        """Return a value times a number."""
        x = value.tensor
        if factor == 1.0:
            return value
        out = self.g.temp("scaled", x.axes, x.shape, x.dtype)
        return Value(self.g.add(Formula([x], out, element(0, x) * factor, "scale")).output, value.dims)

    # -- several axes as one

    def single(self, value: Value) -> Value:
        """Return a value with one axis for each dimension.

        A dimension of several axes, or of none, gets a new axis, which is not cut."""
        if all(len(dim) == 1 for dim in value.dims):
            return value
        whole = self.whole(self.spread(value), [dim[0] for dim in value.dims if len(dim) == 1])
        joined: list[Names] = [
            dim if len(dim) == 1 else ("+".join(dim) or f"unit{at}",) for at, dim in enumerate(whole.dims)
        ]
        sizes: dict[str, int] = {}
        for dim, one in zip(whole.dims, joined, strict=True):
            sizes |= {axis: math.prod(whole.tensor.size(part) for part in dim) for axis in one}
        self._sizes |= sizes
        out = Value(self.g.temp("joined", list(sizes), list(sizes.values()), value.tensor.dtype), joined)
        return self._viewed(whole, out)

    def as_dims(self, value: Value, dims: list[Names]) -> Value:
        """Undo `single`: return a value with the axes `dims`, which may be several for a dimension."""
        if value.dims == dims:
            return value
        alone = [dim[0] for dim in dims if len(dim) == 1]
        names = self.not_cut(dims, alone)
        apart = [tuple(names.get(axis, axis) for axis in dim) for dim in dims]
        sizes = {names.get(axis, axis): self._sizes[axis] for dim in dims for axis in dim}
        out = Value(self.g.temp("apart", list(sizes), list(sizes.values()), value.tensor.dtype), apart)
        return self.cut_again(self._viewed(value, out), dims)

    def _viewed(self, value: Value, out: Value) -> Value:
        """Add the call that copies a value to a tensor with other axes for the same dimensions."""
        layouts = [tuple(tuple(v.tensor.axes.index(axis) for axis in dim) for dim in v.dims) for v in (value, out)]
        alone = [a[0] for a, b in zip(value.dims, out.dims, strict=True) if a == b and len(a) == 1]
        self.g.add(AtenCall("copy", _same, [value.tensor], [out.tensor], layouts, alone))
        return out

    # -- whole axes, for calls on whole tensors

    def not_cut(self, dims: list[Names], alone: Collection[str]) -> dict[str, str]:
        """Return {axis: name of the same axis without cuts} for the axes of `dims` that are cut and not in `alone`."""
        axes = [axis for dim in dims for axis in dim if axis not in alone]
        return {axis: f"whole {axis}" for axis in axes if self.g.cuts.cut(axis, self._sizes[axis])}

    def whole(self, value: Value, alone: Collection[str]) -> Value:
        """Return a value in which only the axes of `alone` may be cut."""
        names = self.not_cut(value.dims, alone)
        if not names:
            return value
        x = value.tensor
        out = self.g.temp("whole", [names.get(axis, axis) for axis in x.axes], x.shape, x.dtype)
        dims = [tuple(names.get(axis, axis) for axis in dim) for dim in value.dims]
        return Value(self.g.add(Gathered(x, out, names)).output, dims)

    def empty(self, node: Node, dims: list[Names], names: Mapping[str, str], kind: torch.dtype) -> Value:
        """Return a value with a new tensor for a call's result. names: {axis: other name}, as from `not_cut`."""
        new = [tuple(names.get(axis, axis) for axis in dim) for dim in dims]
        sizes = {names.get(axis, axis): self._sizes[axis] for dim in dims for axis in dim} or {ONE: 1}
        dtype = self.g.dtype if kind.is_floating_point else "int64"
        return Value(self.g.temp(name_of(node), list(sizes), list(sizes.values()), dtype), new)

    def cut_again(self, value: Value, dims: list[Names]) -> Value:
        """Return a result of `empty` under its original axes `dims`, which may be cut."""
        names = {
            new: old for a, b in zip(value.dims, dims, strict=True) for new, old in zip(a, b, strict=True) if new != old
        }
        if not names:
            return value
        x = value.tensor
        out = self.g.temp(x.name, [names.get(axis, axis) for axis in x.axes], x.shape, x.dtype)
        return Value(self.g.add(Scattered(x, out, names)).output, dims)

    # -- the whole module

    def scope_of(self, node: Node) -> str:
        """Return the name of a call: the path of the module that makes it, and its own name."""
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        path = paths[-1] if paths else ""
        return ".".join(filter(None, [f"{path}.".removeprefix(self.prefix).strip("."), node.name]))

    def run(self) -> None:
        """Add all calls to the graph, then the updates of running statistics.

        If the rule of a call does not support the call's arguments, the call is added as one ATen task."""
        for node in self.captured.calls:
            one = self.find.rules[node]
            with self.g.scope(self.scope_of(node)):
                kept = len(self.g.ops)
                try:
                    self._values[node] = one.build(self, node)
                except NotSupported:
                    del self.g.ops[kept:]
                    self._values[node] = self.find.fallback.build(self, node)
        for buffer, new in self.captured.updates.items():
            with self.g.scope(new.name):
                old, value = self.value(buffer).tensor, self.value(new).tensor
                update(self.g, old, value if value.dtype == old.dtype else converted(self.g, value, old.dtype))


def _repeats(value: torch.Tensor, at: int) -> bool:
    """Return whether all entries along a dimension are equal."""
    return value.stride(at) == 0 or bool((value == value.narrow(at, 0, 1)).all())


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
