"""Time measurement for all benchmarks: repeated runs of a function, and median, minimum and maximum of their times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

Run = Callable[[int], object]  # run(n) starts n runs of the measured work, and waits until all have ended
SHORTEST = 2e-3  # shortest measured time in seconds; shorter runs are started several at once
MOST_RUNS = 200  # largest number of runs started at once


def clocked(run: Run, repeats: int, runs: int = 1) -> list[float]:
    """Return `repeats` measured times of one run, in seconds.

    Each time is measured by starting `runs` runs at once and dividing the total time by `runs`.
    """
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(runs)
        times.append((time.perf_counter() - start) / runs)
    return times


def runs_to_measure(run: Run) -> int:
    """Return how many runs to start at once so that they take at least SHORTEST seconds. A warm-up run goes first."""
    return repeats_that_last([run], SHORTEST, 1, MOST_RUNS)


def repeats_that_last(runs: Sequence[Run], seconds: float, least: int, most: int) -> int:
    """Return how often to repeat all `runs` so that the repeats take `seconds`: at least `least`, at most `most` times.

    Each run is called once to warm up, and once more to estimate its time.
    """
    for run in runs:
        run(1)
    return min(max(math.ceil(seconds / sum(clocked(run, 1)[0] for run in runs)), least), most)


def clocked_in_turns(runs: Sequence[Run], repeats: int, counts: Sequence[int]) -> list[list[float]]:
    """Measure several kinds of runs in turns, so that a disturbance of the machine slows down all of them.

    Args:
        runs: The runs to compare. The order rotates from turn to turn.
        repeats: Number of turns; each turn measures every run once.
        counts: For each run, how many to start at once (see `clocked`).

    Returns:
        For each run, its `repeats` measured times in seconds.
    """
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats):
        for place in range(len(runs)):
            which = (turn + place) % len(runs)
            times[which] += clocked(runs[which], 1, counts[which])
    return times


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of measured times as a dict."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}
