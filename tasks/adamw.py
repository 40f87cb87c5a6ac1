"""AdamW: decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.schema import Betas, NonNegative, Positive
from nntile_py.tiles import Slot, TaskArgs

from .op import Array
from .optimizer import Optimizer


class AdamWArgs(TaskArgs):
    lr: Slot
    beta1_correction: Slot  # 1 - beta1^t
    beta2_correction: Slot  # 1 - beta2^t
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamW(Optimizer):
    """AdamW as torch.optim.AdamW (Loshchilov and Hutter 2019, Alg. 2).

    In step t: p -= lr weight_decay p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps).
    """

    betas: Betas = (0.9, 0.999)
    """Decay rates of the averages of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the averaged square, so that it is never 0."""
    weight_decay: NonNegative = 0.01
    """Weight decay, decoupled from the gradient."""

    flop: ClassVar = 14.0
    colour: ClassVar = "#f0e442"

    @property
    def states(self) -> tuple[str, ...]:
        return "m", "v"

    def slots(self, step: int) -> dict[str, float]:
        return {f"beta{k + 1}_correction": 1 - beta**step for k, beta in enumerate(self.betas)}

    def args(self, lr: Slot, weight_decay: float) -> AdamWArgs:
        correction1, correction2 = Slot("beta1_correction"), Slot("beta2_correction")
        beta1, beta2 = self.betas
        return AdamWArgs(lr, correction1, correction2, beta1, beta2, self.eps, weight_decay)

    def reference(
        self, p: Array, grad: Array, states: Sequence[Array], weight_decay: float, lr: float, step: int
    ) -> tuple[Array, ...]:
        (b1, b2), (m, v) = self.betas, states
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad * grad
        p = p * (1 - lr * weight_decay)
        p = p - lr / (1 - b1**step) * m / (np.sqrt(v) / np.sqrt(1 - b2**step) + self.eps)
        return p, m, v
