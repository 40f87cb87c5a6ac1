"""An extension that is older than the C++ sources of its clone: a warning and a row of `nntile doctor`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nntile_py import doctor
from nntile_py.system import sources
from nntile_py.system.folders import build_info

ROOT = Path(__file__).parents[1]
SOURCE, HEADER = "tasks/a.cpp", "nntile_py/execution/csrc/b.h"
START = 10**18  # a build's start, in nanoseconds


def clone(root: Path) -> Path:
    """Make a clone whose extension was compiled from its sources."""
    for folder in sources.FOLDERS:
        (root / folder).mkdir(parents=True)
    for name in (SOURCE, HEADER, "setup.py"):
        (root / name).write_text(name)
    info = root / "nntile_py" / "_build_info.json"
    info.write_text(json.dumps({"sources": sources.fingerprint(root)}))
    os.utime(info, ns=(START, START))
    for name in (*sources.FOLDERS, SOURCE, HEADER):
        os.utime(root / name, ns=(START - 1, START - 1))
    return root


CHANGES: dict[str, tuple[bool, Callable[[Path], object]]] = {  # {name: whether results may be wrong, change}
    "none": (False, lambda root: None),
    "source": (True, lambda root: (root / SOURCE).write_text("int a;")),
    "header": (True, lambda root: (root / HEADER).write_text("int b;")),
    "new file": (True, lambda root: (root / "tasks/c.h").touch()),
    "removed file": (True, lambda root: (root / SOURCE).unlink()),
    "renamed file": (True, lambda root: (root / SOURCE).rename(root / "tasks/z.cpp")),
    "same content, new time": (False, lambda root: (root / SOURCE).touch()),
    "another language": (False, lambda root: (root / "tasks/a.py").touch()),
    "no clone": (False, lambda root: [(root / "setup.py").unlink(), (root / SOURCE).unlink()]),
    "no hash": (False, lambda root: [(root / "nntile_py/_build_info.json").write_text("{}"), (root / SOURCE).unlink()]),
    "no folder": (False, lambda root: (root / sources.FOLDERS[2]).rmdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_sources(change: str, tmp_path: Path) -> None:
    wrong, apply = CHANGES[change]
    apply(clone(tmp_path))
    message = f"the C++ sources in {tmp_path} have changed since the extension was compiled; results may be wrong"
    assert sources.changed_sources(tmp_path) == (message if wrong else "")


def test_unchanged_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost an import the time of listing three folders."""
    clone(tmp_path)
    monkeypatch.setattr(sources, "fingerprint", lambda root: pytest.fail("read"))
    assert sources.changed_sources(tmp_path) == ""


@pytest.mark.skipif("wheel" in build_info(), reason="a wheel has no sources")
def test_this_extension_is_of_these_sources() -> None:
    """The build has stored the hash, and tests test what is in the clone."""
    assert build_info()["sources"] == sources.fingerprint(ROOT)


@pytest.mark.parametrize("changed", [False, True])
def test_import_and_doctor_name_the_command(changed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "the C++ sources have changed" * changed
    code = (
        f"import nntile_py.extension as e; e.changed_sources = lambda root: {message!r};"
        " import nntile_py.execution.runtime; e.load_core()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    command = "python setup.py -q build_ext --inplace"
    assert done.stderr == (f"warning: {message}: {command}\n" if changed else "")
    monkeypatch.setattr(doctor, "changed_sources", lambda root: message)
    (row,) = doctor._sources()
    value, hint = (message, command) if changed else ("unchanged since the extension was compiled", "")
    assert row == {"name": "  sources", "ok": not changed, "value": value, "hint": hint}
    assert row in doctor._extension()
