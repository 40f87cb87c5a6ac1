"""Standard output and standard error of a command. They may fail: a pipe is closed, the disk under a log is full."""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "standard output"  # in messages
_goes_on = ""  # how the command continues if its output fails, as text for a message; "": the command ends


def protect() -> None:
    """Let a failure of standard output end the command with one message, and a failure of standard error do nothing.

    Files 1 and 2 are opened if the command was started without them: other files would take these numbers.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            stream = open(number, "w", closefd=False)  # noqa: SIM115
            if null > 2:
                os.close(null)
        elif stream is not getattr(sys, f"__{name}__") or stream.fileno() != number:
            continue  # replaced by a test or a notebook
        stream.flush()
        errors = "replace" if number == 1 else "backslashreplace"  # a terminal without UTF-8 shows ? for characters
        lines = number == 2 or stream.isatty()
        binary = io.BufferedWriter(_Stream(number))
        setattr(sys, name, io.TextIOWrapper(binary, stream.encoding, errors, line_buffering=lines))


@contextmanager
def may_fail(goes_on: str) -> Iterator[None]:
    """Context manager and decorator: in its block, a failure of standard output does not end the command.

    goes_on: How the command continues, as text for a message on standard error."""
    global _goes_on
    _goes_on = goes_on
    try:
        yield
    finally:
        if sys.stdout:
            sys.stdout.flush()
        _goes_on = ""


class _Stream(io.FileIO):
    """File descriptor 1 (stdout) or 2 (stderr). After the first failed write, later output goes to /dev/null."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another program has made the terminal non-blocking
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            self._fail(error)
            return memoryview(data).nbytes

    def _fail(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if self.fileno() == 2:
            return
        if not _goes_on:
            raise OSError(error.errno, error.strerror, NAME) from None
        what = "is closed" if error.errno == errno.EPIPE else f"fails ({error.strerror})"
        print(f"the output {what}; {_goes_on}", file=sys.stderr, flush=True)
