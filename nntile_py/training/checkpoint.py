"""Checkpoints: folders that are whole or not there, with all that a run needs to go on to the bit.

model.safetensors and config.json (as transformers reads them), optimizer.safetensors (the optimizer's averages,
`WEIGHT.m` and `WEIGHT.v`), state.json (the step, what the run was, a hash of each file), of `nntile train` also
tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system.folders import exchange, read, sync
from nntile_py.system.version import VERSION
from nntile_py.tasks.optimizer import MOST_SCALE

FORMAT = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MODEL, CONFIG, OPTIMIZER, TOKENIZER, TOKENIZER_CONFIG, STATE = (
    "model.safetensors", "config.json", "optimizer.safetensors", "tokenizer.json", "tokenizer_config.json",
    "state.json",
)  # fmt: skip
_NUMBERS = itertools.count()
_NAME = re.compile(r"step-(\d+)")
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16"}

Array = np.ndarray[Any, Any]


class Damaged(ConfigError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True)
class Stored:
    """An array of a file: NumPy's name of its dtype, its shape, and what gives it when it is written."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class State:
    """What a trainer holds after a step: weights and the optimizer's averages under the checkpoint's names."""

    step: int
    weights: Mapping[str, Stored]
    averages: Mapping[str, Mapping[str, Stored]]  # by their name, m or v, then by weight
    loss_scale: Mapping[str, Any] | None = None  # see LossScale.state

    @property
    def bytes(self) -> int:
        all_of_them = (self.weights, *self.averages.values())
        return sum(stored.bytes for arrays in all_of_them for stored in arrays.values())


# -- writing


def folder_of(run: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:06d}"


def write(folder: Path, state: State, files: Mapping[str, str | bytes], facts: Mapping[str, Any]) -> None:
    """Make the checkpoint `folder`; one of that name that is there is replaced.

    files: by name, beside the arrays; facts: of state.json, beside what is known here. Raises OSError where it
    cannot be written, NNTileError for weights that are no finite numbers."""

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
            (inside / name).write_bytes(data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        known = {"format": FORMAT, "version": VERSION, "step": state.step}
        known |= {"loss_scale": state.loss_scale} if state.loss_scale else {}
        (inside / STATE).write_text(json.dumps(known | dict(facts) | {"sha256": hashes}, indent=2))


def check_space(run: Path, state: State) -> None:
    """Raise OSError where the disk has too little room for a checkpoint; before it is begun."""
    check_room(run, state.bytes)


def check_room(run: Path, need: int) -> None:
    """Raise OSError where the disk of a run's folder has not this many bytes."""
    free = shutil.disk_usage(run).free
    if free < need:
        text = f"{os.strerror(errno.ENOSPC)}: {free / 2**20:.1f} MiB free, {need / 2**20:.1f} MiB needed"
        raise OSError(errno.ENOSPC, text, str(run))


def write_tensors(
    path: Path, tensors: Mapping[str, Stored], check: Callable[[str, Array], None] = lambda name, value: None
) -> str:
    """A safetensors file; returns its SHA-256. One array at a time is in memory, after `check`.

    https://huggingface.co/docs/safetensors: the length of the header in 8 bytes, the header in JSON, the arrays.
    safetensors' own save_file copies every array and holds the GIL until the disk has them: a training run that goes on
    meanwhile would stand still."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.bytes
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": value.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:

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
    """A folder to fill; afterwards it is synced and takes the name `folder`, of a checkpoint's if it is there."""
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not (folder / STATE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: there is something else already; allowed: a new or empty folder, or a checkpoint")
    beside = folder.with_name(f".{folder.name}.tmp{os.getpid()}-{next(_NUMBERS)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        for file in beside.iterdir():
            sync(file)
        sync(beside)
        try:
            beside.rename(folder)  # also of an empty one
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            exchange(folder, beside)
        sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_leftovers(run: Path) -> None:
    """What killed processes have begun and not ended."""
    for path in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(run: Path, after: int) -> list[Path]:
    """Give checkpoints of later steps than `after` another name: the run goes on from there. Their new names."""
    moved = []
    for step, folder in found(run):
        if step > after:
            free = (folder.with_name(f"{folder.name}.old{n}") for n in range(1, 10**6))
            moved.append(folder.rename(next(path for path in free if not path.exists())))
    return moved


def prune(run: Path, keep: int, keep_every: int | None) -> None:
    """Remove all but the newest `keep` and those of every `keep_every` steps."""
    for step, folder in [*found(run)][keep:]:
        if not _for_good(step, keep_every):
            remove(folder)


def spare(run: Path, newest: int | None, keep_every: int | None) -> list[tuple[int, Path]]:
    """Checkpoints that may go where the disk has no room for a new one, the oldest first; newest: the step of the one
    that is known to be whole, which stays; None: all stay."""
    old = [(step, path) for step, path in found(run) if newest is not None and step < newest]
    return [(step, path) for step, path in reversed(old) if not _for_good(step, keep_every)]


def _for_good(step: int, keep_every: int | None) -> bool:
    return bool(keep_every) and step % (keep_every or 1) == 0


def remove(folder: Path) -> None:
    """A checkpoint; a kill meanwhile leaves no part of it under its name."""
    going = folder.with_name(f".{folder.name}.tmp{os.getpid()}")
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def room_of(folder: Path) -> int:
    """Bytes that the disk has more when the folder is gone: a file with another link stays."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.stat().st_nlink == 1)


# -- reading


def found(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run, the newest first."""
    folders = (run / "checkpoints").iterdir() if (run / "checkpoints").is_dir() else ()
    named = ((match, path) for path in folders if (match := _NAME.fullmatch(path.name)))
    return sorted(((int(match[1]), path) for match, path in named), reverse=True)


class _Scale(BaseModel):
    """What LossScale.state gives."""

    model_config = ConfigDict(strict=True, extra="forbid")
    value: float
    good: int = Field(ge=0, lt=2**53)

    @field_validator("value")
    @classmethod
    def _scale(cls, value: float) -> float:
        if not 1 <= value <= MOST_SCALE:
            raise ValueError(f"{value!r} is not allowed; use a number of at least 1 and at most {MOST_SCALE:g}")
        return value


class _Facts(BaseModel):
    """What must be in state.json, whoever has written it."""

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


def facts(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose files are all whole. Raises Damaged."""
    try:
        state = json.loads(read(folder / STATE))
        _Facts.model_validate(state)
        if (named := _NAME.fullmatch(folder.name)) and int(named[1]) != state["step"]:
            raise Damaged(f"{folder}: holds step {state['step']}, which is not its name")
        for name, expected in state["sha256"].items():
            if Path(name).name != name or not (folder / name).is_file():
                raise Damaged(f"{folder / name}: no such file in the checkpoint")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise Damaged(f"{folder / name}: the content is not what was written")
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from None
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise Damaged(f"{folder / STATE}: {told}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{folder / STATE}: not readable ({type(error).__name__}: {error})") from None
    return dict(state)


class Averages(Mapping[str, Array]):
    """Those of one name in a file, by weight; each is read when it is asked for."""

    def __init__(self, path: Path, file: Any, names: Mapping[str, str]) -> None:
        self._path, self._file, self._names = path, file, names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, weight: str) -> Array:
        name = self._names[weight]
        try:
            found: Array = self._file.get_tensor(name)
        except Exception as error:  # safetensors' own, and TypeError for dtypes that numpy lacks
            raise Damaged(f"{self._path}: {name}: {error}") from None
        return found


def averages(folder: Path) -> dict[str, Averages]:
    """The optimizer's averages by their name, then by weight."""
    from safetensors import safe_open

    path, names = folder / OPTIMIZER, dict[str, dict[str, str]]()
    try:
        file: Any = safe_open(path, "numpy")
        for name in file.keys():  # noqa: SIM118
            weight, _, average = name.rpartition(".")
            names.setdefault(average, {})[weight] = name
    except Exception as error:  # its own
        raise Damaged(f"{path}: {error}") from None
    return {average: Averages(path, file, of) for average, of in names.items()}
