"""Worker processes. Each runs worker.py, which reads a line of JSON from stdin, and answers with a line on stdout."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from nntile_py.errors import ConfigError, NNTileError

STOP_LIMIT = 30.0  # seconds for a worker process to stop its runtime
MPIRUN_LIMIT = 10.0  # seconds for mpirun to end its ranks

# On Linux the kernel kills a worker process when its parent ends (PR_SET_PDEATHSIG), and kills it before others
# if main memory runs out. Both are requested before the imports, which take a second.
_START = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    try:
        open("/proc/self/oom_score_adj", "w").write("1000")
    except OSError:
        pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
if len(sys.argv) > 2:
    os.execvp(sys.argv[2], sys.argv[2:])
from nntile_py.measure.worker import main
main()
"""
_RANK = "from nntile_py.measure.worker import main; main()"


class WorkerFailed(NNTileError):
    """A worker process answered with an error, or ended."""


class NoAnswer(NNTileError):
    """A worker process did not answer within its time limit."""


def mpirun(ranks: int) -> list[str]:
    """Return the command that starts worker processes as MPI ranks.

    The variable NNTILE_MPIRUN, such as `mpirun --bind-to none`, replaces mpirun.
    """
    command = shlex.split(os.environ.get("NNTILE_MPIRUN", "mpirun"))
    if not command or not shutil.which(command[0]):
        need = f"needs {command[0] if command else 'mpirun'}, which is not installed"
        raise ConfigError(f"runtime.nodes: got {ranks}, which {need}; allowed: null, or NNTILE_MPIRUN with a command")
    return [*command, "-n", str(ranks), sys.executable, "-c", _RANK]


class WorkerProcess:
    """A worker process, or the ranks of an mpirun, which serve each request together.

    Args:
        label: Text before each error message.
        ranks: Number of MPI ranks; None: one process without mpirun.
        errors: True: keep stderr for error messages. False: stderr is the parent's.
    """

    def __init__(self, label: str = "", ranks: int | None = None, *, errors: bool = True) -> None:
        self.label, self.ranks, self._unread = label, ranks, b""
        self._errors: IO[bytes] | None = tempfile.TemporaryFile() if errors else None  # noqa: SIM115
        command = [sys.executable, "-c", _START, str(os.getpid()), *(mpirun(ranks) if ranks else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent
        )  # fmt: skip

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # the process has ended: reported when its answer is read
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """Return the answer; None if it has not arrived completely.

        Raises:
            WorkerFailed: The answer is an error, or the process has ended.
        """
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise self.ended()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise WorkerFailed(f"{self.label}{answer['error']}")
                return answer
        return None

    def ended(self) -> WorkerFailed:
        """Wait for the end of the process; return an error with the last lines of its stderr, or with its status."""
        status = self.process.wait()
        how = f"status {status}" if status >= 0 else f"signal {-status} ({signal.Signals(-status).name})"
        last = ""
        if self._errors:
            self._errors.seek(0)
            last = "\n".join(self._errors.read().decode(errors="replace").strip().splitlines()[-3:])
        return WorkerFailed(f"{self.label}{last or f'ended with {how}'}")

    def close(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the process to stop its runtime, then kill it."""
        assert self.process.stdin and self.process.stdout
        self.process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        if self.process.poll() is None and self.ranks:  # mpirun then ends its ranks
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(MPIRUN_LIMIT)
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
        if self._errors:
            self._errors.close()


def answers(workers: Sequence[WorkerProcess], seconds: float) -> list[dict[str, Any]]:
    """Return the next answer of each worker process.

    Raises:
        WorkerFailed: A process failed.
        NoAnswer: A process did not answer within `seconds`.
    """
    received: dict[WorkerProcess, dict[str, Any]] = {}
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.process.stdout
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while len(received) < len(workers):
            ready = selector.select(min(1.0, max(0.0, end - time.monotonic())))
            waiting = [worker for worker in workers if worker not in received]
            for worker in [] if ready else waiting:
                # The end of stdout does not always show that a worker has ended: its child may hold stdout open.
                if worker.process.poll() is not None and not (ready := selector.select(0)):
                    raise worker.ended()
            for key, _ in ready:
                if (answer := key.data.read()) is not None:
                    received[key.data] = answer
                    selector.unregister(key.fileobj)
            if len(received) < len(workers) and time.monotonic() >= end:
                raise NoAnswer(f"{waiting[0].label}no answer within {seconds:g} s")
    return [received[worker] for worker in workers]
