"""Activations as in transformers: relu, gelu (exact, erf), gelu_new (its tanh approximation), tanh, silu.

gelu and silu, x sigmoid(x): Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from nntile_py.tiles import R, TaskArgs, W

from .op import Array, GraphLike, Lowering, Op, Tensor

ACTIVATIONS = ("relu", "gelu", "gelu_new", "tanh", "silu")  # kernels know them by their positions

_erf = np.vectorize(math.erf)
_C = math.sqrt(2 / math.pi)


def check_kind(kind: str) -> str:
    """The kind. ValueError: there is no such activation."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation: {kind!r} is not allowed; use one of {', '.join(ACTIVATIONS)}")
    return kind


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))  # overflows nowhere


def activate(kind: str, x: Array) -> Array:
    """The activation in numpy."""
    if kind == "relu":
        return np.maximum(x, 0.0)
    if kind == "gelu":
        return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))
    if kind == "tanh":
        return np.asarray(np.tanh(x))
    if kind == "silu":
        return np.asarray(x * _sigmoid(x))
    return np.asarray(0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x**3))))


def derivative(kind: str, x: Array) -> Array:
    """Its derivative in numpy."""
    if kind == "relu":
        return np.asarray((x > 0).astype(x.dtype))
    if kind == "gelu":
        return np.asarray(0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))
    if kind == "tanh":
        return np.asarray(1 - np.tanh(x) ** 2)
    if kind == "silu":
        return np.asarray(_sigmoid(x) * (1 + x * (1 - _sigmoid(x))))
    t = np.tanh(_C * (x + 0.044715 * x**3))
    return np.asarray(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x))


class ActivationArgs(TaskArgs):
    kind: int  # its place in ACTIVATIONS


class Activation(Op):
    """y = act(x), element-wise; kind is one of ACTIVATIONS."""

    colours: ClassVar = {"forward": "#44aa99"}

    def __init__(self, x: Tensor, out: Tensor, kind: str) -> None:
        super().__init__([x], [out])
        self.act = check_kind(kind)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        dy, x = grads[0], self.inputs[0]
        assert dy is not None
        out = g.temp("activation_grad", x.axes, x.shape, x.dtype)
        return [g.add(ActivationGrad(dy, x, out, self.act)).output]

    def flop(self) -> float:
        return 10.0 * self.output.numel

    def lower(self, low: Lowering) -> None:
        for index in low.indices(self.output):
            x, y = low.tile(self.inputs[0], index), low.tile(self.output, index)
            low.emit("activation", [W(y), R(x)], ActivationArgs(ACTIVATIONS.index(self.act)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (activate(self.act, inputs[0]),)


class ActivationGrad(Op):
    """dx = dy * act'(x)."""

    colours: ClassVar = {"backward": "#882255"}

    def __init__(self, dy: Tensor, x: Tensor, out: Tensor, kind: str) -> None:
        super().__init__([dy, x], [out])
        self.act = kind

    def flop(self) -> float:
        return 15.0 * self.output.numel

    def lower(self, low: Lowering) -> None:
        args = ActivationArgs(ACTIVATIONS.index(self.act))
        for index in low.indices(self.output):
            dy, x = (low.tile(t, index) for t in self.inputs)
            low.emit("activation_grad", [W(low.tile(self.output, index)), R(dy), R(x)], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[0] * derivative(self.act, inputs[1]),)


def activation(g: GraphLike, x: Tensor, kind: str) -> Tensor:
    """act(x), element-wise; kind: one of ACTIVATIONS."""
    return g.add(Activation(x, g.temp(kind, x.axes, x.shape, x.dtype), kind)).output
