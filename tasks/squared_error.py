"""The mean squared error, a loss."""

from __future__ import annotations

from nntile_py.tiles import ACC, R, Slot, TaskArgs, W

from .cross_entropy import loss_tensor
from .op import Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype


class SquaredErrorArgs(TaskArgs):
    scale: Slot  # 1 / (elements of x in all micro-batches of the step)


class SquaredError(Op):
    """loss = sum((x - target)^2) * scale, plus the loss `before` if given. Output: loss, fp64 [1].

    Args:
        target: a tensor with the axes of x.
        scale: name of a slot whose value is 1 / (elements of x in all micro-batches of the step).
    """

    def __init__(
        self, x: Tensor, target: Tensor, loss: Tensor, before: Tensor | None = None, scale: str = "mse_scale"
    ) -> None:
        assert x.axes == target.axes, (x, target)
        super().__init__([t for t in (x, target, before) if t], [loss])
        self.scale = scale

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, target = self.inputs[:2]
        assert not target.requires_grad, target
        out = g.temp("squared_error_grad", x.axes, x.shape, x.dtype)
        return [g.add(SquaredErrorGrad(x, target, out, self.scale)).output, None]

    def flop(self) -> float:
        return 3.0 * self.inputs[0].numel

    def lower(self, lowering: Lowering) -> None:
        x, target = self.inputs[:2]
        loss = lowering.tile(self.output, {"one": 0})
        for index in lowering.indices(x):
            accesses = [ACC(loss), R(lowering.tile(x, index)), R(lowering.tile(target, index))]
            lowering.emit("squared_error", accesses, SquaredErrorArgs(Slot(self.scale)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, target, *before = inputs
        return (((x - target) ** 2).mean(keepdims=True).reshape(1) + sum(before),)


class SquaredErrorGrad(Op):
    """Gradient of SquaredError: dx = 2 (x - target) * scale."""

    def __init__(self, x: Tensor, target: Tensor, out: Tensor, scale: str = "mse_scale") -> None:
        super().__init__([x, target], [out])
        self.scale = scale

    def flop(self) -> float:
        return 2.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        for index in lowering.indices(self.output):
            x, target = (lowering.tile(t, index) for t in self.inputs)
            lowering.emit(
                "squared_error_grad",
                [W(lowering.tile(self.output, index)), R(x), R(target)],
                SquaredErrorArgs(Slot(self.scale)),
            )

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (2 * (inputs[0] - inputs[1]) / inputs[0].size,)


def squared_error(
    g: GraphLike, x: Tensor, target: Tensor, *, loss: Tensor | None = None, scale: str = "mse_scale"
) -> Tensor:
    """Add a SquaredError to the graph; return the mean of (x - target)^2, plus `loss` if given, as fp64 [1].

    Args:
        target: a tensor with the axes and sizes of x, and with the dtype of x or its accumulation dtype (fp32, fp64).
        scale: name of the slot whose value is 1 / (elements of x in all micro-batches of the step).

    Raises:
        ValueError: the target does not fit, or depends on parameters.
    """
    if x.axes != target.axes or x.sizes != target.sizes or target.dtype not in (x.dtype, accumulation_dtype(x.dtype)):
        raise ValueError(f"squared_error: the target {target} ({target.dtype}) does not fit {x} ({x.dtype})")
    if target.requires_grad:
        raise ValueError(f"squared_error: the target {target} depends on parameters; it gets no gradient")
    return g.add(SquaredError(x, target, loss_tensor(g, loss), loss, scale)).output
