"""forks.py: a fork of the server does what a new interpreter does."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forks
import pytest

import nntile_py as nt

CODE = """
import atexit, os, sys
atexit.register(print, "end")
print(sys.argv[1:], os.getcwd(), os.environ.get("COLOUR"), __name__, end=" ")
print("told", file=sys.stderr)
raise SystemExit(%s)
"""


@pytest.mark.parametrize(("raised", "status", "errors"), [("", 0, ""), ("3", 3, ""), ("'why'", 1, "why\n")])
def test_a_fork_ends_as_a_new_interpreter(raised: str, status: int, errors: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE % raised, "a", Path("b")]
    for fresh in (False, True):
        done = forks.run(command, cwd=tmp_path, env=os.environ | {"COLOUR": "red"}, fresh=fresh)
        assert (done.returncode, done.stderr) == (status, f"told\n{errors}")
        assert done.stdout == f"['a', 'b'] {tmp_path} red __main__ end\n"


def test_modules_scripts_errors_and_signals(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, other; print(sys.argv[1:], other.__name__)")
    (tmp_path / "other.py").write_text("")
    assert forks.run([sys.executable, script, "x"], check=True).stdout == "['x'] other\n"
    assert forks.run([sys.executable, "-m", "nntile_py.cli", "--version"]).stdout == f"{nt.__version__}\n"
    done = forks.run([sys.executable, "-c", "1 / 0"])
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert forks.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -9
    with pytest.raises(subprocess.CalledProcessError):
        forks.run([sys.executable, "-c", "exit(1)"], check=True)


def test_a_limit_of_time(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run([sys.executable, "-c", code], timeout=1)
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_forks_side_by_side(tmp_path: Path) -> None:
    """Each ends when all have begun."""
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\n"
        "while len(os.listdir()) < 3: time.sleep(0.01)\nprint(sys.argv[1])"
    )
    with ThreadPoolExecutor(3) as pool:
        done = [*pool.map(lambda name: forks.run([sys.executable, "-c", code, name], cwd=tmp_path, timeout=60), "abc")]
    assert [one.stdout for one in done] == ["a\n", "b\n", "c\n"]


def test_variables_of_the_start_need_a_new_interpreter() -> None:
    """A fork has the hash seed and the threads of the server."""
    code = "import sys; print(sys.flags.hash_randomization, 'torch' in sys.modules)"
    assert forks.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "0"}).stdout == "0 False\n"
    server = forks._servers[os.getpid()].env  # other tests of this process may have changed os.environ since
    assert forks.run([sys.executable, "-c", code], env=server).stdout.endswith("True\n")
