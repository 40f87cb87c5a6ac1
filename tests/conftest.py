"""A running StarPU for a module's tests, processes of their own for the others."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from pairwise import spread

import nntile_py as nt
from nntile_py.graph import step

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it; what it starts would too
# Hundreds of processes are started here: each would compile the package's sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
CPUS = min(2, len(os.sched_getaffinity(0)))


SECONDS = "nntile_py/seconds of files"  # in pytest's cache
# Guess where no run is remembered: seconds of a test in a file with such a word; the first that occurs counts.
GUESSES = {r"\bmpirun\b": 6.0, r"\bforks\.|\bsubprocess\.|\bpython: ": 2.0, r"\bTrainer\(": 1.0, "": 0.2}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is long, and sort the files."""
    leave_few(items)
    longest_first(config, items)


def leave_few(items: list[Any]) -> None:
    """Of a test with the marker few(n), mark all parametrized cases but n as long; `make torture` runs all of them."""
    cases: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of in () if os.environ.get("NNTILE_TORTURE") else cases.values():
        mark = of[0].get_closest_marker("few")
        assert mark
        of = [item for item in of if not item.get_closest_marker("long")]
        chosen = spread([item.callspec.params for item in of], *mark.args)
        for item in set(of).difference(of[number] for number in chosen):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of each garbage collection: they take a tenth of the time otherwise."""
    gc.collect()
    gc.freeze()


def longest_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first: a long file at the end would keep one of two cores idle.

    The last run in this clone tells how long a file takes, else the number and kind of its tests.
    """
    cache = getattr(config, "cache", None)  # -p no:cacheprovider
    seconds = cache.get(SECONDS, {}) if cache else {}
    many = Counter(item.path for item in items)

    def guess(path: Path) -> float:
        text = path.read_text()
        return many[path] * next(each for word, each in GUESSES.items() if re.search(word, text))

    weight = {path: seconds.get(path.name) or guess(path) for path in many}
    items.sort(key=lambda item: (-weight[item.path], item.path))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seconds of the longest files; a run of several files is remembered for the next run's order."""
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                files[Path(report.location[0]).name] += report.duration
    if len(files) > 1 and (cache := getattr(config, "cache", None)):
        cache.set(SECONDS, cache.get(SECONDS, {}) | dict(files))
        longest = ", ".join(f"{name} {seconds:.0f}" for name, seconds in files.most_common(12))
        terminalreporter.write_line(f"seconds of files, {sum(files.values()):.0f} in all: {longest}")


@pytest.fixture(scope="module")
def runtime() -> Iterator[nt.Runtime]:
    """StarPU with two workers, shared by the tests of a module."""
    with nt.Runtime(cpus=CPUS, scheduler="lws") as running:
        yield running


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Run Python code in a process of its own, with performance models of its own: `python(code, *arguments)`.

    A process that hangs fails the test; how it ends is the caller's to judge. `fresh` starts a
    new interpreter instead of a fork, see forks.py.
    """
    home = str(tmp_path_factory.mktemp("starpu"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STARPU") and k != "XDG_CACHE_HOME"}

    def run(
        code: str, *arguments: Any, timeout: float = 240, fresh: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return forks.run(command, timeout=timeout, fresh=fresh, env=environment | {"STARPU_HOME": home} | env)

    return run


@pytest.fixture(scope="module")
def cpu_losses(python: Python) -> Callable[[str, str], list[float]]:
    """Compute losses on CPU workers in another process: `cpu_losses(module, call)` returns what `module.call` does."""

    def compute(module: str, call: str) -> list[float]:
        code = (
            f"import sys, json; sys.path.insert(0, sys.argv[1]); import {module}, nntile_py as nt\n"
            f"with nt.Runtime(cpus=2): print(json.dumps({module}.{call}))"
        )
        result = python(code, str(Path(__file__).parent))
        assert result.returncode == 0, result.stderr
        return [float(loss) for loss in json.loads(result.stdout)]

    return compute


@pytest.fixture
def fp8_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU workers train in `precision: fp8`, with fp32 tiles in the place of bf16 tiles."""
    monkeypatch.setitem(step.TILE_DTYPE, "fp8", "fp32")
    monkeypatch.setitem(step.PRECISIONS, "fp8", ("CPU", "CUDA"))
