"""scripts/setup.sh: its messages, the choice of torch, the packages of the extras; pip and the compiler are fakes."""

import http.server
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = f"""#!/bin/sh
case "$*" in
    "-m pip"*) echo "$*" >>pip-calls ;;
esac
case "$*" in
    "-m pip"*matplotlib*) echo "WARNING: Retrying (Retry(total=1)) /x"; nap ;;
    "-m pip"*" -e "*) echo "Installing collected packages: $(seq -s ', ' 90)"; nap ;;
    "-m pip"*" --index-url "*) echo "Collecting torch"; nap
        [ ! -e download-fails ] || {{ echo "read timed out"; exit 1; }} ;;
    "-m pip"*) echo "Collecting $8"; nap; [ ! -e fails ] || {{ echo "$SAID"; nap; echo no network; exit 1; }}
        case "$*" in *torch*) touch has-torch ;; esac ;;
    "setup.py"*) echo "[3/9] c++ -MMD -c /x/tasks/relu.cpp -o relu.o"; echo "  52 |   T value(i);"; nap
        touch nntile_py/_core.so ;;
    "-W ignore -c import sys, torch"*) exit 1 ;;
    "-c import importlib.metadata"*) [ -e has-torch ] ;;
    "-c import nntile_py"*) ;;
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


PROJECT = """[project]
dependencies = ["numpy", "matplotlib>=3"]
[project.optional-dependencies]
test = ["pytest"]
lint = ["ruff", "mypy"]
mpi = []
starpupy = []
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the script and substitutes for everything that the script calls."""
    smi = "#!/bin/sh\n[ ! -e gpu ] || echo 'GPU 0: NVIDIA H100'\n"
    for name, text in (
        (".venv/bin/python", PYTHON), (".venv/bin/pip", PYTHON), ("bin/pkg-config", PKG_CONFIG),
        ("bin/nvidia-smi", smi), ("bin/nap", "#!/bin/sh\n[ -z \"$NAP\" ] || sleep 1\n"),
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("nntile_py/execution/csrc", "tasks", "tiles", "scripts", "include/starpu/1.4"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("setup.sh", "probe_index.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "setup.py").touch()
    return tmp_path


def setup(folder: Path, *extras: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the script; by default without a GPU and with an index of CPU builds that refuses connections."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NNTILE", "TORCH", "PYTHON"))}
    env |= {"PATH": f"{folder}/bin:{env['PATH']}", "NNTILE_APT": "0", "NNTILE_SETUP_TICK": "0.1", "SAID": RETRYING}
    env |= {"NNTILE_CUDA": "0", "NNTILE_TORCH_INDEX": "http://127.0.0.1:9", **given}
    return subprocess.run(
        ["bash", "scripts/setup.sh", *extras],
        cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def pip_calls(folder: Path) -> list[str]:
    return (folder / "pip-calls").read_text().splitlines()


def test_setup_reports_its_steps_and_its_progress(clone: Path) -> None:
    (clone / "fails").touch()
    failed = setup(clone, NAP="1")
    assert failed.returncode == 1 and "no network" in failed.stderr and "log: .venv/pip.log" in failed.stderr
    assert "at work: cannot reach an index for torch: [Errno -2] Name or service not known\n" in failed.stderr
    (clone / "fails").unlink()
    done = setup(clone, NAP="1")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "minutes" in " ".join(lines[:3])
    more = "at work: Collecting", "at work: installing 90 packages", "done: .venv/bin/nntile"
    assert "T value" not in done.stderr  # a line of a compiler's warning
    for message in ("compiling the extension", "[3/9] relu.cpp", *more):
        assert any(message in line and line[:7] == "setup: " and line[8] == ":" for line in lines), done.stderr
    again = setup(clone)
    assert (again.returncode, again.stderr) == (0, "")  # nothing to do, nothing to report


def test_a_package_index_that_does_not_answer_is_reported_while_pip_waits(clone: Path) -> None:
    assert setup(clone).returncode == 0
    assert "at work: pip waits for the network" in setup(clone, "test", NAP="1").stderr


def test_linters_and_test_tools_come_with_their_extras(clone: Path) -> None:
    assert setup(clone).returncode == 0
    assert any("matplotlib" in call for call in pip_calls(clone))
    assert not any("ruff" in call or "pytest" in call for call in pip_calls(clone))
    (clone / "pip-calls").unlink()
    lint = setup(clone, "lint")
    assert lint.returncode == 0 and "compiling" not in lint.stderr
    (call,) = pip_calls(clone)
    assert "ruff mypy" in call and "pytest" not in call
    for extras in ((), ("lint",)):
        again = setup(clone, *extras)
        assert (again.returncode, again.stderr) == (0, "")
    unknown = setup(clone, "lnt")
    assert unknown.returncode == 1 and "pyproject.toml lacks an extra of these: lnt" in unknown.stderr


class Index(http.server.BaseHTTPRequestHandler):
    """An index of CPU builds; the first folder of the address says how it behaves."""

    def do_GET(self) -> None:
        behaviour = self.path.split("/")[1]
        if behaviour == "hangs" or (behaviour == "wheel-hangs" and self.path.endswith(".whl")):
            self.server.closing.wait(30)  # type: ignore[attr-defined]
            return
        if behaviour == "404":
            self.send_error(404)
            return
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        name = f"torch-2.13.0%2Bcpu-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl"
        page = f'<a href="/{behaviour}/{name}#sha256=0">torch</a>'.encode()
        page = b"\x00\xff<html>Log in" if behaviour == "garbage" else page
        if self.path.endswith(".whl"):
            page = b"<html>" if behaviour == "no-wheel" else b"PK\x03\x04"
        self.send_response(200)
        self.end_headers()
        for byte in page:  # one at a time from a slow index
            self.wfile.write(bytes([byte]))
            if behaviour == "drips" and self.server.closing.wait(0.2):  # type: ignore[attr-defined]
                return

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.closing = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.closing.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://nowhere.invalid", "not known|resolution"),
        ("http://{index}/hangs", "no answer within 2 s"),
        ("http://{index}/drips", "no answer within 2 s"),
        ("http://{index}/wheel-hangs", "no answer within 2 s"),
        ("http://{index}/404", "HTTP Error 404"),
        ("http://{index}/garbage", "no wheel of torch 2.13.0 for cp"),
        ("http://{index}/no-wheel", "is no wheel"),
        ("https://{index}/tls", "SSL"),
    ],
)
def test_without_the_index_of_cpu_builds_torch_comes_from_the_usual_indexes(
    clone: Path, index: str, address: str, reason: str
) -> None:
    seconds = "2" if "no answer" in reason else "30"
    started = time.monotonic()
    done = setup(clone, NNTILE_TORCH_INDEX=address.format(index=index), NNTILE_PROBE_SECONDS=seconds)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 25  # the index that hangs does so for 30 s
    (line,) = (line for line in done.stderr.splitlines() if "torch:" in line)
    assert "from pip's usual indexes" in line and re.search(reason, line) and "TORCH=" in line and "PYTHON=" in line
    assert pip_calls(clone)[0].endswith("--no-compile torch==2.13.0 setuptools wheel ninja")
    assert not any("index-url" in call for call in pip_calls(clone))


def test_without_a_gpu_torch_alone_comes_from_the_index_of_cpu_builds(clone: Path, index: str) -> None:
    done = setup(clone, NNTILE_TORCH_INDEX=f"http://{index}/good")
    assert done.returncode == 0, done.stderr
    assert "the CPU build of PyTorch's index" in done.stderr and "TORCH=" in done.stderr
    first, second, *others = pip_calls(clone)
    assert f"--no-deps --retries 1 --timeout 15 --index-url http://{index}/good torch==2.13.0" in first
    assert second.endswith("--no-compile torch==2.13.0 setuptools wheel ninja")  # with torch's dependencies
    assert others and not any("index-url" in call for call in (second, *others))


def test_a_failed_download_of_the_cpu_build_is_no_end(clone: Path, index: str) -> None:
    (clone / "download-fails").touch()
    done = setup(clone, NNTILE_TORCH_INDEX=f"http://{index}/good")
    assert done.returncode == 0, done.stderr
    assert "its download failed (read timed out)" in done.stderr
    assert pip_calls(clone)[1].endswith("--no-compile torch==2.13.0 setuptools wheel ninja")


def test_a_gpu_or_the_user_decides_on_torch(clone: Path, index: str) -> None:
    (clone / "gpu").touch()
    settings = {"NNTILE_TORCH_INDEX": f"http://{index}/good"}
    done = setup(clone, **settings, NNTILE_CUDA="")
    assert done.returncode == 0 and "for the NVIDIA GPU of this machine" in done.stderr
    assert pip_calls(clone)[0].endswith(" torch==2.13.0 setuptools wheel ninja")
    (clone / "pip-calls").unlink()
    named = setup(clone, **settings, TORCH="torch==2.12.*")
    assert named.returncode == 0 and "torch==2.12.*, as TORCH says" in named.stderr
    assert pip_calls(clone)[0].endswith(" torch==2.12.* setuptools wheel ninja")
    assert not any("index-url" in call for call in pip_calls(clone))


def test_an_interrupted_setup_ends_its_commands_and_continues_later(clone: Path) -> None:
    (clone / "bin" / "nap").write_text("#!/bin/sh\necho $$ >napping; sleep 30\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NNTILE", "TORCH", "PYTHON"))}
    env |= {"PATH": f"{clone}/bin:{env['PATH']}", "NNTILE_APT": "0", "NNTILE_CUDA": "1"}
    run = subprocess.Popen(["bash", "scripts/setup.sh"], cwd=clone, env=env, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (clone / "napping").exists() or not (clone / "napping").read_text():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=10)
    assert run.returncode == 130
    napping = Path("/proc", (clone / "napping").read_text().strip())
    while napping.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (clone / "bin" / "nap").write_text("#!/bin/sh\n")
    assert setup(clone).returncode == 0


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
    "datawizard/copy_driver.c", "datawizard/data_request.h", "datawizard/memalloc.c", "core/topology.c",
)  # fmt: skip


def build_of_starpu(tmp_path: Path, configure: str, tick: str) -> subprocess.Popen[str]:
    """Start a build whose StarPU is only a script `configure`; it is installed in tmp_path/prefix."""
    for name in SOURCES:
        path = tmp_path / "starpu" / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "starpu" / "configure").write_text(configure)
    (tmp_path / "starpu" / "configure").chmod(0o755)
    subprocess.run(["tar", "-cf", "starpu.tar", "starpu"], cwd=tmp_path, check=True)
    prefix = tmp_path / "prefix"
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "build_starpu.sh", "--no-cuda", "--prefix", prefix, "--tarball", "starpu.tar"],
        cwd=tmp_path, env=os.environ | {"NNTILE_SETUP_TICK": tick, "PREFIX": str(prefix)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("quick", [False, True])
def test_a_build_of_starpu_reports_its_progress(quick: bool, tmp_path: Path) -> None:
    """Bash adds no message of its own, also if a command ends before it is waited for."""
    build = build_of_starpu(tmp_path, CONFIGURE.replace("sleep 1", "true") if quick else CONFIGURE, "0.3")
    output, messages = build.communicate(timeout=60)
    assert (build.returncode, output) == (0, f"{tmp_path / 'prefix'}\n"), messages
    assert all(line.startswith("starpu: ") for line in messages.splitlines()), messages
    for message in ("checking for gcc... gcc", "compiling core/jobs.lo"):
        said = re.search(rf"^starpu:   at work for \d+ s: {message}$", messages, re.MULTILINE)
        assert quick or said, messages


def test_a_build_of_starpu_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    configure = CONFIGURE.replace("sleep 1", f"echo $$ >{tmp_path}/pid; exec sleep 600", 1)
    with build_of_starpu(tmp_path, configure, "0.3") as build:
        assert build.stderr and any("at work for" in line for line in build.stderr)  # reads as far as this message
        build.terminate()
        assert build.wait(timeout=30) == 130 and build.stderr.read() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not [*tmp_path.glob(".starpu-build.*")] and not (tmp_path / "prefix" / "lib").exists()


def test_the_extension_is_compiled_with_the_ninja_of_the_virtual_environment(tmp_path: Path) -> None:
    """A machine without a ninja of its own compiles several files at a time, too."""
    os.symlink(shutil.which("c++") or "", tmp_path / "c++")
    os.symlink(shutil.which("as") or "", tmp_path / "as")
    code = """
import runpy, sys
from torch.utils.cpp_extension import is_ninja_available
sys.argv = ["setup.py", "--name"]
before = is_ninja_available()
runpy.run_path("setup.py")
print(before, is_ninja_available())
"""
    env = os.environ | {"PATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.stdout.endswith("False True\n"), run.stdout + run.stderr
