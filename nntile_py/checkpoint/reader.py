"""Reads a checkpoint: its facts, after a check of every file, and the averages of the optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nntile_py.checkpoint.format import FOLDER_NAME, OPTIMIZER, STATE, Array, DamagedCheckpoint, StateFile, is_inside
from nntile_py.system.folders import (
    read,
)  # fmt: skip


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json, after a check of every file's hash. Raises DamagedCheckpoint."""
    try:
        state = json.loads(read(folder / STATE))
        StateFile.model_validate(state)
        if (named := FOLDER_NAME.fullmatch(folder.name)) and int(named[1]) != state["step"]:
            raise DamagedCheckpoint(f"{folder}: holds step {state['step']}, which is not its name")
        for name, expected in state["sha256"].items():
            if not is_inside(name) or not (folder / name).is_file():
                raise DamagedCheckpoint(f"{folder / name}: no such file in the checkpoint")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise DamagedCheckpoint(f"{folder / name}: the content is not what was written")
    except OSError as error:
        raise DamagedCheckpoint(f"{error.filename}: {error.strerror}") from None
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise DamagedCheckpoint(f"{folder / STATE}: {reasons}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder / STATE}: not readable ({type(error).__name__}: {error})") from None
    return dict(state)


class Averages(Mapping[str, Array]):
    """{name of a weight: array} of one of the optimizer's averages, m or v, in a checkpoint.

    An array is read from the file at each access."""

    def __init__(self, path: Path, file: Any, names: Mapping[str, str]) -> None:
        self._path, self._file, self._names = path, file, names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, weight: str) -> Array:
        name = self._names[weight]
        try:
            array: Array = self._file.get_tensor(name)
        except Exception as error:  # of safetensors; TypeError for dtypes that NumPy lacks
            raise DamagedCheckpoint(f"{self._path}: {name}: {error}") from None
        return array


def read_averages(folder: Path) -> dict[str, Averages]:
    """Return the optimizer's averages in a checkpoint: {m or v: {name of a weight: array}}."""
    from safetensors import safe_open

    path, names = folder / OPTIMIZER, dict[str, dict[str, str]]()
    try:
        file: Any = safe_open(path, "numpy")
        for name in file.keys():  # noqa: SIM118
            weight, _, average = name.rpartition(".")
            names.setdefault(average, {})[weight] = name
    except Exception as error:  # of safetensors
        raise DamagedCheckpoint(f"{path}: {error}") from None
    return {average: Averages(path, file, of) for average, of in names.items()}
