"""Ctrl-C while a command starts and ends, when Python would show a traceback."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Context manager: Ctrl-C in its block ends the process with one line and exit status 130.

    For a block that imports modules: an interrupted import may also end in another error than KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or handled by a user's program
        yield
        return
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
