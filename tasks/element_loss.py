"""Base classes of losses that are sums over elements: the squared error and the binary cross-entropy."""

from __future__ import annotations

from typing import ClassVar

from nntile_py.tiles import ACC, R, Slot, TaskArgs, W

from .cross_entropy import loss_tensor
from .op import GraphLike, Lowering, Op, Tensor, accumulation_dtype


class ElementLossArgs(TaskArgs):
    scale: Slot  # 1 / (number of elements that are not ignored, in all micro-batches of the step)


class ElementLossGrad(Op):
    """Gradient of an ElementLoss: dx = scale * (derivative of each element's loss). A subclass sets `kernel`."""

    kernel: ClassVar[str]

    def __init__(self, x: Tensor, target: Tensor, out: Tensor, scale: str) -> None:
        super().__init__([x, target], [out])
        self.scale = scale

    def flop(self) -> float:
        return 2.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        for index in lowering.indices(self.output):
            x, target = (lowering.tile(t, index) for t in self.inputs)
            accesses = [W(lowering.tile(self.output, index)), R(x), R(target)]
            lowering.emit(self.kernel, accesses, ElementLossArgs(Slot(self.scale)))


class ElementLoss(Op):
    """loss = (sum of the elements' losses) * scale, plus the loss `before` if given. Output: loss, fp64 [1].

    A subclass sets `kernel` and `derivative`, the class of its gradient.

    Args:
        target: a tensor with the axes of x.
        scale: name of the slot with 1 / (number of elements that are not ignored, in all micro-batches of the step).
    """

    kernel: ClassVar[str]
    derivative: ClassVar[type[ElementLossGrad]]

    def __init__(self, x: Tensor, target: Tensor, loss: Tensor, before: Tensor | None, scale: str) -> None:
        assert x.axes == target.axes, (x, target)
        super().__init__([t for t in (x, target, before) if t], [loss])
        self.scale = scale

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, target = self.inputs[:2]
        assert not target.requires_grad, target
        out = g.temp(f"{self.kernel}_grad", x.axes, x.shape, x.dtype)
        return [g.add(self.derivative(x, target, out, self.scale)).output, None]

    def flop(self) -> float:
        return 3.0 * self.inputs[0].numel

    def lower(self, lowering: Lowering) -> None:
        x, target = self.inputs[:2]
        loss = lowering.tile(self.output, {"one": 0})
        for index in lowering.indices(x):
            accesses = [ACC(loss), R(lowering.tile(x, index)), R(lowering.tile(target, index))]
            lowering.emit(self.kernel, accesses, ElementLossArgs(Slot(self.scale)))


def element_loss(
    g: GraphLike, kind: type[ElementLoss], x: Tensor, target: Tensor, loss: Tensor | None, scale: str
) -> Tensor:
    """Add a loss of class `kind` to the graph; return it, plus `loss` if given, as fp64 [1].

    Raises:
        ValueError: the target does not fit, or depends on parameters.
    """
    here = f"{kind.kernel}: the target {target}"
    if x.axes != target.axes or x.sizes != target.sizes or target.dtype not in (x.dtype, accumulation_dtype(x.dtype)):
        raise ValueError(f"{here} ({target.dtype}) does not fit {x} ({x.dtype})")
    if target.requires_grad:
        raise ValueError(f"{here} depends on parameters; it gets no gradient")
    return g.add(kind(x, target, loss_tensor(g, loss), loss, scale)).output
