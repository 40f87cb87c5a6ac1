"""The update of a parameter as operators of a graph. Each optimizer itself is a file of tasks/."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param, Source
from nntile_py.tasks.matrix_axes import MatrixAxes
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.optimizer import MASTERS, Optimizer, UpdateOp
from nntile_py.tasks.param_group import ParamGroup, check_match


def add_update(g: Graph, optimizer: Optimizer, param: Param, grad: Tensor, clip: Tensor) -> None:
    """Add the operators that update a parameter, and the tensors of its optimizer states, to a graph.

    clip: the factor by which the gradient is clipped, see GradNorm.
    """
    tensor, axes = param.tensor, matrix_axes(param)

    def state(name: str, dtype: str) -> Tensor:
        return g.named(f"{tensor.name}.{name}", tensor.axes, tensor.shape, "state", dtype)

    chosen, scale = optimizer.of_param([source.weight for source in param.sources], tensor, axes)
    states = [state(name, accumulation_dtype(tensor.dtype)) for name in chosen.states]
    # The master weight of bf16 needs only its low bits, 2 bytes; fp16 needs an fp32 copy, 4 bytes.
    master = state(*MASTERS[tensor.dtype]) if tensor.dtype in MASTERS else None
    group = _group_of(optimizer, param)
    decay = optimizer.weight_decay if _decays(optimizer, param) else 0.0
    if group:
        scale *= group.scale(optimizer.lr)
        decay = decay if group.weight_decay is None else group.weight_decay
    how = {"weight_decay": decay, "lr_scale": scale, "master": master}
    chosen.add_update(g, tensor, grad, states, clip, axes, **how)


def matrix_axes(param: Param) -> MatrixAxes | None:
    """Return the axes of a parameter as stacked matrices; None if the parameter does not consist of matrices.

    Each source must be a matrix: a checkpoint weight with two dimensions, or a part of such a weight. If a fusion has
    joined several parameters, each of their sources stays a matrix of its own.
    """
    order = param.order or param.tensor.axes
    each = {_matrix_axes(source, order) for source in param.sources}
    return each.pop() if len(each) == 1 else None


def _matrix_axes(source: Source, order: Sequence[str]) -> MatrixAxes | None:
    at = dict(itertools.zip_longest(order, source.at, fillvalue=slice(None)))
    matrices = tuple(axis for axis in order if isinstance(at[axis], int))
    if len(source.shape) != 2 or any(one != slice(None) for axis, one in at.items() if axis not in matrices):
        return None
    split = next((k for k in range(len(source.view)) if math.prod(source.view[:k]) == source.shape[0]), 0)
    index = itertools.zip_longest(source.view, source.index, fillvalue=slice(None))
    names = iter(axis for axis in order if axis not in matrices)
    axes = [None if isinstance(one, int) else next(names) for _, one in index]
    rows, columns = (tuple(axis for axis in part if axis) for part in (axes[:split], axes[split:]))
    return MatrixAxes(matrices, rows, columns) if rows and columns else None


def learning_rates(update: Graph, lr: float) -> dict[str, float]:
    """Return {slot: learning rate} for all learning rates of an update's graph, if the optimizer's rate is `lr`."""
    return {op.lr_slot.name: lr * op.lr_scale for op in update.ops if isinstance(op, UpdateOp)}


def check_groups(optimizer: Optimizer, params: Iterable[Param]) -> None:
    """Raise ConfigError if a pattern of `optimizer.groups`, or of `optimizer.patterns`, matches no weight."""
    names = list(dict.fromkeys(source.weight for param in params for source in param.sources))
    patterns = {f"groups[{number}].match": group.match for number, group in enumerate(optimizer.groups)}
    for key, each in (patterns | optimizer.patterns).items():
        check_match(f"optimizer.{key}", each, names)


def _group_of(optimizer: Optimizer, param: Param) -> ParamGroup | None:
    """Return the group of a parameter; None if no group matches, so the settings of the section `optimizer` apply.

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
