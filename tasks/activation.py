"""Activation functions with their names in transformers. gelu uses erf; gelu_new approximates gelu by tanh.

gelu, silu = x sigmoid(x) and quick_gelu = x sigmoid(1.702 x): Hendrycks and Gimpel 2016. relu2 = max(x, 0)^2: So et al.
2021. relu6 = min(max(x, 0), 6): Krizhevsky 2010. leaky_relu = max(x, 0.01 x): Maas et al. 2013. hardswish
= x relu6(x + 3) / 6: Howard et al. 2019. mish = x tanh(log(1 + e^x)): Misra 2019.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

from nntile_py.tiles import TaskArgs

from .op import GraphLike, Tensor
from .pointwise import Pointwise
from .scalar.expression import Number, erf, exp, maximum, select, tanh

ActivationName = Literal[
    "relu", "gelu", "gelu_new", "tanh", "silu", "quick_gelu", "relu2", "relu6", "leaky_relu", "hardswish", "mish",
    "sigmoid",
]  # fmt: skip
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)  # kernels take the position in this tuple

_C = math.sqrt(2 / math.pi)
_LEAK = 0.01  # slope of leaky_relu for negative x
_SLOPES = {"silu": 1.0, "quick_gelu": 1.702}  # the slope in x sigmoid(slope x)


def check_kind(kind: str) -> str:
    """Return `kind` unchanged. Raise ValueError if ACTIVATIONS does not contain it."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation: got {kind!r}; allowed: {', '.join(ACTIVATIONS)}")
    return kind


def _sigmoid(x: Number) -> Number:
    return 0.5 * (1 + tanh(0.5 * x))  # never overflows


def _clamp(x: Number, low: float, high: float) -> Number:
    return -maximum(-maximum(x, low), -high)


def _mish_gate(x: Number) -> Number:
    """Return tanh(log(1 + e^x)), from a = e^-|x|, which never overflows."""
    a = exp(-maximum(x, -x))
    top = select(x > 0, 1 + 2 * a, a * a + 2 * a)
    return top / (top + 2 * select(x > 0, a * a, 1.0))


def activate(kind: str, x: Number) -> Number:
    """Return act(x) for the activation named `kind`; x is an array or an expression."""
    match kind:
        case "relu":
            return maximum(x, 0.0)
        case "relu2":
            return x * maximum(x, 0.0)
        case "relu6":
            return _clamp(x, 0, 6)
        case "leaky_relu":
            return maximum(x, _LEAK * x)
        case "hardswish":
            return x * _clamp(x + 3, 0, 6) / 6
        case "gelu":
            return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
        case "gelu_new":
            return 0.5 * x * (1 + tanh(_C * x * (1 + 0.044715 * x * x)))
        case "mish":
            return x * _mish_gate(x)
        case "tanh":
            return tanh(x)
        case "sigmoid":  # from e^-|x|: exact also near 0
            a = exp(-maximum(x, -x))
            return select(x > 0, 1.0, a) / (1 + a)
    return x * _sigmoid(_SLOPES[kind] * x)


_FEW = {"relu": 1, "relu2": 2, "relu6": 2, "leaky_relu": 2, "hardswish": 5}  # {name: flop} without an exponential


def activate_flop(kind: str) -> float:
    """Return the number of operations of act(x) per element."""
    return float(_FEW.get(kind, 10))


def derivative_flop(kind: str) -> float:
    """Return the number of operations of dy * act'(x) per element."""
    return float(_FEW.get(kind, 15))


def derivative(kind: str, x: Number) -> Number:
    """Return act'(x) for the activation named `kind`; x is an array or an expression."""
    match kind:
        case "relu":
            return select(x > 0, 1.0, 0.0)
        case "relu2":
            return 2 * maximum(x, 0.0)
        case "relu6":
            return select((x > 0) & (x < 6), 1.0, 0.0)
        case "leaky_relu":
            return select(x > 0, 1.0, _LEAK)
        case "hardswish":
            return select(x > -3, select(x < 3, x / 3 + 0.5, 1.0), 0.0)
        case "gelu":
            pdf = exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
            return 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * pdf
        case "gelu_new":
            t = tanh(_C * x * (1 + 0.044715 * x * x))
            return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)
        case "mish":
            gate = _mish_gate(x)
            return gate + x * (1 - gate * gate) * _sigmoid(x)
        case "tanh":
            t = tanh(x)
            return 1 - t * t
        case "sigmoid":
            a = exp(-maximum(x, -x))
            return a / ((1 + a) * (1 + a))
    gate = _sigmoid(_SLOPES[kind] * x)
    return gate * (1 + _SLOPES[kind] * x * (1 - gate))


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
