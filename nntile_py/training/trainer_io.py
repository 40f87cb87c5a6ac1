"""What Trainer.save writes beside arrays, and Trainer.load reads."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.execution.mpi import Ranks
from nntile_py.models.hf_config import arrays, named, tensors_of
from nntile_py.models.registry import find, type_of
from nntile_py.tasks.optimizer import OPTIMIZERS
from nntile_py.training import checkpoint

_METHODS = {method.__name__: method for method in OPTIMIZERS.values()}


def facts(trainer: Any) -> dict[str, Any]:
    """Of a Trainer, what `load` needs besides weights and averages."""
    spec = trainer.spec
    config = getattr(spec.model, "config", None)
    model = config and config.model_dump(mode="json", by_alias=True, exclude={"from_"})
    return {
        "model": model and model | {"type": type_of(spec.model)},
        "trainer": {
            "batch": spec.batch, "seq": spec.seq, "tiles": spec.tiling.tiles, "dtype": spec.dtype,
            "optimizer": {"name": spec.optimizer.method.__name__, **spec.optimizer.settings},
            "clip_grad_norm": spec.clip_grad_norm, "skip_above_norm": spec.skip_above_norm, "accumulate": spec.policy,
            "fusion": vars(spec.fusion), "grad_accumulation": spec.grad_accumulation, "seed": trainer.seed,
            "shift_labels": trainer.shift_labels, "pack": spec.pack, "check_finite": trainer.checked.looks,
            "loss_scale": spec.loss_scale,
        },
    }  # fmt: skip


def save(trainer: Any, folder: Path, ranks: Ranks | None) -> None:
    """What a trainer holds as a checkpoint: see Trainer.save. All ranks call it."""
    config = hasattr(trainer.model, "hf_config")
    files = {checkpoint.CONFIG: json.dumps(trainer.hf_config(), indent=2)} if config else {}
    live = trainer.live()
    if ranks and ranks.rank:
        live.give()
        if ranks.any(False):
            raise NNTileError(f"{folder}: the first rank could not write it")
        return
    written = False
    try:
        checkpoint.write(folder, live.state(), files, facts(trainer))
        written = True
    finally:
        live.end()
        if ranks:
            ranks.any(not written)


def load(cls: type[Any], folder: Path, model: Any, options: Mapping[str, Any]) -> Any:
    """A trainer of this class: see Trainer.load."""
    if not (folder / checkpoint.STATE).is_file():
        newest = next((f"; the newest of this run is {path}" for _, path in checkpoint.found(folder)), "")
        raise ConfigError(f"{folder}: no checkpoint; allowed: a folder that Trainer.save wrote{newest}")
    read, known = checkpoint.facts(folder), [*inspect.signature(cls.__init__).parameters][2:]
    if unknown := options.keys() - {*known}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: unknown argument; allowed are {', '.join(known)}")
    with named(folder):
        saved = _arguments(read["trainer"], folder / checkpoint.STATE, known)
    if model is None:
        if read["model"] is None:
            raise ConfigError(f"{folder}: a model of your own was saved; give it: Trainer.load(folder, model)")
        with named(folder):
            model = find(read["model"].get("type")).from_hf(folder, **read["model"])
    elif isinstance(model, type) or not (hasattr(model, "trace") and hasattr(model, "weights")):
        raise ConfigError(f"model: {model!r} is not allowed; use a model, such as MyModel(config)")
    else:
        model.weights = arrays(tensors_of(folder))
    with named(folder):
        trainer = cls(model, **{**saved, **options})
        trainer.restore(read["step"], checkpoint.averages(folder), scale_of(read, trainer))
    return trainer


def scale_of(facts: Mapping[str, Any], trainer: Any) -> dict[str, Any] | None:
    """The state of the loss' scale that a checkpoint goes on with; None where the trainer begins with another one."""
    same = facts["trainer"].get("loss_scale") == trainer.spec.loss_scale
    return facts.get("loss_scale") if same else None


def check_averages(needed: Collection[str], averages: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError where an average is missing, or is no finite number."""
    if needed != averages.keys():
        told = [", ".join(names) or "none" for names in (averages, needed)]
        raise ConfigError(f"optimizer: the averages that were saved are {told[0]}, those that it needs {told[1]}")
    for name, values in averages.items():
        if wrong := [weight for weight, value in values.items() if not np.isfinite(value).all()]:
            raise ConfigError(f"optimizer: {name} of {wrong[0]} has values that are no finite numbers")


def _arguments(saved: Mapping[str, Any], file: Path, known: list[str]) -> dict[str, Any]:
    """Of the Trainer that was saved; those that its version did not know keep their defaults."""
    if wrong := ({"batch", "seq", "optimizer"} - saved.keys()) | (saved.keys() - {*known}):
        raise checkpoint.Damaged(f"{file}: trainer: {', '.join(sorted(wrong))}")
    try:
        how: dict[str, Any] = dict(saved["optimizer"])
        return {**saved, "optimizer": _METHODS[str(how.pop("name"))](**how)}
    except (KeyError, TypeError, AttributeError) as error:
        raise checkpoint.Damaged(f"{file}: trainer.optimizer: {error!r}") from None
