"""Lion: the sign of a moving average as update, decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.schema import Betas, NonNegative
from nntile_py.tiles import Slot, TaskArgs

from .op import Array
from .optimizer import Optimizer


class LionArgs(TaskArgs):
    lr: Slot
    beta1: float
    beta2: float
    weight_decay: float


class Lion(Optimizer):
    """Lion (Chen et al. 2023, Alg. 2): p -= lr (sign(b1 m + (1 - b1) g) + weight_decay p); m = b2 m + (1 - b2) g.

    A learning rate is usually 3 to 10 times smaller than AdamW's, and the weight decay larger by the same factor.
    """

    lr: NonNegative = 1e-4
    """Learning rate, after the warm-up."""
    betas: Betas = (0.9, 0.99)
    """Decay rates of the average of the gradient: in the update, and in the average that is kept."""
    weight_decay: NonNegative = 0.0
    """Weight decay, decoupled from the gradient."""

    flop: ClassVar = 9.0
    colour: ClassVar = "#e8a838"

    @property
    def states(self) -> tuple[str, ...]:
        return ("m",)

    def args(self, lr: Slot, weight_decay: float) -> LionArgs:
        beta1, beta2 = self.betas
        return LionArgs(lr, beta1, beta2, weight_decay)

    def reference(
        self, p: Array, grad: Array, states: Sequence[Array], weight_decay: float, lr: float, step: int
    ) -> tuple[Array, ...]:
        (b1, b2), (m,) = self.betas, states
        p = p - lr * (np.sign(b1 * m + (1 - b1) * grad) + weight_decay * p)
        return p, b2 * m + (1 - b2) * grad
