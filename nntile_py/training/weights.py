"""A model's weights: out of its arrays into tiles, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.execution.program import Store
from nntile_py.graph.params import Array
from nntile_py.graph.step import Step
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.optimizer import joined, split
from nntile_py.training.state import masters_of


def read(
    built: Step, store: Store, tensors: Mapping[Tensor, Tensor], masters: Mapping[Tensor, Tensor] | None = None
) -> dict[str, Array]:
    """{name in transformers: array} of the tensors of parameters, with what `masters` have besides."""
    result: dict[str, Array] = {}
    for param in built.params:
        if param.tensor in tensors:
            value = store.read(built.first, tensors[param.tensor])
            if master := (masters or {}).get(param.tensor):
                value = joined(value, store.read(built.update, master))
            param.put(result, value)
    return result


def write(model: Any, built: Step, store: Store, same: Callable[[str, Mapping[str, Any]], None]) -> None:
    """The model's weights into their tiles. same: raises ConfigError where ranks differ in them."""
    masters, weights = masters_of(built), getattr(model, "weights", None)
    if not isinstance(weights, Mapping):
        raise ConfigError(f"model: {type(model).__name__}.weights is no dict; allowed: {{name: array}}")
    for param in built.params:
        value = param.weight(weights)
        same("the model's weights", {param.tensor.name: value})
        if param.tensor in masters:
            value, master = split(value, param.tensor.dtype)
            store.write(built.update, masters[param.tensor], master)
        store.write(built.first, param.tensor, value)
