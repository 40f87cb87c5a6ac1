"""Adapters of LoRA as files in peft's format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.lora import A, B, LoRA, adapted, is_adapter, module_of
from nntile_py.models.base import Model
from nntile_py.models.hf_config import arrays, named, read_json, tensors_in
from nntile_py.schema import validated
from nntile_py.system.folders import new_folders, replaced
from nntile_py.typed import typed

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # prefix of weight names in peft's files
# {key of adapter_config.json: allowed values}. Other values would change the result. (): any value is allowed.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_rslora": (False, None), "use_dora": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "lora_bias": (False, None), "fan_in_fan_out": (),
}  # fmt: skip


@typed
def save_adapter(model: Model, folder: str | Path, base: str | None = None) -> None:
    """Write a model's adapters as peft reads them: adapter_model.safetensors and adapter_config.json.

    Args:
        folder: A new folder, or one whose adapter is replaced.
        base: Folder or name of the model that is adapted, for peft. Default: the config's `from`.

    Raises:
        ConfigError: The model has no adapters.
        OSError: A file cannot be written. Then both old files remain.
    """
    if not (lora := model.config.lora):
        raise ConfigError(f"model: {type(model).__name__} has no adapters; allowed: a model with lora")
    from safetensors.numpy import save

    of, folder = adapted(model.params()), Path(folder)
    saved = sorted({module_of(n) for n in model.weights if not is_adapter(n) and lora.chosen(n, lora.modules_to_save)})
    facts = {
        "peft_type": "LORA", "base_model_name_or_path": base or model.config.from_, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "bias": "none", "inference_mode": True,
        "target_modules": [module_of(name) for name in of], "modules_to_save": saved or None,
        "fan_in_fan_out": any(of.values()),
        "task_type": "CAUSAL_LM" if model.objective == "causal" else None,
    }  # fmt: skip
    tensors = {
        f"{PREFIX}{name}": np.ascontiguousarray(value, np.float32) for name, value in model.weights.items()
        if is_adapter(name) or lora.chosen(name, lora.modules_to_save)
    }  # fmt: skip
    replace_both(folder, save(tensors, {"format": "pt"}), json.dumps(facts, indent=2).encode())


def replace_both(folder: Path, weights: bytes, config: bytes) -> None:
    """Write the two files of an adapter. After a kill at any moment, no old file is beside a new one."""
    with new_folders(folder), replaced(folder / ADAPTER_CONFIG) as config_file:
        config_file.write(config)
        config_file.flush()
        with replaced(folder / ADAPTER) as file:
            file.write(weights)
            file.flush()
            os.fsync(file.fileno())
            (folder / ADAPTER_CONFIG).unlink(missing_ok=True)  # load_adapter refuses weights without it


@typed
def load_adapter(model: Model, folder: str | Path) -> Model:
    """Return the model with the adapters of a folder that `save_adapter` or peft wrote.

    Raises:
        ConfigError: The folder holds no LoRA, a variant of LoRA that is not supported, or adapters of another model; or
            the model already has adapters.
    """
    if model.config.lora:
        raise ConfigError(f"model: {type(model).__name__} already has adapters; allowed: a model without, see merged()")
    folder = Path(folder)
    need = "a folder that peft wrote, with adapter_config.json and adapter_model.safetensors"
    if not ((folder / ADAPTER).is_file() and (folder / ADAPTER_CONFIG).is_file()):
        raise ConfigError(f"adapter: {folder} has no {ADAPTER_CONFIG} or no {ADAPTER}; allowed: {need}")
    facts = read_json(folder / ADAPTER_CONFIG, need)
    for key, values in _FIXED.items():
        if values and facts.get(key, values[0]) not in values:
            raise ConfigError(f"{folder / ADAPTER_CONFIG}: {key}: got {facts[key]!r}; allowed: {values[0]!r}")
    with named(folder / ADAPTER):
        tensors = {name.removeprefix(PREFIX): value for name, value in tensors_in(folder / ADAPTER).items()}
        weights: dict[str, Any] = dict(arrays(tensors))
    modules = [name.removesuffix(f".{A}") for name in weights if name.endswith(f".{A}")]
    others = sorted({module_of(name) for name in weights if not is_adapter(name)})
    rank = {value.shape[:1] for name, value in weights.items() if name.endswith(f".{A}")}
    unknown = [name for name in weights if not is_adapter(name) and name not in model.weights]
    unknown += [name for name in modules if f"{name}.weight" not in model.weights]
    if not modules or len(rank) > 1 or unknown:
        what = f"{unknown[0]}, which the model lacks" if unknown else "no LoRA of one rank"
        raise ConfigError(f"adapter: {folder} has {what}; allowed: adapters of a {type(model).__name__} of this size")
    for one, partner in ((A, B), (B, A)):
        for name in weights:
            if name.endswith(f".{one}") and (lacks := name.removesuffix(one) + partner) not in weights:
                raise ConfigError(f"adapter: {folder} has {name} and no {lacks}; allowed: both of each module")
    rows = sum(rank.pop())
    if facts.get("r") != rows:
        got = f"r: got {facts.get('r')!r}"
        raise ConfigError(f"{folder / ADAPTER_CONFIG}: {got}; allowed: {rows}, the rank of the weights in {ADAPTER}")
    keys = {"targets": modules, "rank": rows, "alpha": facts.get("lora_alpha"), "modules_to_save": others}
    lora = validated(LoRA, keys, f"{folder / ADAPTER_CONFIG}: lora_")
    result = type(model)(model.config.changed(lora=lora), {**model.weights, **weights}, seed=model.seed, hf=model.hf)
    with named(folder / ADAPTER):
        for param in result.params():
            for source in param.sources:
                source.check(result.weights)
    return result
