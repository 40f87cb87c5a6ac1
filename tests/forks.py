"""Runs Python commands in forks of a process that has imported nntile_py and torch: no start waits for the imports."""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

# Environment variables that Python and libraries read when they start: a fork would not see a change of these.
READ_AT_START = ("ATEN", "GOMP", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "OMP_", "OPENBLAS", "PYTHON", "TORCH_")
TRANSFORMERS = ("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
SIZE = 1 << 17  # bytes of a message
_servers: dict[int, Server] = {}  # {process id: the server that it has started}


class Server:
    """A process that forks: it listens on a socket in a folder of its own."""

    def __init__(self) -> None:
        self.env = dict(os.environ)
        self._folder = tempfile.TemporaryDirectory()
        self._alive, end = os.pipe()
        command = [sys.executable, __file__, self.path, str(end)]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "pass_fds": [end]}
        self._process = subprocess.Popen(command, cwd="/", **options)
        assert self._process.stdout and self._process.stdout.readline() == b"ready\n"
        os.close(end)
        atexit.register(self._stop)

    @property
    def path(self) -> str:
        return f"{self._folder.name}/socket"

    def _stop(self) -> None:
        os.close(self._alive)
        self._process.communicate()
        self._folder.cleanup()


def run(
    command: Sequence[Any], *, cwd: Any = None, env: Mapping[str, str] | None = None, timeout: float = 300,
    check: bool = False, fresh: bool = False, capture_output: bool = True, text: bool = True,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As subprocess.run, for a command of this Python: with -c, -m or a script; the output is captured as text.

    A new interpreter starts if `fresh` is true, or if a variable differs that is read at the start.
    """
    words, env = [*map(str, command)], dict(os.environ if env is None else env)
    server = _servers.get(os.getpid()) or _servers.setdefault(os.getpid(), Server())
    changed = {name for name in env | server.env if env.get(name) != server.env.get(name)}
    if fresh or any(name.startswith(READ_AT_START) for name in changed):
        return subprocess.run(words, cwd=cwd, env=env, timeout=timeout, check=check, capture_output=True, text=True)
    request = {"words": words[1:], "cwd": os.path.abspath(cwd or "."), "env": env}
    with ExitStack() as stack:
        out, err = (stack.enter_context(open(os.memfd_create(name), "w+b")) for name in ("out", "err"))
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SIZE)
        connection.connect(server.path)
        socket.send_fds(connection, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        pid = int(connection.recv(64))
        connection.settimeout(timeout)
        try:
            status = os.waitstatus_to_exitcode(int(connection.recv(64)))
        except BaseException as error:
            os.kill(pid, signal.SIGKILL)
            if isinstance(error, TimeoutError):
                raise subprocess.TimeoutExpired(words, timeout, *map(content, (out, err))) from None
            raise
        done = subprocess.CompletedProcess(words, status, *(content(file).decode() for file in (out, err)))
    if check:
        done.check_returncode()
    return done


def content(file: Any) -> bytes:
    file.seek(0)
    return file.read()  # type: ignore[no-any-return]


# -- the server


def serve(path: str, alive: int) -> list[str]:
    """Fork for each request until the other end of the pipe `alive` closes. Return in a fork, with its command."""
    running: dict[int, tuple[int, socket.socket]] = {}  # {pidfd: process id, connection}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            for ready in select.select([listener, alive, *running], [], [])[0]:
                if ready == alive:
                    os._exit(0)
                if ready is not listener:
                    pid, connection = running.pop(ready)
                    os.close(ready)
                    status = os.waitpid(pid, 0)[1]
                    with suppress(OSError):  # killed after its time limit
                        connection.send(str(status).encode())
                    connection.close()
                    continue
                connection, _ = listener.accept()
                content, files, *_ = socket.recv_fds(connection, SIZE, 2)
                if b"transformers" in content:  # imported at the first command that names it, here once for all
                    list(map(import_module, TRANSFORMERS))
                if pid := os.fork():
                    connection.send(str(pid).encode())
                    running[os.pidfd_open(pid)] = pid, connection
                    for file in files:
                        os.close(file)
                else:
                    os.dup2(files[0], 1)
                    os.dup2(files[1], 2)
                    for file in (*files, alive, connection.detach(), *running):
                        os.close(file)
                    for _, other in running.values():
                        other.close()
                    break
            else:
                continue
            break
    request = json.loads(content)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    words: list[str] = request["words"]
    return words


def main(words: list[str]) -> None:
    """Run what Python would run with these arguments."""
    option, *rest = words
    if option == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(module))
    elif option == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(option))
        runpy.run_path(option, run_name="__main__")


def end(words: list[str]) -> None:
    """Run a command, and end as Python does, except that memory and modules are not taken apart: 0.4 s with torch."""
    status = 0
    try:
        main(words)
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    for name in ("torch", "nntile_py.cli", "nntile_py.training.run"):
        import_module(name)
    import_module("nntile_py.models.registry").known()
    gc.freeze()
    end(serve(sys.argv[1], int(sys.argv[2])))
