"""Handle of a submitted step, and the step's result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nntile_py import _core
from nntile_py.errors import NotFinite
from nntile_py.training.loss_scale import is_least
from nntile_py.training.nan_check import NanCheck


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss before the update.
        grad_norm: Norm of the gradient before clipping.
        skipped: The weights did not change: grad_norm was above skip_above_norm, or the gradients overflowed.
        loss_scale: What the loss was multiplied by; None: it was not scaled.
    """

    step: int
    loss: float
    grad_norm: float
    skipped: bool = False
    loss_scale: float | None = None

    @property
    def overflow(self) -> bool:
        """True if the gradients overflowed, which a smaller loss scale may prevent."""
        return self.loss_scale is not None and math.isfinite(self.loss) and not math.isfinite(self.grad_norm)


class Pending:
    """A submitted step; `result()` waits for it."""

    def __init__(
        self, step: int, fetch: _core.Fetch, tokens: int, nan_check: NanCheck, skip_above_norm: float | None,
        loss_scale: float | None,
    ) -> None:  # fmt: skip
        self._scale, self._forgot, self._reported = loss_scale, False, False
        self.step, self._fetch, self._nan_check, self._limit = step, fetch, nan_check, skip_above_norm
        self.tokens = tokens  # without padding

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of step {self.step}: {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        return bool(self._fetch.done())

    def result(self) -> StepResult:
        """Wait for the step and return its result.

        Raises:
            TaskError: A task failed.
            NotFinite: The gradients overflow with the least loss scale; or a value is not finite, if the trainer checks
                for that.
        """
        result, self._reported = self.unchecked_result(), True
        if self._hopeless(result):
            need = "use precision: bf16 or fp32, or try a smaller optimizer.lr"
            message = f"step {self.step}: the gradients overflow with a loss scale of {self._scale:g}; {need}"
            self._nan_check.end(message)
            raise NotFinite(message)
        if not (result.overflow or (math.isfinite(result.loss) and math.isfinite(result.grad_norm))):
            self._nan_check.end(f"step {self.step}: the loss is {result.loss}, the gradient norm {result.grad_norm}")
        return result

    def settle(self) -> None:
        """Wait for the step. Raises as `result` does, unless `result` has raised."""
        self.unchecked_result() if self._reported else self.result()

    def unchecked_result(self) -> StepResult:
        """Wait for the step and return its result, also if numbers are not finite."""
        loss, norm = self._fetch.wait()
        loss /= self._scale or 1.0
        skipped = self._limit is not None and not norm <= self._limit
        result = StepResult(self.step, loss, norm, skipped, self._scale)
        if not result.overflow:
            return result
        if not self._forgot and not self._hopeless(result):  # once: later findings belong to later steps
            self._nan_check.forget()
        self._forgot = True
        return replace(result, skipped=True)

    def _hopeless(self, result: StepResult) -> bool:
        return result.overflow and is_least(self._scale or 1.0)
