"""Checks of a model's loss: that the loss exists, and that it can be scaled."""

from __future__ import annotations

from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Tensor


def check_scalable(graph: Graph, loss: Tensor, dtype: str) -> None:
    """Raise ConfigError if an operator adds to the loss without the `scale` slot of an input.

    The slot also holds the loss scale. Gradients of an operator without the slot would lack this scale.
    """
    scales = {one.scale for one in graph.inputs.values()}
    for op in graph.ops:
        slot = getattr(op, "scale", None)
        if getattr(slot, "name", slot) not in scales - {None} and loss.storage in {out.storage for out in op.outputs}:
            other = "bf16 or fp32" if dtype == "fp16" else f"{dtype} without loss_scale"
            raise ConfigError(f"precision: the loss of {op.kind} has no scale= of an input; allowed here: {other}")


def no_loss(config: Any) -> str:
    """Return the second half of the error message for a model whose trace returned no loss."""
    own = getattr(type(config), "model_fields", {}).get("head")
    if not own or (head := config.head) == own.default:
        return " has no loss; allowed in training: a model whose trace returns one"
    folder = f" (from {config.from_})" if getattr(config, "from_", None) else ""
    need = f"another head, such as head: {own.default}, whose weights are random if the folder has none"
    return f" with head: {head}{folder} has no loss; allowed in training: {need}"
