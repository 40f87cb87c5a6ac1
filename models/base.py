"""Base class of models; loading of checkpoints, and conversion from and to transformers."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Generic, Self

import numpy as np
from typing_extensions import TypeVar  # of pydantic

from nntile_py.errors import ConfigError, MissingWeight
from nntile_py.graph.graph import Graph
from nntile_py.graph.initial_weights import DrawnWeights, initial_adapters, initial_weights
from nntile_py.graph.lora import is_adapter, merged
from nntile_py.graph.params import Batch, Param, Traced, trace
from nntile_py.models.hf_config import (
    HEAD_KEYS,
    StoredWeights,
    Weights,
    check_layers,
    check_type,
    choice,
    named,
    read_raw,
    tensors_of,
    translated,
)  # fmt: skip
from nntile_py.models.hf_keys import Keys
from nntile_py.models.model_config import ModelConfig as ModelConfig
from nntile_py.typed import typed

ConfigT = TypeVar("ConfigT", bound=ModelConfig, default=Any)


class Model(Generic[ConfigT]):
    """Base class of models. A subclass sets `Config` and defines `trace(g, batch)`, which builds the model's graph.

    `trace` declares inputs and parameters where it uses them. `class Mine(nt.Model[MyConfig])` tells type checkers
    the class of `self.config`.

    Args:
        config: Sizes and options, an instance of `Config`.
        weights: {name in the checkpoint: numpy array}, fp32 or fp64. Default: random weights, drawn at their first use.
        seed: Seed of the random weights.
        hf: Content of the checkpoint's config.json.
    """

    Config: ClassVar[type[ModelConfig]]
    # Training objective on text: causal (next token) or masked (masked tokens); None: not trained on text.
    objective: ClassVar[str | None] = None
    prefix: ClassVar[str] = ""  # prefix of weight names; checkpoints of the model without a head lack the prefix
    # Weights missing from checkpoints of the model without a head; with new_head: true they are random.
    head_weights: ClassVar[tuple[str, ...]] = ()
    # {key of config.json: its allowed values}; the first value is assumed if config.json lacks the key.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    absent: ClassVar[Mapping[str, Any]] = {}  # {key of config.json: value assumed if config.json lacks the key}
    # {prefix of weight names in other versions of the checkpoint: prefix in this model}
    old_names: ClassVar[Mapping[str, str]] = {}
    # Config fields that describe the head. If they differ from a checkpoint's, from_hf draws a new head.
    head_fields: ClassVar[tuple[str, ...]] = ()

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
            raise ConfigError(f"model: got {type(config).__name__}; allowed: {self.Config.__name__}(...)")
        self.config, self.seed, self.hf = config, seed, dict(hf or {})
        self._weights: Weights | StoredWeights | None = weights
        self._params: list[Param] | None = None

    def __repr__(self) -> str:
        shown = self.config.model_dump(exclude={"type", "from_"}, exclude_defaults=True, exclude_unset=True)
        for name in [*shown]:  # a default may depend on other fields, such as ffn on embed
            others = {field: value for field, value in shown.items() if field != name}
            with suppress(ConfigError):  # the field has no default
                if dict(type(self.config)(**others)) == dict(type(self.config)(**shown)):
                    shown = others
        of_classes = {*self.head_fields} - {"head"}
        if of_classes & shown.keys() and not any("classes" in param.tensor.axes for param in self.params()):
            shown = {name: value for name, value in shown.items() if name not in of_classes}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def trace(self, g: Graph, batch: Batch) -> Traced:
        """Add the model's operators for one micro-batch to the graph; return loss and outputs.

        See docs/write-a-model.md.
        """
        raise NotImplementedError(f"{type(self).__name__} has no trace(g, batch)")

    # -- parameters

    def params(self) -> list[Param]:
        """Return the parameters that `trace` declares. Their sizes depend only on the config, not on the batch."""
        if self._params is None:
            graph = Graph()
            trace(self, graph, Batch(1, 1))
            self._params = list(graph.params.values())
        return self._params

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name in the checkpoint: shape} of all weights."""
        return {source.weight: source.shape for param in self.params() for source in param.sources}

    @property
    def aim(self) -> str | None:
        """What the model predicts in a text, as the config's `objective` or the class says; None: nothing."""
        return self.aim_of(self.config)

    @classmethod
    def aim_of(cls, config: ModelConfig) -> str | None:
        """Return `aim` of a model of this class with a config."""
        return getattr(config, "objective", None) or cls.objective

    def numel(self) -> int:
        """Return the total number of elements of all parameters."""
        return sum(param.tensor.numel for param in self.params())

    @property
    def weights(self) -> Weights:
        """{name in the checkpoint: numpy array}. The first use draws random weights, or makes 16-bit weights fp32."""
        if self._weights is None:
            self._weights = initial_weights(self.params(), self.seed)
        elif isinstance(self._weights, StoredWeights):
            self._weights = self._weights.arrays
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights

    def first_weights(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return the initial weights: `weights`, or a mapping that draws or converts an array when it is read."""
        if type(self).weights is Model.weights and not isinstance(self._weights, dict):
            return DrawnWeights(self.params(), self.seed) if self._weights is None else self._weights
        return self.weights

    def changed(self, **fields: Any) -> Self:
        """Return a model with the same weights and some config fields changed, such as attention="merge"."""
        weights: Any = self._weights  # dict, or StoredWeights, which are not converted here
        return type(self)(self.config.changed(**fields), weights, seed=self.seed, hf=self.hf)

    def merged(self) -> Self:
        """Return the model with its adapters (model.lora) added to the weights, and without adapters."""
        if not (lora := self.config.lora):
            return self
        weights = merged(lora, self.params(), self.weights)
        return type(self)(self.config.changed(lora=None), weights, seed=self.seed, hf=self.hf)

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config's fields from the content of config.json. Raises ConfigError for unsupported values.

        Models that exist in transformers override read_config and hf_config. For other models config.json simply
        holds the fields of `Config`, and these two functions read and write them.
        """
        if "architectures" in raw:  # transformers wrote this config.json
            raise ConfigError(
                f"{cls.__name__} has no read_config(raw), so {cls.__name__}.from_hf reads what nntile train saved of it"
                " and no model of transformers"
            )
        return {name: raw[name] for name in cls.Config.model_fields if name in raw and name not in ("type", "from_")}

    @classmethod
    def saved_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return read_config's fields for a config.json. Every error in its content becomes a ConfigError."""
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
        """Return the content of config.json. For models of transformers it includes model_type and architectures."""
        return self.config.model_dump(mode="json", exclude={"from_"})

    @classmethod
    def from_hf(cls, source: Any, *, seed: int = 0, **fields: Any) -> Self:
        """Load a model from a transformers model, or from a folder that save_pretrained wrote.

        Args:
            source: A transformers model object, or the folder's path.
            seed: Seed of a new head's random weights. A head is new if its kind or classes differ from the saved
                ones. The kind of the saved head enters the seed too, so the new weights do not repeat the random
                weights that the saved model started from.
            fields: Fields of the config to change, such as attention= and dropout=. Dropout is off unless it is given.

        Raises:
            ConfigError: The folder, or this variant of the model, cannot be read.
        """
        with named(source):
            return cls._read(source, fields, seed)

    @classmethod
    def _read(cls, source: Any, fields: dict[str, Any], seed: int) -> Self:
        raw = read_raw(source)
        saved = cls.saved_fields(raw)
        # A new head does not keep the saved classes and labels. If the caller sets one of these fields, it determines
        # the other field.
        own = {*cls.head_fields} - {"head"}
        other = bool(own & fields.keys()) or fields.get("head", saved.get("head")) != saved.get("head")
        kept = {name: value for name, value in saved.items() if not (other and name in own)}
        config: Any = cls.Config(**(kept | fields))
        model = cls(config, hf=raw, seed=seed)
        shapes, copies = model.weight_shapes(), model.copies()
        tensors = translated(tensors_of(source), {*shapes, *copies}, cls.prefix, cls.old_names)
        for copy, weight in copies.items():
            if (same := tensors.pop(copy, None)) is not None and not same.equal(tensors.setdefault(weight, same)):
                need = f"equal weights, as the model computes with {weight} in both places"
                raise ConfigError(f"model: the checkpoint's {copy} differs from {weight}; allowed: {need}")
        new = model._new_head(saved, tensors)
        model.check_adapters(tensors)
        weights = StoredWeights({name: tensors[name] for name in shapes if name in tensors and name not in (new or ())})
        if new is not None:
            # The saved model may have been initialised from the same seed; the hash makes the new weights differ.
            old_head = zlib.crc32(repr([saved.get(name) for name in cls.head_fields]).encode())
            drawn = initial_weights(model.params(), [seed, old_head])
            weights.add({name: drawn[name] for name in new})
            model.hf = {key: value for key, value in raw.items() if key not in HEAD_KEYS}
        weights.add(model.new_adapters(weights))
        for param in model.params():
            for source_of_param in param.sources:
                source_of_param.check_shape(weights.shape(source_of_param.weight))
        check_layers(shapes, tensors)
        if cls.weights is Model.weights:
            model._weights = weights
        else:  # a subclass has its own attribute `weights`
            model.weights = weights.arrays
        return model

    def new_adapters(self, weights: Collection[str]) -> Weights:
        """Return {name: initial values} of this model's adapters that `weights` lack."""
        if not self.config.lora:
            return {}
        drawn = initial_adapters(self.params(), self.seed)
        return {name: value for name, value in drawn.items() if name not in weights}

    def check_adapters(self, tensors: Mapping[str, Any]) -> None:
        """Raise ConfigError if a checkpoint has adapters that this model lacks, or only some of this model's adapters.

        A checkpoint without adapters is allowed.
        """
        own = {name for name in self.weight_shapes() if is_adapter(name)}
        saved = {name for name in tensors if is_adapter(name)}
        if saved - own:
            need = "model.lora as in the run that trained them, or the folder that `nntile merge` makes"
            raise ConfigError(f"model: the checkpoint has the adapter {min(saved - own)}; allowed: {need}")
        if saved and own - saved:
            raise ConfigError(f"model.lora: the checkpoint has adapters, but not {min(own - saved)}; allowed: the same")

    def copies(self) -> Mapping[str, str]:
        """Return {duplicate weight in a checkpoint: weight that this model uses instead}, such as tied embeddings.

        `from_hf` refuses a checkpoint whose two weights differ.
        """
        return {}

    def _new_head(self, saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> set[str] | None:
        """Return the names of the head's weights to draw at random; None if the checkpoint has the same head.

        With `new_head: true` these are the weights of `head_weights` that the checkpoint lacks. Otherwise the head is
        new if a field of `head_fields` differs from the checkpoint's. Then all weights with an axis `classes` are
        drawn, and the weights that neither the checkpoint nor a model with the checkpoint's head has. A head without a
        loss gets no random weights, because no training would ever improve them.

        Args:
            saved: Config fields of the checkpoint.
            tensors: The checkpoint's weights by name.
        """
        same = all(saved.get(name) == getattr(self.config, name) for name in self.head_fields)
        bare = {name for name in self.head_weights if name in self.weight_shapes() and name not in tensors}
        if same and bare:
            if self.config.new_head:
                return bare
            need = "new_head: true, which draws it anew"
            raise MissingWeight(f"model: weight {min(bare)} is missing: the checkpoint has no head; allowed: {need}")
        if same:
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
        """Return keyword arguments for the constructor of the transformers class, besides its config."""
        return {}

    def merged_hf(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return `own` merged with the config.json that the model was loaded from.

        If both have a key, the loaded value counts unless it is null.
        """
        return own | {key: value for key, value in self.hf.items() if value is not None}

    def to_hf(self) -> Any:
        """Return the transformers model with these weights, in evaluation mode. Adapters are merged."""
        import torch

        try:
            import transformers
        except ModuleNotFoundError:
            need = "to install it: pip install transformers"
            raise ConfigError(f"to_hf: the package transformers is missing; allowed: {need}") from None
        if self.config.lora:
            return self.merged().to_hf()
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
        except Exception as error:  # the exception type of a failed check depends on transformers' version
            told = " ".join(str(error).split())
            raise ConfigError(f"model: transformers does not take these sizes ({told})") from error
        dtype = torch.float64 if next(iter(self.weights.values())).dtype == np.float64 else torch.float32
        model: Any = getattr(transformers, architecture)(config, **self.hf_options()).to(dtype)
        names = {name: name if name in model.state_dict() else name.removeprefix(self.prefix) for name in self.weights}
        state = {names[name]: torch.from_numpy(np.array(value)) for name, value in self.weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        pairs = getattr(model, "_tied_weights_keys", None) or {}
        tied = {*pairs, *pairs.values()}  # without ties the bias of one name is not used
        assert not unexpected and set(missing) <= tied, (missing, unexpected)
        model.tie_weights()
        return model.eval()
