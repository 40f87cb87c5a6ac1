"""The clock of all measurements: repeated times of a callable, and their median and spread."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

SHORTEST = 2e-3  # seconds of one measured time, at least: shorter runs are measured several at once
MOST_RUNS = 200  # runs in one measured time, at most


def clocked(run: Callable[[int], object], repeats: int, runs: int = 1) -> list[float]:
    """Return the seconds of one run, measured `repeats` times, each time over `runs` runs in flight together."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(runs)
        times.append((time.perf_counter() - start) / runs)
    return times


def runs_to_measure(run: Callable[[int], object]) -> int:
    """Return how many runs in flight together last at least SHORTEST seconds, after a first run that warms up."""
    run(1)
    (seconds,) = clocked(run, 1)
    return min(max(math.ceil(SHORTEST / seconds), 1), MOST_RUNS)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}
