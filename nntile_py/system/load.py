"""How busy other processes keep the machine: what is measured meanwhile takes longer than it would alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

BUSY = 0.1  # of the cores in use by others: worth telling


class Load:
    """Use as a context: `others` is then how many cores other processes kept busy on average while the block ran.

    Of the cores that this process may use: their busy time in /proc/stat, time taken by a hypervisor included, less
    the processor time of this process. None where the system does not tell, or the block took less than 50 ms."""

    others: float | None = None

    def __enter__(self) -> Load:
        self._start = time.perf_counter(), _busy_seconds(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, own = time.perf_counter() - self._start[0], _busy_seconds(), time.process_time() - self._start[2]
        if busy is not None and self._start[1] is not None and wall >= 0.05:
            self.others = max(busy - self._start[1] - own, 0.0) / wall

    def facts(self) -> dict[str, Any]:
        """For summary.json: cores that this process may use, cores that others kept busy, the load average."""
        return {"cores": cores(), "others": self.others, "load_average": os.getloadavg()[0]}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def is_busy(others: float | None) -> bool:
    """Whether others kept so many cores busy that times are too long."""
    return others is not None and others >= BUSY * cores()


def _busy_seconds() -> float | None:
    """Of all cores that this process may use, since the system started."""
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
