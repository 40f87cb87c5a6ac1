"""Collective operations of a run's ranks. Only rank 0 writes files and prints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime


def ranks_of_run() -> Ranks | None:
    """Return the running Runtime's Ranks, the MPI ranks of the run; None without MPI or without a Runtime."""
    return Runtime.current.ranks if Runtime.current else None


def agree(stop: list[str], due: bool = False) -> tuple[bool, bool]:
    """Combine signals and due checkpoints of all ranks, so that all ranks act at the same step.

    Args:
        stop: Names of the signals that this rank has received. If only other ranks have received a signal, SIGTERM is
            added.
        due: True if a checkpoint is due on this rank.

    Returns:
        Whether any rank has received a signal, and whether a checkpoint is due on any rank. A signal that comes during
        this call is reported by the next call.
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
    """Replaces Metrics and Display on ranks other than 0. Writes and shows nothing."""

    lines: tuple[dict[str, Any], ...] = ()
    first: Mapping[str, Any] = MappingProxyType({})

    def write(self, line: dict[str, Any]) -> None: ...

    def show(self, line: dict[str, Any]) -> None: ...
