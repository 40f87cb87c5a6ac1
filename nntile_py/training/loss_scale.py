"""The factor of the loss whose gradients would be too small for fp16; see Micikevicius et al. (2018), 3.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from nntile_py.graph.step import StepSpec
from nntile_py.tasks.optimizer import MOST_SCALE

INTERVAL = 2000  # steps without an overflow before it is doubled
LEAST = 1.0


@dataclass
class LossScale:
    """As torch.amp.GradScaler by its defaults: halved after a step whose gradients overflow, which changes no weight,
    doubled after 2000 others in a row. `value` is that of the next step, `good` counts since it changed."""

    value: float
    good: int = 0

    @classmethod
    def of(cls, spec: StepSpec) -> Self | None:
        """The first of a run; None where the loss is not scaled."""
        return cls(spec.scale) if spec.scale else None

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "good": self.good}

    def after(self, *, overflow: bool) -> None:
        """To be called with each step in turn. Where it can fall no more, the step's result ends the training."""
        if not overflow:
            self.good += 1
            if self.good >= INTERVAL and 2 * self.value <= MOST_SCALE:
                self.value, self.good = 2 * self.value, 0
        elif not is_least(self.value):
            self.value, self.good = self.value / 2, 0


def is_least(scale: float) -> bool:
    """Whether it is not halved any more."""
    return scale / 2 < LEAST
