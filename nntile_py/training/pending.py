"""A step that was submitted, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nntile_py import _core
from nntile_py.training.finite import Checked


@dataclass(frozen=True)
class StepResult:
    """Of one step: its number from 1, mean cross-entropy, norm of the gradient before clipping; whether the weights
    stayed as they were because of it (skip_above_norm)."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool = False


class Pending:
    """A step that was submitted; `result()` waits for it."""

    def __init__(
        self, step: int, fetch: _core.Fetch, tokens: int, checked: Checked, skip_above_norm: float | None
    ) -> None:
        self.step, self._fetch, self._checked, self._limit = step, fetch, checked, skip_above_norm
        self.tokens = tokens  # padding is none

    def done(self) -> bool:
        return bool(self._fetch.done())

    def result(self) -> StepResult:
        """Raises TaskError if a task failed, NotFinite where the trainer checks for that."""
        loss, norm = self._fetch.wait()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._checked.end(f"step {self.step}: the loss is {loss}, the gradient norm {norm}")
        return StepResult(self.step, loss, norm, self._limit is not None and not norm <= self._limit)
