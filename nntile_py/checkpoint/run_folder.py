"""The folder of a run: its files, its metrics, and how it replaces an earlier run."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.best import BEST, best_step, remove_unfinished_links
from nntile_py.data import confusion
from nntile_py.data.special_tokens import GENERATION
from nntile_py.errors import ConfigError
from nntile_py.runs import taken
from nntile_py.system.folders import (
    MARK,
    NO_ROOM,
    append,
    exchange,
    is_marked,
    link_or_copy,
    mark,
    read,
    remove_files,
    remove_leftovers,
    replace_file,
    replaced,
    same_content,
    sync,
    unmark,
)  # fmt: skip
from nntile_py.system.units import counted
from nntile_py.yaml_text import MOST_BYTES, parse

METRICS, RUN_CONFIG, LOSSES, SAMPLE = "metrics.jsonl", "config.yaml", "loss.png", "sample.txt"
_NEW = "new run"  # mark of the folder of a run that is to replace an earlier run
# Files that `nntile train` writes; a run never removes any other file.
OWN = (
    checkpoint.MODEL, checkpoint.CONFIG, checkpoint.TOKENIZER,
    checkpoint.TOKENIZER_CONFIG, GENERATION, RUN_CONFIG, METRICS, "checkpoints", BEST,
    *confusion.FILES, LOSSES, SAMPLE,
)  # fmt: skip


class RunFolder:
    """The folder of a run, locked while the run trains.

    Args:
        out: The folder.
        replaces: Replace an earlier run in `out`. The new run is written into a folder beside `out`, and replaces `out`
            when its first checkpoint is complete.
        new: The folder must be empty.
        report: Shows a message if a user's file gets another name.

    Attributes:
        path: The folder into which the run writes now: `out`, or a folder beside it until the run replaces `out`.

    Raises:
        ConfigError: Another process trains into the folder.
    """

    def __init__(
        self, out: Path, replaces: bool = False, new: bool = False, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self._report = report
        self.out = self.path = Path(os.path.realpath(out))
        self._locks: list[int] = []
        if replaces and self.out.is_dir():
            self._locks.append(_locked(self.out))
            self.path = self.out.with_name(f"{self.out.name}.new")
        self._made = not self.path.exists()
        self._fresh = new or self._made or self.path != self.out  # True if all files in `path` are of this run
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks.append(_locked(self.path, "--out" if self._fresh else "--resume"))
        if new and any(self.path.iterdir()):
            self.close()
            raise ConfigError(f"--out: another process has begun to train into {out}; allowed: another folder")
        try:
            self._prepare()
        except OSError:
            self.give_up()
            raise

    def _prepare(self) -> None:
        """Remove what killed runs have left, and mark the folder as the folder of a run."""
        for name in OWN:
            remove_leftovers(self.path / name)
        remove_unfinished_links(self.path)
        checkpoint.remove_leftovers(self.path)
        if self.path != self.out:
            if is_marked(self.path, _NEW):
                _remove_run(self.path, self.path)
            mark(self.path, _NEW)
        if self._fresh:  # metrics.jsonl comes first: after a kill it lets --overwrite accept the folder
            append(self.path / METRICS).close()

    def close(self) -> None:
        """Unlock the folder."""
        while self._locks:
            os.close(self._locks.pop())

    def give_up(self) -> None:
        """Remove the files of a run that cannot begin here, and unlock the folder. A resumed run's files stay."""
        if self._fresh:
            _remove_run(self.path, self.path)
            unmark(self.path)
        if self._made:
            with suppress(OSError):  # a user has put a file into it
                self.path.rmdir()
        self.close()

    def settle(self) -> None:
        """Replace the earlier run in `out` by this run. Files in `out` that no run has written stay.

        Called when this run has a checkpoint. Does nothing if the run writes into `out` already."""
        if self.path == self.out:
            return
        old = self.path
        with suppress(OSError):  # if a kill below leaves the earlier run in `old`, the mark allows its removal
            mark(self.out, _NEW)
        exchange(self.out, old)
        self.path = self.out
        with suppress(OSError):  # what cannot be removed or moved stays in `old`
            unmark(self.out)
            self._report_moved(_remove_run(old, self.out))
            unmark(old)
            old.rmdir()

    def publish(self, step: int, names: Set[str] | None = None) -> None:
        """Put a checkpoint's files into the run's folder, except the optimizer's averages and state.json.

        The weights are a hard link to the checkpoint's file, or a copy on disks without hard links. Other files are
        copies, which a user may edit without a change of the checkpoint, or links if the disk has no room for copies.
        A user's files of these names are renamed, see `make_way`.

        names: only the files with these names. None: all files.
        """
        source = checkpoint.checkpoint_folder(self.path, step)
        names = _published(source) if names is None else names
        for name in sorted(names, key=lambda name: (name == checkpoint.MODEL, name)):  # the weights last
            if name == checkpoint.MODEL:
                link_or_copy(source / name, self.path / name)
                continue
            self.make_way(name)
            try:
                replace_file(self.path / name, read(source / name))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                link_or_copy(source / name, self.path / name)
        sync(self.path)

    def make_way(self, name: str) -> None:
        """Rename to NAME.old1 what a user has put in the place of the run's file `name`, or of the file's folder.

        In the place of the folder, files are renamed, and links, because the run would write through a link."""
        path = self.path / name
        inner = path.parent
        if inner != self.path and os.path.lexists(inner) and (inner.is_symlink() or not inner.is_dir()):
            self._report_moved([inner.rename(checkpoint.free_name(inner))])
        if os.path.lexists(path) and not _is_copy(self.path, name):
            self._report_moved([path.rename(checkpoint.free_name(path))])

    def _report_moved(self, renamed: list[Path]) -> None:
        for path in renamed:
            self._report(f"{path.parent / path.stem} is not what a run has written: it is now {path.name}")


def _locked(folder: Path, option: str = "--out") -> int:
    """Lock a folder and return a file descriptor. The lock lasts until the descriptor is closed.

    Raises ConfigError if another process has locked the folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        need = "to wait until that process ends" if option == "--resume" else "another folder"
        raise ConfigError(f"{option}: another process is training into {folder}; allowed: {need}") from None
    return lock


def check_place(option: str, folder: Path) -> None:
    """Raise ConfigError if `folder` is in the folder `checkpoints` of a run, where the run would remove it later.

    option: the option that names the folder, for the message."""
    real = Path(os.path.realpath(folder))
    for above in (real, *real.parents):
        if above.name == "checkpoints" and (above.parent / METRICS).is_file():
            where = f"lies in the checkpoints of the run {above.parent}"
            raise ConfigError(f"{option}: {folder} {where}; allowed: a folder outside of them")


def check_unlocked(folder: Path, option: str = "--out") -> None:
    """Raise ConfigError if another process trains into the folder that an option names."""
    if folder.is_dir():
        os.close(_locked(folder, option))


def check_replaced(out: Path) -> None:
    """Raise ConfigError if `out` is not an earlier run that a new run may replace."""
    target = Path(os.path.realpath(out))
    new = target.with_name(f"{target.name}.new")
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else set()
    for wrong, what in (
        (target.exists() and not target.is_dir(), "is no folder"),
        (target.is_mount(), "is where a disk is mounted"),
        (Path.cwd().is_relative_to(target), "is the current folder, or above it"),
        (names & {*OWN} and not _is_run(target, names), f"is no run, but has {', '.join(sorted(names & {*OWN}))}"),
        (not _is_free(new), f"needs {new}, where something else is"),
    ):
        if wrong:
            raise ConfigError(f"--out: {out} {what}; allowed with --overwrite: the folder of an earlier run")


def _is_run(folder: Path, names: Set[str]) -> bool:
    """Return True if a folder with names of a run's files is a run, by the content of metrics.jsonl and config.yaml."""
    if METRICS not in names:
        return False
    if RUN_CONFIG not in names:
        return names & {*OWN} == {METRICS}
    try:
        config = parse(read(folder / RUN_CONFIG, MOST_BYTES).decode(), RUN_CONFIG)
        first = read(folder / METRICS, 2**16).partition(b"\n")[0]
    except (OSError, ValueError, ConfigError):
        return False
    ours = isinstance(config, dict) and {"model", "data", "tiles", "train", "runtime"} <= config.keys()
    return ours and (not first or b'"step"' in first)


def _is_free(new: Path) -> bool:
    """Return True if a run that is to replace another run may use the folder `new`: it has at most a killed run."""
    return not taken(new) or (is_marked(new, _NEW) and not {entry.name for entry in new.iterdir()} - {*OWN, MARK})


def _remove_run(folder: Path, kept: Path) -> list[Path]:
    """Remove a run's files from `folder`. If `kept` is another folder, move other files to the same place in `kept`.

    A run's small file that differs from its copies in the checkpoints was edited: it counts as a user's file. Returns
    the files that have got another name, see `_move_entries`."""
    inner, written, renamed = folder / "checkpoints", {*OWN}, list[Path]()
    if best_step(folder) is None:
        written -= {BEST}  # a user's file
    for _, path in checkpoint.checkpoints_in(folder):
        copies = {name for name in _published(path) if _is_copy(folder, name)}
        written |= copies
        if folder != kept:
            written -= _published(path) - copies - {checkpoint.MODEL}
    if inner.is_dir() and not inner.is_symlink():
        for _, path in checkpoint.checkpoints_in(folder):
            checkpoint.remove_checkpoint(path)
        renamed = _move_entries(inner, kept / inner.name)
        with suppress(OSError):  # the user's files stay
            inner.rmdir()
    remove_files(folder, written)
    return renamed + _move_entries(folder, kept)


def _published(folder: Path) -> set[str]:
    """Return the names of a checkpoint's files that a run's folder also has. Files in folders of OWN are left out."""
    names = (checkpoint.own_files(folder) or set()) - {checkpoint.OPTIMIZER, checkpoint.STATE}
    return {name for name in names if str(Path(name).parent) not in OWN}


def missing_files(run: Path, source: Path) -> set[str]:
    """Return the names of the files that `publish` takes from the checkpoint `source` and the run's folder lacks."""
    return {name for name in _published(source) if not os.path.lexists(run / name)}


def _is_copy(run: Path, name: str) -> bool:
    """Return True if the file `name` in a run's folder has the content that a checkpoint of the run has for it."""
    path, folders = run / name, checkpoint.checkpoints_in(run)
    return not path.is_symlink() and any(same_content(path, folder / name) for _, folder in folders)


def _move_entries(folder: Path, target: Path) -> list[Path]:
    """Move all entries of a folder into another folder; an entry whose name is taken becomes NAME.old1.

    Returns the entries that have become NAME.old1."""
    renamed = []
    for entry in folder.iterdir() if folder != target else ():
        if entry.name != MARK:
            where = target / entry.name
            if os.path.lexists(where):
                renamed.append(entry.rename(checkpoint.free_name(where)))
            else:
                entry.rename(where)
    return renamed


# -- metrics


class Metrics:
    """Writes metrics.jsonl, one line for each step. On a full disk, lines wait in memory until there is room.

    Args:
        run: The run's folder.
        after: Step after which the run resumes. Earlier lines up to this step stay. 0: a new run, no line stays.
        report: Shows a message.
        earlier: Folder of the metrics.jsonl with the earlier lines. None: `run`.
        ready: Called once, after the lines that stay are on the disk and before they replace the old metrics.jsonl.

    Attributes:
        lines: The lines that stayed.
        first: Entries to add to the first line that this process writes.
        listener: Called with each line that is written; None: no function is called.
    """

    listener: Callable[[dict[str, Any]], None] | None = None

    def __init__(
        self, run: Path, after: int, report: Callable[[str], None], earlier: Path | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._path = run / METRICS
        self.lines = [one for one in read_metrics((earlier or run) / METRICS) if one["step"] <= after] if after else []
        with replaced(self._path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in self.lines).encode())
            file.flush()
            os.fsync(file.fileno())
            ready()
        self._file, self._left, self._report, self._full = append(self._path), b"", report, False
        self.first: dict[str, Any] = {}

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Infinity and nan, which JSON lacks, become null."""
        line, self.first = line | self.first, {}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._left += json.dumps(finite).encode() + b"\n"
        self.flush()
        if self.listener:
            self.listener(finite)

    def flush(self) -> None:
        """Write the waiting lines, if there is room."""
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
            self._full = False
        except OSError as error:
            if not self._full:
                self._report(f"metrics.jsonl: {error.strerror}; its lines are kept and written when there is room")
            self._full = True

    def move(self, run: Path) -> None:
        """Continue the file in the folder `run`, with a copy of all earlier lines that can be read."""
        file, before = append(run / METRICS), b""
        with suppress(OSError):
            before = read(self._path)
        self._file.close()
        self._file, self._path, self._left = file, run / METRICS, before + self._left
        self.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._left:
            self._report(f"metrics.jsonl: {counted(self._left.count(10), 'line')} could not be written")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics.jsonl as dicts; [] without a file. A kill may have cut the last line."""
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
