"""Folders to which a command cannot write: the command ends before any work, with a message that names the option."""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import nntile
from test_watch import LINES

from nntile_py.errors import ConfigError
from nntile_py.runs import check_writable
from nntile_py.system import launcher
from nntile_py.training.run_start import check_folders

CONFIG = {
    "model": {"type": "gpt2", "layers": 1, "embed": 8, "heads": 2},
    "data": {"source": "python-stdlib"},
    "train": {"batch": 2, "seq": 8, "steps": 1},
    "tokenizer": {"vocab_size": 300},
}


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let every new file fail with this error, as in a read-only file system."""

    def fail(**_: Any) -> None:
        raise OSError(number, os.strerror(number), "some temporary name")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train my.yaml --out ro/x", "--out: ro/x"),
        ("train my.yaml --set out=ro/x", "--out: ro/x"),
        ("train my.yaml --resume --out ro/x", "--out: ro/x"),
        ("profile my.yaml --out ro/x", "--out: ro/x"),
        ("analyze my.yaml --out ro/x", "--out: ro/x"),
        ("sweep --auto my.yaml --out ro/x", "--out: ro/x"),
        ("graph my.yaml --out ro/x.dot", "--out: ro/x.dot"),
        ("compare run --out ro/x.png", "--out: ro/x.png"),
        ("report run --out ro/x.html", "--out: ro/x.html"),
        ("report run", "--out: run/report.html"),
        ("report damaged --out ro/x.html", "--out: ro/x.html"),
        ("compare damaged --out ro/x.png", "--out: ro/x.png"),
        ("experiment bt-table2 --results ro/x", "--results: ro/x"),
        ("encode run --input my.txt --out ro/x.npy", "--out: ro/x.npy"),
        ("data prepare my.txt ro/x", "OUT: ro/x"),
        ("merge run ro/x", "OUT: ro/x"),
    ],
)
def test_a_read_only_folder(
    arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in "ro", "run", "damaged":
        Path(folder).mkdir()
    Path("my.yaml").write_text(yaml.safe_dump(CONFIG))
    Path("my.txt").write_text("a text\n")
    Path("run/config.yaml").write_text(yaml.safe_dump(CONFIG))
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    Path("damaged/metrics.jsonl").write_text("no JSON\n")
    refuse(monkeypatch, errno.EROFS)
    assert nntile(*arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {told}: Read-only file system; allowed: a f") and not shown.out
    assert not [*Path("ro").iterdir()]


def test_a_results_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert nntile("experiment", "bt-table2", "--results", "file/x") == 2
    assert f"error: --results: {tmp_path}/file is a file; allowed: a folder to write to" in capsys.readouterr().err
    assert not Path("runs").exists()  # the experiment has not begun
    assert nntile("experiment", "bt-table2", "--plan", "--results", "file/x") == 0  # writes nothing


def test_a_report_of_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is about RUN, as the user has given no --out."""
    (tmp_path / "file").touch()
    assert nntile("report", tmp_path / "file") == 2
    assert "error: RUN:" in capsys.readouterr().err


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    reasons = {
        tmp_path / "file/a/b": f"{tmp_path}/file is a file",
        Path("/proc/x"): "/proc/x: No such file or directory",
    }
    for folder, why in reasons.items():
        with pytest.raises(ConfigError, match=f"--out: {why}; allowed: a folder to write to"):
            check_writable("--out", folder)
    check_writable("--out", tmp_path / "a/b/c")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.chdir(tmp_path)
    check_writable("--out", Path("a/b"))
    refuse(monkeypatch, errno.EROFS)
    with pytest.raises(ConfigError, match="--rescue: saved: Read-only file system"):
        check_folders(tmp_path / "run", Path("saved"), False)
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "leads", lambda: False)
        check_writable("--out", tmp_path)  # another rank writes nothing
    refuse(monkeypatch, errno.ENOSPC)
    check_writable("--out", tmp_path)  # there may be room at the end
