"""A captured module on one and two workers, with less memory than its state, and on two ranks: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_mpi import LACKS, OPEN_MPI

SCRIPT = Path(__file__).with_name("captured_script.py")


def bits(*arguments: Any, ranks: int = 1) -> list[str]:
    """Return the losses and the hash of the weights of a run, and the KiB of its state."""
    started = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    command = [*started, sys.executable, str(SCRIPT), *map(str, arguments)]
    variables = os.environ | OPEN_MPI | {"STARPU_WORKERS_NOBIND": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("bits")).split()


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return bits(1, 0, "none")


def test_two_workers_train_the_same_bits(alone: list[str]) -> None:
    assert bits(2, 0, "none") == alone


def test_a_limit_of_half_the_state_trains_the_same_bits(alone: list[str], tmp_path: Path) -> None:
    assert bits(2, int(alone[-1]) // 2, tmp_path) == alone


@pytest.mark.skipif(bool(LACKS), reason=f"no {', no '.join(LACKS)}")
def test_two_ranks_train_the_same_bits(alone: list[str]) -> None:
    assert bits(1, 0, "none", ranks=2) == alone
