"""Measures how busy other processes keep this machine's cores, because their load disturbs measurements."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUSY = 0.1  # if other processes keep this share of the cores busy, a measurement is reported as disturbed


class Load:
    """Context manager that measures the load of other processes on this process's cores during its block.

    Afterwards `others` is the mean number of cores that other processes kept busy. It is computed from the busy time
    of the cores in /proc/stat, including time taken by a hypervisor, minus the processor time of this process. It is
    None if the system has no such counters, or if the block took less than 50 ms."""

    others: float | None = None
    own = 0.0  # mean number of cores that this process kept busy
    where: tuple[str, frozenset[int]] = ("", frozenset())  # name of the machine, numbers of the usable cores

    def __enter__(self) -> Load:
        self._start = time.perf_counter(), _busy_seconds(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, own = time.perf_counter() - self._start[0], _busy_seconds(), time.process_time() - self._start[2]
        self.own = own / wall
        self.where = platform.node(), frozenset(os.sched_getaffinity(0))
        if busy is not None and self._start[1] is not None and wall >= 0.05:
            self.others = max(busy - self._start[1] - own, 0.0) / wall

    def facts(self) -> dict[str, Any]:
        """Return values for summary.json: usable cores, cores kept busy by other processes, the load average."""
        return {"cores": cores(), "others": self.others, "load_average": os.getloadavg()[0]}


def among(loads: Sequence[Load]) -> dict[str, Any]:
    """Return Load.facts of the rank that other processes disturbed most.

    Args:
        loads: The Load of each rank of a run. The load that other ranks cause on the rank's cores is subtracted.
    """
    candidates = []
    for load in loads:
        ranks = sum(other.own for other in loads if other is not load and other.where == load.where)
        candidates.append(load.facts() | {"others": None if load.others is None else max(load.others - ranks, 0.0)})
    return max(candidates, key=lambda facts: facts["others"] or 0.0)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def is_busy(others: float | None) -> bool:
    """Return True if other processes kept so many cores busy (`others`) that measured times are too long."""
    return others is not None and others >= BUSY * cores()


def _busy_seconds() -> float | None:
    """Return the seconds since the system's start that the cores usable by this process were busy, summed over cores.

    None if /proc/stat has no such counters.
    """
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        tick, mine, total = os.sysconf("SC_CLK_TCK"), {f"cpu{k}" for k in os.sched_getaffinity(0)}, 0
        for name, *ticks in (line.split() for line in lines if line.startswith("cpu")):
            if name in mine:
                user, nice, system, _idle, _iowait, irq, soft, steal = map(int, ticks[:8])
                total += user + nice + system + irq + soft + steal
    except (OSError, ValueError):
        return None
    return total / tick
