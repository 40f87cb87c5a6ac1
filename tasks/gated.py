"""Gated activations: y = act(gate) * up. With silu, this is the gate of SwiGLU (Shazeer 2020, equation 5)."""

from __future__ import annotations

from nntile_py.tiles import TaskArgs

from .activation import ACTIVATIONS, activate, check_kind, derivative
from .op import GraphLike, Tensor
from .pointwise import Pointwise
from .scalar.expression import Number


class GatedArgs(TaskArgs):
    kind: int  # position in ACTIVATIONS


class Gated(Pointwise):
    """y = act(gate) * up, tensors of the same axes; kind is one of ACTIVATIONS."""

    kernel = "gated"

    def __init__(self, gate: Tensor, up: Tensor, out: Tensor, kind: str) -> None:
        assert gate.axes == up.axes == out.axes, (gate, up, out)
        super().__init__([gate, up], [out])
        self.act = check_kind(kind)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        (gate, up), dy = self.inputs, grads[0]
        assert dy is not None
        dgate, dup = (g.temp(name, gate.axes, gate.shape, gate.dtype) for name in ("gate_grad", "up_grad"))
        return list(g.add(GatedGrad(dy, gate, up, dgate, dup, self.act)).outputs)

    def flop(self) -> float:
        return 11.0 * self.output.numel

    def args(self) -> TaskArgs:
        return GatedArgs(ACTIVATIONS.index(self.act))

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        gate, up = inputs
        return (activate(self.act, gate) * up,)


class GatedGrad(Pointwise):
    """dgate = dy * up * act'(gate), dup = dy * act(gate)."""

    kernel = "gated_grad"

    def __init__(self, dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: str) -> None:
        super().__init__([dy, gate, up], [dgate, dup])
        self.act = kind

    def flop(self) -> float:
        return 27.0 * self.output.numel

    def args(self) -> TaskArgs:
        return GatedArgs(ACTIVATIONS.index(self.act))

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        dy, gate, up = inputs
        return dy * up * derivative(self.act, gate), dy * activate(self.act, gate)


def gated(g: GraphLike, gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return act(gate) * up. Raise ValueError if axes or sizes differ, or if `kind` is not an activation."""
    if gate.sizes != up.sizes or gate.axes != up.axes:
        raise ValueError(f"gated: {gate} and {up} have to have the same axes and sizes")
    return g.add(Gated(gate, up, g.temp("gated", gate.axes, gate.shape, gate.dtype), kind)).output
