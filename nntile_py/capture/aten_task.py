"""Runs a call of an ATen operator as one task on whole tensors; another task computes the gradients.

Axes along which entries do not depend on each other, such as the batch of a convolution, may be cut into tiles: each
tile then has a task.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from nntile_py.execution.python_task import PythonTask
from nntile_py.tasks.op import CONTRACTION, ELEMENTWISE, Category, GraphLike, Lowering, Op, Tensor, accumulation_dtype
from nntile_py.tiles import ACC, RW, R, TaskArgs, W

Function = Callable[..., Any]
Layout = tuple[tuple[int, ...], ...]  # for each dimension of torch: the positions of its axes in the tile


def as_torch(tile: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tile with torch's dimensions."""
    order = [k for dim in layout for k in dim]
    shape = [functools.reduce(lambda n, k: n * tile.shape[k], dim, 1) for dim in layout]
    return (tile.permute(order) if order else tile).reshape(shape)  # no order: a tile of one element


def store(value: torch.Tensor, tile: torch.Tensor, layout: Layout, add: bool = False) -> None:
    """Write a result to a tile; with `add`, add the result to the tile."""
    order = [k for dim in layout for k in dim]
    view = tile.permute(order) if order else tile
    value = value.reshape(view.shape)
    view.add_(value) if add else view.copy_(value)


def _task(name: str, modes: dict[str, str], function: Function) -> PythonTask:
    """Return a task that calls `function` with the list of its tiles. modes: {tile: access mode}, in this order."""

    def run(**tiles: torch.Tensor) -> None:
        function([tiles[one] for one in modes])

    kinds = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY) for one in modes]
    named: Any = run
    named.__signature__ = inspect.Signature(kinds)
    named.__name__ = named.__qualname__ = name
    return PythonTask(named, "torch", modes)


class AtenCall(Op):
    """outs = function(inputs): any function of torch tensors.

    Args:
        label: text that identifies the function and its constants.
        function: takes torch tensors, returns a tensor or a tuple.
        layouts: the Layout of the tiles of each input, then of each output.
        alone: axes along which entries do not depend on each other; only these may be cut.
        backward: backward(inputs, gradients of the outputs, numbers of inputs) returns the gradients of these inputs.
            None: a task calls the function again, and torch.autograd differentiates it.
        products: floating point operations in convolutions and other products.
    """

    def __init__(
        self, label: str, function: Function, inputs: Sequence[Tensor], outs: Sequence[Tensor],
        layouts: Sequence[Layout], alone: Sequence[str] = (), backward: Function | None = None, products: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(inputs, outs)
        self.backward, self._products = backward, products
        self.label, self.function, self.layouts, self.alone = label, function, tuple(layouts), tuple(alone)

    @property
    def title(self) -> str:
        return self.label.partition("(")[0]

    @property
    def torch_call(self) -> str:
        return self.title

    @property
    def category(self) -> Category:  # type: ignore[override]
        return CONTRACTION if self._products else ELEMENTWISE

    def flop(self) -> float:
        return self._products or super().flop()

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        wanted = [k for k, x in enumerate(self.inputs) if x.requires_grad and not x.dtype.startswith("int")]
        given = [k for k, grad in enumerate(grads) if grad is not None]
        if not wanted or not given:
            return [None] * len(self.inputs)
        used = [t for t in grads if t is not None]
        result: list[Tensor | None] = [None] * len(self.inputs)
        for part in self._gradient_parts(wanted):
            for k in part:
                x = self.inputs[k]
                dtype = accumulation_dtype(x.dtype) if x.kind == "param" else x.dtype
                result[k] = g.temp("aten_grad", x.axes, x.shape, dtype)
            g.add(AtenCallGrad(self, used, [out for k in part if (out := result[k])], part, given))
        return result

    def _gradient_parts(self, wanted: list[int]) -> list[list[int]]:
        """Return lists of input numbers; one task computes the gradients of all inputs in a list.

        With `backward`, parameters have a list of their own, as earlier layers wait only for gradients of activations.
        """
        params = [k for k in wanted if self.inputs[k].kind == "param"]
        others = [k for k in wanted if k not in params]
        return [part for part in (others, params) if part] if self.backward else [wanted]

    def lower(self, lowering: Lowering) -> None:
        count = len(self.inputs)
        kernel = _forward(self.label, self.function, count, len(self.outputs), self.layouts)
        indices = [*lowering.indices(self.output, [axis for axis in self.output.axes if axis in self.alone])]
        for index in indices:
            outs = [W(whole_tile(lowering, t, index)) for t in self.outputs]
            reads = [R(whole_tile(lowering, t, index)) for t in self.inputs]
            lowering.emit(kernel, [*outs, *reads], flop=self.flop() / len(indices))


class AtenCallGrad(Op):
    """Gradients of an AtenCall. If the call is cut into several tasks, their gradients of an uncut tensor are added.

    Args:
        grads: the gradients of the outputs that have gradients.
        wanted: numbers of the inputs whose gradients are computed into `outs`.
        given: numbers of the outputs that have gradients.
    """

    def __init__(
        self, forward: AtenCall, grads: Sequence[Tensor], outs: Sequence[Tensor], wanted: Sequence[int],
        given: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__([*forward.inputs, *grads], outs)
        self.forward, self.wanted, self.given = forward, tuple(wanted), tuple(given)
        self.grads = list(grads)

    @property
    def title(self) -> str:
        return self.forward.title

    @property
    def torch_call(self) -> str:
        return self.title

    @property
    def category(self) -> Category:  # type: ignore[override]
        return self.forward.category

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def flop(self) -> float:
        if self.forward.backward is None:
            return 2 * self.forward.flop()
        kinds = {self.forward.inputs[k].kind == "param" for k in self.wanted}  # a product for each of both kinds
        return len(kinds) * self.forward.flop()

    def lower(self, lowering: Lowering) -> None:
        fwd = self.forward
        kernel = _backward(
            fwd.label,
            fwd.backward or _differentiated(fwd.function, self.given),
            len(fwd.inputs),
            self.wanted,
            self.given,
            fwd.layouts,
        )
        indices = list(lowering.indices(fwd.output, [axis for axis in fwd.output.axes if axis in fwd.alone]))
        for index in indices:
            outs, sums = [], []
            for t in self.outputs:
                tile = whole_tile(lowering, t, index)
                if len(indices) > 1 and not {*index} <= {*t.axes}:
                    # Tasks that added to one tile would wait for each other: each writes a tile of its own.
                    part = lowering.scratch(f"{t.name}.part", dict.fromkeys(t.axes, 0), tile.shape, tile.dtype)
                    sums.append((tile, part))
                    tile = part
                outs.append(ACC(tile))
            reads = [R(whole_tile(lowering, t, index)) for t in self.inputs]
            lowering.emit(kernel, [*outs, *reads], flop=self.flop() / len(indices))
            for tile, part in sums:
                lowering.emit(_add_part, [ACC(tile), R(part)])


def whole_tile(lowering: Lowering, tensor: Tensor, index: dict[str, int]) -> Any:
    """Return the tile at `index`; along axes that `index` lacks, the first tile."""
    return lowering.tile(tensor, dict.fromkeys(tensor.axes, 0) | index)


_KERNELS: dict[Any, PythonTask] = {}


def _forward(label: str, function: Function, inputs: int, outputs: int, layouts: tuple[Layout, ...]) -> PythonTask:
    key = "forward", label, layouts
    if key not in _KERNELS:

        def run(tiles: list[torch.Tensor]) -> None:
            with torch.no_grad():
                read = zip(tiles[outputs:], layouts[:inputs], strict=True)
                values = function(*(as_torch(tile, layout) for tile, layout in read))
                for value, tile, layout in zip(_tuple(values), tiles[:outputs], layouts[inputs:], strict=True):
                    store(value, tile, layout)

        modes = {f"y{k}": "W" for k in range(outputs)} | {f"x{k}": "R" for k in range(inputs)}
        _KERNELS[key] = _task(f"{label} {layouts}", modes, run)
    return _KERNELS[key]


def _backward(
    label: str, function: Function, inputs: int, wanted: tuple[int, ...], given: tuple[int, ...],
    layouts: tuple[Layout, ...],
) -> PythonTask:  # fmt: skip
    key = "backward", label, layouts, wanted, given
    if key not in _KERNELS:
        count = len(wanted)

        def run(tiles: list[torch.Tensor]) -> None:
            read = [
                as_torch(tile, layout)
                for tile, layout in zip(tiles[count : count + inputs], layouts[:inputs], strict=True)
            ]
            grads = [as_torch(t, layouts[inputs + k]) for t, k in zip(tiles[count + inputs :], given, strict=True)]
            with torch.no_grad():
                found = function(read, grads, wanted)
            for value, tile, k in zip(found, tiles[:count], wanted, strict=True):
                if value is not None:
                    store(value, tile, layouts[k], add=True)

        modes = {f"d{k}": "ACC" for k in range(count)} | {f"x{k}": "R" for k in range(inputs)}
        modes |= {f"g{k}": "R" for k in range(len(given))}
        _KERNELS[key] = _task(f"gradient of {label} {layouts} {wanted} {given}", modes, run)
    return _KERNELS[key]


def _differentiated(function: Function, given: tuple[int, ...]) -> Function:
    """Return a `backward` that calls `function` again and differentiates it.

    given: numbers of the outputs that have gradients."""

    def backward(inputs: list[torch.Tensor], grads: list[torch.Tensor], wanted: tuple[int, ...]) -> Any:
        with torch.enable_grad():
            read = [x.detach().requires_grad_(k in wanted) for k, x in enumerate(inputs)]
            values = _tuple(function(*read))
            pairs = [(values[k], grad) for k, grad in zip(given, grads, strict=True) if values[k].requires_grad]
            outs = [value for value, _ in pairs]
            dys = [grad.to(value.dtype) for value, grad in pairs]
            return torch.autograd.grad(outs, [read[k] for k in wanted], dys, allow_unused=True)

    return backward


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


# -- whole axes


class PlaceArgs(TaskArgs):
    offsets: tuple[int, ...]  # of the tile in the whole tensor


class _Recut(Op):
    """y = x; the axes of `names` {name in x: name in y} are cut into tiles in only one of x and y.

    inverse: the class of the operator that computes the gradient.
    """

    inverse: ClassVar[type[_Recut]]

    def __init__(self, x: Tensor, out: Tensor, names: dict[str, str]) -> None:
        super().__init__([x], [out])
        self.names = names

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, dy = self.inputs[0], grads[0]
        assert dy is not None
        out = g.temp("recut", x.axes, x.shape, dy.dtype)
        return [g.add(self.inverse(dy, out, {new: old for old, new in self.names.items()})).output]

    def flop(self) -> float:
        return 0.0


class Gathered(_Recut):
    """y = x; the axes of `names` {name in x: name in y} are cut in x and whole in y."""

    def lower(self, lowering: Lowering) -> None:
        x, seen = self.inputs[0], set()
        for index in lowering.indices(x):
            at = {self.names.get(axis, axis): 0 if axis in self.names else k for axis, k in index.items()}
            whole = lowering.tile(self.output, at)
            access = RW if whole in seen else W
            seen.add(whole)
            kernel = _place if access is RW else _place_first
            lowering.emit(kernel, [access(whole), R(lowering.tile(x, index))], _offsets(lowering, x, index, self.names))


class Scattered(_Recut):
    """y = x; the axes of `names` {name in x: name in y} are whole in x and cut in y."""

    inverse = Gathered

    def lower(self, lowering: Lowering) -> None:
        out, whole = self.output, {new: old for old, new in self.names.items()}
        for index in lowering.indices(out):
            at = {whole.get(axis, axis): 0 if axis in whole else k for axis, k in index.items()}
            accesses = [W(lowering.tile(out, index)), R(lowering.tile(self.inputs[0], at))]
            lowering.emit(_take, accesses, _offsets(lowering, out, index, whole))


Gathered.inverse = Scattered


def _offsets(lowering: Lowering, x: Tensor, index: dict[str, int], names: Any) -> PlaceArgs:
    return PlaceArgs(tuple(lowering.part(x, axis, index).offset if axis in names else 0 for axis in x.axes))


def _within(whole: torch.Tensor, part: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))]


def _copy_to(whole: torch.Tensor, part: torch.Tensor, *, offsets: tuple[int, ...]) -> None:
    _within(whole, part, offsets).copy_(part)


def _copy_from(part: torch.Tensor, whole: torch.Tensor, *, offsets: tuple[int, ...]) -> None:
    part.copy_(_within(whole, part, offsets))


def _add(whole: torch.Tensor, part: torch.Tensor) -> None:
    whole += part


_add_part = PythonTask(_add, "torch", {"whole": "ACC", "part": "R"})
_place_first = PythonTask(_copy_to, "torch", {"whole": "W", "part": "R"})
_place = PythonTask(_copy_to, "torch", {"whole": "RW", "part": "R"})
_take = PythonTask(_copy_from, "torch", {"part": "W", "whole": "R"})
