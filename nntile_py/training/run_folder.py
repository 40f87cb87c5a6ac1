"""The folder of a run: how it takes the place of an earlier one, gets its weights, and keeps its metrics."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.data import confusion
from nntile_py.errors import ConfigError
from nntile_py.system.folders import exchange, read, replaced, sync
from nntile_py.training import checkpoint

GENERATION, METRICS = "generation_config.json", "metrics.jsonl"
# What `nntile train` writes; whatever else is in a folder is not its own to remove.
OWN = (
    checkpoint.MODEL, checkpoint.CONFIG, checkpoint.TOKENIZER,
    checkpoint.TOKENIZER_CONFIG, GENERATION, "config.yaml", METRICS, "checkpoints", *confusion.FILES,
)  # fmt: skip


class RunFolder:
    """`path`: where the run writes. One that replaces an earlier run is made beside it, and takes its place when it has
    its first checkpoint. A new one is in an empty folder.

    Raises ConfigError where another process trains, or has begun to since it was found to be free."""

    def __init__(self, out: Path, replaces: bool = False, new: bool = False) -> None:
        self.out = self.path = Path(os.path.realpath(out))
        self._locks: list[int] = []
        if replaces and self.out.is_dir():
            self._locks.append(_locked(self.out))
            self.path = self.out.with_name(f"{self.out.name}.new")
        self._made = not self.path.exists()
        self._fresh = new or self._made or self.path != self.out  # what is in it, this run has made
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks.append(_locked(self.path))
        if new and any(self.path.iterdir()):
            self.close()
            raise ConfigError(f"--out: another process has begun to train into {out}; allowed: another folder")
        if self.path != self.out:  # what a killed run has left there
            for name in OWN:
                _remove(self.path / name)
        checkpoint.remove_leftovers(self.path)

    def close(self) -> None:
        """Let others train into it."""
        while self._locks:
            os.close(self._locks.pop())

    def give_up(self) -> None:
        """The run cannot begin here: leave nothing of it behind."""
        for name in OWN if self._fresh else ():
            _remove(self.path / name)
        if self._made:
            self.path.rmdir()
        self.close()

    def settle(self) -> None:
        """There is a checkpoint: take the place of the earlier run. What is not a run's in its folder stays there."""
        if self.path == self.out:
            return
        old = self.path
        exchange(self.out, old)
        self.path = self.out
        for entry in old.iterdir():
            if entry.name not in OWN and not (self.out / entry.name).exists():
                entry.rename(self.out / entry.name)
        shutil.rmtree(old, ignore_errors=True)

    def publish(self, step: int) -> None:
        """The weights of a checkpoint become those of the run: links where the disk has such, else copies."""
        source = checkpoint.folder_of(self.path, step)
        files = checkpoint.TOKENIZER, checkpoint.TOKENIZER_CONFIG, GENERATION, checkpoint.CONFIG, checkpoint.MODEL
        for name in files:  # the weights last
            if (source / name).is_file() or name == checkpoint.MODEL:
                with replaced(self.path / name) as beside:
                    try:
                        os.link(source / name, beside)
                    except OSError:
                        shutil.copyfile(source / name, beside)
        sync(self.path)


def _locked(folder: Path) -> int:
    """Held by the process until it is closed."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"--out: another process is training into {folder}; allowed: another folder") from None
    return lock


def check_place(option: str, folder: Path) -> None:
    """Raise ConfigError for a folder among the checkpoints of a run, which comes and goes with them."""
    whole = Path(os.path.realpath(folder))
    for above in (whole, *whole.parents):
        if above.name == "checkpoints" and (above.parent / METRICS).is_file():
            where = f"lies in the checkpoints of the run {above.parent}"
            raise ConfigError(f"{option}: {folder} {where}; allowed: a folder outside of them")


def check_alone(out: Path) -> None:
    """Raise ConfigError while another process trains into the folder."""
    if out.is_dir():
        os.close(_locked(out))


def check_replaced(out: Path) -> None:
    """Raise ConfigError for what no run may take the place of."""
    there = Path(os.path.realpath(out))
    new = there.with_name(f"{there.name}.new")
    names = {entry.name for entry in there.iterdir()} if there.is_dir() else set()
    for wrong, what in (
        (there.exists() and not there.is_dir(), "is no folder"),
        (there.is_mount(), "is where a disk is mounted; give a folder in it"),
        (Path.cwd().is_relative_to(there), "is the current folder, or above it"),
        (METRICS not in names and names & {*OWN}, f"is no run, but has {', '.join(sorted(names & {*OWN}))}"),
        (new.exists() and {e.name for e in new.iterdir()} - {*OWN}, f"needs {new}, where something else is"),
    ):
        if wrong:
            raise ConfigError(f"--out: {out} {what}; allowed with --overwrite: the folder of an earlier run")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Metrics:
    """metrics.jsonl, a line for each step. A line that has no room on the disk is kept, and written when there is some.

    after: of a run that goes on, the lines up to this step stay; they are in the folder `earlier`. ready: called when
    the disk has had room for them, before the others go."""

    def __init__(
        self, run: Path, after: int, tell: Callable[[str], None], earlier: Path | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._path = run / METRICS
        self.lines = [one for one in _read((earlier or run) / METRICS) if one["step"] <= after] if after else []
        with replaced(self._path) as beside:
            beside.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
            sync(beside)
            ready()
        self._file, self._left, self._tell, self._full = self._path.open("ab", buffering=0), b"", tell, False

    def write(self, line: dict[str, Any]) -> None:
        """JSON has no number that is not finite: it becomes null."""
        whole = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._left += json.dumps(whole).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write the lines that were kept, if there is room."""
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
            self._full = False
        except OSError as error:
            if not self._full:
                self._tell(f"metrics.jsonl: {error.strerror}; its lines are kept and written when there is room")
            self._full = True

    def move(self, run: Path) -> None:
        """Go on in another folder, with the lines so far as far as they can be read."""
        file, before = (run / METRICS).open("ab", buffering=0), b""
        with suppress(OSError):
            before = read(self._path)
        self._file.close()
        self._file, self._path, self._left = file, run / METRICS, before + self._left
        self.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._left:
            self._tell(f"metrics.jsonl: {self._left.count(10)} lines could not be written")


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an earlier part of the run; the last may have been cut off."""
    lines = []
    for text in read(path).decode(errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            if not isinstance(line.get("held_out_loss_before", 0.0), int | float):
                del line["held_out_loss_before"]
            lines.append(line)
    return lines
