"""Activations as in transformers: relu, gelu (exact, with erf), gelu_new (gelu by tanh), tanh, silu, quick_gelu.

gelu, silu = x sigmoid(x) and quick_gelu = x sigmoid(1.702 x): Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import math
from typing import ClassVar

from nntile_py.tiles import TaskArgs

from .op import GraphLike, Tensor
from .pointwise import Pointwise
from .scalar.expression import Number, erf, exp, maximum, select, tanh

ACTIVATIONS = ("relu", "gelu", "gelu_new", "tanh", "silu", "quick_gelu")  # kernels take the position in this tuple

_C = math.sqrt(2 / math.pi)
_SLOPES = {"silu": 1.0, "quick_gelu": 1.702}  # the slope in x sigmoid(slope x)


def check_kind(kind: str) -> str:
    """Return `kind` unchanged. Raise ValueError if ACTIVATIONS does not contain it."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation: {kind!r} is not allowed; use one of {', '.join(ACTIVATIONS)}")
    return kind


def _sigmoid(x: Number) -> Number:
    return 0.5 * (1 + tanh(0.5 * x))  # never overflows


def activate(kind: str, x: Number) -> Number:
    """Return act(x) for the activation named `kind`; x is an array or an expression."""
    if kind == "relu":
        return maximum(x, 0.0)
    if kind == "gelu":
        return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
    if kind == "tanh":
        return tanh(x)
    if kind in _SLOPES:
        return x * _sigmoid(_SLOPES[kind] * x)
    return 0.5 * x * (1 + tanh(_C * x * (1 + 0.044715 * x * x)))


def activate_flop(kind: str) -> float:
    """Return the number of operations of act(x) per element."""
    return 1.0 if kind == "relu" else 10.0


def derivative_flop(kind: str) -> float:
    """Return the number of operations of dy * act'(x) per element."""
    return 1.0 if kind == "relu" else 15.0


def derivative(kind: str, x: Number) -> Number:
    """Return act'(x) for the activation named `kind`; x is an array or an expression."""
    if kind == "relu":
        return select(x > 0, 1.0, 0.0)
    if kind == "gelu":
        pdf = exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * pdf
    if kind == "tanh":
        t = tanh(x)
        return 1 - t * t
    if kind in _SLOPES:
        gate = _sigmoid(_SLOPES[kind] * x)
        return gate * (1 + _SLOPES[kind] * x * (1 - gate))
    t = tanh(_C * x * (1 + 0.044715 * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)


class ActivationArgs(TaskArgs):
    kind: int  # position in ACTIVATIONS


class Activation(Pointwise):
    """y = act(x), element-wise; kind is one of ACTIVATIONS."""

    kernel = "activation"
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
        return activate_flop(self.act) * self.output.numel

    def args(self) -> TaskArgs:
        return ActivationArgs(ACTIVATIONS.index(self.act))

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        return (activate(self.act, inputs[0]),)


class ActivationGrad(Pointwise):
    """dx = dy * act'(x)."""

    kernel = "activation_grad"
    colours: ClassVar = {"backward": "#882255"}

    def __init__(self, dy: Tensor, x: Tensor, out: Tensor, kind: str) -> None:
        super().__init__([dy, x], [out])
        self.act = kind

    def flop(self) -> float:
        return derivative_flop(self.act) * self.output.numel

    def args(self) -> TaskArgs:
        return ActivationArgs(ACTIVATIONS.index(self.act))

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        dy, x = inputs
        return (dy * derivative(self.act, x),)


def activation(g: GraphLike, x: Tensor, kind: str) -> Tensor:
    """Return act(x), element-wise; kind: one of ACTIVATIONS."""
    return g.add(Activation(x, g.temp(kind, x.axes, x.shape, x.dtype), kind)).output
