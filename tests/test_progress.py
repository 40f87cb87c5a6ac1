"""How far long measurements are, told in a job's log too."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from nntile_py import doctor
from nntile_py.cli.options import show
from nntile_py.system import progress as parts
from nntile_py.system.console_tables import facts


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    now = 100.0
    monkeypatch.setattr(parts.time, "monotonic", lambda: now)
    out = io.StringIO()
    with parts.telling(Console(file=out, force_terminal=terminal, width=20), every=10) as tell:
        for k in range(25):
            now = 100.0 + k
            tell(f"{k} of 25 operators in their layouts")
    lines = [f"{k} of 25 operators in their layouts" for k in (0, 10, 20)]
    assert terminal or out.getvalue().splitlines() == lines
    assert not terminal or not any(line + "\n" in out.getvalue() for line in lines)


def test_what_no_terminal_shows_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    long = "a long word and then more " * 20
    show(doctor.render([{"name": "StarPU", "ok": False, "value": long, "hint": "make setup"}]))
    first, second = capsys.readouterr().out.splitlines()
    assert first.split(maxsplit=2) == ["no", "StarPU", long.rstrip()] and second.strip() == "to get it: make setup"


@pytest.mark.parametrize(
    ("gpu", "lacking", "line"),
    [
        (False, ["  CUDA", "  CUDA devices", "cupy"], r"ready for training on \d+ CPU cores?; GPUs: none found"),
        (False, ["extension", "  CUDA", "  CUDA devices"], "not ready for training: extension; see the rows above"),
        (True, [], r"ready for training on \d+ CPU cores?; GPUs: yes"),
        (True, ["  CUDA"], r"ready for .*; GPUs: yes, not usable; see the rows about CUDA"),
    ],
)
def test_doctor_ends_with_what_works_and_groups_rows_about_gpus(
    gpu: bool, lacking: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["extension", "  CUDA", "StarPU", "  CUDA devices", "cupy", "mpi4py"]
    checks = [doctor.Check(name=name, ok=name not in lacking, value="yes", hint="") for name in names]
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor.Path, "glob", lambda self, pattern: [])
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    shown = [check["name"] for check in doctor.without_gpus(checks)]
    assert shown == (names if gpu else ["extension", "StarPU", "mpi4py", "GPUs"])
    assert re.fullmatch(line, doctor.summary(checks))


def test_doctor_says_what_parts_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    show(doctor.render(doctor.without_gpus(doctor.report())))
    rows = capsys.readouterr().out
    assert re.search("mpi4py .*; for runs on several machines", rows)


def test_long_values_go_on_below(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    show(facts({"nodes": "4", "limited by": "sums that begin late " * 5}))
    first, second, third = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert first == "nodes               4" and second.startswith("limited by          sums")
    assert third.startswith(" " * 20) and third.strip() and len(second) <= 80


def test_text_wraps_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As findings of nntile profile are told."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    told = "waits: workers wait for data of others more than they compute\n  cut the batch"
    show(Text(told))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("waits: workers wait for data of") and lines[-1] == "  cut the batch"
    assert " ".join(" ".join(lines).split()) == " ".join(told.split())
