"""Settings for using a trained model, as in `nntile eval`: the settings of its run, overridden by --set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import create_model

from nntile_py.config.data_section import DataSection
from nntile_py.config.run_config import RunConfig
from nntile_py.config.scheduler_file import apply_scheduler, override, runtime_options
from nntile_py.config.sections import AUTO_TILES, TrainSection
from nntile_py.errors import ConfigError
from nntile_py.graph.step import check_precision
from nntile_py.schema import Section, allowed, assignment, keys, validated

# Keys whose values come from the config of the model's run. Other keys have their defaults unless --set changes them.
_OF_RUN = (
    "precision", "fp8", "tiles", "accumulate", "fusion", "scheduler", "runtime", "data.text", "data.label",
    "data.texts", "data.extensions", "data.messages", "data.prompt", "data.response", "train.batch", "train.seq",
)  # fmt: skip
_SETTINGS = ("precision", "fp8", "tiles", "accumulate", "fusion", "scheduler", "runtime", "seed")
_PARTS: dict[str, tuple[type[Section], tuple[str, ...]]] = {
    "data": (DataSection, ("text", "label", "texts", "extensions", "messages", "prompt", "response")),
    "train": (TrainSection, ("batch", "seq", "mask_probability")),
}  # fmt: skip


@dataclass(frozen=True)
class InferenceConfig:
    """Settings for using a trained model.

    Attributes:
        values: Object with the checked keys precision, fp8, tiles, accumulate, fusion, runtime and seed, as in
            RunConfig.
        data: Names of a table's columns, `text`, `label`, `texts`, `messages`, `prompt` and `response`; `extensions`
            of the files that are read from a folder.
        train: `batch` and `seq`, None if neither the run nor --set sets them; `mask_probability`.
        model: {field of the model's config: value}, from `--set model.KEY=VALUE`.
    """

    values: Any
    data: Any
    train: Any
    model: dict[str, Any]

    @property
    def runtime(self) -> dict[str, Any]:
        """Keyword arguments of Runtime, for one process."""
        options = runtime_options(self.values.runtime.model_dump())
        return {name: value for name, value in options.items() if name not in ("nodes", "shard_weights")}

    @property
    def bound(self) -> dict[str, Any]:
        """Keyword arguments of BoundModel."""
        tiles = {} if self.values.tiles == AUTO_TILES else self.values.tiles.sizes
        return {
            "precision": self.values.precision, "fp8": self.values.fp8, "tiles": tiles,
            "accumulate": self.values.accumulate, "fusion": self.values.fusion,
        }  # fmt: skip


def model_fields(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the fields of the model's config that `--set model.KEY=VALUE` options name.

    Raises:
        ConfigError: A key is not one of InferenceConfig, such as a key that only training reads.
    """
    fields = {}
    for item in overrides:
        key, value = assignment(item)
        section, _, name = key.partition(".")
        if section == "model" and name:
            fields[name] = value
        elif section not in (*_SETTINGS, *_PARTS):
            known = [*_SETTINGS, *(f"{part}.{key}" for part, (_, names) in _PARTS.items() for key in names)]
            raise ConfigError(f"--set {item}: unknown key; {allowed(key, [*known, 'model.KEY'], _known())}")
    return fields


def inference_config(saved: Mapping[str, Any], overrides: Iterable[str] = ()) -> InferenceConfig:
    """Return the settings of a run's saved config, changed by `--set` options.

    Args:
        saved: The run's config as parsed YAML. Keys that only training needs are skipped. {}: all keys have defaults.
        overrides: Texts such as "tiles.embed=96".

    Raises:
        ConfigError: A key or a value is not allowed.
    """
    overrides = list(overrides)
    fields = model_fields(overrides)
    tree: dict[str, Any] = {name: {} for name in _PARTS}
    for key in _OF_RUN:
        name, _, inner = key.partition(".")
        value = saved.get(name)
        if inner and isinstance(value, dict) and inner in value:
            tree[name][inner] = value[inner]
        elif not inner and value is not None:
            tree[name] = deepcopy(value)
    _drop_other_columns(tree["data"], {assignment(item)[0] for item in overrides})
    chosen = tree.get("scheduler")
    for item in overrides:
        if not item.startswith("model."):
            override(tree, item)
    if tree.get("scheduler") is not None:
        apply_scheduler(tree, wins=tree["scheduler"] != chosen, overrides=overrides)
    parts = {name: validated(_part(name), tree.pop(name), f"{name}.") for name in _PARTS}
    values: Any = validated(_settings(), tree, elsewhere=_known)
    check_precision("precision", values.precision, values.runtime.cuda != 0)
    return InferenceConfig(values, parts["data"], parts["train"], fields)


def _drop_other_columns(data: dict[str, Any], named: set[str]) -> None:
    """Remove the run's columns of prompts if --set names a column of conversations, and the reverse."""
    of_prompts = ("prompt", "response")
    if "data.messages" in named:
        for key in of_prompts:
            data.pop(key, None)
    elif any(f"data.{key}" in named for key in of_prompts):
        data.pop("messages", None)


@cache
def _settings() -> type[Section]:
    """Return a section class with the keys of RunConfig that _SETTINGS names."""
    return _some("InferenceSettings", RunConfig, _SETTINGS)


@cache
def _part(name: str) -> type[Section]:
    return _some(f"Inference{name.title()}", *_PARTS[name])


def _some(name: str, source: type[Section], names: Iterable[str]) -> type[Section]:
    """Return a section class with some keys of `source`; a key without a default may be None."""
    fields: dict[str, Any] = {}
    for key in names:
        field = source.model_fields[key]
        fields[key] = (field.rebuild_annotation(), field)
        if field.is_required():
            fields[key] = (field.rebuild_annotation() | None, None)
    made: Any = create_model(name, __base__=Section, **fields)
    return made  # type: ignore[no-any-return]


@cache
def _known() -> list[str]:
    """Return the dotted keys that --set may name, except keys of the section `model`."""
    inner = [f"{part}.{key}" for part, (_, names) in _PARTS.items() for key in names]
    return [*(key for key, _ in keys(_settings())), *inner]
