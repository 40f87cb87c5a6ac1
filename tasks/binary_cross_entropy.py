"""The binary cross-entropy of logits: a loss for samples to which any number of the classes may apply."""

from __future__ import annotations

import numpy as np

from .cross_entropy import IGNORED
from .element_loss import ElementLoss, ElementLossGrad, element_loss
from .op import Array, GraphLike, Tensor


class BinaryCrossEntropyGrad(ElementLossGrad):
    """Gradient of BinaryCrossEntropy: dx = (sigmoid(x) - target) * scale; zero where the target is -100."""

    kernel = "binary_cross_entropy_grad"

    def __init__(self, x: Tensor, target: Tensor, out: Tensor, scale: str = "loss_scale") -> None:
        super().__init__(x, target, out, scale)

    def flop(self) -> float:
        return 5.0 * self.output.numel

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, target = inputs
        kept = target != IGNORED
        sigmoid = 0.5 * (1 + np.tanh(x / 2))  # does not overflow
        return ((sigmoid - target) * kept / max(kept.sum(), 1),)


class BinaryCrossEntropy(ElementLoss):
    """loss = sum(log(1 + exp(x)) - x target) * scale, plus the loss `before` if given. Output: loss, fp64 [1].

    The cross-entropy between a target from 0 to 1 and the probability sigmoid(x), as in PyTorch's
    BCEWithLogitsLoss. Elements whose target is -100 are ignored. See ElementLoss.
    """

    kernel, derivative = "binary_cross_entropy", BinaryCrossEntropyGrad

    def __init__(
        self, x: Tensor, target: Tensor, loss: Tensor, before: Tensor | None = None, scale: str = "loss_scale"
    ) -> None:
        super().__init__(x, target, loss, before, scale)

    def flop(self) -> float:
        return 8.0 * self.inputs[0].numel

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, target, *before = inputs
        kept = target != IGNORED
        each = (np.logaddexp(0, x) - x * target) * kept
        return (np.array([each.sum() / max(kept.sum(), 1)]) + sum(before),)


def binary_cross_entropy(
    g: GraphLike, x: Tensor, target: Tensor, *, loss: Tensor | None = None, scale: str = "loss_scale"
) -> Tensor:
    """Return the mean binary cross-entropy of the logits x, plus an earlier `loss` if given, as fp64 [1].

    Args:
        target: numbers from 0 to 1 with the axes and sizes of x, and with the dtype of x or its accumulation dtype
            (fp32, fp64). Elements with -100 are ignored.
        scale: name of the slot with 1 / (elements that are not ignored, in all micro-batches of the step).

    Raises:
        ValueError: the target does not fit, or depends on parameters.
    """
    return element_loss(g, BinaryCrossEntropy, x, target, loss, scale)
