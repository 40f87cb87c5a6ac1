"""scripts/setup.sh says what it does and how far it is; what it calls is replaced here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = f"""#!/bin/sh
case "$*" in
    "-m pip"*) echo "Collecting $7"; sleep 1; [ ! -e fails ] || {{ echo "no network"; exit 1; }} ;;
    "setup.py"*) echo "[3/9] c++ -MMD -c /x/tasks/relu.cpp -o relu.o"; sleep 1; touch nntile_py/_core.so ;;
    "-c import sys, torch"*) exit 1 ;;
    "-c"*) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
PKG_CONFIG = """#!/bin/sh
case "$*" in *--variable=prefix*) pwd ;; *) exit 0 ;; esac
"""


def setup(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NNTILE", "TORCH", "PYTHON"))}
    env |= {"PATH": f"{folder}/bin:{env['PATH']}", "NNTILE_APT": "0", "NNTILE_SETUP_TICK": "0.1"}
    return subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_setup_tells_what_it_does_and_where_it_is(tmp_path: Path) -> None:
    for name, text in ((".venv/bin/python", PYTHON), (".venv/bin/pip", PYTHON), ("bin/pkg-config", PKG_CONFIG)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("nntile_py/execution/csrc", "tasks", "tiles", "scripts", "include/starpu/1.4"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).touch()
    (tmp_path / "fails").touch()
    failed = setup(tmp_path)
    assert failed.returncode == 1 and "no network" in failed.stderr and "log: .venv/pip.log" in failed.stderr
    (tmp_path / "fails").unlink()
    done = setup(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "minutes" in " ".join(lines[:3])
    for told in ("compiling the extension", "[3/9] relu.cpp", "at work: Collecting", "done: .venv/bin/nntile"):
        assert any(told in line and line[:7] == "setup: " and line[8] == ":" for line in lines), (told, done.stderr)
    again = setup(tmp_path)
    assert (again.returncode, again.stderr) == (0, "")  # nothing to do, nothing to say
