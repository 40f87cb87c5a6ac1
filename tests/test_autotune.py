"""Measured choices are stored, so that a later process computes the same bits."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

CODE = """
import os, sys
from nntile_py import _core
_core.keep_choices(sys.argv[1])
def measure():
    print("measured", flush=True)
    return int(sys.argv[2])
print([_core.chosen("gemm", key, measure) for key in sys.argv[3:]])
"""


@pytest.fixture
def choose(python: Any) -> Any:
    def run(folder: Path, choice: int, *keys: str) -> tuple[int, str]:
        result = python(CODE, folder, choice, *keys)
        assert result.returncode == 0, result.stderr
        *measured, told = result.stdout.splitlines()
        return len(measured), told

    return run


def test_the_first_choice_stays(choose: Any, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert choose(folder, 3, "a b", "a b", "c") == (2, "[3, 3, 3]")
    assert choose(folder, 5, "c", "a b", "d") == (1, "[3, 3, 5]")
    assert (folder / "gemm").read_text() == "a b: 3\nc: 3\nd: 5\n"


def test_a_choice_inside_of_another(python: Any, tmp_path: Path) -> None:
    code = """
import sys
from nntile_py import _core
_core.keep_choices(sys.argv[1])
print([_core.chosen("gemm", key, lambda: 1 + _core.chosen("gemm", "inner", lambda: 5)) for key in ("outer", "inner")])
"""
    result = python(code, tmp_path)
    assert result.stdout == "[6, 6]\n", result.stderr
    assert (tmp_path / "gemm").read_text() == "outer: 6\ninner: 6\n"


def test_what_cannot_be_kept_is_measured(choose: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose(tmp_path / "file" / "below", 2, "a", "a") == (1, "[2, 2]")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_no_file_is_there(choose: Any, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "gemm")
    assert choose(tmp_path, 2, "a", "a") == (1, "[2, 2]")


def test_a_last_line_without_its_end(choose: Any, tmp_path: Path) -> None:
    (tmp_path / "gemm").write_text("a: 3\nb: 4")
    assert choose(tmp_path, 5, "c", "b") == (1, "[5, 4]")
    assert choose(tmp_path, 6, "a", "b", "c") == (0, "[3, 4, 5]")


def test_half_a_line_is_not_kept(python: Any, tmp_path: Path) -> None:
    """On a full disk, stored lines stay, and a line that does not fit is not stored in part."""
    code = """
import resource, signal, sys
from nntile_py import _core
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
_core.keep_choices(sys.argv[1])
print([_core.chosen("gemm", key, lambda: 123) for key in "ab"])
"""
    assert python(code, tmp_path, fresh=True).stdout == "[123, 123]\n" and (tmp_path / "gemm").read_text() == "a: 123\n"


def test_a_process_forked_meanwhile_keeps_nobody_waiting(python: Any, tmp_path: Path) -> None:
    code = """
import fcntl, os, sys, time
from nntile_py import _core
_core.keep_choices(sys.argv[1])
child = []
def measure():
    child.append(os.fork())
    if not child[0]: time.sleep(600); os._exit(0)
    return 1
_core.chosen("gemm", "a", measure)
try:
    with open(sys.argv[1] + "/gemm") as file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(_core.chosen("gemm", "b", lambda: 2))
finally:
    os.kill(child[0], 9)
"""
    result = python(code, tmp_path)
    assert result.stdout == "2\n", result.stderr  # the file is free, though the child has it open


def test_lines_that_say_nothing(choose: Any, tmp_path: Path) -> None:
    (tmp_path / "gemm").write_text("a\na: \nb: -1\nb: x\n\nc: 4\nc: 5\n")
    assert choose(tmp_path, 7, "a", "b", "c") == (2, "[7, 7, 4]")


def test_what_fails_is_no_choice(python: Any, tmp_path: Path) -> None:
    code = """
import sys
from nntile_py import _core
_core.keep_choices(sys.argv[1])
def fail(): raise ValueError("no")
try: _core.chosen("gemm", "a", fail)
except ValueError as error: print(error)
print(_core.chosen("gemm", "a", lambda: 6))
"""
    assert python(code, tmp_path).stdout == "no\n6\n" and (tmp_path / "gemm").read_text() == "a: 6\n"


def test_two_at_once_choose_alike(python: Any, tmp_path: Path) -> None:
    code = """
import sys, time
from nntile_py import _core
_core.keep_choices(sys.argv[1])
print(_core.chosen("gemm", "a", lambda: time.sleep(0.5) or int(sys.argv[2])))
"""
    with ThreadPoolExecutor() as pool:
        told = {run.stdout for run in pool.map(lambda choice: python(code, tmp_path, choice), range(3))}
    assert len(told) == 1 and told < {"0\n", "1\n", "2\n"}


def test_without_a_home(python: Any) -> None:
    """HOME unset, and a user that the system does not know: somewhere all the same."""
    code = """
import os, pathlib
def nobody(): raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = nobody
from nntile_py.system.folders import cache_folder
print(cache_folder().parent.is_dir())
"""
    assert python(code).stdout == "True\n"
