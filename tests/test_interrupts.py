"""Ctrl-C, once or several times, at any moment: the process ends soon, or goes on with a working runtime."""

import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

import nntile_py as nt
from nntile_py import cli
from nntile_py.errors import LIMITS
from nntile_py.execution import starpu_settings

TORTURE = bool(os.environ.get("NNTILE_TORTURE"))  # `make torture`
MOMENTS = 100 if TORTURE else 4
PATIENCE = 30.0  # seconds; CI machines are slow

# Starts, tasks in Python, training, reads, waits, stops, again and again.
BUSY = """
import sys, time
import numpy as np
import nntile_py as nt

@nt.task(x="RW")
def slow(x):
    time.sleep(0.02)
    x += 1

model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
ids = np.zeros((2, 8), int)
print("ready", flush=True)
while True:
    with nt.Runtime(cpus=2):
        x, y = nt.array(np.zeros(3)), nt.array(np.zeros(3))
        for _ in range(20):
            slow(x)
            slow(y)
        trainer = nt.Trainer(model, 2, 8)
        for _ in range(5):
            trainer.step(ids, ids)
        x.numpy()
        nt.Runtime.wait()
"""


def test_ctrl_c_of_a_command_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a command's function, where typer ends silently, before it, and while modules are imported."""

    def stopped() -> None:
        raise KeyboardInterrupt

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(stopped)
    monkeypatch.setattr(sys, "argv", ["nntile"])
    for run in (app, stopped):
        with pytest.raises(SystemExit) as end:
            cli.main(run)
        assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    code = "import os\nfrom nntile_py.system.interrupts import ends_at_once as end\nwith end(): os.kill(os.getpid(), 2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


IMPORTS = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from nntile_py import cli
from nntile_py.training.loggers import check_packages

Path("tensorboardX.py").write_text(f"import os\\ntry: os.kill(os.getpid(), {sys.argv[1]})\\nexcept BaseException: pass")
sys.path.insert(0, "")
sys.argv = ["nntile"]
cli.main(lambda: check_packages(SimpleNamespace(logging=SimpleNamespace(tensorboard=True, wandb=None))))
print("not ended")
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_logger_is_imported(number: int, status: int, tmp_path: Path) -> None:
    """tensorboardX imports torch, which ignores or aborts at some exceptions of a signal's handler."""
    command = [sys.executable, "-c", IMPORTS, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr


COMPILES = """
import os, signal, sys, threading, time
from pathlib import Path
from nntile_py import cli
from nntile_py.tasks.scalar import native

folder = Path(os.environ["TMPDIR"])
thread, number = sys.argv[1], getattr(signal, sys.argv[2])

def send():
    while not [*folder.glob("nntile_py*/started")]:
        time.sleep(0.001)
    os.kill(os.getpid(), number)

def run():
    threading.Thread(target=send, daemon=True).start()
    if thread == "main":
        native.why_not()
    else:
        compiles = threading.Thread(target=native.why_not, daemon=True)
        compiles.start()
        compiles.join()

sys.argv = ["nntile"]
cli.main(run) if thread == "command" else run()
"""


SHORT = [("main", "SIGTERM"), ("other", "SIGTERM"), ("command", "SIGINT")]
PAIRS = itertools.product(("main", "other", "command"), ("SIGTERM", "SIGINT", "SIGKILL"))
CASES = [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS]


@pytest.mark.parametrize(("thread", "number"), CASES)
def test_a_signal_while_a_kernel_is_compiled(
    thread: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user's program, which does not handle SIGTERM, and in a command whose other thread compiles."""
    compiler = tmp_path / "slow"
    waits = f"echo $$ > {tmp_path}/pid; touch $TMPDIR/started; exec sleep {PATIENCE}"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *kernel.cpp*) {waits};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o700)
    (tmp_path / "tmp").mkdir()
    for name, value in {"CXX": compiler, "TMPDIR": tmp_path / "tmp", "XDG_CACHE_HOME": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-c", COMPILES, thread, number]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    own = thread == "command" and number != "SIGKILL"
    value = getattr(signal, number)
    assert done.returncode == (128 + value if own else -value), done.stderr
    if own:
        assert done.stderr == "interrupted\n" * (number == "SIGINT")
    compiler_process = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    end = time.monotonic() + 5
    while [*(tmp_path / "tmp").iterdir()] or compiler_process.exists():
        assert time.monotonic() < end, [*(tmp_path / "tmp").iterdir()]
        time.sleep(0.01)
    assert not [*(tmp_path / "cache").rglob("*.so*")]


@pytest.mark.parametrize("kib", [600_000, 2**40, -1])
def test_little_address_space_is_one_message(
    kib: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries would abort the process; -1 is no limit."""
    limit = resource.RLIM_INFINITY if kib < 0 else kib << 10
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(sys, "argv", ["nntile", "train", "missing.yaml"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    message = capsys.readouterr().err
    if kib == 600_000:
        need = "allowed: at least 768000, of which torch takes most"
        assert end.value.code == 1
        assert message == f"error: the limit of memory (ulimit -v) is 600000 KiB; {need}\n"
    else:
        assert end.value.code == 2 and "no such file: missing.yaml" in message


def test_sigterm_of_a_command_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the folder in which a kernel is compiled."""

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)

    with pytest.raises(SystemExit) as end:
        cli.main(run)
    assert end.value.code == 143 and not [*tmp_path.iterdir()]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_limits_of_memory_and_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, before StarPU aborts; no thread for a command's own work is one message, too."""
    with monkeypatch.context() as patch:
        patch.setattr(starpu_settings, "START_BYTES", 1 << 60)
        with pytest.raises(nt.TaskError, match=r"StarPU cannot start 1 worker: the limits .* leave no room"):
            nt.Runtime(cpus=1).start()
    assert nt.Runtime.current is None

    def run(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(SystemExit) as end:
        cli.main(lambda: run("can't start new thread"))
    assert end.value.code == 1 and capsys.readouterr().err == f"error: can't start new thread{LIMITS}\n"
    with pytest.raises(RuntimeError, match="another"):
        cli.main(lambda: run("another"))


def interrupted(code: str, times: int, moment: random.Random) -> tuple[int, str, float]:
    """Return exit status, output, and seconds from the last signal to the end."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(moment.uniform(0, 1.5))
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(moment.uniform(0, 0.1))
        begin = time.monotonic()
        _, said = process.communicate(timeout=PATIENCE)
        return process.returncode, said, time.monotonic() - begin
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("processes", [1, 10] if TORTURE else [1])
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_the_process_ends(times: int, processes: int) -> None:
    """At moments of processes side by side."""

    def ends(seed: int) -> list[float]:
        moment, longest = random.Random(10 * times + seed), []
        for _ in range(MOMENTS // processes):
            status, said, took = interrupted(BUSY, times, moment)
            if times > 1 and status == 130:  # a second interrupt does not wait for tasks
                assert said == "interrupted\n"
            else:
                assert status in (1, -signal.SIGINT), said  # -SIGINT is how Python ends after an interrupt
                assert "KeyboardInterrupt" in said and "FATAL" not in said, said
            longest += [took]
        return longest

    with ThreadPoolExecutor(processes) as pool:
        longest = max(max(one) for one in pool.map(ends, range(processes)))
    print(f"{times} interrupts at {MOMENTS} moments, {processes} at once: the longest end took {longest:.2f} s")


NOTEBOOK = """
import signal, threading, time
import numpy as np
import nntile_py as nt

@nt.task(x="RW")
def slow(x):
    time.sleep(0.05)
    x += 1

def later(delay):
    time.sleep(delay)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

for k in range(%d):
    begin = time.monotonic()
    try:
        threading.Thread(target=later, args=(0.002 * k,)).start()
        with nt.Runtime(cpus=2):
            x = nt.array(np.zeros(3))
            for _ in range(200):
                slow(x)
            x.numpy()
        time.sleep(10)
    except KeyboardInterrupt:
        assert time.monotonic() - begin < %g, time.monotonic() - begin
    with nt.Runtime(cpus=2):
        y = nt.array(np.zeros(3))
        slow(y)
        assert y.numpy().tolist() == [1, 1, 1]
print("works")
"""


@pytest.mark.timeout(7200)
def test_a_notebook_goes_on() -> None:
    """An interrupt during start, work or wait drops tasks that have not begun; the next runtime works."""
    code = NOTEBOOK % (MOMENTS * 10, PATIENCE / 2)
    patience = 3600 if TORTURE else 280
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0 and done.stdout == "works\n", done.stderr


# Workers are paused, so that a task never ends. With `train`, the process handles signals as `nntile train` does.
STALLED = """
import contextlib, ctypes, sys, threading
import numpy as np
import nntile_py as nt

held, free = threading.Event(), threading.Event()

@nt.task(x="RW")
def hold(x):
    held.set()
    free.wait()

folder, command = sys.argv[1:]
with contextlib.ExitStack() as stack:
    runtime = stack.enter_context(nt.Runtime(cpus=1, memory=1 << 24, disk={"path": folder, "size": 1 << 24}))
    if command == "train":
        from nntile_py.training import signals

        signals.SECOND_SIGTERM = 0.2
        stack.enter_context(signals.signals_of_run(runtime))
    starpu = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "libstarpu-1" in line))
    x = nt.array(np.zeros(3))
    for _ in range(2):
        hold(x)
    held.wait()
    starpu.starpu_pause()
    free.set()
    print("ready", flush=True)
    if command != "ends":
        nt.Runtime.wait()
"""


@pytest.mark.parametrize(
    ("command", "number"),
    [("script", "SIGINT"), ("ends", "SIGINT"), ("train", "SIGINT"), ("train", "SIGTERM")],
)
def test_a_second_signal_ends_a_stalled_process(command: str, number: str, tmp_path: Path) -> None:
    """In the block of a runtime, at the end of the block, and in a training run."""
    code = [sys.executable, "-c", STALLED, str(tmp_path), command]
    process = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        for _ in range(2):
            assert process.poll() is None
            process.send_signal(getattr(signal, number))
            time.sleep(0.5)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    value = getattr(signal, number)
    assert (process.returncode, said) == (128 + value, "interrupted\n")
    assert not [*tmp_path.iterdir()]
