"""The update of a parameter as operators of a graph. Each optimizer itself is a file of tasks/."""

from __future__ import annotations

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.optimizer import MASTERS, Optimizer, Update


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
    decay = optimizer.weight_decay if _decays(optimizer, param) else 0.0
    g.add(Update(optimizer, tensor, grad, states, clip, weight_decay=decay, master=master))


def _decays(optimizer: Optimizer, param: Param) -> bool:
    """Return whether weight decay acts on the parameter: on matrices only, unless `decay` is "all".

    A matrix has two or more axes in the checkpoint. A bias of attention has one axis in the checkpoint, though its
    tensor has two: heads and head_dim.
    """
    return optimizer.decay == "all" or all(len(source.shape) > 1 for source in param.sources)
