"""Signals to a training run: the first signal ends the run after a step, a second signal ends the process."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nntile_py.execution.runtime import Runtime
from nntile_py.training.loggers import CALLBACK

SECOND_SIGTERM = 5.0  # seconds; a SIGTERM that comes later than this after the first signal ends the process


def exit_status(stop: list[str]) -> int:
    """Return 128 + the number of the first signal in `stop`; 0 if there is none, or the callback has ended the run."""
    return 128 + signal.Signals[stop[0]].value if stop and stop[0] != CALLBACK else 0


@contextmanager
def signals_of_run(runtime: Runtime) -> Iterator[list[str]]:
    """Yield a list to which SIGINT and SIGTERM append their names while the block runs.

    After the first signal, a SIGINT raises KeyboardInterrupt at once, and the process then ends without waiting for
    tasks. A SIGTERM soon after another signal is ignored: Slurm sends each rank two. A later SIGTERM ends the process.
    """
    stop: list[str] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = first or time.monotonic()
        if time.monotonic() - first > SECOND_SIGTERM and not runtime.ranks:
            runtime.end_process(number)
        stop.append(signal.Signals(number).name)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except KeyboardInterrupt:
        if stop and not runtime.ranks:
            runtime.end_process(signal.SIGINT)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
