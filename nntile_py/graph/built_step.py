"""What a StepSpec builds: the graphs and task lists of a training step or of an evaluation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import Order
from nntile_py.graph.optimizers import learning_rates
from nntile_py.graph.packed_flop import PackedFlop
from nntile_py.graph.params import Param
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tiles import TaskList


@dataclass
class Step:
    """The graphs and task lists of a step.

    Attributes:
        first: forward and backward of the first micro-batch.
        more: forward and backward of each further micro-batch, which add to the gradients.
        update: update of the weights.
        optional: optional inputs of the model, each with its neutral value, which has no effect.
        refused: True: the searched layouts were measured to be slower, so the step has the default layouts.
        memory_settings: settings of a run, such as "recompute: layer", with which activations take less memory.
    """

    graph: Graph
    update_graph: Graph
    grads: dict[Tensor, Tensor]
    first: Lowering
    more: Lowering | None
    update: Lowering
    optional: dict[str, float]
    refused: bool = False
    memory_settings: Sequence[str] = ()

    @property
    def params(self) -> list[Param]:
        return list(self.graph.params.values())

    @property
    def kept(self) -> dict[str, Order]:
        """{name: order of axes} for each weight that a layout search has reordered."""
        return {param.tensor.name: param.tensor.axes for param in self.params if param.order}

    def learning_rates(self, lr: float) -> dict[str, float]:
        """Return {slot: learning rate} of the update for a step with the learning rate `lr`."""
        return learning_rates(self.update_graph, lr)

    @cached_property
    def flop(self) -> float:
        return self.graph.flop()

    @cached_property
    def packed_flop(self) -> PackedFlop:
        """The flop of a step's passes as a function of its packed inputs."""
        return PackedFlop.of(self.graph)

    @property
    def lists(self) -> list[Lowering]:
        return [lowering for lowering in (self.first, self.more, self.update) if lowering]

    def order(self, micro_batches: int) -> list[int]:
        """Return the positions in `lists` in the order in which the lists of a step run."""
        return [0, *[1] * (micro_batches - 1), len(self.lists) - 1]

    def in_turn(self, micro_batches: int) -> list[TaskList]:
        """Return the task lists of a step in the order in which they run."""
        return [self.lists[k].tasks for k in self.order(micro_batches)]

    def kept_tiles(self) -> dict[Hashable, int]:
        """Return {key: bytes} of every tile that outlives a step: weights, gradients, optimizer state, inputs."""
        tiles = {a.tile for lowering in self.lists for task in lowering.tasks.tasks for a in task.accesses}
        return {t.key: t.bytes for t in tiles if t.persistent}

    def peak_bytes(self) -> int:
        """Return the largest number of bytes alive at once if the step's tasks run in order."""
        kept = sum(self.kept_tiles().values())
        return max(lowering.tasks.peak_bytes(kept) for lowering in self.lists)

    def largest(self, count: int = 3) -> str:
        """Return the `count` largest tensors of the step with their sizes, as text."""
        sizes: dict[str, int] = {}
        for tile in {a.tile for lowering in self.lists for task in lowering.tasks.tasks for a in task.accesses}:
            sizes[tile.tensor] = sizes.get(tile.tensor, 0) + tile.bytes
        top = sorted(sizes, key=lambda name: (-sizes[name], name))[:count]
        return ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in top)


@dataclass
class Graphs:
    """Forward and backward of a step in one graph, before it is cut into tiles.

    Attributes:
        grads: {parameter: gradient}.
        optional, refused: as in Step.
    """

    graph: Graph
    grads: dict[Tensor, Tensor]
    loss: Tensor
    optional: dict[str, float]
    refused: bool = False


@dataclass
class Evaluation:
    """The task list of a forward pass, with the outputs that the host can read."""

    graph: Graph
    outputs: dict[str, Tensor]
    forward: Lowering

    @property
    def params(self) -> list[Param]:
        return list(self.graph.params.values())
