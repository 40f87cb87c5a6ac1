"""Reads config and weights of a transformers checkpoint: a folder of save_pretrained, or a model object."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.folders import is_name, read
from nntile_py.tasks.activation import ACTIVATIONS as OURS
from nntile_py.tasks.activation import ActivationName

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
# Keys of config.json that describe the head.
HEAD_KEYS = ("architectures", "num_labels", "id2label", "label2id", "problem_type")
# {activation in transformers: its name in nntile_py}
ACTIVATIONS: dict[str, ActivationName] = {
    **{name: name for name in OURS}, "gelu_python": "gelu", "swish": "silu",
    **dict.fromkeys(("gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_new"),
}  # fmt: skip
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # names of weight files; the first existing file is read
_NEED = "weights that save_pretrained wrote"
# Part of error messages: how to read a folder with a model of the user's own class.
OWN = "model.type: torch, or for a model of your own YourModel.from_hf(FOLDER) or model.type: my_file.py:YourModel"


@contextmanager
def named(source: Any) -> Iterator[None]:
    """Context in which the message of a ConfigError names the folder that is read.

    A TypeError, raised for a saved value of a wrong type, becomes a ConfigError.
    """
    try:
        yield
    except (ConfigError, TypeError) as error:
        if not isinstance(source, str | Path) or str(source) in str(error):
            raise
        kind = type(error) if isinstance(error, ConfigError) else ConfigError
        raise kind(f"{error} (in {source})") from error


def read_raw(source: Any) -> dict[str, Any]:
    """Return the content of config.json of a folder, or the same content for a transformers model."""
    if isinstance(source, str | Path):
        return read_json(Path(source) / "config.json", "a folder saved by save_pretrained")
    if not hasattr(source, "state_dict") or not hasattr(source, "config"):
        raise ConfigError(f"model: got {type(source).__name__}; allowed: a transformers model, or its folder")
    theirs = (cls for cls in type(source).__mro__ if cls.__module__.startswith("transformers."))
    return {**source.config.to_dict(), "architectures": [next(theirs, type(source)).__name__]}


def tensors_of(source: Any) -> dict[str, Any]:
    """Return {name: torch tensor} of a checkpoint or a transformers model, including its buffers."""
    if not isinstance(source, str | Path):
        return {name: value.detach().cpu().clone() for name, value in source.state_dict().items()}
    tensors: dict[str, Any] = {}
    for file in weight_files(Path(source)):
        tensors |= tensors_in(file)
    return tensors


def tensors_in(file: Path) -> dict[str, Any]:
    """Return {name: torch tensor} of a file of weights."""
    try:
        if not file.is_file():  # reading a pipe would never end
            raise OSError("no such file")
        return _load(file)
    except Exception as error:  # safetensors and torch raise many classes
        raise ConfigError(f"model: cannot read {file} ({error}); allowed: {_NEED}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: a file named in WEIGHTS, or the files that NAME.index.json lists.

    Raises:
        ConfigError: The folder has no weight file.
    """
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _parts(index)
        if (folder / name).is_file():
            return [folder / name]
    raise ConfigError(f"model: no {' or '.join(WEIGHTS)} in {folder}; allowed: {_NEED}")


def _parts(index: Path) -> list[Path]:
    """Return the weight files that the index of a checkpoint in several files lists."""
    places = read_json(index, _NEED).get("weight_map")
    if not isinstance(places, dict):
        raise ConfigError(f"model: {index} has no weight_map; allowed: {_NEED}")
    for name in places.values():
        if not isinstance(name, str) or not is_name(name):
            raise ConfigError(f"model: {index} names {name!r}; allowed: files in its own folder")
    return sorted({index.parent / name for name in places.values()})


def _load(file: Path) -> dict[str, Any]:
    """Return {name: tensor} of a safetensors file or a torch.save file. Code in the file is never run."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    import torch

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # torch's text suggests options that would run code from the file
        raise ValueError("it is no file of torch.save, or holds Python objects, which are never loaded") from None
    if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise ValueError("it does not hold a dict of tensors, as model.state_dict() returns")
    return {str(name): value.detach().contiguous() for name, value in tensors.items()}


# {suffix of LayerNorm's weights in files of 2018 to 2020: suffix today}; transformers renames them too.
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


def translated(tensors: dict[str, Any], names: Collection[str], prefix: str, old: Mapping[str, str]) -> dict[str, Any]:
    """Return a checkpoint's tensors under the names that the model uses.

    Args:
        tensors: Tensors by their names in the checkpoint.
        names: Names of the model's weights.
        prefix: Prefix of the model's names. It is added if no name in the checkpoint has the prefix, as in
            checkpoints of the model without a head.
        old: {prefix in other versions of the checkpoint: prefix in the model}. A tensor is renamed only if the
            checkpoint lacks the model's own name.

    Raises:
        ConfigError: Two different tensors of the checkpoint get the same name in the model, such as LayerNorm.weight
            and LayerNorm.gamma.
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
            if name.startswith(start) and own in names and own not in tensors:
                name = own
        name = prefix + name if bare and name not in names else name
        if name in result and not value.equal(result[name]):
            need = "one of them, or equal weights"
            raise ConfigError(f"model: the checkpoint has {name} also under another name ({original}); allowed: {need}")
        result[name] = value
    return result


class StoredWeights(Mapping[str, Array]):
    """A checkpoint's weights as numpy arrays: fp64 if all of them are fp64, otherwise fp32.

    A 16-bit weight is converted when it is read. Only the last converted array is kept, so a trainer fills its tiles
    without an fp32 copy of the whole model.

    Args:
        tensors: {name: torch tensor}.

    Raises:
        ConfigError: A weight is not floating-point (as in a quantised model), or has values that are not finite.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        import torch

        half = (torch.float16, torch.bfloat16)
        for name, value in tensors.items():
            if value.dtype not in (*half, torch.float32, torch.float64):
                kind = str(value.dtype).removeprefix("torch.")
                raise ConfigError(f"model: weight {name} is {kind}; allowed: float16, bfloat16, float32, float64")
            if value.is_meta:
                raise ConfigError(f"model: weight {name} has no values, since it is on the device meta; allowed: cpu")
        double = all(value.dtype == torch.float64 for value in tensors.values())
        self._stored: dict[str, Any] = {  # 16-bit torch tensors, and arrays
            name: value if value.dtype in half else (value if double else value.float()).numpy()
            for name, value in tensors.items()
        }
        self._last: tuple[str, Array] | None = None
        for name, value in self._stored.items():
            finite = np.isfinite(value) if isinstance(value, np.ndarray) else torch.isfinite(value)
            if not finite.all():
                kind = "float64" if double else "float32"
                raise ConfigError(
                    f"model: weight {name} has values that are not finite in {kind}; allowed: finite values"
                )

    def __getitem__(self, name: str) -> Array:
        value = self.arrays[name] if "arrays" in vars(self) else self._stored[name]
        if isinstance(value, np.ndarray):
            return value
        if self._last is None or self._last[0] != name:
            self._last = None  # frees the array before the next is allocated
            self._last = name, value.float().numpy()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, weights: Weights) -> None:
        """Add arrays to the weights, in place of weights of the same names."""
        self._stored |= weights

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight without conversion; None if there is no such weight."""
        return tuple(self._stored[name].shape) if name in self._stored else None

    @cached_property
    def arrays(self) -> Weights:
        """All weights, converted. From then on, reading a weight returns one of these arrays."""
        return {name: self[name] for name in self}


def arrays(tensors: Mapping[str, Any]) -> Weights:
    """Return torch tensors as numpy arrays: see StoredWeights, which also has the errors."""
    return StoredWeights(tensors).arrays


def check_layers(shapes: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ConfigError if the checkpoint has an extra weight, such as a bias, in a layer of this model.

    The checkpoint's layer would then compute something else. Layers that this model lacks altogether, such as
    another head, are ignored, and so are buffers, as in transformers.
    """
    layers = {name.rpartition(".")[0] for name in shapes}
    if more := [name for name in found if name not in shapes and "." in name and name.rpartition(".")[0] in layers]:
        raise ConfigError(f"model: the checkpoint has {', '.join(more[:3])}; this model's layers have no such weight")


def read_json(path: Path, need: str, key: str = "model") -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises ConfigError.

    need: The allowed file, for error messages. key: Config key at the beginning of the messages.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is missing; allowed: {need}")
    try:
        raw = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: cannot read {path} ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{key}: {path} holds no object")
    return raw


def choice(raw: Mapping[str, Any], key: str, *known: Any) -> Any:
    """Return the value of `key` in config.json. Raises ConfigError unless it is one of `known`.

    If config.json lacks the key, return the first of `known`.
    """
    value = raw.get(key, known[0])
    if value not in list(known):
        listed = ", ".join(dict.fromkeys(map(repr, known)))
        raise ConfigError(f"model: {key} is {short(value)} in the model's config; allowed: {listed}")
    return value


def architecture(raw: Mapping[str, Any], *known: str) -> str:
    """Return the transformers class that config.json names. Raises ConfigError unless it is one of `known`.

    If config.json names no class, return the first of `known`.
    """
    given = raw.get("architectures") or [known[0]]
    if not isinstance(given, list) or given[0] not in list(known):
        raise ConfigError(f"model: architectures is {given!r} in the model's config; allowed: {', '.join(known)}")
    return str(given[0])


def rope_scaling(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section `rope_scaling` of a model's config: rope_parameters without the base of the wavelengths.

    As transformers does, fill in the length for which the model was trained, and the factor by which it is exceeded.

    Args:
        raw: Content of config.json.
        rope: rope_parameters in config.json, or the part of it for one type of layers.
    """
    found = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind, length = found.get("rope_type", found.get("type")), "original_max_position_embeddings"
    choice(raw, "partial_rotary_factor", None, 1, 1.0)
    if choice(rope, "partial_rotary_factor", None, 1, 1.0):
        del found["partial_rotary_factor"]
    own, longest = raw.get(length), raw.get("max_position_embeddings")
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        found[length] = longest if kind == "dynamic" else own or found.get(length) or longest
    if kind in ("yarn", "longrope") and found.get("factor") is None and found[length] and longest:
        found["factor"] = longest / found[length]
    return found or None


def padding_row(raw: Mapping[str, Any]) -> int | None:
    """Return the row of the embedding table that gets no gradient: config.json's pad_token_id, or None without it.

    A negative number counts from the end: -1 is the last row.
    """
    number = raw.get("pad_token_id")
    if isinstance(number, int) and number < 0:
        return int(raw["vocab_size"]) + number
    return number


def check_type(raw: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError unless config.json's model_type is `kind`."""
    if raw.get("model_type") != kind:
        raise ConfigError(f"model: got model_type {raw.get('model_type')!r}; allowed: {kind}, {OWN}")
