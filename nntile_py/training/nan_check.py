"""NanCheck: names the operator that wrote the first value that is not finite."""

from __future__ import annotations

from collections import deque

from nntile_py import _core
from nntile_py.errors import NotFinite
from nntile_py.execution.program import Program


class NanCheck:
    """Remembers the latest runs of a trainer's programs, to name the operator that wrote the first nan or infinity.

    Args:
        enabled: The programs check all values that tasks write.
        runs: How many runs to remember.
    """

    def __init__(self, enabled: bool, runs: int) -> None:
        self.enabled = enabled
        self._latest: deque[tuple[int, Program, str]] = deque(maxlen=runs)

    def ran(self, program: Program, what: str) -> None:
        """Record a run of a program. what: the run's name in messages."""
        if self.enabled:
            self._latest.append((program.checked_run, program, what))

    def forget(self) -> None:
        """Discard the values found so far: an overflow with a loss scale is no error."""
        if self.enabled:
            _core.take_not_finite()

    def end(self, what: str) -> None:
        """Raise NotFinite, which names the first operator that wrote nan or infinity, if the check is enabled."""
        if not self.enabled:
            return
        number, task, part = _core.take_not_finite() or (0, 0, 0)
        for run, program, description in self._latest:
            if run == number:
                source = program.named(task, part)
                raise NotFinite(f"{what}; the first such value was written by {source}, in {description}")
        raise NotFinite(f"{what}; no task wrote such a value")
