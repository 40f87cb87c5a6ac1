"""Running statistics: tensors that each training pass changes, and that evaluations and checkpoints read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nntile_py.execution.python_task import PythonTask
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import Constant
from nntile_py.graph.params import Param, Source
from nntile_py.tasks.op import GraphLike, Lowering, Op, Tensor, accumulation_dtype
from nntile_py.tiles import R, W


def statistics(g: Graph, name: str, sizes: Mapping[str, int], source: Source) -> Tensor:
    """Declare statistics as a parameter that no optimizer changes, in the dtype of accumulation. Returns the tensor."""
    tensor = g.named(name, list(sizes), list(sizes.values()), "param", accumulation_dtype(g.dtype))
    tensor.requires_grad = False
    g.params[tensor] = Param(tensor, Constant(0.0), (source,))
    return tensor


class StatisticsUpdate(Op):
    """Overwrites statistics by their new value: the output shares the tiles of `old`."""

    def __init__(self, old: Tensor, new: Tensor, out: Tensor) -> None:
        super().__init__([new], [out])
        out.storage = old

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        return [None]

    def lower(self, lowering: Lowering) -> None:
        for index in lowering.indices(self.output):
            lowering.emit(_copy, [W(lowering.tile(self.output, index)), R(lowering.tile(self.inputs[0], index))])


def update(g: Graph, old: Tensor, new: Tensor) -> None:
    """Add the operator that overwrites statistics. In the same pass, nothing may read the statistics afterwards."""
    g.add(StatisticsUpdate(old, new, g.temp("statistics", old.axes, old.shape, old.dtype)))


def _assign(old: torch.Tensor, new: torch.Tensor) -> None:
    old.copy_(new)


_copy = PythonTask(_assign, "torch", {"old": "W", "new": "R"})
