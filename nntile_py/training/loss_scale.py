"""Loss scaling for fp16, whose smallest gradients would vanish.

Source: Micikevicius et al. (2018), Mixed precision training, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from nntile_py.graph.step import StepSpec
from nntile_py.tasks.optimizer import MOST_SCALE

INTERVAL = 2000  # steps in a row without an overflow that double the scale
LEAST = 1.0


@dataclass
class LossScale:
    """The factor of the loss, with the defaults of torch.amp.GradScaler.

    A step whose gradients overflow changes no weight and halves the factor; 2000 other steps in a row double it.

    Attributes:
        value: Factor of the next step.
        good: Steps without an overflow since the factor changed.
    """

    value: float
    good: int = 0

    @classmethod
    def of(cls, spec: StepSpec) -> Self | None:
        """Return the scale of a run's first step; None if the loss is not scaled."""
        return cls(spec.scale) if spec.scale else None

    @property
    def state(self) -> dict[str, Any]:
        """Value and count, as a checkpoint stores them."""
        return {"value": self.value, "good": self.good}

    def after(self, *, overflow: bool) -> None:
        """Update the scale after a step. At an overflow with the least scale, the step's result raises NotFinite."""
        if not overflow:
            self.good += 1
            if self.good >= INTERVAL and 2 * self.value <= MOST_SCALE:
                self.value, self.good = 2 * self.value, 0
        elif not is_least(self.value):
            self.value, self.good = self.value / 2, 0


def is_least(scale: float) -> bool:
    """Return True if the scale cannot be halved."""
    return scale / 2 < LEAST
