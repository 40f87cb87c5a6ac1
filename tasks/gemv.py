"""Product of a matrix and one row, with the operators around the product: BLAS gemv in passes that generate tokens."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import numpy as np

from nntile_py.tiles import R, TaskArgs, W

from .activation import ACTIVATIONS, activate, activate_flop
from .norm import Norm
from .op import CONTRACTION, Array, GraphLike, Lowering, Op, Tensor

NORMS = ("rms_norm", "layer_norm")


class GemvArgs(TaskArgs):
    norm: int  # position in NORMS; -1: x is not normalised
    bias: bool
    residual: bool
    activation: int  # position in ACTIVATIONS; -1: none
    factor: bool
    eps: float  # of the norm
    scale: float


class InputNorm(NamedTuple):
    """The norm of a product's input: one of NORMS, its weights (gamma, and beta for a LayerNorm), and its eps."""

    kind: str
    weights: tuple[Tensor, ...]
    eps: float

    @classmethod
    def of(cls, norm: Norm) -> InputNorm:
        """Return the norm that an operator computes; the operator adds no residual."""
        assert not norm.residual, norm
        return cls(norm.kernel, tuple(norm.inputs[1:]), norm.eps)

    def apply(self, x: Array, weights: tuple[Array, ...]) -> Array:
        """Return the normalised row x [k]; weights: values of `self.weights`."""
        d = x - x.mean() if self.kind == "layer_norm" else x
        y: Array = d / np.sqrt((d * d).mean() + self.eps) * weights[0]
        return y + weights[1] if self.kind == "layer_norm" else y


class Gemv(Op):
    """y = act(scale W norm(x) + bias + residual) * factor, for one row x: axes of x that W lacks have the size 1.

    A pass that generates one token of one text has only such products. The operator reads W once, at the rate of the
    memory, and saves the tasks of the norm, the activation and the gate.

    Args:
        x: The axes that W has too are summed. They must not be cut.
        weight: W, a parameter with the axes of y that x lacks, in y's order, then the summed axes, in x's order.
        norm: None: x is not normalised. RMSNorm and LayerNorm are over all summed axes.
        bias: Axes of y that x lacks, in y's order.
        residual: Axes of y.
        activation: One of ACTIVATIONS; None: none.
        factor: Axes of y; the other operand of a gated activation, see Gated.
    """

    category = CONTRACTION
    colours: ClassVar = {"forward": "#003f6b"}

    def __init__(
        self, x: Tensor, weight: Tensor, out: Tensor, *, scale: float = 1.0, norm: InputNorm | None = None,
        bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None,
        factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        optional = [t for t in (bias, residual, factor) if t]
        super().__init__([x, weight, *(norm.weights if norm else ()), *optional], [out])
        self.x, self.weight, self.scale, self.norm = x, weight, scale, norm
        self.bias, self.residual, self.activation, self.factor = bias, residual, activation, factor
        self.k = tuple(axis for axis in x.axes if axis in weight.axes)
        n = tuple(axis for axis in out.axes if axis not in x.axes)
        assert weight.axes == (*n, *self.k) and (bias is None or bias.axes == n), (x, weight, bias, out)
        assert math.prod(x.shape) == math.prod(map(x.size, self.k)), x
        assert all(t is None or t.axes == out.axes for t in (residual, factor)), (residual, factor, out)

    @property
    def title(self) -> str:
        last = {"bias": self.bias, "residual": self.residual, self.activation or "": self.activation}
        parts = [self.norm.kind if self.norm else "", *(name for name, there in last.items() if there)]
        return " + ".join(part for part in (self.kind, *parts, "factor" if self.factor else "") if part)

    def flop(self) -> float:
        norm = {"": 0, "rms_norm": 4, "layer_norm": 8}[self.norm.kind if self.norm else ""]
        each = float(sum(t is not None for t in (self.bias, self.residual, self.factor)))
        each += activate_flop(self.activation) if self.activation else 0
        return self.products() + norm * self.x.numel + each * self.output.numel

    def products(self) -> float:
        return 2.0 * self.weight.numel

    def lower(self, lowering: Lowering) -> None:
        assert not any(lowering.cut(self.x, axis) for axis in self.k), self.x
        kind = self.norm.kind if self.norm else ""
        args = GemvArgs(
            norm=NORMS.index(kind) if kind else -1, bias=bool(self.bias), residual=bool(self.residual),
            activation=ACTIVATIONS.index(self.activation) if self.activation else -1, factor=bool(self.factor),
            eps=self.norm.eps if self.norm else 0.0, scale=self.scale,
        )  # fmt: skip
        for index in lowering.indices(self.output):
            at = index | dict.fromkeys(self.x.axes, 0)
            tiles = [lowering.tile(t, at) for t in self.inputs]
            accesses = [W(lowering.tile(self.output, index)), *map(R, tiles)]
            lowering.emit("gemv", accesses, args, flop=2.0 * math.prod(tiles[1].shape))

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        raise AssertionError("fusion comes after the gradients")

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        values = iter(inputs)
        row, weight = next(values).reshape(-1), next(values)
        if self.norm:
            row = self.norm.apply(row, tuple(next(values).reshape(-1) for _ in self.norm.weights))
        y = (self.scale * weight.reshape(-1, row.size) @ row).reshape(self.output.shape)
        for added in (self.bias, self.residual):
            y = y + next(values).reshape(self.output.shape) if added else y
        y = activate(self.activation, y) if self.activation else y
        return (y * next(values) if self.factor else y,)
