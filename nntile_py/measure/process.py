"""Processes that measure a sweep's points; what runs in them is in worker.py."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nntile_py.errors import ConfigError

if TYPE_CHECKING:
    from nntile_py.measure.sweep_spec import Point

STOP_LIMIT = 30.0  # seconds for a process to stop its runtime
MPIRUN_LIMIT = 10.0  # and for mpirun to end its ranks

# On Linux a sweep that is killed takes its point with it (PR_SET_PDEATHSIG), so that none goes on beside the resumed
# sweep. Asked for before anything is imported, as that takes a second.
_START = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
if len(sys.argv) > 2:
    os.execvp(sys.argv[2], sys.argv[2:])
from nntile_py.measure.worker import main
sys.exit(main())
"""
_RANK = "import sys; from nntile_py.measure.worker import main; sys.exit(main())"


def ranks_of(point: Point) -> int | None:
    """How many processes measure a point together, started by mpirun; None: one, without it."""
    return point.config.runtime.nodes if point.config and point.measure.how != "plan" else None


def mpirun(ranks: int) -> list[str]:
    """The command that starts so many ranks: NNTILE_MPIRUN, such as `mpirun --bind-to none`, with their number."""
    command = shlex.split(os.environ.get("NNTILE_MPIRUN", "mpirun"))
    if not command or not shutil.which(command[0]):
        told = f"needs {command[0] if command else 'mpirun'}, which is not there"
        raise ConfigError(f"runtime.nodes: got {ranks}, which {told}; allowed: null, or NNTILE_MPIRUN with a command")
    return [*command, "-n", str(ranks), sys.executable, "-c", _RANK]


class Process:
    """Measures one point after the other; ranks: with so many processes, or None."""

    def __init__(self, ranks: int | None = None) -> None:
        self.runs: Any = None  # Point.process of its first point, and so of all
        self.ranks = ranks
        command = mpirun(ranks) if ranks else []
        self._errors, self._read = tempfile.TemporaryFile(), b""  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, start_new_session=True,
        )  # fmt: skip

    def measure(self, point: Point, time_limit: float) -> dict[str, Any]:
        """The point's status with its metrics or its error; after an error the process is of no more use."""
        assert point.config is not None and self._child.stdin
        self.runs = point.process
        what = {"config": point.config.model_dump(by_alias=True), "measure": point.measure.model_dump()}
        with suppress(BrokenPipeError):  # it has ended: said below
            self._child.stdin.write(json.dumps(what).encode() + b"\n")
            self._child.stdin.flush()
        try:
            line = self._line(time.monotonic() + time_limit)
        except TimeoutError:
            return {"status": "timeout", "error": f"no result after {time_limit:g} s (time_limit)"}
        answer = json.loads(line) if line else {}
        if line and "error" not in answer:
            return {"status": "ok", **answer}
        status = self._child.wait() if not line else 0
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        return {"status": "failed", "error": answer.get("error") or self._tail() or f"ended with {ended}"}

    def _line(self, end: float) -> bytes:
        """The next answer; empty if none will come."""
        assert self._child.stdout
        while True:
            *lines, self._read = self._read.split(b"\n")
            if answers := [line for line in lines if line.startswith(b"{")]:
                return answers[0]
            if not select.select([self._child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(self._child.stdout.fileno(), 1 << 16)
            if not data:
                return b""
            self._read += data

    def _tail(self) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().decode(errors="replace").strip().splitlines()[-3:])

    def close(self, patience: float) -> None:
        """Let it stop its runtime for so many seconds, then kill it."""
        assert self._child.stdin and self._child.stdout
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(patience)
        if self._child.poll() is None and self.ranks:  # mpirun then ends what it has started
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(MPIRUN_LIMIT)
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._child.stdout.close()
        self._errors.close()


class Processes:
    """Gives each point its process: a new one, or with `together` the last one if it runs the same (Point.process).

    With `together` the one for the next is there before it is needed: its imports take seconds.
    """

    def __init__(self, together: bool) -> None:
        self.together = together
        self._last: Process | None = None
        self._next = Process() if together else None

    def measure(self, point: Point, time_limit: float, follows: Sequence[Point] = ()) -> dict[str, Any]:
        assert point.config
        if self._last and self._last.runs != point.process:
            self._end(STOP_LIMIT)
        if not self._last:
            self._last, self._next = self._take(ranks_of(point)), None
        if (
            self.together
            and point.config.runtime.cuda  # on CPU its imports would take the cores of what is being measured
            and not self._next
            and any(p.process != point.process for p in follows)
        ):
            self._next = Process()
        result: dict[str, Any] = {}
        try:
            result = self._last.measure(point, time_limit)
        finally:
            well = result.get("status") == "ok"
            if not (well and self.together):
                self._end(STOP_LIMIT if well else 0.0)
        return result

    def _take(self, ranks: int | None) -> Process:
        """The one that is there, if it has as many ranks."""
        if self._next and self._next.ranks == ranks:
            return self._next
        if self._next:
            self._next.close(0.0)
        return Process(ranks)

    def _end(self, patience: float) -> None:
        if self._last:
            self._last.close(patience)
        self._last = None

    def close(self) -> None:
        self._end(STOP_LIMIT)
        if self._next:
            self._next.close(0.0)
