"""Fusion of neighbouring operators into one operator.

Each kind of fusion is a pass over the graph, which a switch turns on or off. This file defines the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from nntile_py.errors import ConfigError, say_once
from nntile_py.graph.graph import Graph
from nntile_py.graph.passes import epilogue, norm_rules, transposes
from nntile_py.graph.passes.fp8 import FP8, quantize_products
from nntile_py.graph.passes.greedy_fusion import fuse_greedily
from nntile_py.graph.passes.rewriter import Rewriter, Rule
from nntile_py.schema import Names, Settings, Switch, only
from nntile_py.tasks.cross_entropy import CrossEntropy, CrossEntropyGrad
from nntile_py.tasks.op import Op
from nntile_py.tasks.scalar import native
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import is_low

Pass = Callable[[Rewriter], None]


class Fusion(Settings):
    """Which neighbouring operators become one task. `fusion: true` is the default. `fusion: false` switches all fusion
    off: the naive graph. `fusion: {found: false}` uses only the fused kernels that are written by hand."""

    section: ClassVar = "fusion"

    bias: Switch = True
    """Fuse a bias into the product before it."""
    activation: Switch = True
    """Fuse an activation into the product before it."""
    reshape: Switch = True
    """Fuse a transposition into the product before it. If the product is a sum of several tasks, the last
    one transposes."""
    qkv: Annotated[
        bool | Literal["qk"],
        *only("true, false or qk", lambda v: v if type(v) is bool or v == "qk" else None, enum=[True, False, "qk"]),
    ] = True
    """Compute queries, keys and values in one product (keys and values if the queries have another input); `qk`: only
    queries and keys."""
    residual_norm: Switch = True
    """Fuse a residual into the product before it. If `found` is off: also fuse the residual and its dropout into the
    norm after it."""
    found: Switch = True
    """Fuse groups of neighbouring element-wise operators, sums, norms and softmax that one loop over the same axes can
    compute; each group gets a generated kernel. Products keep their own fusion (`bias`, `activation`, `reshape`,
    `residual_norm`). If switched off, or without a C++ compiler for CPU workers, kernels written by hand serve a few
    of these groups."""
    exclude: Names = ()
    """Names of groups of `found` that are not fused, such as dropout_add_layer_norm; `nntile plan` lists them."""

    @property
    def projections(self) -> int:
        """Number of projections (queries, keys, values) that one product computes."""
        return 2 if self.qkv == "qk" else 3 if self.qkv else 1

    @staticmethod
    def of(value: Fusion | bool | Mapping[str, Any]) -> Fusion:
        """Return the Fusion for a config value: True or False for all switches, or {switch: value}.

        A switch that the mapping lacks is on.
        """
        if isinstance(value, Fusion):
            return value
        if isinstance(value, bool):
            return Fusion(**every_rule(value))
        if not isinstance(value, Mapping):
            names = ", ".join(Fusion.model_fields)
            raise ConfigError(f"fusion: got {value!r}; allowed: true, false or a mapping of {names}")
        return Fusion(**{str(name): switch for name, switch in value.items()})

    def changed(self, **switches: Any) -> Fusion:
        """Return a copy of this Fusion with other values for some switches."""
        return Fusion(**{**dict(self), **switches})


def every_rule(on: bool) -> dict[str, Any]:
    """Return {switch: on} for all switches, as `fusion: true` or `fusion: false` sets them."""
    return {name: on for name in Fusion.model_fields if name != "exclude"}


def fuse(graph: Graph, fusion: Fusion, tiling: Tiling | None = None, fp8: FP8 | None = None) -> Graph:
    """Fuse operators of a graph, in place, by the passes that `fusion` switches on. Return the graph.

    Args:
        tiling: the tiling with which the graph will be lowered; None: no axis is cut.
        fp8: options of 8-bit products; None: there are none. Operands are quantised after the passes that remove
            transposes.
    """
    tiling = tiling or Tiling()
    for op in graph.ops:
        op.fit(tiling)
    greedy = fusion.found and _has_generated_kernels(graph.dtype)
    if fusion.reshape:
        _run(graph, _transposes(tiling))
    if fp8:
        quantize_products(graph, fp8)
    _run(graph, _passes(fusion, tiling, greedy=greedy))
    return graph


def _run(graph: Graph, passes: Iterable[Pass]) -> None:
    """Run passes over a graph, in place."""
    rewriter = Rewriter(graph)
    for run in passes:
        run(rewriter)
    graph.ops = list(rewriter.ops.values())


def _all_of(*rules: Rule) -> Iterator[Pass]:
    return (partial(Rewriter.apply, rule=rule) for rule in rules)


def _transposes(tiling: Tiling) -> Iterator[Pass]:
    """Yield the passes that remove transposes."""
    output = partial(transposes.transposed_output, tiling=tiling)
    return _all_of(transposes.attention_layout, transposes.transposed_input, output)


def _passes(fusion: Fusion, tiling: Tiling, *, greedy: bool) -> Iterator[Pass]:
    """Yield the passes after the transposes, in the order in which they run.

    greedy: whether greedy fusion is one of the passes.

    The rules before greedy fusion then skip norms over uncut rows and most activations, because a group of greedy
    fusion computes them as fast or faster. The rules after greedy fusion fuse activations and bias gradients that
    are in no group.
    """

    def of_norms(*rules: Rule) -> Iterator[Pass]:
        return _all_of(*(norm_rules.where_rows_are_cut(rule, tiling) if greedy else rule for rule in rules))

    if fusion.residual_norm:
        yield from of_norms(norm_rules.norm_grad_add, norm_rules.norm_grad_dropout)
    if fusion.bias:
        yield from _all_of(epilogue.bias)
        yield from of_norms(norm_rules.norm_bias_grad)
        yield from () if greedy else _all_of(epilogue.bias_grad)
    if fusion.residual_norm:
        yield from _all_of(epilogue.residual)
        yield from () if greedy else _all_of(partial(norm_rules.norm_residual, tiling=tiling))
    if fusion.activation:
        first = epilogue.where_free(epilogue.activation) if greedy else epilogue.activation
        yield from _all_of(first, epilogue.activation_grad)
    if greedy:
        yield partial(_fuse_greedily, fusion=fusion, tiling=tiling)
        yield from _all_of(epilogue.activation) if fusion.activation else ()
        yield from _all_of(epilogue.bias_grad) if fusion.bias else ()
    yield from _all_of(partial(_cross_entropy, tiling=tiling))


def _fuse_greedily(rewriter: Rewriter, fusion: Fusion, tiling: Tiling) -> None:
    """Run greedy fusion. Raises ConfigError if `exclude` names a group that the graph does not have."""
    met = fuse_greedily(rewriter, tiling, fusion.exclude)
    missing = [name for name in fusion.exclude if name not in met]
    # A forward pass may lack a group of the backward pass.
    if missing and any(op.phase == "backward" for op in rewriter.order):
        known = ", ".join(sorted(met)) or "none, as there are no groups"
        raise ConfigError(f"fusion.exclude: {missing[0]!r} is no group of this model; allowed: {known}")


def lacking(dtype: str) -> str | None:
    """Return the reason why generated kernels of this dtype cannot be compiled; None if they can be compiled.

    bf16 and fp16 run on GPUs only, which need no C++ compiler.
    """
    return None if is_low(dtype) else native.why_not()


def _has_generated_kernels(dtype: str) -> bool:
    """Return whether generated kernels of this dtype can be compiled. If not, print the reason once."""
    why = lacking(dtype)
    if why:
        say_once(f"fusion: the rules of `found: false` are used, which are some percent slower, as {why}")
    return why is None


def _cross_entropy(rewriter: Rewriter, op: Op, tiling: Tiling) -> bool:
    """Fuse CrossEntropy and its gradient into one task, which reads the logits once.

    The two do not fuse if the classes are cut, or if another operator reads the logits after the loss and before the
    gradient.
    """
    if not isinstance(op, CrossEntropyGrad) or op.fused:
        return False
    logits, forward = op.inputs[0], rewriter.maker[op.inputs[2]]
    assert isinstance(forward, CrossEntropy)
    if tiling.cut(op.classes, logits.size(op.classes)):
        return False
    order = rewriter.order
    if any(order[forward] < order[reader] < order[op] for reader in rewriter.readers[logits]):
        return False
    forward.fused, op.fused = op, True
    return True
