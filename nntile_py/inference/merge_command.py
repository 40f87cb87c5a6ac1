"""`nntile merge`: save a model with its adapters merged into the weights, or only the adapters in peft's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.checkpoint.format import (
    CONFIG,
    MODEL,
    TOKENIZER,
    TOKENIZER_CONFIG,
    StoredArray,
    new_folder,
    write_tensors,
)
from nntile_py.checkpoint.model_files import companions_of
from nntile_py.errors import ConfigError
from nntile_py.inference.open_model import OpenedModel, open_model
from nntile_py.models.adapters import load_adapter, save_adapter
from nntile_py.models.hf_config import read_json
from nntile_py.runs import check_writable
from nntile_py.system.folders import read, write_new


def merge(folder: Path, out: Path, adapter: Path | None, adapter_only: bool, fields: Mapping[str, Any]) -> str:
    """Write the model of `folder` with merged adapters, or only its adapters, to `out`. Returns a message.

    Args:
        folder: Folder of a run or of transformers' save_pretrained.
        out: A new or empty folder.
        adapter: Folder of adapters that peft or `save_adapter` wrote; None: the adapters in `folder`.
        adapter_only: Write adapters in peft's format.
        fields: Fields of the model's config that replace the folder's, see open_model.

    Raises:
        ConfigError: There are no adapters, or `out` is taken or not writable.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT: {out} exists; allowed: a new or empty folder")
    check_writable("OUT", out)
    opened = open_model(folder, fields)
    model = load_adapter(opened.model, adapter) if adapter else opened.model
    if not model.config.lora:
        need = "a run with model.lora, or --adapter FOLDER"
        raise ConfigError(f"FOLDER: the model in {folder} has no adapters; allowed: {need}")
    if adapter_only:
        section = opened.config.get("model")
        base = section.get("from") if isinstance(section, dict) else None
        with new_folder(out) as inside:
            save_adapter(model, inside, base or str(folder))
        return f"adapters saved in {out}"
    _save(model.merged(), opened, out)
    return f"merged weights saved in {out}"


def _save(model: Any, opened: OpenedModel, out: Path) -> None:
    """Write weights, config.json, the tokenizer's files, and the files of `companions_of` to a new folder."""
    config = read_json(opened.folder / CONFIG, "a folder with config.json")
    if "lora" in config:  # a key in the config of a user's own model
        config["lora"] = None
    weights = {name: StoredArray(str(v.dtype), v.shape, partial(np.asarray, v)) for name, v in model.weights.items()}
    with new_folder(out) as inside:
        write_tensors(inside / MODEL, weights)
        write_new(inside / CONFIG, json.dumps(config, indent=2))
        for file in companions_of(opened.folder):
            place = inside / file.relative_to(opened.folder)
            place.parent.mkdir(exist_ok=True)
            write_new(place, read(file))
        for name in (TOKENIZER, TOKENIZER_CONFIG):
            if (opened.folder / name).is_file():
                write_new(inside / name, read(opened.folder / name))
