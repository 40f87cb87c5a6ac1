"""`nntile data prepare` ends at any moment, by SIGKILL or SIGTERM: the same command gives the same bytes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nntile_py.data import prepare as module
from nntile_py.errors import ConfigError
from nntile_py.training.prepare_command import prepare

# Ends a fork at its first, second, ... operation on a file of OUT, and runs the command again after each end. Files
# that only an interrupted call needs may be left beside complete tokens.
ENDS = """
import os, shutil, signal, sys
from pathlib import Path
from nntile_py.data import prepare as module, tokenization
from nntile_py.data.token_files import is_token_folder
from nntile_py.training.prepare_command import prepare

source, out, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
module.SAVE_EVERY, tokenization.BATCH = 0, 400
left = number = None

def count(event, args):
    global left
    if left is None or event not in ("open", "os.rename", "os.remove") or str(out) not in str(args[0]):
        return
    left -= 1
    if left < 0:
        left = None
        if number == signal.SIGKILL:
            os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

def run(overwrite=False):
    prepare({"source": source}, out, None, 260, False, overwrite, lambda text: None)

def files():
    beside = (".segments", "lock", module.PROGRESS)
    return {path.name: path.read_bytes() for path in out.iterdir() if not path.name.endswith(beside)}

sys.addaudithook(count)
run()
expected, total = files(), 0
for number, overwrite in ((signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGTERM, True)):
    ends, ended = 0, True
    while ended:
        if not overwrite:
            shutil.rmtree(out)
        child = os.fork()
        if not child:
            left = ends
            try:
                run(overwrite)
                os._exit(0)
            finally:
                os._exit(1)
        ended, ends, total = os.waitpid(child, 0)[1] != 0, ends + step, total + 1
        if not (out.exists() and is_token_folder(out)):
            run()
        assert files() == expected, (ends, {*files()} ^ {*expected})
print(total)
"""


def rows_in(folder: Path, name: str = "rows", count: int = 9) -> Path:
    """Write a table of documents."""
    texts = [f"{name} {k} says hello {k * 7 % 11} times\n" * (1 + k % 5) for k in range(count)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_the_same_command_gives_the_same_bytes(step: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(rows_in(tmp_path)), str(tmp_path / "out"), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80 / step


def test_another_command_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another text, vocabulary or share of held-out text. The first command does not continue from its files."""
    monkeypatch.setattr(module, "SAVE_EVERY", 0)
    monkeypatch.setattr("nntile_py.data.tokenization.BATCH", 600)
    original, rows, others = module.tokenize, rows_in(tmp_path, "rows", 40), rows_in(tmp_path, "others", 50)

    def run(out: str, source: Path, stop: int | None = None, size: int = 300, **settings: Any) -> list[str]:
        def stopping(*args: Any) -> Any:
            for count, blocks in enumerate(original(*args)):
                if count == stop:
                    raise KeyboardInterrupt
                yield blocks

        said: list[str] = []
        monkeypatch.setattr(module, "tokenize", stopping)
        try:
            prepare({"source": str(source)} | settings, tmp_path / out, None, size, False, False, said.append)
        except KeyboardInterrupt:
            assert stop is not None
        return said

    def files(out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}

    changes: list[dict[str, Any]] = [{"source": others}, {"size": 290}, {"val_fraction": 0.3}]
    for number, change in enumerate(changes):
        another = {"source": rows} | change
        run(f"new{number}", **another)
        run(f"out{number}", rows, stop=3)
        with pytest.raises(ConfigError, match=f"has not completed {tmp_path}/out{number}; allowed: the same"):
            run("other", tmp_path / f"out{number}")
        run(f"out{number}", stop=0, **another)
        assert not any("going on" in line for line in run(f"out{number}", rows, stop=2))
        assert not any("going on" in line for line in run(f"out{number}", **another))
        assert files(f"out{number}") == files(f"new{number}")
    with pytest.raises(ConfigError, match="has tokens already"):
        run("out0", rows)
