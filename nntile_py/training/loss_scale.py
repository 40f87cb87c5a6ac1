"""Loss scaling for fp16. Without it, the smallest gradients would round to zero.

Source: Micikevicius et al. (2018), Mixed precision training, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from nntile_py.graph.step import StepSpec
from nntile_py.tasks.optimizer import MOST_SCALE

INTERVAL = 2000  # the scale doubles after this number of steps in a row without an overflow
LEAST = 1.0


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied. It changes as in torch.amp.GradScaler with that class's defaults.

    A step whose gradients overflow changes no weight and halves the factor. 2000 steps in a row without an overflow
    double it.

    Attributes:
        value: Factor of the next step.
        good: Number of steps without an overflow since the factor last changed.
    """

    value: float
    good: int = 0

    @classmethod
    def of(cls, spec: StepSpec) -> Self | None:
        """Return the LossScale before a run's first step; None if the loss is not scaled."""
        return cls(spec.scale) if spec.scale else None

    @property
    def state(self) -> dict[str, Any]:
        """The dict {"value": ..., "good": ...}, which checkpoints store."""
        return {"value": self.value, "good": self.good}

    def after(self, *, overflow: bool) -> LossScale:
        """Return the factor after one more step. overflow: the step's gradients overflowed.

        The smallest factor is not halved: if a step overflows with it, Pending.result raises NotFinite."""
        if overflow:
            return self if is_least(self.value) else LossScale(self.value / 2)
        if self.good + 1 >= INTERVAL and 2 * self.value <= MOST_SCALE:
            return LossScale(2 * self.value)
        return LossScale(self.value, self.good + 1)


def is_least(scale: float) -> bool:
    """Return True if half of the scale would be below LEAST."""
    return scale / 2 < LEAST
