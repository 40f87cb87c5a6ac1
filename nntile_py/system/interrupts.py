"""Signals to a command: Ctrl-C while it starts, when Python would show a traceback, and SIGTERM."""

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


@contextmanager
def ends_at_sigterm() -> Iterator[None]:
    """Context manager that turns SIGTERM into SystemExit(143), so that temporary files are removed."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second SIGTERM ends the process at once
        raise SystemExit(128 + number)

    try:
        signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
