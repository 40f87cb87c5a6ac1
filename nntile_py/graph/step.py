"""A training step and an evaluation as task lists: pure data, shared by whoever runs, plans, profiles or draws one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from nntile_py.errors import ConfigError, operators_refuse
from nntile_py.graph import packed_inputs
from nntile_py.graph.fusion import Fusion, fuse, narrow_gradients
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import arrange, keep_in
from nntile_py.graph.layouts import Order
from nntile_py.graph.lowering import lower
from nntile_py.graph.optimizers import add_update
from nntile_py.graph.params import Array, Batch, Param, Traceable, Traced, trace
from nntile_py.graph.qkv_fusion import pack_projections
from nntile_py.graph.random_inputs import random_inputs
from nntile_py.graph.timings import Timings
from nntile_py.tasks.adamw import AdamW
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tasks.optimizer import MOST_SCALE, Ends, GradNorm, Optimizer
from nntile_py.tiles import Tiling
from nntile_py.tiles.allreduce import Meeting
from nntile_py.tiles.tasklist import live_slot
from nntile_py.typed import plain

# The workers that compute in it.
PRECISIONS = {"fp32": ("CPU", "CUDA"), "fp64": ("CPU",), "bf16": ("CUDA",), "fp16": ("CUDA",), "tf32": ("CUDA",)}
TILE_DTYPE = {"tf32": "fp32"}  # the others are what they say
LOSS_SCALE = {"fp16": 65536.0}  # the first of a run: torch.amp.GradScaler's


def check_precision(key: str, precision: str, cuda: bool) -> None:
    """ConfigError, which names `key`, if workers of this kind do not compute in that precision."""
    kind = "CUDA" if cuda else "CPU"
    if kind not in PRECISIONS[precision]:
        known = ", ".join(name for name, kinds in PRECISIONS.items() if kind in kinds)
        need = "runtime.cuda: 0" if cuda else "GPUs (runtime.cuda)"
        raise ConfigError(f"{key}: {precision} needs {need}; allowed on {kind} workers: {known}")


def check_pack(pack: bool, tile: int | None) -> None:
    """ConfigError for tiles of packed sequences."""
    if pack and tile is not None:
        raise ConfigError(f"tiles.seq: got {tile}; allowed with pack: none, a bin is not cut")


def _check_scalable(graph: Graph, loss: Tensor, dtype: str) -> None:
    """ConfigError where a part of the loss has no slot that scales it, and with it its gradients."""
    scales = {one.scale for one in graph.inputs.values()}
    for op in graph.ops:
        slot = getattr(op, "scale", None)
        if getattr(slot, "name", slot) not in scales - {None} and loss.storage in {out.storage for out in op.outputs}:
            other = "bf16 or fp32" if dtype == "fp16" else f"{dtype} without loss_scale"
            raise ConfigError(f"precision: the loss of {op.kind} has no scale= of an input; allowed here: {other}")


@dataclass
class Step:
    """Task lists of one step: `first` micro-batch, each `more` (added to its gradients), `update` of the weights."""

    graph: Graph
    update_graph: Graph
    grads: dict[Tensor, Tensor]
    first: Lowering
    more: Lowering | None
    update: Lowering
    optional: dict[str, float]  # inputs that a step may have besides, and what is as good as none
    refused: bool = False  # searched layouts, which are slower by a verdict: it has the default ones

    @property
    def params(self) -> list[Param]:
        return list(self.graph.params.values())

    @property
    def kept(self) -> dict[str, Order]:
        """The orders of the weights that are not as declared, by name."""
        return {param.tensor.name: param.tensor.axes for param in self.params if param.order}

    @property
    def flop(self) -> float:
        return self.graph.flop()

    @property
    def lists(self) -> list[Lowering]:
        return [low for low in (self.first, self.more, self.update) if low]

    def kept_tiles(self) -> dict[Hashable, int]:
        """Bytes of every tile that outlives a step: weights, gradients, optimizer state, inputs."""
        tiles = {a.tile for low in self.lists for task in low.tasks.tasks for a in task.accesses}
        return {t.key: t.bytes for t in tiles if t.persistent}

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


@dataclass
class Graphs:
    """What a step computes before it is cut: forward and backward in one graph, the gradients of its parameters."""

    graph: Graph
    grads: dict[Tensor, Tensor]
    loss: Tensor
    optional: dict[str, float]
    refused: bool = False


@dataclass
class Evaluation:
    """Task list of a forward pass; `outputs` that were asked for are kept for the host."""

    graph: Graph
    outputs: dict[str, Tensor]
    forward: Lowering

    @property
    def params(self) -> list[Param]:
        return list(self.graph.params.values())


@dataclass(frozen=True)
class StepSpec:
    """All that decides the programs of a training step.

    batch, seq: of one micro-batch; policy: how partial sums of a tile meet (`accumulate`); given: optional inputs that
    steps have. pack: sequences of unequal lengths, of `seq` tokens at most, lie one behind the other in bins, one for
    each tile of the batch, all with room for as many sequences of `seq` tokens; a pass has batch * seq tokens at most,
    also where that fills no whole number of them. alone: False where other machines add to its
    gradients, each with a batch of its own. ranks: that share the tasks, see allreduce.Meeting. timings: forward and
    backward get the layouts that are cheapest by these (layout_search). kept: the orders of weights that are not as
    declared, by name, where another program has chosen them. loss_scale: what the loss is first multiplied by, see
    training/loss_scale.py; None: 65536 in fp16, else none. Raises ConfigError for values out of range.
    """

    model: Traceable
    batch: int
    seq: int
    tiling: Tiling = field(default_factory=Tiling)
    dtype: str = "fp32"
    optimizer: Optimizer = field(default_factory=AdamW)
    clip_grad_norm: float | None = None
    policy: str = "chain"
    fusion: Fusion = field(default_factory=Fusion)
    grad_accumulation: int = 1
    skip_above_norm: float | None = None
    given: frozenset[str] = frozenset()
    pack: bool = False
    alone: bool = True
    ranks: int = 1
    timings: Timings | None = None
    kept: Mapping[str, Order] | None = None
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.model, "trace", None)):
            raise ConfigError(
                f"model: {type(self.model).__name__} is not allowed; use a model of nt.models, or a class of your own"
                " with trace(graph, batch)"
            )
        if self.dtype not in PRECISIONS:
            raise ConfigError(f"dtype: {self.dtype!r} is not allowed; use one of {', '.join(PRECISIONS)}")
        if not isinstance(self.optimizer, Optimizer):
            kind = type(self.optimizer).__name__
            raise ConfigError(f"optimizer: {kind} is not allowed; use nt.AdamW(...) or nt.SGD(...)")
        for name in ("batch", "seq", "grad_accumulation", "clip_grad_norm", "skip_above_norm", "pack", "loss_scale"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("batch", "seq", "grad_accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(f"{name}: {value!r} is not allowed; use a positive integer below 2^31")
        if not isinstance(self.pack, bool):
            raise ConfigError(f"pack: {self.pack!r} is not allowed; use True or False")
        scale = self.loss_scale
        number = isinstance(scale, Real) and not isinstance(scale, bool)
        if scale is not None and not (number and 1 <= scale <= MOST_SCALE):
            need = f"use a number of at least 1 and at most {MOST_SCALE:g}, or None"
            raise ConfigError(f"loss_scale: {scale!r} is not allowed; {need}")
        check_pack(self.pack, self.tiling.tiles.get("seq"))

    @property
    def rows(self) -> int:
        """Rows of a micro-batch's arrays: sequences, or bins."""
        return len(self.tiling.parts("batch", self.batch)) if self.pack else self.batch

    @property
    def scale(self) -> float | None:
        """What the loss is first multiplied by; None: it is not."""
        return float(self.loss_scale) if self.loss_scale else LOSS_SCALE.get(self.dtype)

    @property
    def capacity(self) -> int:
        """Places of a row."""
        return self.seq * -(-self.batch // self.rows)

    def live_slots(self) -> list[str]:
        """The slots that say how much of each bin is filled."""
        return [live_slot(axis, k) for axis in packed_inputs.LIVE for k in range(self.rows)] if self.pack else []

    @property
    def cuts(self) -> Tiling:
        """The tiling of the graph: each bin is a tile."""
        return Tiling({**self.tiling.tiles, "batch": 1}) if self.pack else self.tiling

    def with_inputs(self, given: Iterable[str]) -> StepSpec:
        """The same for steps that have these optional inputs."""
        return replace(self, given=frozenset(given))

    @operators_refuse()
    def trace(self, *, training: bool = True) -> tuple[Graph, Traced, Batch]:
        """The model's graph, forward alone, before fusion."""
        graph = Graph(TILE_DTYPE.get(self.dtype, self.dtype), training=training, cuts=self.cuts)
        graph.filled = self.batch * self.seq / (self.rows * self.capacity)
        batch = Batch(self.rows, self.capacity, self.given, packed=self.seq if self.pack else None)
        if self.pack:
            packed_inputs.begin(graph, batch)
        traced = trace(self.model, graph, batch)
        if training and traced.loss is None:
            raise ConfigError(f"model: {type(self.model).__name__}{_no_loss(getattr(self.model, 'config', None))}")
        if self.pack:
            packed_inputs.check(graph, self.model)
        if self.fusion.qkv:
            pack_projections(graph, traced.outputs.values(), self.fusion.packed)
        return graph, traced, batch

    def random_inputs(
        self, rows: int, seed: int, alpha: float = 1.0, predicted: float = 1.0, *, training: bool = True
    ) -> dict[str, Array]:
        """Of a step, or an evaluation, of so many sequences, as a user gives them, packed or not; see
        random_inputs.py. Raises ConfigError, before anything is drawn, for more sequences than tiles can have."""
        self.tiling.parts("batch", rows)
        graph = replace(self, pack=False).trace(training=training)[0]
        made = random_inputs(graph, rows, seed, alpha, predicted)
        derived = {name for name, one in graph.inputs.items() if callable(one.default)} if self.pack else set()
        return {name: value for name, value in made.items() if name not in derived}  # bins have theirs

    @operators_refuse()
    def graphs(self) -> Graphs:
        """Forward and backward as a graph, not yet cut into tiles."""
        graph, traced, batch = self.trace()
        assert traced.loss
        if self.scale:
            _check_scalable(graph, traced.loss, self.dtype)
        grads = graph.backward(traced.loss)
        fuse(graph, self.fusion, self.cuts)
        if self.grad_accumulation == 1 and self.alone:
            narrow_gradients(graph, grads.values(), self.cuts)
        chosen = arrange(graph, self.timings, self.cuts, self.policy, self.kept) if self.timings else None
        return Graphs(graph, graph.grads, traced.loss, batch.optional, chosen is not None and chosen.refused)

    @operators_refuse()
    def update(self, made: Graphs, ends: Ends | None = None) -> Graph:
        """The optimizer's part of the step; ends: see GradNorm."""
        update = Graph(made.graph.dtype)
        norm, clip = (update.named(name, ["one"], [1], "scalar", "fp64") for name in ("grad_norm", "clip"))
        norms = list(made.grads.values()), norm, clip, self.clip_grad_norm, ends
        update.add(GradNorm(*norms, skip_above=self.skip_above_norm, scaled=self.scale is not None))
        params = {param.tensor: param for param in made.graph.params.values()}
        for tensor, grad in made.grads.items():
            update.tensors[tensor.name] = tensor
            with update.scope(tensor.name):
                add_update(update, self.optimizer, params[tensor], grad, clip)
        return update

    @operators_refuse()
    def step(self) -> Step:
        """Forward, backward and update as task lists."""
        made = self.graphs()
        graph, grads = made.graph, made.grads
        meeting, more = self._meeting(grads.values()), None
        first = lower(graph, self.cuts, self.policy, meeting=meeting)
        # They can be read until the next step begins; the activations then take their place.
        first.tasks.forget(first.tile(grad, index) for grad in grads.values() for index in first.indices(grad))
        if meeting:
            first.tasks.forget(meeting.apart())
        update = self.update(made, first.tasks.ends("batch"))
        if self.grad_accumulation > 1:
            more = lower(graph, self.cuts, self.policy, holds=[*grads.values(), made.loss], meeting=meeting)
        last = lower(update, self.cuts, self.policy, holds=grads.values(), meeting=meeting and meeting.ended())
        return Step(graph, update, grads, first, more, last, made.optional, made.refused)

    def _meeting(self, grads: Iterable[Tensor] = ()) -> Meeting | None:
        """None: in a chain. With several micro-batches gradients meet once."""
        if self.ranks == 1 or self.policy == "chain":
            return None
        return Meeting(self.ranks, {(t.storage.kind, t.storage.name) for t in grads if self.grad_accumulation > 1})

    @operators_refuse()
    def evaluation(self, keep: bool = False) -> Evaluation:
        """A forward pass without dropout; with `keep` the model's outputs are kept for the host."""
        graph, traced, _ = self.trace(training=False)
        return self._evaluation(graph, traced.outputs, traced.outputs if keep else {})

    @operators_refuse()
    def outputs(self, name: str) -> Evaluation:
        """A forward pass that makes one of the model's outputs, and nothing that this does not need, such as a loss.

        Raises ConfigError where the model has no such output."""
        graph, traced, _ = self.trace(training=False)
        if name not in traced.outputs:
            raise ConfigError(f"output: the model has no {name!r}; allowed: {', '.join(traced.outputs)}")
        kept = {name: traced.outputs[name]}
        graph.prune(kept.values())
        return self._evaluation(graph, kept, kept)

    def _evaluation(self, graph: Graph, outputs: dict[str, Tensor], kept: dict[str, Tensor]) -> Evaluation:
        for name, tensor in kept.items():
            if not tensor.persistent:
                for one in (tensor, tensor.storage):
                    one.name, one.kind = name, "output"
        fuse(graph, self.fusion, self.cuts)
        if self.kept:
            keep_in(graph, self.kept)
        return Evaluation(graph, outputs, lower(graph, self.cuts, self.policy, meeting=self._meeting()))


def _no_loss(config: Any) -> str:
    """What a model without a loss lacks, and what to do."""
    own = getattr(type(config), "model_fields", {}).get("head")
    if not own or (head := config.head) == own.default:
        return " has no loss; allowed in training: a model whose trace returns one"
    folder = f" (from {config.from_})" if getattr(config, "from_", None) else ""
    need = f"another head, such as head: {own.default}, which is drawn anew where a folder has none"
    return f" with head: {head}{folder} has no loss; allowed in training: {need}"
