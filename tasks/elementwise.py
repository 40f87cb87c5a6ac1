"""Add, multiply, broadcast add, sums over axes, transpose, renaming of axes, packing (for QKV) and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, Access, R, Slot, TaskArgs, W

from .op import NORMALIZATION, Array, GraphLike, Index, Lowering, Op, Tensor, accumulation_dtype, permutation, require
from .pointwise import Pointwise
from .scalar.evaluate import dropout_hash
from .scalar.expression import Call, Definition, Element, Expression, Keep, Number, Output


class Add(Pointwise):
    """y = a + b, tensors of the same axes."""

    kernel = "add"

    def __init__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        require(a.axes == b.axes == out.axes, "add: both need the same axes (bias_add takes fewer)", a, b)
        super().__init__([a, b], [out])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        return [grads[0], grads[0]]

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        return (inputs[0] + inputs[1],)


class Multiply(Pointwise):
    """y = a * b, tensors of the same axes; da = dy * b, db = dy * a."""

    kernel = "multiply"

    def __init__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        assert a.axes == b.axes == out.axes, (a, b, out)
        super().__init__([a, b], [out])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        (a, b), dy = self.inputs, grads[0]
        assert dy is not None
        return [multiply(g, dy, y, like=x) if x.requires_grad else None for x, y in ((a, b), (b, a))]

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        return (inputs[0] * inputs[1],)


class BiasAddArgs(TaskArgs):
    shape: tuple[int, ...]  # of the bias, with size 1 for each axis of x that the bias lacks


class BiasAdd(Op):
    """y = x + bias; the bias has a subset of x's axes, in x's order."""

    colours: ClassVar = {"forward": "#b5bd61"}

    def __init__(self, x: Tensor, bias: Tensor, out: Tensor) -> None:
        fits = [axis for axis in x.axes if axis in bias.axes] == list(bias.axes)
        require(fits, "bias_add: the bias needs some of the axes, in the same order", x, bias)
        super().__init__([x, bias], [out])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        (x, bias), dy = self.inputs, grads[0]
        assert dy is not None
        db = None
        if bias.requires_grad:
            db = g.add(Sum(dy, g.temp("bias_grad", bias.axes, bias.shape, accumulation_dtype(bias.dtype)))).output
        return [dy if x.requires_grad else None, db]

    def lower(self, lowering: Lowering) -> None:
        x, bias = self.inputs
        for index in lowering.indices(self.output):
            shape = [lowering.part(x, axis, index).size if axis in bias.axes else 1 for axis in x.axes]
            y = lowering.tile(self.output, index)
            lowering.emit(
                "bias_add", [W(y), R(lowering.tile(x, index)), R(lowering.tile(bias, index))], BiasAddArgs(tuple(shape))
            )

    def scalar(self) -> Definition:
        axes, bias = self.output.axes, self.inputs[1]
        return Definition(self.output.sizes, (Output(0, axes, Element(0, axes) + Element(1, bias.axes)),))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, bias = self.inputs
        return (inputs[0] + inputs[1].reshape([s if axis in bias.axes else 1 for axis, s in x.sizes.items()]),)


class SumArgs(TaskArgs):
    axes: tuple[int, ...]  # summed axes


class Sum(Op):
    """y = sum of x over the axes missing in y, the gradient of a broadcast; y has its axes in x's order."""

    category = NORMALIZATION  # the data-movement paper counts every reduction as a normalization
    colours: ClassVar = {"backward": "#ff9896"}

    def __init__(self, x: Tensor, out: Tensor) -> None:
        fits = [axis for axis in x.axes if axis in out.axes] == list(out.axes)
        require(fits, "sum: the result needs some of the axes, in the same order", x, out)
        super().__init__([x], [out])

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        args = SumArgs(tuple(i for i, axis in enumerate(x.axes) if axis not in self.output.axes))
        for index in lowering.by_batch(lowering.indices(x), self.sums):
            lowering.emit("sum", [ACC(lowering.tile(self.output, index)), R(lowering.tile(x, index))], args)

    def scalar(self) -> Definition:
        x = self.inputs[0]
        return Definition(x.sizes, (Output(0, self.output.axes, Element(0, x.axes), total=True),))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[0].sum(axis=tuple(i for i, a in enumerate(self.inputs[0].axes) if a not in self.output.axes)),)


class TransposeArgs(TaskArgs):
    order: tuple[int, ...]  # for each axis of the output: its position in the input


class Transpose(Op):
    """y = x with its axes in another order."""

    colours: ClassVar = {"forward": "#a6d854", "backward": "#5b7f2b"}

    def __init__(self, x: Tensor, out: Tensor) -> None:
        assert sorted(x.axes) == sorted(out.axes), (x, out)
        super().__init__([x], [out])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        return [transpose(g, grads[0], self.inputs[0].axes)]

    def flop(self) -> float:
        return 0.0

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        args = TransposeArgs(tuple(permutation(x.axes, self.output.axes)))
        for index in lowering.indices(self.output):
            lowering.emit("transpose", [W(lowering.tile(self.output, index)), R(lowering.tile(x, index))], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[0].transpose(permutation(self.inputs[0].axes, self.output.axes)),)


class Rename(Op):
    """y = x with other names for its axes, such as key instead of seq. The tiles are the same: no task is needed."""

    def __init__(self, x: Tensor, names: dict[str, str]) -> None:
        axes = [names.get(axis, axis) for axis in x.axes]
        out = Tensor(f"{x.name}.as", axes, x.shape, x.dtype, storage=x)
        super().__init__([x], [out])
        self.names = names

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        return [g.add(Rename(grads[0], {new: old for old, new in self.names.items()})).output]

    def flop(self) -> float:
        return 0.0

    def elements(self) -> int:
        return 0

    def lower(self, lowering: Lowering) -> None:
        for old, new in self.names.items():
            size = self.output.size(new)
            if lowering.tiling.tile(old, size) != lowering.tiling.tile(new, size):
                raise ValueError(f"{self.name}: {old} and {new} are cut into different tiles; they must be cut alike")

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[0],)


class PackArgs(TaskArgs):
    axis: int  # axis of the packed tile; the slice at each of its indices is one of the other tiles


class Unpack(Op):
    """Split a tensor along `axis`, which is never cut, into one tensor per index: q, k, v from a packed qkv."""

    def __init__(self, x: Tensor, outs: Sequence[Tensor], axis: str) -> None:
        super().__init__([x], outs)
        self.axis, self.picks = axis, (axis,)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x = self.inputs[0]
        assert all(grads)
        out = g.temp("packed_grad", x.axes, x.shape, x.dtype)
        return [g.add(Pack([t for t in grads if t], out, self.axis)).output]

    def flop(self) -> float:
        return 0.0

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        for index in lowering.indices(x, [a for a in x.axes if a != self.axis]):
            outs = [W(lowering.tile(t, index)) for t in self.outputs]
            lowering.emit(
                "unpack", [R(lowering.tile(x, index | {self.axis: 0})), *outs], PackArgs(x.axes.index(self.axis))
            )

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        at = self.inputs[0].axes.index(self.axis)
        return tuple(inputs[0].take(i, axis=at) for i in range(len(self.outputs)))


class Pack(Op):
    """Stack tensors along a new axis, which is never cut: the inverse of Unpack."""

    def __init__(self, xs: Sequence[Tensor], out: Tensor, axis: str) -> None:
        super().__init__(xs, [out])
        self.axis = axis

    def flop(self) -> float:
        return 0.0

    def lower(self, lowering: Lowering) -> None:
        out = self.output
        for index in lowering.indices(out, [a for a in out.axes if a != self.axis]):
            ins = [R(lowering.tile(t, index)) for t in self.inputs]
            lowering.emit(
                "pack", [W(lowering.tile(out, index | {self.axis: 0})), *ins], PackArgs(out.axes.index(self.axis))
            )

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (np.stack(inputs, axis=self.output.axes.index(self.axis)),)


class DropoutArgs(TaskArgs):
    """Arguments from which a kernel computes the dropout mask of a tile."""

    key: int
    row_numbers: bool  # whether the task's last tile has row numbers
    first: int  # index of the tile's first element in the whole tensor, apart from the part that row numbers give
    strides: tuple[int, ...]  # of the whole tensor
    seed: Slot
    p: float


class Dropout(Op):
    """y = x * mask / (1 - p); the mask of an element is a hash of (seed, key, element index in the whole tensor).

    The mask does not depend on the tiling and is not stored. The gradient is the same operator on dy. The index uses
    the order of axes at construction: a Dropout that is moved to tensors in another layout has the same mask.

    Args:
        p: probability in [0, 1) of a zero.
        key: number of this dropout; the seed is the slot `dropout_seed`, which changes each step.
        row_numbers: int64 with all axes of x but the last, for packed sequences. In the element index, they take the
            place of the rows' positions. None: the index uses the positions.
    """

    def __init__(self, x: Tensor, out: Tensor, p: float, key: int, row_numbers: Tensor | None = None) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"dropout: got {p}; allowed: a number from 0 to below 1")
        if row_numbers:
            fits = row_numbers.axes == x.axes[:-1]
            require(fits, "dropout: of packed sequences the axes must be batch, seq and one more", x)
        super().__init__([x, *([row_numbers] if row_numbers else [])], [out])
        self.p, self.key, self.row_numbers, self.order = p, key, row_numbers, x.axes

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        dy = grads[0]
        assert dy is not None
        out = g.temp("dropout_grad", dy.axes, dy.shape, dy.dtype, band=dy.band)
        dx = g.add(Dropout(dy, out, self.p, self.key, self.row_numbers)).output
        return [dx, *[None for _ in self.inputs[1:]]]

    def args(self, lowering: Lowering, index: Index) -> DropoutArgs:
        x = self.inputs[0]
        steps = {a: math.prod(x.size(b) for b in self.order[i + 1 :]) for i, a in enumerate(self.order)}
        strides = tuple(steps[axis] for axis in x.axes)
        axes = list(zip(x.axes, strides, strict=True))[len(x.axes) - 1 if self.row_numbers else 0 :]
        first = sum(lowering.part(x, axis, index).offset * stride for axis, stride in axes)
        return DropoutArgs(self.key, self.row_numbers is not None, first, strides, Slot("dropout_seed"), self.p)

    def numbers(self, lowering: Lowering, index: Index) -> list[Access]:
        """Return a list with the access to the tile of row numbers, a task's last tile; empty without row numbers."""
        return [R(lowering.tile(self.row_numbers, index))] if self.row_numbers else []

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        for index in lowering.indices(x):
            accesses = [
                W(lowering.tile(self.output, index)),
                R(lowering.tile(x, index)),
                *self.numbers(lowering, index),
            ]
            lowering.emit("dropout", accesses, self.args(lowering, index))

    def scalar(self) -> Definition:
        axes = self.output.axes
        y = dropped(self, Element(0, axes), Element(1, axes[:-1]) if self.row_numbers else None)
        return Definition(self.output.sizes, (Output(0, axes, y),))

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        sizes = dict(zip(self.inputs[0].axes, inputs[0].shape, strict=True))
        index = np.arange(inputs[0].size, dtype=np.uint64).reshape([sizes[axis] for axis in self.order])
        index = index.transpose(permutation(self.order, self.inputs[0].axes))
        if self.row_numbers:
            width = inputs[0].shape[-1]
            index = (inputs[1].astype(np.uint64) * np.uint64(width))[..., None] + np.arange(width, dtype=np.uint64)
        keep = dropout_hash(index, self.key, seed) >= np.uint64(int(self.p * 2**32))
        return (inputs[0] * keep / (1 - self.p),)


def dropped(of: Dropout | DropoutArgs, x: Expression, row_numbers: Element | None = None) -> Expression:
    """Return the expression x * mask / (1 - p). row_numbers: element with the row number; None: the row's position."""
    return Call("select", Keep(of.key, of.p, row_numbers), x * (1 / (1 - of.p)), 0.0)


def add(g: GraphLike, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, for tensors of the same axes."""
    return g.add(Add(a, b, g.temp("add", a.axes, a.shape, a.dtype))).output


def bias_add(g: GraphLike, x: Tensor, bias: Tensor) -> Tensor:
    """Return x + bias; the bias has some of x's axes, in x's order."""
    return g.add(BiasAdd(x, bias, g.temp("bias_add", x.axes, x.shape, x.dtype))).output


def multiply(g: GraphLike, a: Tensor, b: Tensor, *, like: Tensor | None = None) -> Tensor:
    """Return a * b. Raise ValueError if axes or sizes differ.

    Args:
        like: the tensor whose gradient the product is, if any. It sets the dtype and the band of the product.
    """
    if a.sizes != b.sizes or a.axes != b.axes:
        raise ValueError(f"multiply: {a} and {b} have to have the same axes and sizes")
    dtype = accumulation_dtype(a.dtype) if like and like.kind == "param" else a.dtype
    return g.add(Multiply(a, b, g.temp("multiply", a.axes, a.shape, dtype, band=(like or a).band))).output


def transpose(g: GraphLike, x: Tensor, axes: Sequence[str]) -> Tensor:
    """Return x with its axes in the order `axes`; x itself if the order is the same."""
    if tuple(axes) == x.axes:
        return x
    require(sorted(axes) == sorted(x.axes), f"transpose: the axes {', '.join(axes)} are not those of the tensor", x)
    return g.add(Transpose(x, g.temp("transpose", axes, [x.size(a) for a in axes], x.dtype))).output


def rename(g: GraphLike, x: Tensor, **names: str) -> Tensor:
    """Return x with other axis names, in the same tiles: rename(g, k, seq="key")."""
    return g.add(Rename(x, names)).output


def unpack(g: GraphLike, x: Tensor, axis: str) -> list[Tensor]:
    """Return one tensor for each index of x along `axis`, which is never cut."""
    axes = [a for a in x.axes if a != axis]
    shape = [x.size(a) for a in axes]
    outs = [g.temp(f"{axis}{i}", axes, shape, x.dtype) for i in range(x.size(axis))]
    return g.add(Unpack(x, outs, axis)).outputs


def dropout(g: GraphLike, x: Tensor, p: float) -> Tensor:
    """Return x with elements set to zero with probability p, and all others divided by 1 - p.

    Returns x itself if p is 0 or if the graph is for evaluation.
    """
    if p == 0 or not g.training:
        return x
    out = g.temp("dropout", x.axes, x.shape, x.dtype, band=x.band)
    fitting = (numbers for numbers in g.row_numbers.values() if numbers.axes == x.axes[:-1])
    row_numbers = next(fitting, None) or next((one for axis, one in g.row_numbers.items() if axis in x.axes), None)
    return g.add(Dropout(x, out, p, g.dropout_key(), row_numbers)).output
