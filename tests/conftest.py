"""A running StarPU for a module's tests, processes of their own for the others."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nntile_py as nt

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it; what it starts would too
# Hundreds of processes are started here: each would compile the package's sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
CPUS = min(2, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of many tests first: with two files at a time a long one is not left for the end."""
    many = Counter(item.path for item in items)
    items.sort(key=lambda item: -many[item.path])


@pytest.fixture(scope="module")
def runtime() -> Iterator[nt.Runtime]:
    """StarPU with two workers, shared by the tests of a module."""
    with nt.Runtime(cpus=CPUS, scheduler="lws") as running:
        yield running


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Run Python code in a process of its own, with performance models of its own: `python(code, *arguments)`.

    A process that hangs fails the test; how it ends is the caller's to judge.
    """
    home = str(tmp_path_factory.mktemp("starpu"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STARPU") and k != "XDG_CACHE_HOME"}

    def run(code: str, *arguments: Any, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=timeout,
            env=environment | {"STARPU_HOME": home} | env, check=False,
        )  # fmt: skip

    return run
