"""Handles signals: Ctrl-C while a command starts, Ctrl-C while the runtime starts or stops, and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Context manager: Ctrl-C in its block ends the process with one line and exit status 130, SIGTERM with status 143.

    For a block that imports modules: an interrupted import may also end in another error, end the process with a trace
    of C++, or go on."""
    handlers = {  # handlers of a command, and handlers in the block
        signal.SIGINT: (signal.default_int_handler, lambda number, _: end_at_once(number)),
        signal.SIGTERM: (_exit_at_sigterm, lambda number, _: os._exit(128 + number)),
    }
    replaced = [number for number, (usual, _) in handlers.items() if signal.getsignal(number) is usual]
    try:
        for number in replaced:  # not signals that are ignored, or handled by a user's program
            signal.signal(number, handlers[number][1])
    except ValueError:  # not in the main thread: other threads get no signals
        replaced = []
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, handlers[number][0])


@contextmanager
def ends_at_sigterm() -> Iterator[None]:
    """Context manager that turns SIGTERM into SystemExit(143), so that temporary files are removed."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGTERM, _exit_at_sigterm)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        to_default(signal.SIGTERM)


def _exit_at_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second SIGTERM ends the process at once
    raise SystemExit(128 + number)


@contextmanager
def uninterrupted(end: Callable[[int], NoReturn] | None = None, interrupted: bool = False) -> Iterator[None]:
    """Delay SIGINT until the block ends, so that the block always runs to its end.

    The delay is at most the time of the running tasks. Only the main thread gets signals, so other threads do nothing.

    Args:
        end: Ends the process. Called at a second SIGINT, because tasks that stall would delay the first SIGINT for
            minutes. Not called in an interactive session, whose variables would be lost.
        interrupted: The first SIGINT came before the block.
    """
    ignored = signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN)
    if threading.current_thread() is not threading.main_thread() or ignored:
        yield
        return
    came: list[int] = []

    def note(number: int, _: object) -> None:
        if end and (came or interrupted) and not hasattr(sys, "ps1"):
            end(number)
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # no other handler was set in the block
            signal.signal(signal.SIGINT, before)
        if came and callable(before) and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            before(came[0], None)


def to_default(number: int) -> None:
    """Give a signal its default action, unless the process ignores the signal."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


def end_at_once(number: int) -> NoReturn:
    """End the process with one line and the exit status of a signal."""
    with suppress(Exception):  # a closed pipe, or a signal during a write
        sys.stdout.flush()
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
