"""Load a trainer from a checkpoint. Resume a run: choose the checkpoint and check that it belongs to the run."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nntile_py.checkpoint.format import STATE, DamagedCheckpoint, checkpoints_in
from nntile_py.checkpoint.reader import read_averages, read_facts
from nntile_py.checkpoint.run_folder import check_unlocked
from nntile_py.config.run_config import RunConfig
from nntile_py.data.dataset import Dataset
from nntile_py.errors import ConfigError
from nntile_py.models.base import Model
from nntile_py.models.hf_config import arrays, named, tensors_of
from nntile_py.models.registry import check_code, find
from nntile_py.system.folders import read
from nntile_py.tasks.optimizer import OPTIMIZERS
from nntile_py.tiles import AXES
from nntile_py.tiles.tiling import is_tile_size
from nntile_py.yaml_text import as_written

# Keys of the config that may change when a run resumes, without a report. Keys of `data` are among them, because the
# hashes of the tokens show whether the text has changed, see data_facts.
FREE = (
    "out", "runtime", "scheduler", "profile", "debug", "sample", "logging", "checkpoint", "tokenizer", "model.from",
    "train.log_every", "data.text", "data.label", "data.extensions", "data.max_bytes", "data.val_fraction",
    "data.held_out", "data.sequences", "data.messages", "data.prompt", "data.response",
)  # fmt: skip
# Keys that must not change; changes of other keys are allowed and reported. The backend of attention may change, as the
# tile sizes may: the model is the same.
FIXED = ("model", "optimizer.name", "freeze")
BACKEND = "model.attention"
# Must not change if both configs have it: the size of a vocabulary that is trained on the text. Other keys of
# `tokenizer` may change, such as the path of the same tokenizer.
VOCABULARY = "tokenizer.vocab_size"
_OPTIMIZERS = {optimizer.__name__: optimizer for optimizer in OPTIMIZERS.values()}


# -- Trainer.load


def load_trainer(cls: type[Any], folder: Path, model: Any, trust_code: bool, options: Mapping[str, Any]) -> Any:
    """Return the trainer of a checkpoint; see Trainer.load."""
    if not (folder / STATE).is_file():
        newest = next((f"; the newest of this run is {path}" for _, path in checkpoints_in(folder)), "")
        raise ConfigError(f"{folder}: no checkpoint; allowed: a folder that Trainer.save wrote{newest}")
    facts, known = read_facts(folder), [*inspect.signature(cls.__init__).parameters][2:]
    if unknown := options.keys() - {*known}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: unknown argument; allowed: {', '.join(known)}")
    with named(folder):
        saved = _trainer_arguments(facts["trainer"], folder / STATE, known)
    if model is None:
        if facts["model"] is None:
            raise ConfigError(f"{folder}: saved with a model of your own; allowed: Trainer.load(folder, model)")
        kind = facts["model"].get("type")
        if not trust_code:
            check_code(kind, folder / STATE, "model=MODEL, a model of yours, or trust_code=True")
        with named(folder):
            model = find(kind).from_hf(folder, **facts["model"])
    elif isinstance(model, type) or not (hasattr(model, "trace") and hasattr(model, "weights")):
        raise ConfigError(f"model: got {model!r}; allowed: a model, such as MyModel(config)")
    else:
        model.weights = arrays(tensors_of(folder))
    with named(folder):
        trainer = cls(model, **{**saved, **options})
        trainer.restore(facts["step"], read_averages(folder), loss_scale_of(facts, trainer))
    return trainer


def _trainer_arguments(saved: Mapping[str, Any], file: Path, known: list[str]) -> dict[str, Any]:
    """Return the arguments of Trainer that state.json holds under `trainer`, with the optimizer as an object.

    Arguments that the saving version did not know are absent and get their defaults. known: names of all arguments."""
    if wrong := ({"batch", "seq", "optimizer"} - saved.keys()) | (saved.keys() - {*known}):
        raise DamagedCheckpoint(f"{file}: trainer: {', '.join(sorted(wrong))}")
    try:
        settings: dict[str, Any] = dict(saved["optimizer"])
        return {**saved, "optimizer": _OPTIMIZERS[str(settings.pop("name"))](**settings)}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{file}: trainer.optimizer: {error!r}") from None


def loss_scale_of(facts: Mapping[str, Any], trainer: Any) -> dict[str, Any] | None:
    """Return LossScale.state of a checkpoint; None if `trainer` has another first loss scale than the saved trainer."""
    same = facts["trainer"].get("loss_scale") == trainer.spec.loss_scale
    return facts.get("loss_scale") if same else None


# -- nntile train --resume


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint from which a run resumes, with its state.json."""

    folder: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    def model(self, config: RunConfig) -> Model:
        """Return the config's model with the weights of the checkpoint."""
        section = config.model
        return find(section.type).from_hf(self.folder, **section.model_dump(by_alias=True))

    def restore(self, trainer: Any) -> None:
        """Set the checkpoint's averages, step and loss scale in a trainer of the model that `model` returns."""
        trainer.restore(self.step, read_averages(self.folder), loss_scale_of(self.facts, trainer))


def newest_checkpoint(where: Path, report: Callable[[str], None]) -> ResumePoint:
    """Return the checkpoint `where`; if `where` is a run's folder, the run's newest undamaged checkpoint.

    Raises ConfigError if there is none."""
    single = (where / STATE).is_file()
    for folder in candidates_in(where):
        try:
            return ResumePoint(folder, read_facts(folder))
        except DamagedCheckpoint as error:
            report(f"{error}: this checkpoint is damaged" + ("" if single else "; trying the one before it"))
    raise _nothing_to_resume("no checkpoint that is whole", where)


def candidates_in(where: Path) -> list[Path]:
    """Return the checkpoint `where`; if `where` is a run's folder, all its checkpoints, the newest first.

    Raises ConfigError if there is none. Nothing is read, so the checkpoints may be damaged."""
    if (where / STATE).is_file():
        return [where]
    if folders := [folder for _, folder in checkpoints_in(where)]:
        return folders
    check_unlocked(where, "--resume")
    raise _nothing_to_resume("no checkpoint", where)


def _nothing_to_resume(what: str, where: Path) -> ConfigError:
    need = "a run's folder with checkpoints/, or one of its checkpoints"
    return ConfigError(
        f"--resume: {what} in {where}; allowed: {need}; a run that was killed before its first one begins anew with"
        " --overwrite"
    )


def saved_overrides(where: Path) -> list[str]:
    """Return the `--set` options that a run saved in its newest readable state.json; [] if there are none.

    where: the run's folder or one of its checkpoints."""
    for facts in _states(where):
        overrides = facts.get("overrides")
        if isinstance(overrides, list) and all(isinstance(item, str) for item in overrides):
            return overrides
    return []


def saved_tiles(where: Path) -> dict[str, int] | None:
    """Return the tile sizes that a run saved in its newest readable state.json; None if no state.json has tile sizes.

    where: the run's folder or one of its checkpoints."""
    for tiles in _saved_sections(where, "tiles"):
        sizes = {axis: tiles.get(axis) for axis in AXES}
        if all(size is None or is_tile_size(size) for size in sizes.values()):
            return {axis: size for axis, size in sizes.items() if size}
    return None


def saved_micro_batches(where: Path) -> tuple[int, int] | None:
    """Return (sequences of a micro-batch, number of micro-batches) of a run; None: no readable state.json has them.

    where: the run's folder or one of its checkpoints."""
    for train in _saved_sections(where, "train"):
        batch, count = train.get("batch"), train.get("grad_accumulation")
        if type(batch) is int and type(count) is int and min(batch, count) > 0:
            return batch, count
    return None


def _saved_sections(where: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield a section of the config in each readable state.json of a run, the newest first."""
    for facts in _states(where):
        config = facts.get("config")
        section = config.get(name) if isinstance(config, dict) else None
        if isinstance(section, dict):
            yield section


def _states(where: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of each readable state.json of a run, the newest first."""
    folders = [where] if (where / STATE).is_file() else [folder for _, folder in checkpoints_in(where)]
    for folder in folders:
        try:
            facts = json.loads(read(folder / STATE))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(facts, dict):
            yield facts


def data_facts(config: RunConfig, dataset: Dataset) -> dict[str, str]:
    """Return {name: SHA-256} of a run's tokens, of its tokenizer, and of the file of a model of the user's own.

    The hash of the tokenizer leaves out the tokenizer's template: a saved tokenizer may have a template that the
    original lacks. The hash of the tokens covers the tokens that a template adds."""
    bare = Tokenizer.from_str(dataset.tokenizer.to_str())
    bare.post_processor = None
    parts = dataset.contents() | {"tokenizer (its template aside)": bare.to_str().encode()}
    if (file := Path(str(config.model.type).rpartition(":")[0])).suffix == ".py":
        parts["text of the model's file"] = file.read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}


def check_same_config(point: ResumePoint, config: RunConfig) -> str:
    """Check that `config` may continue the run of a checkpoint. Returns the allowed differences as text.

    Raises:
        ConfigError: The checkpoint is of another run. The message names the keys that differ.
    """
    if point.facts.get("config") is None:
        need = "the folder of a run; nt.Trainer.load reads folders of trainer.save"
        raise ConfigError(f"--resume: got {point.folder}, which trainer.save wrote; allowed: {need}")
    old, new = flattened(point.facts["config"]), flattened(config.model_dump(mode="json", by_alias=True))
    both = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key] and not _in(key, FREE)]
    differences = {key: f"{key} was {as_written(old[key])}, is {as_written(new[key])}" for key in both}
    refused = [text for key, text in differences.items() if _in(key, FIXED) and key != BACKEND]
    if None not in (trained := [tree.get(VOCABULARY) for tree in (old, new)]) and trained[0] != trained[1]:
        refused.append(f"{VOCABULARY} was {trained[0]}, is {trained[1]}")
    if refused:
        raise _of_another_run(point, refused)
    return ", ".join(differences.values())


def check_same_data(point: ResumePoint, data: Mapping[str, str]) -> None:
    """Raise ConfigError if a checkpoint's run has other data. data: result of data_facts for the resumed run."""
    saved = point.facts.get("data") or {}
    if refused := [f"another {name}" for name, digest in data.items() if saved.get(name, digest) != digest]:
        raise _of_another_run(point, refused)


def _of_another_run(point: ResumePoint, refused: Sequence[str]) -> ConfigError:
    return ConfigError(f"--resume: {point.folder} is of another run: {'; '.join(refused)}; allowed: the same")


def check_steps(point: ResumePoint, config: RunConfig) -> None:
    """Raise ConfigError if a checkpoint has reached train.steps."""
    if config.train.steps <= point.step:
        reached = f"the checkpoint {point.folder} is of step {point.step}"
        more = f"to train on, add --set train.steps=N with N above {point.step}"
        more += f"; the weights of step {point.step} are in {point.folder}"
        raise ConfigError(f"train.steps: got {config.train.steps}; allowed with --resume: more, as {reached}; {more}")


def _in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as {dotted key: value}."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        result |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result
