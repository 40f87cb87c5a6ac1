"""NanCheck: finds the operator that wrote the first nan or infinity."""

from __future__ import annotations

from collections import deque

from nntile_py import _core
from nntile_py.errors import NotFinite
from nntile_py.execution.program import Program


class NanCheck:
    """Finds the operator that wrote the first nan or infinity. For this it remembers a trainer's latest program runs.

    Args:
        enabled: True if the trainer's programs check all values that tasks write. False: the check does nothing.
        runs: Number of program runs to remember.
    """

    def __init__(self, enabled: bool, runs: int) -> None:
        self.enabled = enabled
        self._latest: deque[tuple[int, Program, str]] = deque(maxlen=runs)

    def ran(self, program: Program, what: str) -> None:
        """Record that `program` was submitted. what: the run's name in messages, such as "pass 1 of step 3"."""
        if self.enabled:
            self._latest.append((program.checked_run, program, what))

    def forget(self) -> None:
        """Discard the nan or infinity found so far. Called when scaled gradients overflow, which is no error."""
        if self.enabled:
            _core.take_not_finite()

    def end(self, what: str) -> None:
        """Raise NotFinite if the check is enabled. The message names the operator that first wrote nan or infinity.

        what: beginning of the message."""
        if not self.enabled:
            return
        number, task, part = _core.take_not_finite() or (0, 0, 0)
        for run, program, description in self._latest:
            if run == number:
                source = program.named(task, part)
                raise NotFinite(f"{what}; the first such value was written by {source}, in {description}")
        raise NotFinite(f"{what}; no task wrote such a value")
