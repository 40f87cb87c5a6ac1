"""StarPU's own Python package and nntile_py in one StarPU: order of tasks, shared memory, starts and stops."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("starpupy_script.py")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("starpu") is None, reason="StarPU's Python package is not compiled"
)
PROGRAMS = (
    "runtime_first", "starpupy_first", "crossed", "runtime_ends_first", "no_shutdown", "several_times", "exception",
)  # fmt: skip
REFUSED = (
    "no runtime is running",
    "runtime.cpus: got 1; allowed: 2, as starpu.init() has started StarPU with 2",
    "runtime.scheduler: got dmda; allowed: lws, as starpu.init() has started StarPU with lws",
    "runtime.memory: starpu.init() has started StarPU; allowed: the Runtime first",
    "array: got bfloat16, which numpy lacks; allowed: dtypes of numpy, such as float32",
    "was shared before any task wrote it; allowed: nt.zeros, nt.array",
    "handle: got ndarray; allowed: starpu.Handle(x) of a numpy array x",
    "handle: its array is not contiguous",
    "handle: got Handle; allowed: starpu.Handle(x) of a numpy array x",
    "an array of starpupy is not cut into tiles",
    "starpu_array: the handle is unregistered",
)


def run(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, name], capture_output=True, text=True, timeout=60)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_starpu(name: str) -> None:
    """Tasks of both packages on the same tiles run in the order of submission, whichever package started StarPU."""
    ended = run(name)
    assert ended.returncode == 0, ended.stderr


def test_what_is_refused() -> None:
    """Each wrong use has one message."""
    ended = run("refused")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) == len(REFUSED), ended.stdout + ended.stderr
    for line, wanted in zip(lines, REFUSED, strict=True):
        assert wanted in line
