"""Gated activations: y = act(gate) * up; with silu the gate of SwiGLU (Shazeer 2020, equation 5)."""

from __future__ import annotations

from nntile_py.tiles import R, TaskArgs, W

from .activation import ACTIVATIONS, activate, check_kind, derivative
from .op import Array, GraphLike, Lowering, Op, Tensor
from .scalar.expression import Definition, Element, Output


class GatedArgs(TaskArgs):
    kind: int  # position in ACTIVATIONS


class Gated(Op):
    """y = act(gate) * up, tensors of the same axes; kind is one of ACTIVATIONS."""

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

    def lower(self, low: Lowering) -> None:
        for index in low.indices(self.output):
            gate, up = (low.tile(t, index) for t in self.inputs)
            low.emit("gated", [W(low.tile(self.output, index)), R(gate), R(up)], GatedArgs(ACTIVATIONS.index(self.act)))

    def scalar(self) -> Definition:
        axes = self.output.axes
        gate, up = Element(0, axes), Element(1, axes)
        return Definition(self.output.sizes, (Output(0, axes, activate(self.act, gate) * up),))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (activate(self.act, inputs[0]) * inputs[1],)


class GatedGrad(Op):
    """dgate = dy * up * act'(gate), dup = dy * act(gate)."""

    def __init__(self, dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: str) -> None:
        super().__init__([dy, gate, up], [dgate, dup])
        self.act = kind

    def flop(self) -> float:
        return 27.0 * self.output.numel

    def lower(self, low: Lowering) -> None:
        for index in low.indices(self.output):
            written = [W(low.tile(t, index)) for t in self.outputs]
            read = [R(low.tile(t, index)) for t in self.inputs]
            low.emit("gated_grad", [*written, *read], GatedArgs(ACTIVATIONS.index(self.act)))

    def scalar(self) -> Definition:
        axes = self.output.axes
        dy, gate, up = (Element(k, axes) for k in range(3))
        dgate, dup = dy * up * derivative(self.act, gate), dy * activate(self.act, gate)
        return Definition(self.output.sizes, (Output(0, axes, dgate), Output(1, axes, dup)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        dy, gate, up = inputs
        return dy * up * derivative(self.act, gate), dy * activate(self.act, gate)


def gated(g: GraphLike, gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up. ValueError: axes or sizes differ, or `kind` is not an activation."""
    if gate.sizes != up.sizes or gate.axes != up.axes:
        raise ValueError(f"gated: {gate} and {up} have to have the same axes and sizes")
    return g.add(Gated(gate, up, g.temp("gated", gate.axes, gate.shape, gate.dtype), kind)).output
