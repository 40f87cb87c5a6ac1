"""The mean squared error, a loss."""

from __future__ import annotations

from .element_loss import ElementLoss, ElementLossGrad, element_loss
from .op import Array, GraphLike, Tensor


class SquaredErrorGrad(ElementLossGrad):
    """Gradient of SquaredError: dx = 2 (x - target) * scale."""

    kernel = "squared_error_grad"

    def __init__(self, x: Tensor, target: Tensor, out: Tensor, scale: str = "mse_scale") -> None:
        super().__init__(x, target, out, scale)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (2 * (inputs[0] - inputs[1]) / inputs[0].size,)


class SquaredError(ElementLoss):
    """loss = sum((x - target)^2) * scale, plus the loss `before` if given. Output: loss, fp64 [1]. See ElementLoss."""

    kernel, derivative = "squared_error", SquaredErrorGrad

    def __init__(
        self, x: Tensor, target: Tensor, loss: Tensor, before: Tensor | None = None, scale: str = "mse_scale"
    ) -> None:
        super().__init__(x, target, loss, before, scale)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, target, *before = inputs
        return (((x - target) ** 2).mean(keepdims=True).reshape(1) + sum(before),)


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
    return element_loss(g, SquaredError, x, target, loss, scale)
