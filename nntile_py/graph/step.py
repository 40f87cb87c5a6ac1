"""StepSpec: everything that determines a training step. It builds the step, or an evaluation, as task lists.

Task lists are pure data. Runs, plans, profiles and drawings read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real

from nntile_py.errors import ConfigError, operators_refuse
from nntile_py.graph import packed_inputs
from nntile_py.graph.built_step import Evaluation, Graphs, Step
from nntile_py.graph.freeze import freeze
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.key_value_cache import CacheShape, KeyValueCache, Sampling, check_cached, summed_last
from nntile_py.graph.layout_search import arrange, keep_in
from nntile_py.graph.layouts import Order
from nntile_py.graph.loss_checks import check_scalable, no_loss
from nntile_py.graph.lowering import lower
from nntile_py.graph.optimizers import add_update, check_groups
from nntile_py.graph.params import Array, Batch, Traceable, Traced, trace
from nntile_py.graph.passes.cached_projections import fuse_cached_projections
from nntile_py.graph.passes.fp8 import FP8, class_axes
from nntile_py.graph.passes.one_row import fuse_one_row
from nntile_py.graph.passes.precision import narrow_gradients
from nntile_py.graph.passes.qkv_fusion import merge_projections
from nntile_py.graph.random_inputs import random_inputs
from nntile_py.graph.recompute_choice import Room, StepEstimate, candidates, fastest, fewer_activations
from nntile_py.graph.recompute_rule import AUTO, RECOMPUTE, WORDS, as_recompute
from nntile_py.graph.timings import Timings
from nntile_py.tasks.adamw import AdamW
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.optimizer import MOST_SCALE, OPTIMIZERS, Ends, GradNorm, Optimizer
from nntile_py.tiles import Tiling
from nntile_py.tiles.allreduce import RankSums
from nntile_py.tiles.eviction import OFFLOAD_WORDS, Offloaded, as_offload
from nntile_py.tiles.task import live_slot
from nntile_py.typed import plain

# For each precision: the kinds of workers that compute in it.
PRECISIONS = {"fp32": ("CPU", "CUDA"), "fp64": ("CPU",), "bf16": ("CUDA",), "fp16": ("CUDA",), "tf32": ("CUDA",),
              "fp8": ("CUDA",)}  # fmt: skip
TILE_DTYPE = {name: name for name in PRECISIONS} | {"tf32": "fp32", "fp8": "bf16"}  # dtype of tiles by precision
LOSS_SCALE = {"fp16": 65536.0}  # initial loss scale, as torch.amp.GradScaler has it


def check_precision(key: str, precision: str, cuda: bool) -> None:
    """Raise ConfigError, with `key` in its message, if CUDA (or else CPU) workers do not compute in the precision."""
    if precision not in PRECISIONS:
        raise ConfigError(f"{key}: got {precision!r}; allowed: {', '.join(PRECISIONS)}")
    kind = "CUDA" if cuda else "CPU"
    if kind not in PRECISIONS[precision]:
        known = ", ".join(name for name, kinds in PRECISIONS.items() if kind in kinds)
        need = "runtime.cuda: 0" if cuda else "GPUs (runtime.cuda)"
        raise ConfigError(f"{key}: {precision} needs {need}; allowed on {kind} workers: {known}")


def check_pack(pack: bool, tile: int | None) -> None:
    """Raise ConfigError if sequences are packed into bins and `tile` (the key tiles.seq) would cut the bins."""
    if pack and tile is not None:
        raise ConfigError(f"tiles.seq: got {tile}; allowed with pack: none, a bin is not cut")


@dataclass(frozen=True)
class StepSpec:
    """Everything that determines the programs of a training step. A config is converted to a StepSpec once.

    Attributes:
        batch: number of sequences of a micro-batch.
        seq: number of positions of a sequence.
        accumulate: accumulation policy: how tasks add partial sums to a tile.
        given: names of the optional inputs that steps pass.
        pack: pack sequences of at most `seq` tokens into bins, one bin for each tile of the batch. All bins have room
            for the same number of sequences of `seq` tokens. A pass has at most batch * seq tokens.
        one_machine: False if other machines, each with its own batch, add to the gradients.
        ranks: number of ranks that share the tasks, see allreduce.RankSums.
        timings: measured times of operators, by which forward and backward get the fastest layouts (layout_search);
            None: default layouts.
        kept: {weight: order of axes}, as the layout search of another program with the same weights has chosen them.
        loss_scale: initial loss scale, see training/loss_scale.py; None: 65536 in fp16, else no scale.
        freeze: patterns of names of weights that are not trained, see graph/freeze.py.
        recompute: forward operators whose tasks run again in the backward pass, see graph/recompute_rule.py.
        room: the memory for which `recompute: auto` chooses; None: the CPU workers and main memory of this machine.
        offload: kinds of tensors whose tiles leave a GPU between uses, see tiles/eviction.py.
        fp8: options of `precision: fp8`.
        captured: on one GPU: whether the step's programs run as CUDA graphs; None: only if tasks are short.

    Raises:
        ConfigError: a value is out of range.
    """

    model: Traceable
    batch: int
    seq: int
    tiling: Tiling = field(default_factory=Tiling)
    precision: str = "fp32"
    optimizer: Optimizer = field(default_factory=AdamW)
    clip_grad_norm: float | None = None
    accumulate: str = "chain"
    fusion: Fusion = field(default_factory=Fusion)
    grad_accumulation: int = 1
    skip_above_norm: float | None = None
    given: frozenset[str] = frozenset()
    pack: bool = False
    one_machine: bool = True
    ranks: int = 1
    timings: Timings | None = None
    kept: Mapping[str, Order] | None = None
    loss_scale: float | None = None
    freeze: Sequence[str] = ()
    recompute: str | Sequence[str] = "none"
    offload: Sequence[Offloaded] = ()
    room: Room | None = None
    fp8: FP8 = field(default_factory=FP8)
    captured: bool | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.model, "trace", None)):
            raise ConfigError(
                f"model: got {type(self.model).__name__}; allowed: a model of nt.models, or a class of your own"
                " with trace(graph, batch)"
            )
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision: got {self.precision!r}; allowed: {', '.join(PRECISIONS)}")
        if not isinstance(self.optimizer, Optimizer):
            kind = type(self.optimizer).__name__
            known = ", ".join(f"nt.{method.__name__}(...)" for method in OPTIMIZERS.values())
            raise ConfigError(f"optimizer: got {kind}; allowed: {known}")
        for name in (
            "batch",
            "seq",
            "grad_accumulation",
            "clip_grad_norm",
            "skip_above_norm",
            "pack",
            "loss_scale",
            "captured",
        ):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("batch", "seq", "grad_accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(f"{name}: got {value!r}; allowed: a positive integer below 2^31")
        patterns = self.freeze
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"freeze: got {patterns!r}; allowed: a list of patterns")
        object.__setattr__(self, "freeze", tuple(patterns))
        if (recompute := as_recompute(self.recompute)) is None:
            raise ConfigError(f"recompute: got {self.recompute!r}; allowed: {WORDS}")
        object.__setattr__(self, "recompute", recompute)
        if (kinds := as_offload(self.offload)) is None:
            raise ConfigError(f"offload: got {self.offload!r}; allowed: {OFFLOAD_WORDS}")
        object.__setattr__(self, "offload", kinds)
        if not isinstance(self.pack, bool):
            raise ConfigError(f"pack: got {self.pack!r}; allowed: True or False")
        if not isinstance(self.captured, bool | None):
            raise ConfigError(f"captured: got {self.captured!r}; allowed: True, False or None")
        if not isinstance(self.fp8, FP8):
            raise ConfigError(f"fp8: got {self.fp8!r}; allowed: nt.FP8(...)")
        scale = self.loss_scale
        number = isinstance(scale, Real) and not isinstance(scale, bool)
        if scale is not None and not (number and 1 <= scale <= MOST_SCALE):
            need = f"a number of at least 1 and at most {MOST_SCALE:g}, or None"
            raise ConfigError(f"loss_scale: got {scale!r}; allowed: {need}")
        check_pack(self.pack, self.tiling.tiles.get("seq"))

    @property
    def _fp8(self) -> FP8 | None:
        return self.fp8 if self.precision == "fp8" else None

    @cached_property
    def padded(self) -> StepSpec:
        """The same spec without packing: each row is one padded sequence."""
        return replace(self, pack=False) if self.pack else self

    @cached_property
    def chosen_recompute(self) -> str | Sequence[str]:
        """`recompute`, with the fastest value that fits into `room` in the place of `auto`."""
        return self.recompute if self.recompute != AUTO else fastest(self.recompute_estimates).recompute

    @cached_property
    def recompute_estimates(self) -> list[StepEstimate]:
        """The estimates among which `recompute: auto` chooses. With another value: the estimate of this value."""
        values = RECOMPUTE if self.recompute == AUTO else (self.recompute,)
        return candidates(self, self.room or Room.of(os.cpu_count() or 1, 0, None, None), values)

    @property
    def rows(self) -> int:
        """Number of rows of a micro-batch's arrays. A row is a sequence, or with packing a bin."""
        return len(self.tiling.parts("batch", self.batch)) if self.pack else self.batch

    @property
    def scale(self) -> float | None:
        """Initial loss scale, None without scaling."""
        return float(self.loss_scale) if self.loss_scale else LOSS_SCALE.get(self.precision)

    @property
    def capacity(self) -> int:
        """Number of positions of a row: of a sequence, or with packing of a bin."""
        return self.seq * -(-self.batch // self.rows)

    def live_slots(self) -> list[str]:
        """Return the names of the slots that say how far a step fills each bin; empty without packing."""
        return [live_slot(axis, k) for axis in packed_inputs.LIVE for k in range(self.rows)] if self.pack else []

    @property
    def cuts(self) -> Tiling:
        """The tiling of the graph. With packing, a tile of the batch is one bin."""
        return Tiling({**self.tiling.tiles, "batch": 1}) if self.pack else self.tiling

    def with_inputs(self, given: Iterable[str]) -> StepSpec:
        """Return this spec for steps that pass the optional inputs `given`."""
        return self if self.given == frozenset(given) else replace(self, given=frozenset(given))

    @operators_refuse()
    def trace(self, *, training: bool = True, cache: CacheShape | None = None) -> tuple[Graph, Traced, Batch]:
        """Return the model's forward graph before fusion, with the loss, the outputs and the batch.

        cache: sizes of the cache with keys and values of each row's earlier tokens; None: each row is a whole sequence.
        """
        graph = Graph(TILE_DTYPE[self.precision], training=training, cuts=self.cuts)
        graph.filled = self.batch * self.seq / (self.rows * self.capacity)
        length = cache.length if cache else None
        batch = Batch(self.rows, self.capacity, self.given, packed=self.seq if self.pack else None, cached=length)
        if self.pack:
            packed_inputs.begin(graph, batch)
        if cache:
            graph.cache = KeyValueCache(graph, cache, self.rows, self.capacity)
        traced = trace(self.model, graph, batch)
        graph.class_axes = class_axes(graph)
        self.tiling.check_axes(graph.sizes())
        freeze(graph, self.freeze)
        if training and traced.loss is None:
            raise ConfigError(f"model: {type(self.model).__name__}{no_loss(getattr(self.model, 'config', None))}")
        if self.pack:
            packed_inputs.check(graph, self.model)
        if self.fusion.qkv:
            merge_projections(graph, traced.outputs.values(), self.fusion.projections)
        return graph, traced, batch

    def random_inputs(
        self, rows: int, seed: int, alpha: float = 1.0, predicted: float = 1.0, *, training: bool = True
    ) -> dict[str, Array]:
        """Return random inputs of `rows` padded sequences, as a user passes them; see random_inputs.py.

        Raises:
            ConfigError: the batch would have too many tiles.
        """
        self.tiling.parts("batch", rows)
        graph = self.padded.trace(training=training)[0]
        inputs = random_inputs(graph, rows, seed, alpha, predicted)
        derived = {name for name, one in graph.inputs.items() if callable(one.default)} if self.pack else set()
        return {name: value for name, value in inputs.items() if name not in derived}  # packing computes these

    @cached_property
    @operators_refuse()
    def graphs(self) -> Graphs:
        """Forward and backward as a graph, before it is cut into tiles. Lowering does not change the graph."""
        graph, traced, batch = self.trace()
        assert traced.loss
        if self.scale:
            check_scalable(graph, traced.loss, self.precision)
        grads = graph.backward(traced.loss)
        if not all(one.requires_grad for one in graph.params):  # the gradients of frozen weights are not computed
            changed = [out for op in graph.ops for out in op.outputs if out.storage.kind == "param"]  # statistics
            graph.prune_operators([traced.loss, *grads.values(), *changed])
        fuse(graph, self.fusion, self.cuts, self._fp8)
        if self.grad_accumulation == 1 and self.one_machine:
            narrow_gradients(graph, grads.values(), self.cuts)
        chosen = arrange(graph, self.timings, self.cuts, self.accumulate, self.kept) if self.timings else None
        return Graphs(graph, graph.grads, traced.loss, batch.optional, chosen is not None and chosen.refused)

    @operators_refuse()
    def update(self, graphs: Graphs, ends: Ends | None = None) -> Graph:
        """Return the graph that updates the weights from the gradients in `graphs`; `ends`: see GradNorm."""
        update = Graph(graphs.graph.dtype)
        norm, clip = (update.named(name, ["one"], [1], "scalar", "fp64") for name in ("grad_norm", "clip"))
        norms = list(graphs.grads.values()), norm, clip, self.clip_grad_norm, ends
        update.add(GradNorm(*norms, skip_above=self.skip_above_norm, scaled=self.scale is not None))
        params = {param.tensor: param for param in graphs.graph.params.values()}
        check_groups(self.optimizer, params.values())
        for tensor, grad in graphs.grads.items():
            update.tensors[tensor.name] = tensor
            with update.scope(tensor.name):
                add_update(update, self.optimizer, params[tensor], grad, clip)
        return update

    @operators_refuse()
    def step(self, recompute: str | Sequence[str] | None = None) -> Step:
        """Return the training step: forward, backward and update as task lists.

        recompute: value in place of `self.chosen_recompute`.
        """
        graphs, graph, grads = self.graphs, self.graphs.graph, self.graphs.grads
        rank_sums, more = self._rank_sums(grads.values()), None
        again = self.chosen_recompute if recompute is None else recompute
        first = lower(graph, self.cuts, self.accumulate, rank_sums=rank_sums, recomputed=again)
        # The next step discards the gradients when it begins, so activations can use the gradients' memory. Until then
        # the host can read the gradients.
        first.tasks.forget(first.tile(grad, index) for grad in grads.values() for index in first.indices(grad))
        if rank_sums:
            first.tasks.forget(rank_sums.apart())
        update = self.update(graphs, first.tasks.ends("batch"))
        if self.grad_accumulation > 1:
            holds = [*grads.values(), graphs.loss]
            more = lower(graph, self.cuts, self.accumulate, holds=holds, rank_sums=rank_sums, recomputed=again)
        ended = rank_sums and rank_sums.ended()
        last = lower(update, self.cuts, self.accumulate, holds=grads.values(), rank_sums=ended)
        memory_settings = fewer_activations(self.batch, again, self.ranks)
        return Step(graph, update, grads, first, more, last, graphs.optional, graphs.refused, memory_settings)

    def _rank_sums(self, grads: Iterable[Tensor] = ()) -> RankSums | None:
        """Return the object that adds the partial sums of several ranks; None: one rank, or a chain from rank to rank.

        If a step has several micro-batches, gradients are added over the ranks once, after the last micro-batch.
        """
        if self.ranks == 1 or self.accumulate == "chain":
            return None
        return RankSums(self.ranks, {(t.storage.kind, t.storage.name) for t in grads if self.grad_accumulation > 1})

    @operators_refuse()
    def evaluation(self, keep: bool = False) -> Evaluation:
        """Return a forward pass without dropout. keep: True: the outputs stay in memory, so the host can read them."""
        graph, traced, _ = self.trace(training=False)
        return self._evaluation(graph, traced.outputs, traced.outputs if keep else {})

    @operators_refuse()
    def outputs(self, *names: str) -> Evaluation:
        """Return a forward pass that computes only the outputs `names`.

        Raises:
            ConfigError: the model has no such output.
        """
        graph, traced, _ = self.trace(training=False)
        if missing := [name for name in names if name not in traced.outputs]:
            raise ConfigError(f"output: the model has no {missing[0]!r}; allowed: {', '.join(traced.outputs)}")
        kept = {name: traced.outputs[name] for name in names}
        graph.prune(kept.values())
        return self._evaluation(graph, kept, kept)

    @operators_refuse()
    def generation(
        self, cache: CacheShape, sampling: Sampling, *, advances: bool, partial_sums: bool = False
    ) -> Evaluation:
        """Return a pass over the new tokens of cached sequences; its output next_tokens has a drawn token for each row.

        The pass has further outputs if `sampling` asks for log-probabilities.

        Args:
            advances: The pass prepares the next one, with the drawn tokens as new tokens; see tasks.Sample.
            partial_sums: Products of one row may leave partial sums to their readers; only CPU workers support this.

        Raises:
            ConfigError: The model does not predict the next token from the tokens before it.
        """
        graph, traced, _ = self.trace(training=False, cache=cache)
        if "logits" not in traced.outputs:
            need = "a model with a head causal_lm, such as GPT2LMHeadModel"
            raise ConfigError(f"generation: the model has no output 'logits'; allowed: {need}")
        assert isinstance(graph.cache, KeyValueCache)
        outputs = graph.cache.sampled(traced.outputs["logits"], sampling, advances)
        graph.prune(outputs.values())
        check_cached(graph)
        fuse_cached_projections(graph, self.cuts, merge=bool(self.fusion.qkv))
        return self._evaluation(graph, outputs, outputs, partial_sums=partial_sums)

    def _evaluation(
        self, graph: Graph, outputs: dict[str, Tensor], kept: dict[str, Tensor], *, partial_sums: bool = False
    ) -> Evaluation:
        """Fuse and lower a forward graph. The outputs `kept` stay in memory, so the host can read them."""
        for name, tensor in kept.items():
            if not tensor.persistent:
                for one in (tensor, tensor.storage):
                    one.name, one.kind = name, "output"
        fuse(graph, self.fusion, self.cuts, None if graph.cache else self._fp8)
        if orders := self.kept or (summed_last(graph) if graph.cache else None):
            keep_in(graph, orders)
        if graph.cache and self.fusion.found:
            fuse_one_row(graph, self.cuts, partial_sums=partial_sums)
        return Evaluation(graph, outputs, lower(graph, self.cuts, self.accumulate, rank_sums=self._rank_sums()))
