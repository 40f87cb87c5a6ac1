"""LoRA (Hu et al. 2021): each chosen product x W^T gets a trained sum of low rank, (alpha / rank) (x A^T) B^T."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ZEROS, Part, Uniform
from nntile_py.models.hf_config import ADAPTER_CONFIG
from nntile_py.schema import BelowOne, Count, Names, Positive, Section
from nntile_py.tasks.contract import contract
from nntile_py.tasks.elementwise import add, dropout
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.param_group import matches

A, B = ".lora_A.weight", ".lora_B.weight"  # ends of the names of factors, as in peft
AXIS = "lora"  # the axis of size `rank`, which is never cut
ALL = "all-linear"  # target that stands for all products


class LoraSection(Section):
    """Train low-rank sums of the model's products instead of its weights."""

    rank: Count
    """Rank of the sums: rows of A and columns of B."""
    alpha: Positive
    """The sums are multiplied by alpha / rank."""
    targets: Names
    """Products that get a sum: ends of the names of modules, such as [q_proj, v_proj], or [all-linear] for all."""
    dropout: BelowOne = 0.0
    """Dropout of the input of A."""
    train_also: Names = ()
    """Patterns of names of further weights that are trained, such as `["*norm*"]`, as in `optimizer.groups`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def trains(self, weight: str) -> bool:
        """Return whether a weight of the checkpoint is trained."""
        return is_factor(weight) or matches(weight, self.train_also)

    def adapts(self, module: str) -> bool:
        """Return whether the product with the weight MODULE.weight gets a sum."""
        return any(target == ALL or f".{module}".endswith(f".{target}") for target in self.targets)

    def check(self, weights: Sequence[str]) -> None:
        """Raise ConfigError if a target or a pattern matches none of the names of a model's weights."""
        modules = [name.removesuffix(A) for name in weights if name.endswith(A)]
        for target in self.targets or ("",):
            if not (modules if target == ALL else [m for m in modules if f".{m}".endswith(f".{target}")]):
                known = dict.fromkeys(name.split(".")[-2] for name in weights if name.endswith(".weight"))
                need = f"ends of names of products with weights, or {ALL}; the model has {', '.join(known)}"
                raise ConfigError(f"model.lora.targets: {target!r} matches no product; allowed: {need}")
        for pattern in self.train_also:
            if not any(matches(name, [pattern]) for name in weights):
                need = f"a pattern of names such as {', '.join(weights[-3:])}"
                raise ConfigError(f"model.lora.train_also: {pattern!r} matches no weight; allowed: {need}")


def adapter_config(settings: LoraSection, weights: Iterable[str], base: str | None, causal: bool, **form: bool) -> Any:
    """Return the content of peft's adapter_config.json for a model that is trained with `model.lora`.

    Args:
        settings: The section `model.lora`.
        weights: Names of the model's weights.
        base: Folder of the base model; None: its weights are beside the adapter.
        causal: Whether the model predicts the next token.
        form: fan_in_fan_out, see Model.
    """
    also = {name.split(".")[-2] for name in weights if matches(name, settings.train_also)}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if causal else None, "base_model_name_or_path": base,
        "r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout,
        "target_modules": sorted(modules_of(weights)), "modules_to_save": sorted(also) or None, **form,
        "bias": "none", "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip


# {key of adapter_config.json: its allowed values besides null}
_PLAIN = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "use_rslora": (False,), "lora_bias": (False,),
    "rank_pattern": ({},), "alpha_pattern": ({},), "use_qalora": (False,), "use_bdlora": (False,),
}  # fmt: skip


def scale_of(raw: Mapping[str, Any]) -> float:
    """Return alpha / rank of an adapter_config.json. Raises ConfigError for a kind of adapter that is not supported."""
    for key, known in _PLAIN.items():
        if (value := raw.get(key)) is not None and value not in list(known):
            raise ConfigError(f"model: {key} is {value!r} in {ADAPTER_CONFIG}; allowed: {known[0]!r}")
    try:
        return float(raw["lora_alpha"]) / int(raw["r"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        need = "an adapter of peft"
        raise ConfigError(f"model: {ADAPTER_CONFIG} has no numbers r and lora_alpha; allowed: {need}") from None


def check_factors(
    found: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], raw: Mapping[str, Any],
    settings: LoraSection | None, transposed: bool,
) -> None:  # fmt: skip
    """Check that an adapter's weights fit a model.

    Args:
        found: {name: tensor} of the adapter.
        shapes: {name: shape} of the model's weights.
        raw: Content of adapter_config.json.
        settings: The section `model.lora`; None: the adapter will be merged.
        transposed: see `merged`.

    Raises:
        ConfigError: The adapter is of another model, or `settings` differ from those of the adapter.
    """
    scale, need = scale_of(raw), "an adapter that was trained on this model"
    for name in found:
        module = next((name.removesuffix(end) for end in (A, B) if name.endswith(end)), None)
        own = shapes.get(f"{module}.weight" if module else name)
        if own is None:
            raise ConfigError(f"model: the adapter has {name}, and the model has no such weight; allowed: {need}")
        rank, (rows, columns) = int(raw["r"]), own[::-1] if transposed and module else (*own, 0)[:2]
        expected = own if not module else (rank, columns) if name.endswith(A) else (rows, rank)
        if tuple(found[name].shape) != expected:
            shape = tuple(found[name].shape)
            raise ConfigError(f"model: the adapter's {name} has shape {shape}, expected {expected}; allowed: {need}")
    for name in found:
        if is_factor(name) and {name.removesuffix(A).removesuffix(B) + end for end in (A, B)} - found.keys():
            raise ConfigError(f"model: the adapter has {name} without the other factor; allowed: both")
    if settings and ({*filter(is_factor, found)} != {*filter(is_factor, shapes)} or scale != settings.scale):
        ends = sorted({name.split(".")[-1] for name in modules_of(found)})
        theirs = f"rank {raw['r']}, alpha {raw['lora_alpha']} and targets {', '.join(ends)}"
        raise ConfigError(f"model.lora: differs from the adapter, which has {theirs}; allowed: the same")


def is_factor(weight: str) -> bool:
    """Return whether a weight is a factor of LoRA, by its name."""
    return weight.endswith((A, B))


class LoraSum:
    """The factors A and B of one product. `add_to` adds (alpha / rank) (x A^T) B^T to the product's result.

    Several products with the same x may be parts of one weight of the checkpoint. They share A and x A^T.

    Args:
        module: name of the module in the checkpoint, whose weight is MODULE.weight.
        inner, out: axes as of `dense_weights`.
        part: (number, count) if the product's weight is a part of the checkpoint's weight along the first axis of out.
    """

    def __init__(
        self, g: Graph, settings: LoraSection, module: str, inner: Mapping[str, int], out: Mapping[str, int],
        part: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        self.settings, self.module, self.rank = settings, module, {AXIS: settings.rank}
        bound = 1 / math.sqrt(math.prod(inner.values()))  # kaiming_uniform_(a=sqrt(5)), as in peft
        name = module + A
        self.a = g.tensors[name] if name in g.tensors else g.param(name, {**self.rank, **inner}, Uniform(bound))
        name, source = module + B, None
        if part:
            name, source = f"{module}.{part[0]}{B}", Part(module + B, *part, next(iter(out)))
        self.b = g.param(name, {**out, **self.rank}, ZEROS, source)

    def add_to(self, g: Graph, y: Tensor, x: Tensor) -> Tensor:
        """Return y + (alpha / rank) (dropout(x) A^T) B^T."""
        with g.scope("lora"):
            narrow = g.shared.get((self.a, x))
            if narrow is None:
                axes = [axis for axis in x.axes if axis not in self.a.axes]
                narrow = contract(g, dropout(g, x, self.settings.dropout), self.a, [*axes, AXIS])
                g.shared[self.a, x] = narrow
            return add(g, contract(g, narrow, self.b, y.axes, scale=self.settings.scale), y)


def merged(weights: Any, scale: float, transposed: bool) -> dict[str, Any]:
    """Return a model's weights with W + scale B A in place of W, A and B.

    Args:
        weights: {name: array}, factors included.
        scale: alpha / rank.
        transposed: W is [inputs, outputs], as of GPT-2's Conv1D.
    """
    result = {name: value for name, value in weights.items() if not is_factor(name)}
    for name in modules_of(weights):
        delta = scale * (weights[name + B] @ weights[name + A])
        weight = result[f"{name}.weight"]
        result[f"{name}.weight"] = weight + (delta.T if transposed else delta).astype(weight.dtype)
    return result


def modules_of(weights: Iterable[str]) -> list[str]:
    """Return the names of the modules that have factors among these weights."""
    return [name.removesuffix(A) for name in weights if name.endswith(A)]
