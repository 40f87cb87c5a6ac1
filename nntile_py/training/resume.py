"""Which checkpoint a run goes on from, and whether it is one of this run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nntile_py.config.run_config import RunConfig
from nntile_py.data.dataset import Dataset
from nntile_py.errors import ConfigError
from nntile_py.models.base import Model
from nntile_py.models.registry import find
from nntile_py.training import checkpoint
from nntile_py.training.trainer import Trainer
from nntile_py.training.trainer_io import scale_of

# Keys that may differ and change no number.
FREE = (
    "out", "runtime", "scheduler", "profile", "debug", "sample", "checkpoint", "data", "tokenizer", "model.from",
    "train.log_every", "train.eval_every", "train.eval_batches",
)  # fmt: skip
FIXED = ("model", "optimizer.name")  # others may differ, and are told


@dataclass(frozen=True)
class Resumed:
    """A whole checkpoint and its state.json."""

    folder: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    def model(self, config: RunConfig) -> Model:
        """With the weights of the checkpoint."""
        made = config.model
        return find(made.type).from_hf(self.folder, **made.model_dump(by_alias=True))

    def restore(self, trainer: Trainer) -> None:
        """Averages, step and the loss' scale, for a trainer of `model`."""
        trainer.restore(self.step, checkpoint.averages(self.folder), scale_of(self.facts, trainer))


def newest(where: Path, tell: Callable[[str], None]) -> Resumed:
    """Of a run's folder the newest whole checkpoint, or the one that `where` is. Raises ConfigError."""
    one = (where / checkpoint.STATE).is_file()
    folders = [where] if one else [folder for _, folder in checkpoint.found(where)]
    for folder in folders:
        try:
            return Resumed(folder, checkpoint.facts(folder))
        except checkpoint.Damaged as error:
            tell(f"{error}: this checkpoint is damaged" + ("" if one else "; trying the one before it"))
    what = "no checkpoint that is whole" if folders else "no checkpoint"
    raise ConfigError(f"--resume: {what} in {where}; allowed: a run's folder with checkpoints/, or one of"
                      " those; a run that was killed before its first one begins anew with --overwrite")


def data_facts(config: RunConfig, dataset: Dataset) -> dict[str, str]:
    """What makes another run of a run: hashes of the tokens, of what made them, of an own model's file.

    A saved tokenizer has a template that the one that the run began with may lack; what it adds is in the tokens."""
    bare = Tokenizer.from_str(dataset.tokenizer.to_str())
    bare.post_processor = None
    parts = dataset.contents() | {"tokenizer (its template aside)": bare.to_str().encode()}
    if (file := Path(str(config.model.type).rpartition(":")[0])).suffix == ".py":
        parts["text of the model's file"] = file.read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}


def check_same(resumed: Resumed, config: RunConfig, data: dict[str, str]) -> str:
    """Raise ConfigError, naming what differs, for the checkpoint of another run; what else differs, in words."""
    if resumed.facts.get("config") is None:
        raise ConfigError(f"--resume: {resumed.folder} is no run's (trainer.save wrote it); use nt.Trainer.load")
    old, new = flat(resumed.facts["config"]), flat(config.model_dump(mode="json", by_alias=True))
    both = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key] and not _in(key, FREE)]
    differ = {key: f"{key} was {old[key]}, is {new[key]}" for key in both}
    fixed = [words for key, words in differ.items() if _in(key, FIXED)]
    saved = resumed.facts.get("data") or {}
    fixed += [f"another {name}" for name, digest in data.items() if saved.get(name, digest) != digest]
    if fixed:
        raise ConfigError(f"--resume: {resumed.folder} is of another run: {'; '.join(fixed)}; allowed: the same")
    if config.train.steps <= resumed.step:
        reached = f"the checkpoint {resumed.folder} is of step {resumed.step}"
        raise ConfigError(f"train.steps: got {config.train.steps}; allowed with --resume: more, as {reached}")
    return ", ".join(differ.values())


def _in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted key."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result
