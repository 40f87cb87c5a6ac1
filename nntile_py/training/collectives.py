"""Collective operations of a run's ranks, and what replaces files and output on ranks other than 0."""

from typing import Any

import numpy as np

from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime


def ranks_of_run() -> Ranks | None:
    """Return the ranks of the run; None for a single process."""
    return Runtime.current.ranks if Runtime.current else None


def agree(stop: list[str], due: bool = False) -> tuple[bool, bool]:
    """Combine what ranks know, so that all ranks act at the same step.

    Args:
        stop: Names of the signals that came to this rank. Gets a name if a signal came to another rank.
        due: True if this rank has a checkpoint due.

    Returns:
        True if a signal came to any rank, and True if any rank has a checkpoint due. The next call reports a signal
        that comes during this call.
    """
    if not (ranks := ranks_of_run()):
        return bool(stop), due
    stopped, due = (bool(column.any()) for column in ranks.gathered(np.array([bool(stop), due], np.uint8)).T)
    if stopped and not stop:
        stop.append("SIGTERM")
    return stopped, due


def from_rank_0(value: float) -> float:
    """Broadcast rank 0's value to all ranks."""
    ranks = ranks_of_run()
    return ranks.of_first(value) if ranks else value


class NoOutput:
    """Stands in for metrics and display on ranks other than 0, which write and show nothing."""

    lines: tuple[dict[str, Any], ...] = ()

    def write(self, line: dict[str, Any]) -> None: ...

    def show(self, line: dict[str, Any]) -> None: ...
