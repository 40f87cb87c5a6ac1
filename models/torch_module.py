"""Any PyTorch module as a model of a YAML: a class of transformers, or what a function in a user's file returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import create_model

from nntile_py.errors import ConfigError, MissingWeight
from nntile_py.graph.graph import Graph
from nntile_py.graph.lora import is_adapter
from nntile_py.graph.params import Batch, Param, Traced, trace
from nntile_py.models.base import Model
from nntile_py.models.hf_config import Weights, arrays, choice, read_raw, tensors_of
from nntile_py.models.model_config import ModelConfig, TokenConfig
from nntile_py.schema import UNFILLED, Filled, short

if TYPE_CHECKING:
    import torch

    from nntile_py.capture.torch_model import TorchModel

# {end of a class name in transformers: what the class predicts}
OBJECTIVES: dict[str, Literal["causal", "masked"]] = {
    "ForCausalLM": "causal", "LMHeadModel": "causal", "ForMaskedLM": "masked",
}  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions")  # keys of config.json
SIZES = 2, 8  # rows and positions for which a module is captured if only its parameters are asked for


class TorchConfig(TokenConfig):
    type: str = "torch"
    positions: Filled = UNFILLED
    """Largest number of tokens of a sequence; null: train.seq."""
    objective: Literal["causal", "masked"] | None = None
    """What the model predicts in a text, the next token or masked tokens; null: as its class in transformers is named,
    and `causal` for a module of your own."""


class TorchModule(Model[TorchConfig]):
    """Any language model of transformers, captured from PyTorch: the class that config.json of `model.from` names.

    See docs/torch-models.md.
    """

    Config = TorchConfig
    # The user's function that makes the module; None: config.json names the module's class.
    function: ClassVar[Callable[..., Any] | None] = None

    @cached_property
    def module(self) -> torch.nn.Module:
        """The module. Its weights may differ from the model's weights, see `weights`."""
        return self._made(initialised=False)

    def _made(self, initialised: bool) -> torch.nn.Module:
        """Return a new module. The weights of a class of transformers have random values only if `initialised`."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.function is None:
                return _of_transformers(self.raw, initialised)
            module = type(self).function(**self._arguments())  # type: ignore[misc]
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"model.type: {self.config.type} returns {short(module)}; allowed: a torch.nn.Module")
        if any(one.is_meta for one in (*module.parameters(), *module.buffers())):
            raise ConfigError(f"model.type: {self.config.type} returns a module on meta; allowed: one with weights")
        return module

    @property
    def raw(self) -> Mapping[str, Any]:
        """The content of config.json."""
        if not self.hf:
            if self.config.from_ is None:
                need = "a folder that save_pretrained wrote, with config.json"
                raise ConfigError(f"model.from: missing; allowed with model.type: {self.config.type}: {need}")
            self.hf = read_raw(self.config.from_)
        return self.hf

    def _arguments(self) -> dict[str, Any]:
        assert self.function is not None
        return {name: getattr(self.config, name) for name in _parameters(self.function)}

    # -- the graph

    @cached_property
    def _captures(self) -> dict[tuple[str, ...], TorchModel]:
        return {}

    def trace(self, g: Graph, batch: Batch) -> Traced:
        takes = inspect.signature(self.module.forward).parameters
        masked = "attention_mask" in takes and batch.has("attention_mask", neutral=1)
        names = ("input_ids", "labels", *["attention_mask"] * masked)
        if names not in self._captures:
            from nntile_py.capture.torch_model import TorchModel

            loss = None if "labels" in takes else self._loss
            self._captures[names] = TorchModel(self.module, self._example(names), loss, "logits")
        return self._captures[names].trace(g, batch)

    def _example(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        import torch

        rows, positions = SIZES
        ids = torch.arange(rows * positions).reshape(rows, positions) % (self.config.vocab or 2)
        return {name: torch.ones_like(ids) if name == "attention_mask" else ids for name in names}

    def _loss(self, output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of logits, for a module that does not compute it."""
        import torch

        logits = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(logits, torch.Tensor):
            if "logits" not in output:
                need = "a module that returns logits [batch, seq, vocab], or an object with `logits`"
                raise ConfigError(f"model: {type(self.module).__name__} returns {', '.join(output)}; allowed: {need}")
            logits = output["logits"]
        labels = inputs["labels"]
        if self.config.objective != "masked":  # the output at position s predicts the token at position s + 1
            labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def params(self) -> list[Param]:
        if self._params is None:
            graph = Graph()
            known = next((one.captured_sizes for one in self._captures.values() if one.captured_sizes), None)
            trace(self, graph, Batch(*(known or (SIZES[0], min(SIZES[1], self.config.positions or SIZES[1])))))
            self._params = list(graph.params.values())
        return self._params

    # -- weights

    @property
    def weights(self) -> Weights:
        """{name in the module: numpy array}."""
        if self._weights is None:
            made = self.module if self.function else self._made(initialised=True)
            self._weights = arrays(_state_of(made))
            self._weights |= self.new_adapters(self._weights)
        return super().weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        if cls.function is not None:
            return super().read_config(raw)
        architecture = _architecture(raw)
        found = {
            "vocab": raw.get("vocab_size"), "positions": next((raw[key] for key in POSITIONS if raw.get(key)), None),
            "objective": next((aim for end, aim in OBJECTIVES.items() if architecture.endswith(end)), None),
        }  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}

    def hf_config(self) -> dict[str, Any]:
        return super().hf_config() if self.function else dict(self.raw)

    @classmethod
    def _read(cls, source: Any, fields: dict[str, Any], seed: int) -> Self:
        if cls.function is not None:
            return super()._read(source, fields, seed)
        raw = read_raw(source)
        model = cls(cls.Config(**(cls.saved_fields(raw) | fields)), hf=raw, seed=seed)
        module, loading = _of_transformers_with_weights(raw, source)
        # Two names may stand for one weight, such as a tied embedding and head. named_parameters has one of the names.
        names = {name for name, _ in module.named_parameters()}
        if missing := sorted(names & {*loading["missing_keys"]}):
            raise MissingWeight(f"model: weight {missing[0]} is missing")
        model.module = module
        adapters = {name: value for name, value in tensors_of(source).items() if is_adapter(name)}
        if adapters or model.config.lora:
            model.check_adapters(adapters)
        model.weights = arrays(_state_of(module) | adapters)
        model.weights |= model.new_adapters(model.weights)
        return model

    def to_hf(self) -> Any:
        """Return the module with these weights, in evaluation mode. Adapters are merged."""
        import torch

        if self.config.lora:
            return self.merged().to_hf()
        with torch.no_grad():
            for name, value in _state_of(self.module).items():
                value.copy_(torch.from_numpy(np.array(self.weights[name])))
        return self.module.eval()


def _state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    from nntile_py.capture.export import state_of

    return state_of(module)


def _architecture(raw: Mapping[str, Any]) -> str:
    """Return the name of transformers' class in config.json. Raises ConfigError if there is none."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(f"model: architectures is {names!r} in the model's config; allowed: a class of transformers")
    if raw.get("auto_map"):
        need = "a class of transformers, or my_file.py:function, which returns the module"
        raise ConfigError(f"model: auto_map in the model's config names Python code, which would run; allowed: {need}")
    return names[0]


def _class_and_config(raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class of transformers that config.json names, and config.json as an object of transformers."""
    import transformers

    name = _architecture(raw)
    cls = getattr(transformers, name, None)
    if cls is None or not hasattr(cls, "from_pretrained"):
        version = transformers.__version__
        raise ConfigError(f"model: architectures is {name!r} in the model's config, unknown in transformers {version}")
    try:
        config = cls.config_class.from_dict({**raw})
    except Exception as error:  # the exception type of a failed check depends on transformers' version
        raise ConfigError(f"model: transformers does not take this config ({' '.join(str(error).split())})") from error
    config.use_cache = False
    return cls, config


def _of_transformers(raw: Mapping[str, Any], initialised: bool) -> torch.nn.Module:
    import torch
    from transformers.initialization import no_init_weights

    choice(raw, "quantization_config", None)
    cls, config = _class_and_config(raw)
    config.dtype = torch.float32
    try:
        with nullcontext() if initialised else no_init_weights():
            return cls(config)  # type: ignore[no-any-return]
    except Exception as error:  # sizes that do not fit raise many classes
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"model: {cls.__name__} of transformers does not take this config ({told})") from error


def _of_transformers_with_weights(raw: Mapping[str, Any], source: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a module with the weights of a folder, and transformers' loading info, such as missing_keys."""
    import torch

    if isinstance(source, torch.nn.Module):
        return source, {"missing_keys": set()}
    from transformers.utils import logging

    cls, config = _class_and_config(raw)
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        made: tuple[Any, dict[str, Any]] = cls.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers and safetensors raise many classes
        told = " ".join(str(error).split())[:600]
        raise ConfigError(f"model: transformers cannot read the weights ({told})") from error
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    if wrong := made[1].get("mismatched_keys"):
        name, shape, expected = min(wrong)
        raise ConfigError(f"model: weight {name} has shape {tuple(shape)}, expected {tuple(expected)}")
    return made


# -- functions of a user's file


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return all parameters of a function except *args and **kwargs."""
    known = inspect.signature(function).parameters
    return {name: one for name, one in known.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


@cache
def of_function(function: Callable[..., Any], name: str) -> type[TorchModule]:
    """Return the model class of a function that returns a torch.nn.Module. Its parameters are keys of the config.

    Args:
        function: Takes keyword arguments. The run fills in `vocab` and `positions`.
        name: my_file.py:function, for errors.

    Raises:
        ConfigError: A parameter has the name of another key.
    """
    fields: dict[str, Any] = {"type": (str, name)}
    for key, one in _parameters(function).items():
        if key in ModelConfig.model_fields or key in ("from", "objective") or one.kind == one.POSITIONAL_ONLY:
            need = "names other than type, from, lora and objective, which are passed by keyword"
            raise ConfigError(f"model.type: {name}: the parameter {key} of the function; allowed: {need}")
        if key not in TorchConfig.model_fields:
            kind = one.annotation if one.annotation is not one.empty else Any
            fields[key] = (kind, ... if one.default is one.empty else one.default)
    module = sys.modules[function.__module__]
    hints = inspect.get_annotations(function.__init__ if inspect.isclass(function) else function, eval_str=True)
    fields = {key: (hints.get(key, kind), default) for key, (kind, default) in fields.items()}
    config = create_model(f"{function.__name__}Config", __base__=TorchConfig, __module__=module.__name__, **fields)
    content = {
        "Config": config, "function": staticmethod(function), "objective": "causal",
        "__module__": module.__name__, "__doc__": inspect.getdoc(function),
    }  # fmt: skip
    return type(function.__name__, (TorchModule,), content)
