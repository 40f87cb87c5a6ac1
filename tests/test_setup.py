"""scripts/setup.sh says what it does and how far it is; what it calls is replaced here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = f"""#!/bin/sh
case "$*" in
    "-m pip"*" -e "*) echo "WARNING: Retrying (Retry(total=1)) /x"; sleep 1
        echo "Installing collected packages: $(seq -s ', ' 90)"; sleep 1 ;;
    "-m pip"*) echo "Collecting $7"; sleep 1; [ ! -e fails ] || {{ echo "$SAID"; sleep 1; echo no network; exit 1; }} ;;
    "setup.py"*) echo "[3/9] c++ -MMD -c /x/tasks/relu.cpp -o relu.o"; sleep 1; touch nntile_py/_core.so ;;
    "-c import sys, torch"*) exit 1 ;;
    "-c"*) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
RETRYING = (
    "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError('<HTTPSConnection at 0x7f>: "
    "Failed to establish a new connection: [Errno -2] Name or service not known')': /whl/cpu/torch/"
)
PKG_CONFIG = """#!/bin/sh
case "$*" in *--variable=prefix*) pwd ;; *) exit 0 ;; esac
"""


def setup(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NNTILE", "TORCH", "PYTHON"))}
    env |= {"PATH": f"{folder}/bin:{env['PATH']}", "NNTILE_APT": "0", "NNTILE_SETUP_TICK": "0.1", "SAID": RETRYING}
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
    assert "at work: cannot reach an index for torch: [Errno -2] Name or service not known\n" in failed.stderr
    (tmp_path / "fails").unlink()
    done = setup(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "minutes" in " ".join(lines[:3])
    more = "at work: pip waits for the network", "at work: installing 90 packages", "done: .venv/bin/nntile"
    for told in ("compiling the extension", "[3/9] relu.cpp", "at work: Collecting", *more):
        assert any(told in line and line[:7] == "setup: " and line[8] == ":" for line in lines), (told, done.stderr)
    again = setup(tmp_path)
    assert (again.returncode, again.stderr) == (0, "")  # nothing to do, nothing to say


CONFIGURE = """#!/bin/sh
pc=starpu-1.4.pc to=$PREFIX/lib/pkgconfig
if [ "$1" = --version ]; then echo "StarPU configure 1.4.10"; exit; fi
echo "checking for gcc... gcc"; sleep 1
printf 'all:\\n\\t@echo "  CC       core/jobs.lo"; echo "jobs.c:1: warning: unused"; sleep 1\\n' >Makefile
printf 'install:\\n\\tmkdir -p %s\\n\\tcp %s %s\\n' $to $pc $to >>Makefile
printf 'Name: StarPU\\nDescription: none\\nVersion: 1.4.10\\n' >$pc
"""
SOURCES = (
    "drivers/driver_common/driver_common.c", "core/dependencies/implicit_data_deps.c", "core/perfmodel/perfmodel.c",
    "datawizard/copy_driver.c", "datawizard/data_request.h", "datawizard/memalloc.c",
)  # fmt: skip


def test_a_build_of_starpu_tells_where_it_is(tmp_path: Path) -> None:
    for name in SOURCES:
        path = tmp_path / "starpu" / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "starpu" / "configure").write_text(CONFIGURE)
    (tmp_path / "starpu" / "configure").chmod(0o755)
    subprocess.run(["tar", "-cf", "starpu.tar", "starpu"], cwd=tmp_path, check=True)
    prefix = tmp_path / "prefix"
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "build_starpu.sh", "--no-cuda", "--prefix", prefix, "--tarball", "starpu.tar"],
        cwd=tmp_path, env=os.environ | {"NNTILE_SETUP_TICK": "0.3", "PREFIX": str(prefix)}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{prefix}\n"), done.stderr
    for told in ("checking for gcc... gcc", "compiling core/jobs.lo"):
        assert re.search(rf"^starpu:   at work for \d+ s: {told}$", done.stderr, re.MULTILINE), done.stderr
