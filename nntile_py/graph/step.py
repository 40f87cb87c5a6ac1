"""A training step and an evaluation as task lists: pure data, shared by the trainer and by `nntile plan`."""

from __future__ import annotations

from dataclasses import dataclass

from nntile_py.graph.fusion import Fusion, fuse, narrow_gradients
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.graph.optimizers import Optimizer
from nntile_py.models.gpt2 import GPT2, Binding
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tasks.optimizer import GradNorm
from nntile_py.tiles import Tiling

PRECISIONS = ("fp32", "fp64", "bf16", "tf32")
TILE_DTYPE = {"tf32": "fp32"}  # the others are what they say


@dataclass
class Step:
    """Task lists of one step: `first` micro-batch, each `more` (added to its gradients), `update` of the weights."""

    graph: Graph
    update_graph: Graph
    bindings: list[Binding]
    grads: dict[Tensor, Tensor]
    first: Lowering
    more: Lowering | None
    update: Lowering

    @property
    def flop(self) -> float:
        return self.graph.flop()

    @property
    def lists(self) -> list[Lowering]:
        return [low for low in (self.first, self.more, self.update) if low]

    def kept_tiles(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Bytes of every tile that outlives a step: weights, gradients, optimizer state, inputs."""
        tiles = {a.tile for low in self.lists for task in low.tasks.tasks for a in task.accesses}
        return {(t.tensor, t.index): t.bytes for t in tiles if t.persistent}

    def peak_bytes(self) -> int:
        """Bytes alive at the worst point of the step when its tasks run in order."""
        kept = sum(self.kept_tiles().values())
        return max(low.tasks.peak_bytes(kept) for low in self.lists)

    def largest(self, count: int = 3) -> str:
        """The tensors that take most memory, and the axes along which they can be cut."""
        sizes: dict[str, int] = {}
        for tile in {a.tile for low in self.lists for task in low.tasks.tasks for a in task.accesses}:
            sizes[tile.tensor] = sizes.get(tile.tensor, 0) + tile.bytes
        top = sorted(sizes, key=lambda name: -sizes[name])[:count]
        return ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in top)


def build_step(
    model: GPT2,
    batch: int,
    seq: int,
    tiling: Tiling,
    *,
    dtype: str,
    optimizer: Optimizer,
    clip_grad_norm: float | None,
    policy: str,
    fusion: Fusion,
    grad_accumulation: int = 1,
) -> Step:
    graph = Graph(TILE_DTYPE.get(dtype, dtype))
    loss, _, bindings = model.build(graph, batch, seq, fusion)
    grads = graph.backward(loss)
    fuse(graph, fusion, tiling.cut("vocab", model.config.vocab), tiling)
    if grad_accumulation == 1:
        narrow_gradients(graph, grads.values(), tiling)
    first = lower(graph, tiling, policy)
    # They can be read until the next step begins; the activations then take their place.
    first.tasks.forget(first.tile(grad, index) for grad in grads.values() for index in first.indices(grad))
    update = Graph(graph.dtype)
    norm, clip = (update.named(name, ["one"], [1], "scalar", "fp64") for name in ("grad_norm", "clip"))
    update.add(GradNorm(list(grads.values()), norm, clip, clip_grad_norm, first.tasks.ends("batch")))
    for param, grad in grads.items():
        update.tensors[param.name] = param
        with update.scope(param.name):
            optimizer.build(update, param, grad, clip)
    kept = [*grads.values(), loss]
    return Step(
        graph,
        update,
        bindings,
        grads,
        first,
        lower(graph, tiling, policy, holds=kept) if grad_accumulation > 1 else None,
        lower(update, tiling, policy, holds=grads.values()),
    )


@dataclass
class Evaluation:
    """Task list of a forward pass; the logits are kept for the host if they were asked for."""

    graph: Graph
    logits: Tensor
    bindings: list[Binding]
    forward: Lowering


def build_evaluation(
    model: GPT2, batch: int, seq: int, tiling: Tiling, *, dtype: str, policy: str, fusion: Fusion, keep_logits: bool
) -> Evaluation:
    graph = Graph(TILE_DTYPE.get(dtype, dtype))
    _, logits, bindings = model.without_dropout().build(graph, batch, seq, fusion)
    fuse(graph, fusion, tiling.cut("vocab", model.config.vocab), tiling)
    if keep_logits:
        logits.name, logits.kind = "logits", "scalar"
    return Evaluation(graph, logits, bindings, lower(graph, tiling, policy))
