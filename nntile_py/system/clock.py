"""The clock of all measurements: repeated times of a callable, and their median and spread."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

Run = Callable[[int], object]  # starts that many runs, and waits until all of them have ended
SHORTEST = 2e-3  # seconds of one measured time, at least: shorter runs are measured several at once
MOST_RUNS = 200  # runs in one measured time, at most


def clocked(run: Run, repeats: int, runs: int = 1) -> list[float]:
    """Return the seconds of one run, measured `repeats` times, each time over `runs` runs in flight together."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(runs)
        times.append((time.perf_counter() - start) / runs)
    return times


def runs_to_measure(run: Run) -> int:
    """Return how many runs in flight together last at least SHORTEST seconds, after a first run that warms up."""
    return repeats_that_last([run], SHORTEST, 1, MOST_RUNS)


def repeats_that_last(runs: Sequence[Run], seconds: float, least: int, most: int) -> int:
    """Return how often to repeat all runs so that the repeats last `seconds`, after first runs that warm up."""
    for run in runs:
        run(1)
    return min(max(math.ceil(seconds / sum(clocked(run, 1)[0] for run in runs)), least), most)


def clocked_in_turns(runs: Sequence[Run], repeats: int, counts: Sequence[int]) -> list[list[float]]:
    """Measure several runs in turns, so that a disturbance of the machine slows down all of them.

    Args:
        counts: for each run, how many are in flight together.

    Returns:
        The seconds of each run. Each run is equally often the first of a turn.
    """
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats):
        for place in range(len(runs)):
            which = (turn + place) % len(runs)
            times[which] += clocked(runs[which], 1, counts[which])
    return times


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}
