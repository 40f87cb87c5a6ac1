"""The factor of the loss whose gradients would be too small for fp16; see Micikevicius et al. (2018), 3.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from nntile_py.errors import NotFinite
from nntile_py.graph.optimizers import MOST_SCALE
from nntile_py.graph.step import StepSpec

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

    def after(self, step: int, *, overflow: bool) -> None:
        """To be called with each step in turn. Raises NotFinite where even a scale of 1 was too large."""
        if not overflow:
            self.good += 1
            if self.good >= INTERVAL and 2 * self.value <= MOST_SCALE:
                self.value, self.good = 2 * self.value, 0
        elif self.value / 2 < LEAST:
            need = "use precision: bf16 or fp32, or try a smaller optimizer.lr"
            raise NotFinite(f"step {step}: the gradients overflow with a loss scale of {self.value:g}; {need}")
        else:
            self.value, self.good = self.value / 2, 0
