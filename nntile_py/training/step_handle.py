"""Pending: handle of a submitted step. StepResult: its result. StepsInFlight: the steps not waited for yet."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from nntile_py import _core
from nntile_py.errors import NotFinite
from nntile_py.graph.step import StepSpec
from nntile_py.training.loss_scale import LossScale, is_least
from nntile_py.training.nan_check import NanCheck

STEPS_IN_FLIGHT = 2  # most submitted steps whose results the trainer has not waited for


@dataclass(frozen=True)
class StepResult:
    """Result of a training step.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss before the update.
        grad_norm: Norm of the gradient before clipping.
        skipped: True if the step changed no weights: grad_norm was nan or above skip_above_norm, or the gradients
            overflowed.
        loss_scale: Factor by which the loss was multiplied; None: the loss was not scaled.
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
    """Handle of a submitted step. `result()` waits for the step."""

    def __init__(
        self, step: int, fetch: _core.Fetch, tokens: int, flop: float, nan_check: NanCheck,
        skip_above_norm: float | None, loss_scale: float | None,
    ) -> None:  # fmt: skip
        self._scale, self._forgot, self._reported = loss_scale, False, False
        self.step, self._fetch, self._nan_check, self._limit = step, fetch, nan_check, skip_above_norm
        self.tokens, self.flop = tokens, flop  # of the step, without padding

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of step {self.step}: {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        return bool(self._fetch.done())

    def result(self) -> StepResult:
        """Wait for the step and return its result.

        Raises:
            TaskError: A task failed.
            NotFinite: The gradients overflow even with the smallest loss scale; or, with check_finite, the loss or the
                gradient norm is not finite.
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
        """Wait for the step. Raises the errors of `result`, unless the user has already called `result`."""
        self.unchecked_result() if self._reported else self.result()

    def unchecked_result(self) -> StepResult:
        """Wait for the step and return its result, even if the loss or the gradient norm is not finite."""
        loss, norm = self._fetch.wait()
        loss /= self._scale or 1.0
        skipped = self._limit is not None and not norm <= self._limit
        result = StepResult(self.step, loss, norm, skipped, self._scale)
        if not result.overflow:
            return result
        if not self._forgot and not self._hopeless(result):  # only once: NanCheck's later finds belong to later steps
            self._nan_check.forget()
        self._forgot = True
        return replace(result, skipped=True)

    def _hopeless(self, result: StepResult) -> bool:
        return result.overflow and is_least(self._scale or 1.0)


class StepsInFlight:
    """The submitted steps whose results the trainer has not waited for. Their results update the loss scale.

    Attributes:
        scale: The loss scale; None: the loss is not scaled.
    """

    def __init__(self, spec: StepSpec) -> None:
        self.scale, self._steps = LossScale.of(spec), deque[Pending]()
        self._deciding: Pending | None = None  # the step whose gradient norm decides the next loss scale

    @property
    def factor(self) -> float | None:
        """Factor of the next step's loss; None: the loss is not scaled."""
        return self.scale.value if self.scale else None

    def add(self, step: Pending) -> None:
        """Add a step that was just submitted."""
        self._steps.append(step)
        self._deciding = step if self.scale else None

    def settle(self) -> None:
        """Wait until another step may be submitted; with a scaled loss, also until the next step's scale is known."""
        while len(self._steps) >= STEPS_IN_FLIGHT:
            try:
                self._steps[0].settle()
            except Exception:  # no KeyboardInterrupt: after an interrupt the next call waits for the step
                self._steps.popleft()
                raise
            self._steps.popleft()
        self.scale_state()  # last: if the step overflows, this discards what NanCheck has found so far

    def scale_state(self) -> dict[str, Any] | None:
        """Wait for earlier steps, and return LossScale.state for the next step; None if the loss is not scaled."""
        if self.scale is None:
            return None
        if self._deciding:
            result, scale = self._deciding.unchecked_result(), self.scale
            if result.overflow or math.isfinite(result.grad_norm):  # if the loss is not finite either, no scale helps
                scale = scale.after(overflow=result.overflow)
            self.scale, self._deciding = scale, None  # one statement: an interrupt changes both or neither
        return self.scale.state
