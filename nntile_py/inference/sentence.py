"""Folders of sentence-transformers: their settings for preparing texts and for turning hidden states into vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nntile_py.errors import ConfigError
from nntile_py.models.hf_config import arrays, choice, read_json, tensors_of
from nntile_py.schema import short
from nntile_py.system.folders import read

Array = np.ndarray[Any, Any]
MODULES, SETTINGS, MODEL_SETTINGS = "modules.json", "sentence_*_config.json", "config_sentence_transformers.json"
_NEED = "a folder that sentence-transformers wrote"
# Keys of sentence_bert_config.json that would change the computation, with their allowed values. A missing key has the
# first value.
_FIXED = {
    "model_args": (None, {}), "tokenizer_args": (None, {}), "config_args": (None, {}), "processing_kwargs": (None, {}),
    "transformer_task": ("feature-extraction",), "module_output_name": ("token_embeddings",), "mask_prompt": (False,),
    "modality_config": (None, {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}),
}  # fmt: skip
_ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid")  # classes of torch.nn
# {pooling mode: its key in 1_Pooling/config.json}, in the order of the modes' vectors
_MODES = {
    "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens", "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens", "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """Turns the hidden states of a text into one vector: the vectors of all `modes`, one after the other.

    Source: Reimers and Gurevych (2019), Sentence-BERT, section 3; weightedmean: Muennighoff (2022), SGPT.

    Attributes:
        modes: Entries of _MODES.
        prompted: True: the prompt's tokens are pooled too.
    """

    modes: tuple[str, ...]
    prompted: bool = True

    def __call__(self, rows: Array, prompt: int = 0) -> Array:
        """Return the vector of hidden states [tokens, embed]. prompt: number of the prompt's tokens."""
        first = 0 if self.prompted else min(prompt, len(rows))
        part, weights = rows[first:], np.arange(first + 1, len(rows) + 1)[:, None]
        vectors = {
            "cls": lambda: rows[0],
            "max": lambda: part.max(0, initial=-1e9),
            "mean": lambda: part.sum(0) / max(len(part), 1),
            "mean_sqrt_len_tokens": lambda: part.sum(0) / math.sqrt(max(len(part), 1)),
            "weightedmean": lambda: (part * weights).sum(0) / max(weights.sum(), 1),
            "lasttoken": lambda: rows[-1],
        }
        return np.concatenate([vectors[mode]() for mode in self.modes])


@dataclass(frozen=True)
class SentenceModel:
    """Settings of a folder of sentence-transformers.

    Attributes:
        folder: Folder of the transformers model and its tokenizer.
        max_length: Largest number of tokens of a text; None: the model's number of positions.
        lower: True: texts are converted to lower case.
        prompts: {name: text that is put before each text}.
        default_prompt: Name of the prompt that is used if the caller gives none.
        pooling: Turns a text's hidden states into a vector. None: modules.json is missing, or was not read.
        modules: Functions that are applied to the vector, in this order.
        truncate_dim: The vector is cut to this many entries, after the modules; None: all.
    """

    folder: Path
    max_length: int | None
    lower: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    pooling: Pooling | None = None
    modules: tuple[Callable[[Array], Array], ...] = ()
    truncate_dim: int | None = None

    def prompt(self, text: str | None, name: str | None) -> str:
        """Return the prompt: `text`, else the prompt `name`, else the folder's default. Raises ConfigError."""
        if text is not None:
            return text
        if (name := self.default_prompt if name is None else name) is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none, as the folder has no prompts"
            raise ConfigError(f"prompt_name: got {short(name)}; allowed: {known}")
        return self.prompts[name]

    def prepared(self, text: str) -> str:
        """Return a text without blanks at its ends, in lower case if the folder says so."""
        return text.strip().lower() if self.lower else text.strip()

    def prompt_tokens(self, tokenizer: Tokenizer, prompt: str) -> int:
        """Return the number of tokens of the prompt at the beginning of a text, with the template's first token."""
        tokens = tokenizer.encode(self.prepared(prompt))
        return len(tokens.ids) - (1 if tokens.special_tokens_mask[-1:] == [1] else 0) if prompt else 0

    def vector(self, rows: Array, prompt: int) -> Array:
        """Return a text's vector from its hidden states [tokens, embed]. prompt: number of the prompt's tokens."""
        assert self.pooling
        value = self.pooling(rows.astype(np.float64), prompt)
        for module in self.modules:
            value = module(value)
        return value[: self.truncate_dim].astype(rows.dtype)


def has_modules(folder: Path) -> bool:
    """Return True if sentence-transformers wrote the folder: it has a modules.json."""
    return (folder / MODULES).is_file()


def read_sentence_model(folder: Path, pooled: bool) -> SentenceModel | None:
    """Return the settings of a folder; None if it has neither modules.json nor sentence_bert_config.json.

    pooled: Read the modules after the transformer too, which turn hidden states into a vector.

    Raises:
        ConfigError: A setting is not supported, or a file is broken; with `pooled` also if modules.json is missing.
    """
    modules = _modules(folder) if has_modules(folder) else []
    if pooled and not modules:
        raise ConfigError(f"output: got sentence, and {folder} has no {MODULES}; allowed: {_NEED}")
    inner = folder / modules[0][1] if modules else folder
    # Folders of 2019 to 2021 name the file after the model, such as sentence_roberta_config.json.
    files = [path for path in sorted(inner.glob(SETTINGS), key=lambda path: "_bert_" not in path.name)]
    if not modules and not files:
        return None
    settings = read_json(files[0], _NEED) if files else {}
    for key, value in settings.items():
        if key in _FIXED:
            choice(settings, key, *_FIXED[key])
        elif key not in ("max_seq_length", "do_lower_case") and value:
            raise ConfigError(f"model: {key} is {short(value)} in {files[0]}; allowed: max_seq_length, do_lower_case")
    length, lower = settings.get("max_seq_length"), choice(settings, "do_lower_case", False, True)
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"model: max_seq_length is {short(length)} in {files[0]}; allowed: a positive integer")
    general = read_json(folder / MODEL_SETTINGS, _NEED) if (folder / MODEL_SETTINGS).is_file() else {}
    prompts, default = general.get("prompts") or {}, general.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"model: prompts is {short(prompts)} in {folder / MODEL_SETTINGS}; allowed: texts by name")
    width = general.get("truncate_dim")
    if width is not None and (type(width) is not int or width < 1):
        where = folder / MODEL_SETTINGS
        raise ConfigError(f"model: truncate_dim is {short(width)} in {where}; allowed: a positive integer")
    model = SentenceModel(inner, length or _longest(inner), lower, prompts, default, truncate_dim=width)
    if not pooled:
        return model
    choice(general, "model_type", "SentenceTransformer")
    if len(modules) < 2 or modules[1][0] != "Pooling":
        raise ConfigError(f"model: {folder / MODULES} has no Pooling after Transformer; allowed: Transformer, Pooling")
    functions = [_MAKERS[kind](folder / path) for kind, path in modules[2:]]
    return replace(model, pooling=_pooling(folder / modules[1][1]), modules=tuple(functions))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class name, folder) of each module in modules.json; the first module is a Transformer."""
    path = folder / MODULES
    try:
        entries = [(str(module["type"]), module["path"]) for module in json.loads(read(path))]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {path} ({error!r}); allowed: {_NEED}") from None
    names = []
    for number, (kind, place) in enumerate(entries):
        if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(f"model: {path} names {short(place)}; allowed: folders inside its own folder")
        name = kind.rpartition(".")[2]
        known = ("Transformer",) if number == 0 else ("Pooling", *_MAKERS)
        if name not in known or not kind.startswith("sentence_transformers."):
            raise ConfigError(f"model: module {number} in {path} is {kind}; allowed: {', '.join(known)}")
        names.append((name, place))
    if not names:
        raise ConfigError(f"model: {path} lists no modules; allowed: {_NEED}")
    return names


def _longest(folder: Path) -> int | None:
    """Return model_max_length of tokenizer_config.json: the limit of a text's tokens if max_seq_length is missing.

    Return None if the file has no such key, or no integer between 1 and 10^6 - 1: then it states no limit.
    """
    file = folder / "tokenizer_config.json"
    length = read_json(file, _NEED).get("model_max_length") if file.is_file() else None
    return length if type(length) is int and 0 < length < 10**6 else None


# -- modules after the transformer


def _pooling(folder: Path) -> Pooling:
    file = folder / "config.json"
    raw = read_json(file, _NEED)
    chosen = raw.get("pooling_mode")
    if chosen is None:
        chosen = [mode for mode, key in _MODES.items() if raw.get(key, mode == "mean")]
    modes = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(modes, list) or not modes or not {*map(str, modes)} <= {*_MODES}:
        raise ConfigError(f"model: pooling_mode is {short(chosen)} in {file}; allowed: {', '.join(_MODES)}")
    names = {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"}
    known = names | {*_MODES.values()}
    for key, value in raw.items():
        if key not in known and value:
            raise ConfigError(f"model: {key} is {short(value)} in {file}; allowed: {', '.join(sorted(known))}")
    ordered = tuple(mode for mode in _MODES if mode in modes)
    return Pooling(ordered, choice(raw, "include_prompt", True, False))


def _dense(folder: Path) -> Callable[[Array], Array]:
    """Return a module Dense: a matrix, a bias, and an activation function."""
    import torch

    raw = read_json(folder / "config.json", _NEED)
    for key in ("module_input_name", "module_output_name"):
        choice(raw, key, "sentence_embedding", None)
    name = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        need = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"model: activation_function is {name!r} in {folder / 'config.json'}; allowed: {need}")
    activation, weights = getattr(torch.nn, name)(), arrays(tensors_of(folder))
    if weights.keys() - {"linear.bias"} != {"linear.weight"}:
        raise ConfigError(f"model: weights in {folder} are {', '.join(weights)}; allowed: linear.weight, linear.bias")
    matrix, bias = weights["linear.weight"].astype(np.float64), weights.get("linear.bias", np.zeros(1))

    def dense(x: Array) -> Array:
        result: Array = activation(torch.from_numpy(matrix @ x + bias)).numpy()
        return result

    return dense


def normalized(x: Array) -> Array:
    """Return a vector divided by its length."""
    scaled: Array = x / max(float(np.linalg.norm(x)), 1e-12)
    return scaled


_MAKERS: dict[str, Callable[[Path], Callable[[Array], Array]]] = {
    "Normalize": lambda folder: normalized, "Dense": _dense, "Dropout": lambda folder: lambda x: x,
}  # fmt: skip
