"""The update of a parameter as operators of a graph. Each optimizer itself is a file of tasks/."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.optimizer import MASTERS, Optimizer, Update
from nntile_py.tasks.param_group import ParamGroup


def add_update(g: Graph, optimizer: Optimizer, param: Param, grad: Tensor, clip: Tensor) -> None:
    """Add the operators that update a parameter, and the tensors of its optimizer states, to a graph.

    clip: the factor by which the gradient is clipped, see GradNorm.
    """
    tensor = param.tensor

    def state(name: str, dtype: str) -> Tensor:
        return g.named(f"{tensor.name}.{name}", tensor.axes, tensor.shape, "state", dtype)

    states = [state(name, accumulation_dtype(tensor.dtype)) for name in optimizer.states]
    # The master weight of bf16 needs only its low bits, 2 bytes; fp16 needs an fp32 copy, 4 bytes.
    master = state(*MASTERS[tensor.dtype]) if tensor.dtype in MASTERS else None
    group = _group_of(optimizer, param)
    scale = group.scale(optimizer.lr) if group else 1.0
    decay = optimizer.weight_decay if _decays(optimizer, param) else 0.0
    if group and group.weight_decay is not None:
        decay = group.weight_decay
    g.add(Update(optimizer, tensor, grad, states, clip, weight_decay=decay, lr_scale=scale, master=master))


def learning_rates(update: Graph, lr: float) -> dict[str, float]:
    """Return {slot: learning rate} for all learning rates of an update's graph, if the optimizer's rate is `lr`."""
    return {op.lr_slot.name: lr * op.lr_scale for op in update.ops if isinstance(op, Update)}


def check_groups(optimizer: Optimizer, params: Iterable[Param]) -> None:
    """Raise ConfigError if a pattern of `optimizer.groups` matches no weight."""
    names = list(dict.fromkeys(source.weight for param in params for source in param.sources))
    for number, group in enumerate(optimizer.groups):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                need = f"a pattern of names such as {', '.join(names[-3:])}"
                raise ConfigError(f"optimizer.groups[{number}].match: {pattern!r} matches no weight; allowed: {need}")


def _group_of(optimizer: Optimizer, param: Param) -> ParamGroup | None:
    """Return the group of a parameter; None if it takes the settings of the section `optimizer`.

    Raises:
        ConfigError: The parameter joins several weights of a checkpoint, which are in different groups.
    """
    weights = [source.weight for source in param.sources]
    groups = [next((group for group in optimizer.groups if group.matches(weight)), None) for weight in weights]
    for weight, group in zip(weights, groups, strict=True):
        if group is not groups[0]:
            need = "patterns that match both or none, or for queries, keys and values fusion.qkv=false"
            both = f"{weights[0]} and {weight} are in different groups, but one parameter here"
            raise ConfigError(f"optimizer.groups: {both}; allowed: {need}")
    return groups[0]


def _decays(optimizer: Optimizer, param: Param) -> bool:
    """Return whether weight decay acts on the parameter: on matrices only, unless `decay` is "all".

    A matrix has two or more axes in the checkpoint. A bias of attention has one axis in the checkpoint, though its
    tensor has two: heads and head_dim.
    """
    return optimizer.decay == "all" or all(len(source.shape) > 1 for source in param.sources)
