"""Open a trained model: the folder of a run, a checkpoint, or a folder that transformers' save_pretrained wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from nntile_py.checkpoint.format import STATE, TOKENIZER, checkpoints_in
from nntile_py.checkpoint.reader import read_facts
from nntile_py.checkpoint.resume import newest_checkpoint
from nntile_py.checkpoint.run_folder import RUN_CONFIG
from nntile_py.data.tokenizer import load_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.models.base import Model
from nntile_py.models.hf_config import WEIGHTS, named, weight_files
from nntile_py.models.registry import class_in, code_of
from nntile_py.runs import run_of
from nntile_py.system.folders import read, same_content
from nntile_py.typed import short
from nntile_py.yaml_text import MOST_BYTES, parse

NEED = "the folder of a run, one of its checkpoints, or a folder that save_pretrained wrote"


class OpenedModel(NamedTuple):
    """A model from a folder.

    Attributes:
        model: The model with its weights.
        folder: The folder with the weights: a run's folder, or a checkpoint of it.
        tokenizer: The tokenizer of the folder; None: the folder has none.
        config: The config of the run as parsed YAML; empty if the folder belongs to no run.
        step: Number of training steps; None if it is not known.
    """

    model: Model
    folder: Path
    tokenizer: Tokenizer | None
    config: dict[str, Any]
    step: int | None

    @property
    def tokenizer_file(self) -> Path:
        """The path of the tokenizer in the folder, whether it exists or not."""
        return self.folder / TOKENIZER


def open_model(path: str | Path, fields: Mapping[str, Any] | None = None, *, torch_modules: bool = True) -> OpenedModel:
    """Return the model of a folder with its tokenizer.

    If a run has not put weights into its folder yet, its newest complete checkpoint is read.

    Args:
        path: The folder of a run, a checkpoint, or a folder that save_pretrained or `Trainer.save` wrote.
        fields: Fields of the model's config that replace those of the folder, such as attention. `type` allows code of
            the user's own to run: my_file.py:MyModel.
        torch_modules: Whether the caller can use a captured PyTorch module.

    Raises:
        ConfigError: The folder cannot be read, a file of the checkpoint is damaged, or the model is a class in a
            Python file and the `fields` do not name the file.
    """
    path, fields = Path(path), {**(fields or {})}
    if not path.is_dir():
        what = "is a file" if path.is_file() else "no such folder"
        raise ConfigError(f"{path}: {what}; allowed: {NEED}")
    folder = path if _has_weights(path) else _newest(path)
    facts, config, saved = _saved(folder)
    with named(folder):
        cls = class_in(folder, fields.pop("type", None), saved.get("type"), torch_modules=torch_modules)
        adapters = {"lora": saved["lora"]} if saved.get("lora") else {}
        model = cls.from_hf(folder, **(adapters | fields))
    tokenizer = load_tokenizer(file, str(folder)) if (file := folder / TOKENIZER).is_file() else None
    return OpenedModel(model, folder, tokenizer, config, _step(folder, facts))


def no_tokenizer(folder: Path) -> ConfigError:
    """Return the error of commands that need a tokenizer, for a folder without tokenizer.json."""
    how = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    need = f"a folder with a model and its tokenizer. From vocab.json and merges.txt, {how} makes the file"
    return ConfigError(f"{folder} has no {TOKENIZER}, which turns texts into tokens; allowed: {need}")


def saved_adapters(folder: Path) -> dict[str, Any]:
    """Return {"lora": settings of the adapters in a folder} to open its model; {} without adapters."""
    lora = _saved(folder)[2].get("lora")
    return {"lora": lora} if isinstance(lora, dict) else {}


def class_of_encoder(folder: Path, model_type: str | None) -> type[Model]:
    """Return the class of an encoder's model in a folder: the class that `model_type`, the run or config.json names."""
    kind = _saved(folder)[2].get("type")  # not `torch`: nntile_py may have the class of config.json
    return class_in(folder, model_type, kind if code_of(kind) else None, torch_modules=False)


def _saved(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the facts of a checkpoint, the run's config, and the config's section `model`; each {} if missing."""
    facts = read_facts(folder) if (folder / STATE).is_file() else {}
    config = facts.get("config") or _run_config(folder)
    saved = facts.get("model") or config.get("model")
    return facts, config, saved if isinstance(saved, dict) else {}


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for weights in WEIGHTS for name in (weights, f"{weights}.index.json"))


def _newest(run: Path) -> Path:
    """Return the newest complete checkpoint of a run that has not put weights into its folder."""
    if not checkpoints_in(run):
        what = "no checkpoint yet" if (run / RUN_CONFIG).is_file() else f"no {' or '.join(WEIGHTS)}"
        raise ConfigError(f"{run}: {what}; allowed: {NEED}")
    return newest_checkpoint(run, lambda message: None).folder


def _run_config(folder: Path) -> dict[str, Any]:
    """Return the config.yaml of a run's folder as a dict; {} if there is none."""
    file = run_of(folder) / RUN_CONFIG
    if not file.is_file():
        return {}
    tree = parse(read(file, MOST_BYTES).decode(errors="replace"), str(file))
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: got {short(tree)}; allowed: the config that `nntile train` writes")
    return tree


def _step(folder: Path, facts: Mapping[str, Any]) -> int | None:
    """Return the step of a checkpoint; for a run's folder, the step of its checkpoint with the same weights."""
    if facts:
        return int(facts["step"])
    files = weight_files(folder)
    saved = ((step, checkpoint / files[0].name) for step, checkpoint in checkpoints_in(folder))
    return next((step for step, file in saved if same_content(file, files[0])), None)
