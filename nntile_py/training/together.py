"""What the ranks of a run do together, and what those do not that are not the first."""

from typing import Any

import numpy as np

from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime


def ranks_of_run() -> Ranks | None:
    """All of them; None where there is one."""
    return Runtime.current.ranks if Runtime.current else None


def agree(stop: list[str], due: bool = False) -> bool:
    """A signal that has come to one rank has come to all. Returns whether one of them says that something is due."""
    if ranks := ranks_of_run():
        asked, due = (bool(column.any()) for column in ranks.gathered(np.array([bool(stop), due], np.uint8)).T)
        if asked and not stop:
            stop.append("SIGTERM")
    return due


def told_by_first(value: float) -> float:
    """What the first rank says, who knows more than the others."""
    ranks = ranks_of_run()
    return ranks.of_first(value) if ranks else value


class Silent:
    """In the place of metrics, display and saver on all ranks but the first: that one writes and shows for all."""

    lines: tuple[dict[str, Any], ...] = ()
    needs_report = False

    def write(self, line: dict[str, Any]) -> None: ...

    def show(self, line: dict[str, Any]) -> None: ...

    def due(self, step: int) -> bool:
        return False

    def begin(self, step: int) -> None: ...

    def reported(self, step: int, good: bool) -> None: ...
