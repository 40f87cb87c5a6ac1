"""Runs cases that others send, each in a fork of this process, which has imported everything: that takes seconds.

A line of JSON on stdin is a case: {"folder": where it runs, "reader": what runs, "args": its arguments}; the answer is
a line of JSON, as of `one`."""

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
WALL = 40.0  # seconds, then it is killed: far more than is allowed, as others may use the machine
MEMORY = 4 << 30  # bytes of addresses, beyond those that this process has


def one(case: dict[str, Any]) -> dict[str, Any]:
    """Exit status (negative: the signal), seconds on the clock and of the processor, what was said."""
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    begin = time.monotonic()
    child = os.fork()
    if not child:
        _run(case, out, err)
    watch = os.pidfd_open(child)
    ended = bool(select.select([watch], [], [], WALL)[0])
    if not ended:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    os.close(watch)
    return {
        "status": os.waitstatus_to_exitcode(status), "ended": ended, "seconds": time.monotonic() - begin,
        "processor": used.ru_utime + used.ru_stime, "out": _text(out), "err": _text(err),
    }  # fmt: skip


def _text(number: int) -> str:
    with os.fdopen(number, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _run(case: dict[str, Any], out: int, err: int) -> None:
    """As Python itself ends a process, but for what it frees."""
    status = 70
    try:
        os.setsid()
        for number, to in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(number, to)
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(case["folder"])
        for name, value in case.get("env", {}).items():
            os.environ[name] = value
        import readers

        try:
            readers.READERS[case["reader"]](*case["args"])
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
    warnings.simplefilter("error")
    import readers

    readers.prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(one(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
