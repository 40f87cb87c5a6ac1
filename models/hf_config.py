"""A checkpoint, as save_pretrained of transformers writes it or as one of its models holds it: config and weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.folders import read

Weights = dict[str, np.ndarray[Any, Any]]
HEAD_KEYS = ("architectures", "num_labels", "id2label", "label2id")  # of config.json: what the head is
# Activations of transformers, and their names here.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_new"
    ),
    "quick_gelu": "quick_gelu", "relu": "relu", "tanh": "tanh", "silu": "silu", "swish": "silu",
}  # fmt: skip
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # files with weights, the first one that exists is read
_NEED = "expected weights that save_pretrained wrote"
# How a folder is read that holds a model of the user's.
OWN = "a model of your own by YourModel.from_hf(FOLDER), in a YAML by model.type: my_file.py:YourModel"


@contextmanager
def named(source: Any) -> Iterator[None]:
    """A ConfigError inside of it, also one for a wrong type that was saved, says which folder is read."""
    try:
        yield
    except (ConfigError, TypeError) as error:
        if not isinstance(source, str | Path) or str(source) in str(error):
            raise
        kind = type(error) if isinstance(error, ConfigError) else ConfigError
        raise kind(f"{error} (in {source})") from error


def read_raw(source: Any) -> dict[str, Any]:
    """What config.json holds, of a folder that save_pretrained wrote or of a model of transformers."""
    if isinstance(source, str | Path):
        return _read_json(Path(source) / "config.json", "a folder saved by save_pretrained")
    if not hasattr(source, "state_dict") or not hasattr(source, "config"):
        raise ConfigError(f"model: {type(source).__name__} is not allowed; use a transformers model, or its folder")
    theirs = (cls for cls in type(source).__mro__ if cls.__module__.startswith("transformers."))
    return {**source.config.to_dict(), "architectures": [next(theirs, type(source)).__name__]}


def tensors_of(source: Any) -> dict[str, Any]:
    """Return all tensors of a checkpoint by name, buffers included."""
    if not isinstance(source, str | Path):
        return {name: value.detach().cpu().clone() for name, value in source.state_dict().items()}
    tensors: dict[str, Any] = {}
    for file in weight_files(Path(source)):
        try:
            if not file.is_file():  # reading a pipe would never end
                raise OSError("no such file")
            tensors |= _load(file)
        except Exception as error:  # safetensors and torch raise many classes
            raise ConfigError(f"model: cannot read {file} ({error}); {_NEED}") from None
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights: one of WEIGHTS, or the parts that its index lists.

    Raises:
        ConfigError: The folder has none of them.
    """
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _parts(index)
        if (folder / name).is_file():
            return [folder / name]
    raise ConfigError(f"model: no {' or '.join(WEIGHTS)} in {folder}; {_NEED}")


def _parts(index: Path) -> list[Path]:
    """Return the files that an index of a checkpoint in several files lists."""
    places = _read_json(index, _NEED).get("weight_map")
    if not isinstance(places, dict):
        raise ConfigError(f"model: {index} has no weight_map; {_NEED}")
    for name in places.values():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ConfigError(f"model: {index} names {name!r}; allowed: files in its own folder")
    return sorted({index.parent / name for name in places.values()})


def _load(file: Path) -> dict[str, Any]:
    """Return the tensors of a file in safetensors, or of a file of torch.save. Code in the file is never run."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    import torch

    tensors = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise ValueError("it does not hold a dict of tensors, as model.state_dict() returns")
    return {str(name): value.detach().contiguous() for name, value in tensors.items()}


# Names of a LayerNorm's weights in files of 2018 to 2020, as transformers reads them.
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


def translated(tensors: dict[str, Any], shapes: Collection[str], prefix: str, old: Mapping[str, str]) -> dict[str, Any]:
    """Return a checkpoint's tensors under the names that the model uses.

    Args:
        tensors: As in the files.
        shapes: Names of the model's weights.
        prefix: First part of the names, which checkpoints of the bare model leave out.
        old: Names in other versions of the checkpoint and their names in the model. They count only if the checkpoint
            lacks the model's own name.
    """
    bare = bool(prefix) and not any(name.startswith(prefix) for name in tensors)
    result: dict[str, Any] = {}
    for original, value in tensors.items():
        name = original
        for suffix, today in _OLD_NAMES.items():
            if name.endswith(suffix):
                name = name.removesuffix(suffix) + today
        for start, today in old.items():
            own = today + name.removeprefix(start)
            if name.startswith(start) and own in shapes and own not in tensors:
                name = own
        result[prefix + name if bare and name not in shapes else name] = value
    return result


def arrays(tensors: Mapping[str, Any]) -> Weights:
    """Weights as fp32, as fp64 where all are. Others than floating-point numbers are those of a quantised model."""
    import torch

    for name, value in tensors.items():
        if value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            kind = str(value.dtype).removeprefix("torch.")
            raise ConfigError(f"model: weight {name} is {kind}; allowed: float16, bfloat16, float32, float64")
        if not value.isfinite().all():
            raise ConfigError(f"model: weight {name} has values that are no finite numbers; allowed: finite ones")
    double = all(value.dtype == torch.float64 for value in tensors.values())
    return {name: (value if double else value.float()).numpy() for name, value in tensors.items()}


def check_layers(shapes: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse more weights in a layer than the model's own has (a bias, a scale): it would compute something else.

    Whole layers that the model does not have, such as another head, and buffers are left out, as transformers does.
    """
    layers = {name.rpartition(".")[0] for name in shapes}
    if more := [name for name in found if name not in shapes and "." in name and name.rpartition(".")[0] in layers]:
        raise ConfigError(f"model: the checkpoint has {', '.join(more[:3])}; this model's layers have no such weight")


def _read_json(path: Path, need: str) -> dict[str, Any]:
    """The object that a JSON file holds."""
    if not path.is_file():
        raise ConfigError(f"model: {path} is missing; expected {need}")
    try:
        raw = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {path} ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"model: {path} holds no object")
    return raw


def choice(raw: Mapping[str, Any], key: str, *known: Any) -> Any:
    """What config.json has under `key`, one of `known`; where it has none the first of these. Else a ConfigError."""
    value = raw.get(key, known[0])
    if value not in list(known):
        listed = ", ".join(map(repr, known))
        raise ConfigError(f"model: {key} is {short(value)} in the model's config; allowed: {listed}")
    return value


def architecture(raw: Mapping[str, Any], *known: str) -> str:
    """The class of transformers that wrote config.json, one of `known`; where none is told the first of these."""
    given = raw.get("architectures") or [known[0]]
    if not isinstance(given, list) or given[0] not in list(known):
        raise ConfigError(f"model: architectures is {given!r} in the model's config; allowed: {', '.join(known)}")
    return str(given[0])


def padding_row(raw: Mapping[str, Any]) -> int | None:
    """Return the row of the embedding's table that gets no gradient, of pad_token_id. -1 is the last row."""
    number = raw.get("pad_token_id")
    if isinstance(number, int) and number < 0:
        return int(raw["vocab_size"]) + number
    return number


def check_type(raw: Mapping[str, Any], kind: str) -> None:
    """Refuse another model_type than `kind`."""
    if raw.get("model_type") != kind:
        raise ConfigError(f"model: model_type is {raw.get('model_type')!r}; only {kind} can be read here, {OWN}")
