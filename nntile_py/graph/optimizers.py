"""The update of a parameter as operators of a graph; the optimizers themselves are files of tasks/."""

from __future__ import annotations

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.optimizer import MASTERS, Optimizer, Update


def add_update(g: Graph, optimizer: Optimizer, param: Param, grad: Tensor, clip: Tensor) -> None:
    """Add the update of a parameter, with the tensors of its states, to a graph."""
    tensor = param.tensor

    def state(name: str, dtype: str) -> Tensor:
        return g.named(f"{tensor.name}.{name}", tensor.axes, tensor.shape, "state", dtype)

    states = [state(name, accumulation_dtype(tensor.dtype)) for name in optimizer.states]
    # bf16 keeps the low bits of the master weight: 2 bytes, where fp32's own copy, as for fp16, takes 4.
    master = state(*MASTERS[tensor.dtype]) if tensor.dtype in MASTERS else None
    decay = optimizer.weight_decay if _decays(optimizer, param) else 0.0
    g.add(Update(optimizer, tensor, grad, states, clip, weight_decay=decay, master=master))


def _decays(optimizer: Optimizer, param: Param) -> bool:
    """Whether weight decay acts on the parameter.

    Matrices have two or more axes in the checkpoint, as in nanoGPT: a bias of attention has two axes here, heads and
    head_dim, but one in the checkpoint.
    """
    return optimizer.decay == "all" or all(len(source.shape) > 1 for source in param.sources)
