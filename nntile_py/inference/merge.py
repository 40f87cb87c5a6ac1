"""The command `nntile merge`: write a model with its adapter merged into the weights, as transformers reads it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.format import StoredArray
from nntile_py.checkpoint.model_files import companions_of
from nntile_py.errors import ConfigError
from nntile_py.inference.open_model import open_model
from nntile_py.models.hf_config import ADAPTER, base_of, is_adapter
from nntile_py.system.folders import write_new


def merge(folder: Path, out: Path, trust_code: bool = False) -> int:
    """Write the model of an adapter's folder, with merged weights, to a new folder. Returns the number of weights.

    Args:
        folder: The folder of a run with `model.lora`, one of its checkpoints, or an adapter of peft.
        out: The folder to write. It gets the weights, config.json, and the small files of the base model and the run.
        trust_code: Run the Python file that the folder names.

    Raises:
        ConfigError: `folder` has no adapter, or `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT: {out} is not an empty folder; allowed: a new or empty folder")
    opened = open_model(folder, trust_code=trust_code)
    if not is_adapter(opened.folder):
        need = "a run with model.lora, its checkpoint, or an adapter of peft"
        raise ConfigError(f"FOLDER: {opened.folder} has no {ADAPTER}; allowed: {need}")
    model, files = opened.model, dict[str, str | bytes]()
    for place in filter(None, (base_of(opened.folder), opened.folder)):
        files |= companions_of(place)
    config = model.hf_config() | {"dtype": str(next(iter(model.weights.values())).dtype)}
    files[checkpoint.CONFIG] = json.dumps(config, indent=2).encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        write_new(out / name, content)
    arrays = {
        name: StoredArray(str(value.dtype), value.shape, partial(model.weights.__getitem__, name))
        for name, value in model.weights.items()
    }
    checkpoint.write_tensors(out / checkpoint.MODEL, arrays)  # last: a folder without weights cannot be opened
    return len(arrays)
