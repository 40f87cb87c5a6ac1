"""Build workloads to draw, sweep and time: training steps, inference, and the small graphs that papers measure.

All sizes come from a config, so that a sweep can change each of them. This module does not use StarPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nntile_py.config.builders import step_spec, tiling
from nntile_py.errors import ConfigError
from nntile_py.graph.built_step import Evaluation, Step
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import arrange
from nntile_py.graph.lowering import lower
from nntile_py.graph.params import Batch, Param, Traced
from nntile_py.graph.passes.qkv_fusion import merge_projections
from nntile_py.graph.step import TILE_DTYPE, StepSpec
from nntile_py.models.layer import TransformerDecoderConfig, TransformerEncoder, TransformerEncoderConfig
from nntile_py.models.parts import attention_mask
from nntile_py.system.folders import installed
from nntile_py.tasks.activation import activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.contract import linear
from nntile_py.tasks.elementwise import add, bias_add, transpose
from nntile_py.tasks.layer_norm import layer_norm
from nntile_py.tasks.op import GraphLike, Lowering, Op, Tensor
from nntile_py.tiles import TaskList

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

Work = Literal[
    "train", "inference", "attention", "linear_relu", "linear_gelu", "linear_reshape", "bias_norm",
    "qkv_none", "qkv_qk", "qkv_all", "encoder", "decoder", "mha",
]  # fmt: skip
FORWARD = ("inference", "attention")  # workloads that are forward passes
Phase = Literal["forward", "backward", "all"]
TITLES = {
    "train": "a training step of",
    "inference": "a forward pass of",
    "attention": "the attention of",
    "encoder": "an encoder layer of",
    "decoder": "a decoder layer of",
    "mha": "multi-head attention of",
}


@dataclass
class Built:
    """The graphs of a workload with their task lists, in the order in which they run.

    Attributes:
        flop: floating point operations of contractions and attentions.
        params: parameters of a forward pass; empty for other workloads.
    """

    graphs: list[tuple[Graph, Lowering]]
    flop: float
    params: list[Param] = field(default_factory=list)

    @property
    def lists(self) -> list[TaskList]:
        return [lowering.tasks for _, lowering in self.graphs]


def build(config: RunConfig, work: Work = "train", phase: Phase = "all", *, fusion: Fusion | None = None) -> Built:
    """Return the graphs of a workload with their task lists.

    phase: for the small graphs that papers measure. fusion: replaces the config's fusion."""
    spec = spec_of(config, work, fusion)
    if work == "train":
        return of_step(spec.step(), config.train.grad_accumulation)
    if work in FORWARD:
        return of_evaluation(spec.evaluation())
    (graph,) = logical(config, work, fusion, phase)
    return Built([(graph, lower(graph, spec.tiling, config.accumulate))], graph.flop())


PAPER = ["train.batch=8", "train.seq=512", "model.embed=1024", "model.heads=16", "model.dropout=0.1",
         "model.attention=naive", "model.attention_dropout=0.1", "tiles={}"]  # fmt: skip
PRESETS = {  # workloads that need no config: sizes of BERT-large (Ivanov et al. 2021, section III.D)
    "encoder": ("encoder_layer.yaml", PAPER),
    "decoder": ("decoder_layer.yaml", [*PAPER, "model.memory=null"]),
    "mha": ("encoder_layer.yaml", PAPER),
}


def preset(work: str, overrides: Sequence[str]) -> RunConfig:
    """Return the config of a workload in PRESETS, changed by KEY=VALUE overrides."""
    from nntile_py.config.run_config import RunConfig, resolve
    from nntile_py.schema import read_yaml

    file, own = PRESETS[work]
    # The default is one CPU worker: a layer whose tensors are not cut into tiles can keep only one worker busy.
    where = [] if any(item.startswith(("runtime.", "scheduler=")) for item in overrides) else ["runtime.cpus=1"]
    tree = read_yaml(installed("experiments") / file, "CONFIG", RunConfig)
    return resolve(tree, [*own, *where, *overrides], f"--work {work}")


def work_title(config: RunConfig, work: str) -> str:
    """Return a title for a workload: its model, sizes and precision."""
    sizes = {"batch": config.train.batch, "seq": config.train.seq}
    names = ("layers", "embed", "heads") if work in ("train", "inference") else ("embed", "heads")
    sizes |= {name: getattr(config.model, name) for name in names if hasattr(config.model, name)}
    title = TITLES.get(work, f"{work.replace('_', ' + ')} with sizes of")
    return f"{title} {config.model.type}: {', '.join(f'{n} {s}' for n, s in sizes.items())}, {config.precision}"


def logical(config: RunConfig, work: Work, fusion: Fusion | None = None, phase: Phase = "all") -> list[Graph]:
    """Return the graphs of a workload without tasks. For a training step, the second graph is the update.

    Args:
        fusion: replaces the config's fusion and gives the default layouts, see spec_of.
        phase: for the small graphs that papers measure, the phase to keep.
    """
    spec = spec_of(config, work, fusion)
    if work == "train":
        training = spec.graphs
        return [training.graph, spec.update(training)]
    if work in FORWARD:
        return [spec.evaluation().graph]
    graph = small_graph(config, work, spec.fusion, backward=phase != "forward")
    if spec.timings:
        arrange(graph, spec.timings, spec.tiling, config.accumulate)
    return [graph if phase == "all" else select(graph, phase)]


def spec_of(config: RunConfig, work: Work, fusion: Fusion | None = None) -> StepSpec:
    """Return the StepSpec of the config's model; for the work `attention`, of the model's attention only.

    Args:
        fusion: replaces the config's fusion; layouts are then the default ones.
    """
    spec = step_spec(config)
    if fusion:
        spec = replace(spec, fusion=fusion, timings=None)
    if work != "attention":
        return spec
    _need(config, work, "embed", "heads", "attention")
    return replace(spec, model=AttentionOnly(config.model))


class AttentionOnly:
    """The attention of a layer without its products, as in figures 11 to 13 of ByteTransformer (Zhai et al. 2023).

    The inputs are q, k, v [batch, seq, heads, head_dim], and attention_mask if the batch has one.

    Args:
        config: a model's config with the fields embed, heads and attention.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.weights: dict[str, Any] = {}

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        sizes = {"batch": batch.size, "seq": batch.seq, "heads": c.heads, "head_dim": c.embed // c.heads}
        q, k, v = (g.input(name, sizes, None) for name in "qkv")
        return Traced(None, {"attention": attention(g, q, k, v, attention_mask(g, batch), c.attention)})


def of_evaluation(evaluation: Evaluation) -> Built:
    """Return the graph of a forward pass with its task list."""
    return Built([(evaluation.graph, evaluation.forward)], evaluation.graph.flop(), evaluation.params)


def of_step(step: Step, grad_accumulation: int) -> Built:
    """Return the graphs of a training step with their task lists."""
    more = [(step.graph, step.more)] * (grad_accumulation - 1) if step.more else []
    return Built([(step.graph, step.first), *more, (step.update_graph, step.update)], grad_accumulation * step.flop)


def small_graph(config: RunConfig, work: Work, fusion: Fusion, *, backward: bool) -> Graph:
    """Return the fused graph of a small workload, a key of _MAKERS, with the input x [batch, seq, embed].

    backward: add the backward pass. The gradients of the outputs are then further inputs."""
    graph = Graph(TILE_DTYPE[config.precision], cuts=tiling(config))
    _need(config, work, "embed", "heads")
    sizes = [config.train.batch, config.train.seq, config.model.embed]
    x = graph.named("x", ["batch", "seq", "embed"], sizes, "input")
    x.requires_grad = True  # as for a layer inside a model
    outputs = _MAKERS[work](graph, x, config)
    if fusion.qkv:
        merge_projections(graph, count=fusion.projections)
    if backward:
        loss = graph.add(_OutputGradients(outputs, graph.temp("loss", ["one"], [1], "fp64"))).output
        graph.backward(loss)
        graph.ops = [op for op in graph.ops if not isinstance(op, _OutputGradients)]
    for tensor in outputs:
        tensor.kind = "scalar"  # a result, which fusion may not remove
    return fuse(graph, fusion, tiling(config), config.fp8 if config.precision == "fp8" else None)


def _need(config: RunConfig, work: Work, *fields: str) -> None:
    if {*fields} - type(config.model).model_fields.keys():
        need = f"{', '.join(fields[:-1])} and {fields[-1]}"
        raise ConfigError(f"work {work}: a model with {need} is needed; {config.model.type} has none")


def select(graph: Graph, phase: str) -> Graph:
    """Remove the operators of other phases from the graph, and return the graph.

    Tensors that removed operators wrote become inputs. Outputs that only removed operators read become results."""
    graph.ops = [op for op in graph.ops if phase in ("all", op.phase)]
    written = {t.storage for op in graph.ops for t in op.outputs}
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor.storage not in written and tensor.storage.kind == "temp":
                tensor.storage.kind = "input"
                tensor.storage.name = tensor.name = f"{tensor.name}#{len(graph.tensors)}"
                graph.tensors[tensor.name] = tensor.storage
    for op in graph.ops:  # outputs that no operator reads any more become results
        for tensor in op.outputs:
            if not any(tensor in other.inputs for other in graph.ops) and tensor.storage.kind == "temp":
                tensor.storage.kind = "scalar"
                tensor.storage.name = tensor.name = f"{tensor.name}#{len(graph.tensors)}"
                graph.tensors[tensor.name] = tensor.storage
    return graph


class _OutputGradients(Op):
    """Placeholder for the rest of a model. The gradients of its inputs are inputs of the graph. It has no tasks."""

    def __init__(self, inputs: list[Tensor], loss: Tensor) -> None:
        super().__init__(inputs, [loss])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert isinstance(g, Graph)
        return [g.named(f"dy{k}", t.axes, t.shape, "input") for k, t in enumerate(self.inputs)]

    def lower(self, lowering: Lowering) -> None:
        pass


# -- the graphs


def _param(g: Graph, name: str, **sizes: int) -> Tensor:
    return g.named(name, list(sizes), list(sizes.values()), "param")


def _linear(act: str) -> Callable[[Graph, Tensor, RunConfig], list[Tensor]]:
    """Return a function that builds act(x W + bias), the first half of a feed-forward block, and returns its output.

    Source: figures 10, 11, 12 and 15 of the NNTile report; figure 10 of ByteTransformer (Zhai et al. 2023) for gelu."""

    def make(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
        ffn = getattr(c.model, "ffn", 4 * c.model.embed)
        weight, bias = _param(g, "fc.weight", embed=c.model.embed, ffn=ffn), _param(g, "fc.bias", ffn=ffn)
        return [activation(g, linear(g, x, weight, ["batch", "seq", "ffn"], bias), act)]

    return make


def _bias_norm(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
    """Build LayerNorm(x + bias + residual), which follows attention and the feed-forward block; return its output.

    Source: figure 9 of ByteTransformer (Zhai et al. 2023)."""
    bias, gamma, beta = (_param(g, name, embed=c.model.embed) for name in ("bias", "gamma", "beta"))
    residual = g.named("residual", x.axes, x.shape, "input")
    residual.requires_grad = True
    return [layer_norm(g, add(g, bias_add(g, x, bias), residual), gamma, beta, 1e-12)]


def _heads(c: RunConfig) -> dict[str, int]:
    return {"heads": c.model.heads, "head_dim": c.model.embed // c.model.heads}


def _linear_reshape(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
    """Build x W with rows of embed, reshaped to [batch, heads, seq, head_dim], and return its output.

    Source: figures 13 and 16 of the NNTile report."""
    y = linear(g, x, _param(g, "q.weight", embed=c.model.embed, **_heads(c)), ["batch", "seq", "heads", "head_dim"])
    return [transpose(g, y, ["batch", "heads", "seq", "head_dim"])]


def _qkv(stacked: int) -> Callable[[Graph, Tensor, RunConfig], list[Tensor]]:
    """Return a function that builds queries, keys and values and returns them.

    stacked: 1: three products; 2: two, with Q and K stacked; 3: one product. The backward pass has dX and dW of each
    product, and the sum of several dX. Source: Table II of Ivanov et al. 2021."""

    def make(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
        names = {1: ["q", "k", "v"], 2: ["qk", "v"], 3: ["qkv"]}[stacked]
        axes, result = ["batch", "seq", "heads", "head_dim"], []
        for name in names:
            parts = {"qkv": len(name)} if len(name) > 1 else {}
            weight = _param(g, f"{name}.weight", embed=c.model.embed, **parts, **_heads(c))
            result.append(linear(g, x, weight, [*axes[:2], *parts, *axes[2:]]))
        return result

    return make


def _layers(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
    """Build an encoder layer (models/layer.py) and return its output.

    Source: Tables I, III and V of Ivanov et al. 2021."""
    return [_one_layer(c, TransformerEncoderConfig).layers(g, x)]


def _decoder(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
    """Build a decoder layer, causal self-attention and attention to an encoder's output, and return its output.

    The encoder's output has `memory` positions if the model's config has this field, else `seq`."""
    layer = _one_layer(c, TransformerDecoderConfig)
    sizes = c.train.batch, getattr(layer.config, "memory", None) or c.train.seq, c.model.embed
    memory = g.named("memory", ["batch", "key", "embed"], sizes, "input")
    memory.requires_grad = True  # as for the output of an encoder
    return [layer.layers(g, x, memory)]


def _mha(g: Graph, x: Tensor, c: RunConfig) -> list[Tensor]:
    """Build multi-head self-attention with its four products, and return its output.

    Source: Table IV of Ivanov et al. 2021."""
    layer = _one_layer(c, TransformerEncoderConfig)
    with g.scope("attn"):
        return [layer.attend(g, x, x, "self_attn", layer.config.causal)]


def _one_layer(c: RunConfig, kind: type[TransformerEncoderConfig]) -> TransformerEncoder:
    """Return a model of one layer with the config's sizes.

    If the config's own layer is of `kind`, the model has this layer, else a layer of `kind` with ReLU."""
    if isinstance(c.model, kind):
        return TransformerEncoder(c.model.model_copy(update={"layers": 1}))
    names = {"embed", "heads", "ffn", "dropout", "attention_dropout", "attention", "layer_norm_eps"}
    sizes = {name: getattr(c.model, name) for name in names & type(c.model).model_fields.keys()}
    return TransformerEncoder(kind(layers=1, **sizes))


_MAKERS: dict[str, Callable[[Graph, Tensor, RunConfig], list[Tensor]]] = {
    "linear_relu": _linear("relu"),
    "linear_gelu": _linear("gelu"),
    "linear_reshape": _linear_reshape,
    "bias_norm": _bias_norm,
    "qkv_none": _qkv(1),
    "qkv_qk": _qkv(2),
    "qkv_all": _qkv(3),
    "encoder": _layers,
    "decoder": _decoder,
    "mha": _mha,
}
