"""A step that was submitted, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nntile_py import _core
from nntile_py.errors import NotFinite
from nntile_py.training.loss_scale import is_least
from nntile_py.training.nan_check import Checked


@dataclass(frozen=True)
class StepResult:
    """Of one step: its number from 1, mean cross-entropy, norm of the gradient before clipping; whether the weights
    stayed as they were because of it (skip_above_norm, or gradients that overflow with this scale of the loss)."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool = False
    loss_scale: float | None = None

    @property
    def overflow(self) -> bool:
        """Whether a smaller scale of the loss may help."""
        return self.loss_scale is not None and math.isfinite(self.loss) and not math.isfinite(self.grad_norm)


class Pending:
    """A step that was submitted; `result()` waits for it."""

    def __init__(
        self, step: int, fetch: _core.Fetch, tokens: int, checked: Checked, skip_above_norm: float | None,
        loss_scale: float | None,
    ) -> None:  # fmt: skip
        self._scale, self._forgot, self._told = loss_scale, False, False
        self.step, self._fetch, self._checked, self._limit = step, fetch, checked, skip_above_norm
        self.tokens = tokens  # padding is none

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of step {self.step}: {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        return bool(self._fetch.done())

    def result(self) -> StepResult:
        """Raises TaskError if a task failed, NotFinite where the trainer checks for that, or where gradients overflow
        whatever the loss' scale."""
        result, self._told = self.found(), True
        if self._hopeless(result):
            need = "use precision: bf16 or fp32, or try a smaller optimizer.lr"
            told = f"step {self.step}: the gradients overflow with a loss scale of {self._scale:g}; {need}"
            self._checked.end(told)
            raise NotFinite(told)
        if not (result.overflow or (math.isfinite(result.loss) and math.isfinite(result.grad_norm))):
            self._checked.end(f"step {self.step}: the loss is {result.loss}, the gradient norm {result.grad_norm}")
        return result

    def settle(self) -> None:
        """Wait for it; raises as `result` does, unless that has told it."""
        self.found() if self._told else self.result()

    def found(self) -> StepResult:
        """The same, whatever is wrong with the numbers."""
        loss, norm = self._fetch.wait()
        loss /= self._scale or 1.0
        skipped = self._limit is not None and not norm <= self._limit
        result = StepResult(self.step, loss, norm, skipped, self._scale)
        if not result.overflow:
            return result
        if not self._forgot and not self._hopeless(result):  # once: what is found later is a later step's
            self._checked.forget()
        self._forgot = True
        return replace(result, skipped=True)

    def _hopeless(self, result: StepResult) -> bool:
        return result.overflow and is_least(self._scale or 1.0)
