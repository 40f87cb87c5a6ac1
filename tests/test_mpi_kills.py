"""Long runs on several ranks: one is killed again and again, and all end and go on where they were; nothing grows."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_mpi import END, SCRIPT, TREE, ended, left, pid_of, pytestmark, start

from nntile_py.checkpoint import format as checkpoint

__all__ = ["pytestmark"]  # skipped where that is
TORTURE = bool(os.environ.get("NNTILE_TORTURE"))  # `make torture`
KILLS = int(os.environ.get("NNTILE_KILLS", "100" if TORTURE else "2"))
STEPS = 10 * KILLS if TORTURE else 8
SETS = [f"train.steps={STEPS}", f"train.eval_every={STEPS}", "checkpoint.every=1", "optimizer.warmup_steps=2"]


def begun(ranks: int, folder: Path, run: str, *arguments: str) -> Any:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    sets = [word for one in SETS for word in ("--set", one)]
    command = ["-m", "nntile_py.cli", "train", "tiny.yaml", "--out", run, *sets, *arguments]
    return start(ranks, *command, cwd=folder)


def steps(run: Path) -> list[int]:
    """The steps after which there is a whole checkpoint, the newest first."""
    return [number for number, _ in checkpoint.checkpoints_in(run)]


def until_after(step: int, run: Path, process: Any) -> None:
    """A later one has a checkpoint, or the process has ended."""
    end = time.monotonic() + 200
    while max([0, *steps(run)]) <= step and process.poll() is None:
        assert time.monotonic() < end, "does not go on"
        time.sleep(0.01)


def kill(rank: int, folder: Path, process: Any) -> bool:
    """Whether it was there, or came, and was killed."""
    while process.poll() is None:
        with suppress(AssertionError, ProcessLookupError):
            os.kill(pid_of(rank, folder), signal.SIGKILL)
            return True
    return False


@pytest.mark.timeout(2 * 3600)
@pytest.mark.long
def test_killed_ranks(tmp_path: Path) -> None:
    """Two and three ranks in turn; a third of the kills come while they start."""
    status, _, errors = ended(begun(1, tmp_path, "whole"), 3600)
    assert status == 0, errors
    run, moment, newest, killed, longest = tmp_path / "run", random.Random(KILLS), 0, 0, 0.0
    while killed < KILLS and newest < STEPS:
        ranks = 2 + killed % 2
        process = begun(ranks, tmp_path, "run", "--resume" if steps(run) else "--overwrite")
        if killed % 3 == 2:
            time.sleep(moment.uniform(0, 6))
        else:
            until_after(newest, run, process)
            time.sleep(moment.uniform(0, 0.4))
        if not kill(moment.randrange(ranks), tmp_path, process):
            status, _, errors = ended(process, END)
            assert status == 0 and steps(run)[0] == STEPS, errors  # it was through
            break
        at, (status, out, errors) = time.monotonic(), ended(process, END)
        longest, killed = max(longest, time.monotonic() - at), killed + 1
        assert status != 0, errors
        for other in range(ranks):
            with pytest.raises(AssertionError, match="no process"):  # none is left
                pid_of(other, tmp_path)
        there = max([0, *steps(run)])
        assert there >= newest and f"going on after step {newest}" * (newest > 0 and "going on" in out) in out, out
        newest = there
    status, out, errors = ended(begun(1, tmp_path, "run", "--resume" if newest else "--overwrite"), 3600)
    assert status == 0, errors
    assert not newest or f"going on after step {newest}" in out, out
    assert newest == STEPS or left(run, STEPS) == left(tmp_path / "whole", STEPS)
    print(f"{killed} kills, the last after step {newest} of {STEPS}; all had ended {longest:.1f} s after one at most")


@pytest.mark.timeout(2 * 3600)
@pytest.mark.long
def test_memory_does_not_grow(tmp_path: Path) -> None:
    steps = 10_000 if TORTURE else 300
    status, _, errors = ended(start(2, SCRIPT, "grow", tmp_path / "out", STEPS=str(steps)), 3600)
    assert status == 0, errors
    for rank in range(2):
        first, half, end = json.loads((tmp_path / f"out.{rank}").read_text())["kib"]
        print(f"rank {rank}: {first} KiB after {steps // 10} steps, {half} after half of {steps}, {end} after all")
        assert end - half < 0.02 * half and end - first < 0.05 * first
