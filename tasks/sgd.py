"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nntile_py.schema import BelowOne, NonNegative
from nntile_py.tiles import Slot, TaskArgs

from .op import Array
from .optimizer import Optimizer


class SGDArgs(TaskArgs):
    lr: Slot
    momentum: float
    weight_decay: float


class SGD(Optimizer):
    """SGD as torch.optim.SGD without dampening: g += weight_decay p; m = momentum m + g; p -= lr m."""

    momentum: BelowOne = 0.0
    """Momentum; 0: none, and no state."""
    weight_decay: NonNegative = 0.0
    """Weight decay, added to the gradient."""

    flop: ClassVar = 5.0
    colour: ClassVar = "#cdb700"
    reads_first: ClassVar = True

    @property
    def states(self) -> tuple[str, ...]:
        return ("m",) if self.momentum else ()

    def args(self, lr: Slot, weight_decay: float) -> SGDArgs:
        return SGDArgs(lr, self.momentum, weight_decay)

    def reference(
        self, p: Array, grad: Array, states: Sequence[Array], weight_decay: float, lr: float, step: int
    ) -> tuple[Array, ...]:
        m = grad + weight_decay * p
        states = [self.momentum * state + m for state in states]
        return p - lr * (states[0] if states else m), *states
