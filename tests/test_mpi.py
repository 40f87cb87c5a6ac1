"""Ranks that mpirun starts: the same numbers as one process, and an end of all where one fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nntile_py

SCRIPT = Path(__file__).with_name("mpi_script.py")
BUILT = json.loads((Path(nntile_py.__file__).parent / "_build_info.json").read_text()).get("mpi")
LACKS = [
    name
    for name, there in (
        ("mpirun", shutil.which("mpirun")),
        ("mpi4py", importlib.util.find_spec("mpi4py")),
        ("an extension with MPI", BUILT),
    )
    if not there
]
pytestmark = pytest.mark.skipif(bool(LACKS), reason=f"no {', no '.join(LACKS)}")
END = 30  # seconds until all ranks have ended after one failed


def start(ranks: int, *command: Any, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Python on so many ranks, or on one without mpirun. They share the cores, which Open MPI has to be told."""
    open_mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_mpi_yield_when_idle": "1",
    }  # fmt: skip
    started = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [*started, sys.executable, *map(str, command)], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | open_mpi | {"STARPU_WORKERS_NOBIND": "1"},
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout: float = 280) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, errors = process.communicate()
        raise AssertionError(f"did not end in {timeout} s: {out}\n{errors}") from None
    return process.returncode, out, errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank of 1, 2 and 4 has found."""
    found = {}
    for ranks in (1, 2, 4):
        out = tmp_path_factory.mktemp("mpi") / "found"
        status, _, errors = ended(start(ranks, SCRIPT, "train", out))
        assert status == 0, errors
        found[ranks] = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_what_one_process_does(trained: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    (alone,) = trained[1]
    for rank in trained[ranks]:
        assert rank.keys() == alone.keys()
        for case, found in rank.items():
            if "chain" in case:
                assert found == alone[case], case
            else:
                np.testing.assert_allclose(found["losses"], alone[case]["losses"], rtol=2e-5, err_msg=case)
                np.testing.assert_allclose(found["logits"], alone[case]["logits"], rtol=2e-5, err_msg=case)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("exception", ["rank 1 of 2", "ArithmeticError: on purpose"]),
        ("other plan", ["the plan is not the same on all ranks: task ", "on rank 1"]),
        ("other data", ["what step 1 is given is not the same on all ranks: input_ids", "on rank 1"]),
    ],
)
def test_an_error_on_one_rank_ends_all(what: str, told: list[str], tmp_path: Path) -> None:
    status, _, errors = ended(start(2, SCRIPT, what, tmp_path / "out"))
    assert status not in (0, None)
    assert all(text in errors for text in told), errors
    assert errors.count("Traceback") == 1, errors


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    process, file = start(2, SCRIPT, "run", tmp_path / "out"), tmp_path / "out.1"
    end = time.monotonic() + 200
    while not (file.exists() and file.read_text()):
        assert process.poll() is None and time.monotonic() < end, ended(process)
        time.sleep(0.1)
    os.kill(int(file.read_text()), signal.SIGKILL)
    status, _, errors = ended(process, END)
    assert status != 0
    assert "rank 1" in errors and "signal 9" in errors, errors
