"""The folder of a run: its files, its metrics, and how it replaces an earlier run."""

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

from tokenizers import Tokenizer

from nntile_py.checkpoint import format as checkpoint
from nntile_py.config.run_config import RunConfig
from nntile_py.data import confusion
from nntile_py.data.tokenizer import PAD, frame, number_of, roles
from nntile_py.errors import ConfigError
from nntile_py.system.folders import exchange, read, replaced, sync

Files = dict[str, str | bytes]
GENERATION, METRICS = "generation_config.json", "metrics.jsonl"
# Files that `nntile train` writes; a run never removes any other file.
OWN = (
    checkpoint.MODEL, checkpoint.CONFIG, checkpoint.TOKENIZER,
    checkpoint.TOKENIZER_CONFIG, GENERATION, "config.yaml", METRICS, "checkpoints", *confusion.FILES,
)  # fmt: skip


class RunFolder:
    """The folder of a run, locked while the run trains.

    Args:
        out: The folder.
        replaces: Replace an earlier run in `out`. The new run is written beside it, and takes its place when the first
            checkpoint is complete.
        new: The folder must be empty.

    Attributes:
        path: The folder into which the run writes now: `out`, or a folder beside it until the run replaces `out`.

    Raises:
        ConfigError: Another process trains into the folder.
    """

    def __init__(self, out: Path, replaces: bool = False, new: bool = False) -> None:
        self.out = self.path = Path(os.path.realpath(out))
        self._locks: list[int] = []
        if replaces and self.out.is_dir():
            self._locks.append(_locked(self.out))
            self.path = self.out.with_name(f"{self.out.name}.new")
        self._made = not self.path.exists()
        self._fresh = new or self._made or self.path != self.out  # True if all files in `path` are of this run
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks.append(_locked(self.path))
        if new and any(self.path.iterdir()):
            self.close()
            raise ConfigError(f"--out: another process has begun to train into {out}; allowed: another folder")
        if self.path != self.out:  # files that a killed run left
            for name in OWN:
                _remove(self.path / name)
        checkpoint.remove_leftovers(self.path)

    def close(self) -> None:
        """Unlock the folder."""
        while self._locks:
            os.close(self._locks.pop())

    def give_up(self) -> None:
        """Remove the files of a run that cannot begin here, and unlock the folder. A resumed run's files stay."""
        for name in OWN if self._fresh else ():
            _remove(self.path / name)
        if self._made:
            self.path.rmdir()
        self.close()

    def settle(self) -> None:
        """Replace the earlier run in `out` by this run. Files in `out` that no run has written stay.

        Called when this run has a checkpoint. Does nothing if the run writes into `out` already."""
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
        """Put a checkpoint's weights, config.json and tokenizer files into the run's folder.

        They are hard links to the checkpoint's files, or copies on disks without hard links."""
        source = checkpoint.checkpoint_folder(self.path, step)
        files = checkpoint.TOKENIZER, checkpoint.TOKENIZER_CONFIG, GENERATION, checkpoint.CONFIG, checkpoint.MODEL
        for name in files:  # the weights last
            if (source / name).is_file() or name == checkpoint.MODEL:
                with replaced(self.path / name) as beside:
                    beside.unlink()  # a link is created only where there is no file
                    try:
                        os.link(source / name, beside)
                    except OSError:
                        shutil.copyfile(source / name, beside)
        sync(self.path)


def _locked(folder: Path) -> int:
    """Lock a folder and return a file descriptor. The lock lasts until the descriptor is closed.

    Raises ConfigError if another process has locked the folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"--out: another process is training into {folder}; allowed: another folder") from None
    return lock


def check_place(option: str, folder: Path) -> None:
    """Raise ConfigError if `folder` is in the folder `checkpoints` of a run, where the run would remove it later.

    option: the option that names the folder, for the message."""
    real = Path(os.path.realpath(folder))
    for above in (real, *real.parents):
        if above.name == "checkpoints" and (above.parent / METRICS).is_file():
            where = f"lies in the checkpoints of the run {above.parent}"
            raise ConfigError(f"{option}: {folder} {where}; allowed: a folder outside of them")


def check_unlocked(out: Path) -> None:
    """Raise ConfigError if another process trains into the folder."""
    if out.is_dir():
        os.close(_locked(out))


def check_replaced(out: Path) -> None:
    """Raise ConfigError if `out` is not an earlier run that a new run may replace."""
    target = Path(os.path.realpath(out))
    new = target.with_name(f"{target.name}.new")
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else set()
    for wrong, what in (
        (target.exists() and not target.is_dir(), "is no folder"),
        (target.is_mount(), "is where a disk is mounted; give a folder in it"),
        (Path.cwd().is_relative_to(target), "is the current folder, or above it"),
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


# -- files beside the arrays


def model_files(trainer: Any, tokenizer: Tokenizer, config: RunConfig) -> Files:
    """Return {file name: content} of the files beside the weights, as transformers reads them.

    These are config.json, the tokenizer's files and, if the folder of `model.from` has it, generation_config.json."""
    known = roles(tokenizer)
    saved = trainer.hf_config()
    for role in ("bos_token", "eos_token"):
        saved[f"{role}_id"] = tokenizer.token_to_id(known[role]) if role in known else None
    if (pad := number_of(tokenizer, PAD)) is not None:
        saved["pad_token_id"] = pad
    files = {checkpoint.CONFIG: json.dumps(saved, indent=2)} | tokenizer_files(tokenizer, config)
    if config.model.from_ and (source := Path(config.model.from_) / GENERATION).is_file():
        files[GENERATION] = read(source)
    return files


def tokenizer_files(tokenizer: Tokenizer, config: RunConfig) -> Files:
    """Return {file name: content} of tokenizer.json and tokenizer_config.json.

    The tokenizer frames a text like the training sequences, such as by [CLS] and [SEP]. If model and tokenizer come
    from one folder, tokenizer_config.json is a copy of the file in that folder."""
    framed = Tokenizer.from_str(tokenizer.to_str())
    if config.aim == "masked":
        frame(framed)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= roles(tokenizer) | {"model_input_names": ["input_ids", "attention_mask"]}
    if getattr(config.model, "kinds", 0) > 1:
        settings["model_input_names"].append("token_type_ids")
    if positions := getattr(config.model, "positions", None):
        settings["model_max_length"] = positions
    text: str | bytes = json.dumps(settings, indent=2)
    source, path = config.model.from_, config.tokenizer.path
    if source and path and (file := Path(source) / checkpoint.TOKENIZER_CONFIG).is_file():
        text = read(file) if file.parent.samefile(Path(path).parent) else text
    return {checkpoint.TOKENIZER: framed.to_str(pretty=True), checkpoint.TOKENIZER_CONFIG: text}


# -- metrics


class Metrics:
    """Writes metrics.jsonl, one line for each step. On a full disk, lines wait in memory until there is room.

    Args:
        run: The run's folder.
        after: Step after which the run resumes. Lines of earlier runs up to this step stay. 0: there are none.
        report: Shows a message.
        earlier: Folder of the metrics.jsonl with the earlier lines. None: `run`.
        ready: Called once, after the lines that stay are on the disk and before they replace the old metrics.jsonl.

    Attributes:
        lines: The lines that stayed.
    """

    def __init__(
        self, run: Path, after: int, report: Callable[[str], None], earlier: Path | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._path = run / METRICS
        self.lines = [one for one in _read((earlier or run) / METRICS) if one["step"] <= after] if after else []
        with replaced(self._path) as beside:
            beside.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
            sync(beside)
            ready()
        self._file, self._left, self._report, self._full = self._path.open("ab", buffering=0), b"", report, False

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Infinity and nan, which JSON lacks, become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._left += json.dumps(finite).encode() + b"\n"
        self.flush()

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
            self._report(f"metrics.jsonl: {self._left.count(10)} lines could not be written")


def _read(path: Path) -> list[dict[str, Any]]:
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
