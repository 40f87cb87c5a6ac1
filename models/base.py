"""Base classes of models: a typed config, weights by their names in a checkpoint, conversion to transformers."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from typing_extensions import TypeVar  # of pydantic

from nntile_py.errors import ConfigError, MissingWeight, raised
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch, Param, Traced, trace
from nntile_py.models.hf_config import (
    HEAD_KEYS,
    Weights,
    arrays,
    check_layers,
    check_type,
    choice,
    named,
    read_raw,
    tensors_of,
    translated,
)  # fmt: skip
from nntile_py.models.hf_keys import Keys
from nntile_py.models.init import initial_weights
from nntile_py.schema import Count, Section, allowed, explained, short
from nntile_py.typed import typed


class ModelConfig(Section):
    """Sizes and choices of a model: the section `model` of a YAML. Frozen; raises ConfigError for wrong values.

    A subclass adds fields and sets `type`, the model's name in a YAML. A run fills in `vocab` from the tokenizer,
    `positions` from train.seq, and `masked` from train.seq and train.mask_probability, if the model has these fields.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    if TYPE_CHECKING:  # fields of its subclasses, where only a model's own text knows which

        def __getattr__(self, name: str) -> Any: ...

    type: str = ""
    """The model: gpt2, bert, llama, ... (the files of models/), or a class in your own file: `my_file.py:MyModel`."""
    from_: str | None = Field(None, alias="from")
    """Folder with weights and sizes to start from, written by transformers' `save_pretrained` or by `nntile train`;
    null: random weights."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(explained(type(self), error, "model.")) from None
        except Exception as error:  # of a validator of the user's
            raise told(type(self), error) from error
        for name, value in self:
            try:
                self.model_dump(mode="json", include={name})
            except ValueError as error:
                need = f"what config.yaml can hold: numbers, texts, lists, mappings ({error})"
                raise ConfigError(f"model.{name}: got {short(value)}; allowed: {need}") from None

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_yaml_has_it(cls, value: Any, checked: Any, info: ValidationInfo) -> Any:
        """Strict as JSON is, which has no other types than YAML: a list may be a tuple or a set, a text a path."""
        try:
            return checked(value)
        except ValidationError:
            if not isinstance(value, list | str) or not info.field_name:
                raise
            field = cls.model_fields[info.field_name]
            try:
                return TypeAdapter(field.rebuild_annotation()).validate_json(json.dumps(value), strict=True)
            except (ValidationError, TypeError):
                pass
            raise

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values of some fields."""
        known = type(self).model_fields
        for name in fields:
            if name not in known:
                raise ConfigError(f"model.{name}: unknown key; {allowed(name, list(known))}")
        return type(self)(**(self.model_dump(by_alias=True) | fields))

    def fill(self, **defaults: Any) -> None:
        """Set fields that are None; for validators."""
        for name, value in defaults.items():
            if getattr(self, name) is None:
                self.__dict__[name] = value

    def check_size(self, name: str, divisor: str) -> None:
        """Raise ConfigError unless the size `divisor` divides the size `name`."""
        whole, part = getattr(self, name), getattr(self, divisor)
        for key, size in ((name, whole), (divisor, part)):
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"model.{key}: got {short(size)}; allowed: an integer of at least 1")
        if whole % part:
            small = [n for n in range(1, math.isqrt(min(whole, 2**40)) + 1) if whole % n == 0]
            fitting = ", ".join(map(str, sorted({*small, *(whole // n for n in small)})))
            raise ConfigError(f"model.{divisor}: got {part}; allowed: a divisor of model.{name} = {whole}: {fitting}")


class TokenConfig(ModelConfig):
    """Config of a model that reads tokens."""

    vocab: Count | None = None
    """Size of the vocabulary; null: the tokenizer's."""


ConfigT = TypeVar("ConfigT", bound=ModelConfig, default=Any)


class Model(Generic[ConfigT]):
    """A model: its `Config`, and `trace(g, batch)`, which declares inputs and parameters where it uses them.

    `class Mine(nt.Model[MyConfig])` tells type checkers the class of `self.config`.

    Args:
        config: Sizes and choices, an instance of `Config`.
        weights: {name in the checkpoint: numpy array}, fp32 or fp64. Default: random weights, drawn at their first use.
        seed: Seed of the random weights.
        hf: Content of the checkpoint's config.json.
    """

    Config: ClassVar[type[ModelConfig]]
    objective: ClassVar[str | None] = None  # what text is made into: causal, masked; None: it is not trained on text
    prefix: ClassVar[str] = ""  # that checkpoints of the bare model leave out
    head_weights: ClassVar[tuple[str, ...]] = ()  # that a bare model's checkpoint lacks: new_head draws them
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # keys of config.json: allowed values, the default first
    absent: ClassVar[Mapping[str, Any]] = {}  # values of keys that config.json lacks
    old_names: ClassVar[Mapping[str, str]] = {}  # first parts of names in other versions of a checkpoint: names here
    head_fields: ClassVar[tuple[str, ...]] = ()  # of the config: a checkpoint with others gets a new head, see from_hf

    @typed
    def __init__(
        self,
        config: ConfigT,
        weights: Weights | None = None,
        *,
        seed: int = 0,
        hf: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(config, self.Config):
            raise ConfigError(f"model: {type(config).__name__} is not allowed; use {self.Config.__name__}(...)")
        self.config, self.seed, self.hf = config, seed, dict(hf or {})
        self._weights = weights
        self._params: list[Param] | None = None

    def __repr__(self) -> str:
        changed = self.config.model_dump(exclude={"type", "from_"}, exclude_defaults=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def trace(self, g: Graph, batch: Batch) -> Traced:
        """The model's operators on one micro-batch; see docs/write-a-model.md."""
        raise NotImplementedError(f"{type(self).__name__} has no trace(g, batch)")

    # -- parameters

    def params(self) -> list[Param]:
        """Return the parameters that `trace` declares; their sizes depend only on the config."""
        if self._params is None:
            graph = Graph()
            trace(self, graph, Batch(1, 1))
            self._params = list(graph.params.values())
        return self._params

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's weights: {name: shape}."""
        return {source.weight: source.shape for param in self.params() for source in param.sources}

    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(param.tensor.numel for param in self.params())

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            self._weights = initial_weights(self.params(), self.seed)
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights

    def changed(self, **fields: Any) -> Self:
        """The same weights with other values of some fields of the config, such as attention="merge"."""
        return type(self)(self.config.changed(**fields), self._weights, seed=self.seed, hf=self.hf)

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the config, from config.json; raises ConfigError for what is not supported.

        A model that transformers knows has its own, as of hf_config; the others write and read their fields.
        """
        if "architectures" in raw:  # transformers wrote it
            raise ConfigError(
                f"{cls.__name__} has no read_config(raw), so {cls.__name__}.from_hf reads what nntile train saved of it"
                " and no model of transformers"
            )
        return {name: raw[name] for name in cls.Config.model_fields if name in raw and name not in ("type", "from_")}

    @classmethod
    def saved_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What read_config makes of config.json; whatever is wrong in that is a ConfigError."""
        choice(raw, "quantization_config", None)
        keys = Keys({**cls.absent, **raw})
        if cls.fixed:
            check_type(keys, cls.Config.model_fields["type"].default)
        for key, values in cls.fixed.items():
            choice(keys, key, *values)
        try:
            fields = cls.read_config(keys)
        except KeyError as error:
            raise ConfigError(f"model: {error} is missing in config.json; {cls.__name__} needs it") from error
        except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ConfigError(f"model: config.json does not hold a {cls.__name__} ({told})") from error
        if cls.fixed:
            keys.check_used(cls.__name__)
        return fields

    def hf_config(self) -> dict[str, Any]:
        """What config.json holds: for transformers its config of the model, with model_type and architectures."""
        return self.config.model_dump(mode="json", exclude={"from_"})

    @classmethod
    def from_hf(cls, source: Any, *, seed: int = 0, **fields: Any) -> Self:
        """From a model of transformers, or a folder saved by save_pretrained (safetensors).

        fields: of the config, such as attention= and dropout=; dropout is off unless it is given. If the head or the
        classes differ from the saved ones, the new head's weights are random. They are seeded with `seed` and the kind
        of the saved head, so they do not repeat the random weights that the saved model started from.
        Raises ConfigError for a folder or a variant of the model that cannot be read.
        """
        with named(source):
            return cls._read(source, fields, seed)

    @classmethod
    def _read(cls, source: Any, fields: dict[str, Any], seed: int) -> Self:
        raw = read_raw(source)
        saved = cls.saved_fields(raw)
        own = {*cls.head_fields} - {"head"}  # go together: labels without classes say how many there are
        kept = {name: value for name, value in saved.items() if not (own & fields.keys() and name in own)}
        config: Any = cls.Config(**(kept | fields))
        model = cls(config, hf=raw, seed=seed)
        shapes, copies = model.weight_shapes(), model.copies()
        tensors = translated(tensors_of(source), {*shapes, *copies}, cls.prefix, cls.old_names)
        for copy, weight in copies.items():
            if (same := tensors.pop(copy, None)) is not None and weight in tensors and not same.equal(tensors[weight]):
                need = f"equal weights, as the model computes with {weight} in both places"
                raise ConfigError(f"model: the checkpoint's {copy} differs from {weight}; allowed: {need}")
        new = model._new_head(saved, tensors)
        weights = arrays({name: tensors[name] for name in shapes if name in tensors and name not in (new or ())})
        if new is not None:
            # The weights that the folder comes from may be drawn from this seed, too.
            old_head = zlib.crc32(repr([saved.get(name) for name in cls.head_fields]).encode())
            drawn = initial_weights(model.params(), [seed, old_head])
            weights |= {name: drawn[name] for name in new}
            model.hf = {key: value for key, value in raw.items() if key not in HEAD_KEYS}
        for param in model.params():
            for one in param.sources:
                one.check(weights)
        check_layers(shapes, tensors)
        model.weights = weights
        return model

    def copies(self) -> Mapping[str, str]:
        """Return weights that a checkpoint may have, and the weights that this model uses in their place."""
        return {}

    def _new_head(self, saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> set[str] | None:
        """Weights that a checkpoint with the fields `saved` lacks where any of `head_fields` differs from its own.

        Those of the classes (parameters that have an axis of this name) are among them. None: the head is the same. A
        head without a loss has none: what no training would mend is not drawn."""
        if bare := {name for name in self.head_weights if name in self.weight_shapes() and name not in tensors}:
            if self.config.new_head:
                return bare
            need = "new_head: true, which draws it anew"
            raise MissingWeight(f"model: weight {min(bare)} is missing: the checkpoint has no head; allowed: {need}")
        if all(saved.get(name) == getattr(self.config, name) for name in self.head_fields):
            return None
        if trace(self, Graph(), Batch(1, 1)).loss is None:
            return set()
        old = type(self)(self.config.changed(**{name: saved.get(name) for name in self.head_fields}))
        kept = old.weight_shapes()
        return {
            source.weight for param in self.params() for source in param.sources
            if "classes" in param.tensor.axes or source.weight not in {*kept, *tensors}
        }  # fmt: skip

    def hf_options(self) -> dict[str, Any]:
        """What transformers' class takes besides its config."""
        return {}

    def merged_hf(self, own: dict[str, Any]) -> dict[str, Any]:
        """A config for transformers; a model that came from there keeps what it came with."""
        return own | {key: value for key, value in self.hf.items() if value is not None}

    def to_hf(self) -> Any:
        """The model of transformers with these weights."""
        import torch
        import transformers

        raw = self.hf_config()
        if "architectures" not in raw:
            cls = type(self).__name__
            raise ConfigError(
                f"model: transformers does not know {cls}, whose hf_config() names no architectures;"
                f" {cls}.from_hf(FOLDER) reads what nntile train saves"
            )
        (architecture,) = raw["architectures"]
        try:
            config = transformers.AutoConfig.for_model(**raw)
        except Exception as error:  # whatever its checks say; they change with its versions
            told = " ".join(str(error).split())
            raise ConfigError(f"model: transformers does not take these sizes ({told})") from error
        dtype = torch.float64 if next(iter(self.weights.values())).dtype == np.float64 else torch.float32
        model: Any = getattr(transformers, architecture)(config, **self.hf_options()).to(dtype)
        names = {name: name if name in model.state_dict() else name.removeprefix(self.prefix) for name in self.weights}
        state = {names[name]: torch.from_numpy(np.array(value)) for name, value in self.weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        assert not unexpected and set(missing) <= tied, (missing, unexpected)
        model.tie_weights()
        return model.eval()


def told(cls: type, error: Exception) -> Exception:
    """An error in a user's class as a ConfigError that names file and line; others as they are."""
    if isinstance(error, ConfigError) or cls.__module__.startswith("nntile_py."):
        return error
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return ConfigError(f"model: {cls.__name__} ({file}) raises {raised(error, file)}")
