"""Format of a checkpoint: a folder, complete or absent, from which training continues with bitwise equal results.

model.safetensors and config.json have the form that transformers reads. optimizer.safetensors has the optimizer's
averages, named `WEIGHT.m` and `WEIGHT.v`. state.json has the step, the settings of the run and a hash of each file.
`nntile train` adds tokenizer.json, tokenizer_config.json, and small files from the folder of `model.from`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system.folders import (
    MARK,
    create,
    errors_name,
    exchange,
    is_marked,
    mark,
    read,
    remove_files,
    remove_marked,
    sync,
    temporary_name,
    temporary_names,
    unmark,
    write_new,
)  # fmt: skip
from nntile_py.system.folders import remove_leftovers as remove_temporary_files
from nntile_py.system.units import room
from nntile_py.system.version import VERSION
from nntile_py.tasks.optimizer import MOST_SCALE

FORMAT = 1
MODEL, CONFIG, OPTIMIZER, TOKENIZER, TOKENIZER_CONFIG, STATE = (
    "model.safetensors", "config.json", "optimizer.safetensors", "tokenizer.json", "tokenizer_config.json",
    "state.json",
)  # fmt: skip
FILES = (MODEL, CONFIG, OPTIMIZER, TOKENIZER, TOKENIZER_CONFIG, STATE)
_UNFINISHED = "unfinished checkpoint"  # mark of a folder that is being written
FOLDER_NAME = re.compile(r"step-(\d+)")
_HIDDEN_NAME = re.compile(r"\.(step-\d+)\..*")
_FILE_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16"}

Array = np.ndarray[Any, Any]


class DamagedCheckpoint(ConfigError):
    """A file of a checkpoint has changed since it was written, or is missing."""


@dataclass(frozen=True)
class StoredArray:
    """An array to be written: NumPy's name of its dtype, its shape, and a function that reads the array."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TrainerState:
    """Weights and the optimizer's averages after a step, by the names that they have in a checkpoint."""

    step: int
    weights: Mapping[str, StoredArray]
    averages: Mapping[str, Mapping[str, StoredArray]]  # by name of the average, m or v, then by weight
    loss_scale: Mapping[str, Any] | None = None  # LossScale.state

    @property
    def bytes(self) -> int:
        groups = (self.weights, *self.averages.values())
        return sum(stored.bytes for arrays in groups for stored in arrays.values())


# -- writing


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the path of a step's checkpoint inside the folder of a run."""
    return run / "checkpoints" / f"step-{step:06d}"


def write_checkpoint(
    folder: Path, state: TrainerState, files: Mapping[str, str | bytes], facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint into `folder`. It replaces an earlier checkpoint in that folder.

    Args:
        folder: The folder to write.
        state: Weights and averages.
        files: Further files, by name; a name may have one folder in front, such as 1_Pooling/config.json.
        facts: Further entries of state.json.

    Raises:
        OSError: The disk does not take the files.
        NNTileError: A weight has values that are not finite.
    """

    def finite(name: str, value: Array) -> None:
        if not np.isfinite(value).all():
            raise NNTileError(f"weight {name} has values that are no finite numbers after step {state.step}")

    averages = {f"{weight}.{name}": value for name, of in state.averages.items() for weight, value in of.items()}
    with new_folder(folder) as inside:
        hashes = {
            MODEL: write_tensors(inside / MODEL, state.weights, finite),
            OPTIMIZER: write_tensors(inside / OPTIMIZER, averages),
        }
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (inside / name).parent.mkdir(exist_ok=True)
            write_new(inside / name, data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        known = {"format": FORMAT, "version": VERSION, "step": state.step}
        known |= {"loss_scale": state.loss_scale} if state.loss_scale else {}
        write_new(inside / STATE, json.dumps(known | dict(facts) | {"sha256": hashes}, indent=2))


def check_free_space(run: Path, need: int) -> None:
    """Raise OSError if the disk of a run's folder has less than `need` bytes free."""
    free = shutil.disk_usage(run).free
    if free < need:
        text = f"{os.strerror(errno.ENOSPC)}: {room(free)} free, {room(need)} needed"
        raise OSError(errno.ENOSPC, text, str(run))


def write_tensors(
    path: Path, tensors: Mapping[str, StoredArray], check: Callable[[str, Array], None] = lambda name, value: None
) -> str:
    """Write a new safetensors file and return its SHA-256. Only one array at a time is in memory.

    check: called with each array's name and the array before the array is written; may raise an error.

    Source: https://huggingface.co/docs/safetensors: length of the header in 8 bytes, header in JSON, arrays.
    safetensors' own save_file copies every array and holds the GIL until the disk has all arrays, which would stop a
    training run that continues meanwhile."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.bytes
        header[name] = {"dtype": _FILE_DTYPES[value.dtype], "shape": value.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with errors_name(path), create(path) as file:

        def put(data: Any) -> None:
            digest.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little") + text)
        for name, stored in tensors.items():
            array = stored.read()
            check(name, array)
            put(np.ascontiguousarray(array, stored.dtype).reshape(-1).view(np.uint8))
    return digest.hexdigest()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. Afterwards sync it and rename it to `folder`, replacing an earlier checkpoint.

    Files that a user has put into the folder of the earlier checkpoint stay.

    Raises:
        ConfigError: `folder` exists and is neither empty nor a checkpoint of this program, or a user's file in it has
            the name of a new file.
    """
    folder = Path(os.path.realpath(folder))
    users_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(folder, unfinished=True)
    beside = temporary_name(folder)
    beside.mkdir()
    lock = os.open(beside, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark(beside, _UNFINISHED)
        yield beside
        unmark(beside)
        for file in beside.rglob("*"):
            sync(file)
        sync(beside)
        if twice := users_files(folder) & {file.name for file in beside.iterdir()}:
            need = "a folder without it, as a checkpoint needs this name"
            raise ConfigError(f"{folder}: {min(twice)} is of no checkpoint; allowed: {need}")
        try:
            beside.rename(folder)  # an empty folder of that name may exist
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            exchange(folder, beside)
            for name in users_files(beside):
                (beside / name).rename(folder / name)
        sync(folder.parent)
    finally:
        _remove_own(beside)
        os.close(lock)


def own_files(folder: Path) -> set[str] | None:
    """Return the names of the files that this program wrote into a checkpoint; None if `folder` is no checkpoint.

    The content of state.json tells a checkpoint from other folders that have a file of this name."""
    try:
        state = StateFile.model_validate(json.loads(read(folder / STATE)))
    except (OSError, ValueError, RecursionError):  # pydantic's ValidationError is a ValueError
        return None
    return {STATE, *filter(is_inside, state.sha256)}


def is_inside(name: str) -> bool:
    """Return True if a relative path stays in a checkpoint: a file's name, or FOLDER/NAME."""
    parts = Path(name).parts
    return 1 <= len(parts) <= 2 and not Path(name).is_absolute() and ".." not in parts


def users_files(folder: Path) -> set[str]:
    """Return the names in a checkpoint that this program did not write; an empty set if there is no such folder.

    Raises:
        ConfigError: `folder` is neither empty nor a checkpoint of this program.
    """
    if not os.path.lexists(folder):
        return set()
    own, names = own_files(folder), {entry.name for entry in folder.iterdir()} if folder.is_dir() else {""}
    if own is None and names:
        raise ConfigError(f"{folder}: there is something else already; allowed: a new or empty folder, or a checkpoint")
    return names - {Path(name).parts[0] for name in own or ()}


def _remove_own(folder: Path) -> None:
    """Remove a folder if this program has made it: an unfinished checkpoint, or a checkpoint without users' files."""
    if is_marked(folder, _UNFINISHED):
        remove_marked(folder)
        return
    # state.json last: after a kill it still tells that the folder is a checkpoint.
    remove_files(folder, sorted(own_files(folder) or (), key=STATE.__eq__))
    with suppress(OSError):  # users' files stay
        folder.rmdir()


def _remove_left(folder: Path, unfinished: bool) -> None:
    """Remove temporary folders that killed processes have left while they wrote or replaced the checkpoint `folder`.

    unfinished: Remove only unfinished checkpoints: a complete one may be a replaced checkpoint that another thread is
    just removing."""
    for left in temporary_names(folder):
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another process or thread writes it
                if is_marked(left, _UNFINISHED) or not unfinished:
                    remove_temporary_files(left / MARK)  # files of a process that was killed while it wrote the mark
                    _remove_own(left)
                    left.rename(free_name(folder))  # users' files, if there are any
            finally:
                os.close(lock)


def remove_leftovers(run: Path) -> None:
    """Remove incomplete checkpoints that killed processes left. No other thread may write a checkpoint of the run."""
    folder = run / "checkpoints"
    for name in sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else ():
        if hidden := _HIDDEN_NAME.fullmatch(name):
            _remove_left(folder / hidden[1], unfinished=False)


def set_aside(run: Path, after: int) -> list[Path]:
    """Rename the checkpoints of steps after step `after`, from which a run resumes. Returns their new paths."""
    moved = []
    for step, folder in checkpoints_in(run):
        if step > after:
            moved.append(folder.rename(free_name(folder)))
    return moved


def free_name(path: Path) -> Path:
    """Return the first free one of the paths PATH.old1, PATH.old2, ..."""
    names = (path.with_name(f"{path.name}.old{n}") for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def prune(run: Path, keep: int, keep_every: int | None, best: int | None = None) -> None:
    """Remove checkpoints, except the newest `keep`, the one of step `best`, and multiples of `keep_every` steps."""
    for step, folder in [*checkpoints_in(run)][keep:]:
        if step != best and not _is_permanent(step, keep_every):
            remove_checkpoint(folder)


def removable(
    run: Path, newest: int | None, keep_every: int | None, best: int | None = None
) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint that may be removed if the disk is full, the oldest first.

    newest: step of the newest checkpoint that is known to be complete. Older checkpoints may be removed, except the
    checkpoint of step `best`, and multiples of `keep_every` steps. None: no checkpoint may be removed."""
    older = [(n, path) for n, path in checkpoints_in(run) if newest is not None and n < newest and n != best]
    return [(step, path) for step, path in reversed(older) if not _is_permanent(step, keep_every) and own_files(path)]


def _is_permanent(step: int, keep_every: int | None) -> bool:
    return bool(keep_every) and step % (keep_every or 1) == 0


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. If the process is killed meanwhile, no part stays under the checkpoint's name.

    Files that a user has put into the folder are then in FOLDER.old1. A folder that is no checkpoint stays."""
    if own_files(folder) is None:
        return
    going = temporary_name(folder)
    folder.rename(going)
    _remove_own(going)
    if going.exists():
        going.rename(free_name(folder))


def freed_bytes(folder: Path) -> int:
    """Return how many bytes the removal of a checkpoint frees. A file with a second hard link frees nothing."""
    files = [file.stat() for name in own_files(folder) or () if (file := folder / name).is_file()]
    return sum(facts.st_size for facts in files if facts.st_nlink == 1)


# -- reading


def checkpoints_in(run: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint of a run, the newest first."""
    folders = (run / "checkpoints").iterdir() if (run / "checkpoints").is_dir() else ()
    named = ((match, path) for path in folders if (match := FOLDER_NAME.fullmatch(path.name)))
    return sorted(((int(match[1]), path) for match, path in named), reverse=True)


class _Scale(BaseModel):
    """Schema of LossScale.state in state.json."""

    model_config = ConfigDict(strict=True, extra="forbid")
    value: float
    good: int = Field(ge=0, lt=2**53)

    @field_validator("value")
    @classmethod
    def _scale(cls, value: float) -> float:
        if not 1 <= value <= MOST_SCALE:
            raise ValueError(f"got {value!r}; allowed: a number of at least 1 and at most {MOST_SCALE:g}")
        return value


class StateFile(BaseModel):
    """Schema of state.json. Further entries are allowed."""

    model_config = ConfigDict(strict=True)
    format: Literal[1]
    step: int = Field(ge=0, lt=2**53)
    sha256: dict[str, str]
    model: dict[str, Any] | None
    trainer: dict[str, Any]
    config: dict[str, Any] | None = None
    data: dict[str, str] | None = None
    loss_scale: _Scale | None = None

    @field_validator("sha256")
    @classmethod
    def _all(cls, hashes: dict[str, str]) -> dict[str, str]:
        if missing := {MODEL, OPTIMIZER} - hashes.keys():
            raise ValueError(f"{', '.join(sorted(missing))} missing")
        return hashes
