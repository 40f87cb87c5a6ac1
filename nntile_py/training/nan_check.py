"""Where a value that is no finite number came from."""

from __future__ import annotations

from collections import deque

from nntile_py import _core
from nntile_py.errors import NotFinite
from nntile_py.execution.program import Program


class Checked:
    """The last runs of a trainer's programs; with `looks` their tasks' results were looked at."""

    def __init__(self, looks: bool, runs: int) -> None:
        self.looks = looks
        self._last: deque[tuple[int, Program, str]] = deque(maxlen=runs)

    def ran(self, program: Program, what: str) -> None:
        """To be called after each run."""
        if self.looks:
            self._last.append((program.checked_run, program, what))

    def forget(self) -> None:
        """What was found so far is as it should be."""
        if self.looks:
            _core.take_not_finite()

    def end(self, what: str) -> None:
        """Raise NotFinite, which names the first operator that wrote such a value, if that was looked for."""
        if not self.looks:
            return
        number, task, part = _core.take_not_finite() or (0, 0, 0)
        for run, program, when in self._last:
            if run == number:
                raise NotFinite(f"{what}; the first such value was made by {program.named(task, part)}, in {when}")
        raise NotFinite(f"{what}; no first such value was found among what tasks wrote")
