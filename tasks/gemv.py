"""Product of a matrix and one row, with the operators around the product: BLAS gemv in passes that generate tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import R, TaskArgs, TileRange, W

from .activation import ACTIVATIONS, activate, activate_flop
from .norm import Norm
from .op import CONTRACTION, Array, GraphLike, Lowering, Op, Tensor

NORMS = ("rms_norm", "layer_norm")


class GemvArgs(TaskArgs):
    norm: int  # position in NORMS; -1: x is not normalised
    inputs: int  # number of tiles whose sum is x
    bias: bool
    residuals: int  # number of tiles of the residual
    activation: int  # position in ACTIVATIONS; -1: none
    factor: bool
    eps: float  # of the norm
    scale: float


class Gemv(Op):
    """y = act(scale W norm(x) + bias + residual) * factor, for one row x: axes of x that W lacks have the size 1.

    A pass that generates one token of one text has only such products. The operator reads W once, at the rate of the
    memory, and saves the tasks of the norm, the activation and the gate.

    If a summed axis is cut, y is the sum of several outputs, each of which is the product of one tile of x. The readers
    of y add these outputs, so that no task only adds. Such a product has neither norm, activation nor factor.

    Args:
        x: Tensors of equal axes, whose sum is the row. The axes that W has too are summed.
        weight: W, a parameter with the axes of y that x lacks, in y's order, then the summed axes, in x's order.
        outs: y, or for each tile of the summed axis a tensor with the axes of y.
        parts: The tiles of the summed axis that is cut; empty: none is cut.
        norm: An RMSNorm or LayerNorm without a residual, over all summed axes; None: x is not normalised.
        bias: Axes of y that x lacks, in y's order.
        residual: Tensors with the axes of y, whose sum is added.
        activation: One of ACTIVATIONS; None: none.
        factor: Axes of y; the other operand of a gated activation, see Gated.
    """

    category = CONTRACTION
    colours: ClassVar = {"forward": "#003f6b"}

    def __init__(
        self, x: Sequence[Tensor], weight: Tensor, outs: Sequence[Tensor], *, parts: Sequence[TileRange] = (),
        scale: float = 1.0, norm: Norm | None = None, bias: Tensor | None = None, residual: Sequence[Tensor] = (),
        activation: str | None = None, factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        optional = [t for t in (bias, *residual, factor) if t]
        super().__init__([*x, weight, *(norm.inputs[1:] if norm else ()), *optional], [*outs])
        self.x, self.weight, self.parts, self.scale, self.norm = tuple(x), weight, tuple(parts), scale, norm
        self.bias, self.residual, self.activation, self.factor = bias, tuple(residual), activation, factor
        assert norm is None or (norm.kernel in NORMS and not norm.residual), norm
        row, out = self.x[0], outs[0]
        self.k = tuple(axis for axis in row.axes if axis in weight.axes)
        n = tuple(axis for axis in out.axes if axis not in row.axes)
        assert weight.axes == (*n, *self.k) and (bias is None or bias.axes == n), (x, weight, bias, out)
        assert math.prod(row.shape) == math.prod(map(row.size, self.k)), x
        assert all(t.axes == out.axes for t in (*outs, *residual, *([factor] if factor else []))), self.inputs
        assert all(t.axes == row.axes for t in self.x) and len(outs) == max(len(self.parts), 1), (x, outs)
        assert not parts or not (norm or activation or factor), self.inputs

    @property
    def title(self) -> str:
        last = {"bias": self.bias, "residual": self.residual, self.activation or "": self.activation}
        parts = [self.norm.kernel if self.norm else "", *(name for name, there in last.items() if there)]
        return " + ".join(part for part in (self.kind, *parts, "factor" if self.factor else "") if part)

    def flop(self) -> float:
        norm = self.norm.operations if self.norm else 0.0
        each = float(len(self.residual) + sum(t is not None for t in (self.bias, self.factor)))
        each += activate_flop(self.activation) if self.activation else 0
        return self.products() + (norm + len(self.x) - 1) * self.x[0].numel + each * self.output.numel

    def products(self) -> float:
        return 2.0 * self.weight.numel

    def lower(self, lowering: Lowering) -> None:
        row = self.x[0]
        cut = [axis for axis in self.k if lowering.cut(row, axis)]
        assert [lowering.parts(row, axis) for axis in cut] == [[*self.parts]] * bool(self.parts), row
        first, later = self._args(whole=True), self._args(whole=False)
        for index in lowering.indices(self.output):
            for number, out in enumerate(self.outputs):
                at = index | dict.fromkeys(row.axes, 0) | dict.fromkeys(cut, number)
                # Only the first part adds bias and residual.
                tiles = [lowering.tile(t, at) for t in (self.inputs if not number else [*self.x, self.weight])]
                accesses = [W(lowering.tile(out, index)), *map(R, tiles)]
                flop = 2.0 * math.prod(tiles[len(self.x)].shape)
                lowering.emit("gemv", accesses, later if number else first, flop=flop)

    def _args(self, whole: bool) -> GemvArgs:
        """Return the arguments of a task; whole: of a task that adds bias and residual."""
        return GemvArgs(
            norm=NORMS.index(self.norm.kernel) if self.norm else -1, inputs=len(self.x), bias=whole and bool(self.bias),
            residuals=len(self.residual) * whole, factor=bool(self.factor),
            activation=ACTIVATIONS.index(self.activation) if self.activation else -1,
            eps=self.norm.eps if self.norm else 0.0, scale=self.scale,
        )  # fmt: skip

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        raise AssertionError("fusion comes after the gradients")

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        values = iter(inputs)
        x = sum(next(values) for _ in self.x)
        assert isinstance(x, np.ndarray)
        weight, row = next(values), x.reshape(-1)
        if self.norm:
            row = self.norm.reference(row, *(next(values) for _ in self.norm.inputs[1:]))[0]
        if self.parts:
            return self._reference_of_parts(row, weight, values)
        y = (self.scale * weight.reshape(-1, row.size) @ row).reshape(self.output.shape)
        y = self._added(y, values)
        y = activate(self.activation, y) if self.activation else y
        return (y * next(values) if self.factor else y,)

    def _added(self, y: Array, values: Iterator[Array]) -> Array:
        for _ in (*([self.bias] if self.bias else []), *self.residual):
            y = y + next(values).reshape(self.output.shape)
        return y

    def _reference_of_parts(self, row: Array, weight: Array, values: Iterator[Array]) -> tuple[Array, ...]:
        sizes = [self.x[0].size(axis) for axis in self.k]
        axis = sizes.index(self.parts[-1].end)
        results: list[Array] = []
        for part in self.parts:
            inside = np.zeros(sizes)
            inside[(slice(None),) * axis + (slice(part.offset, part.end),)] = 1
            y = (self.scale * weight.reshape(-1, row.size) @ (row * inside.reshape(-1))).reshape(self.output.shape)
            results.append(y if results else self._added(y, values))
        return tuple(results)
