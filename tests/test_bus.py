"""StarPU's measurement of the buses between GPUs, for which no GPU is needed here: a process of its own makes it."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nntile_py.execution import starpu_settings


def test_once_for_each_number_of_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many of them are used; again after a measurement that failed."""
    visible, status, measured = 4, 0, 0

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        nonlocal measured
        measured += 1
        return subprocess.CompletedProcess(command, status)

    def measures(used: int) -> int:
        before = measured
        starpu_settings.prepare_cuda(used, None)
        return measured - before

    monkeypatch.setattr(os, "environ", dict(os.environ))  # StarPU's settings are no other test's
    monkeypatch.setattr(starpu_settings, "_OURS", set())
    monkeypatch.setattr(starpu_settings, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(starpu_settings, "cuda_devices", lambda: visible)
    monkeypatch.setattr("nntile_py._core.keep_choices", lambda folder: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert [measures(used) for used in (1, 4, 1, 2)] == [1, 0, 0, 0]
    visible = 1
    assert [measures(1), measures(1)] == [1, 0]
    visible, status = 2, 1
    assert [measures(2), measures(1)] == [1, 1]
    status = 0
    assert [measures(2), measures(1)] == [1, 0]
