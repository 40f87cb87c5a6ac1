"""Pass for generation: cached attention itself rotates queries and keys; one product computes q, k and v.

A decoding pass has few rows, so each kernel that is saved counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param, Source
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.cached_attention import CachedAttention
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import BiasAdd, Transpose
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tasks.rotary import Rotary
from nntile_py.tiles import Tiling

AXIS = "all_heads"  # the heads of queries, of keys, then of values


def fuse_cached_projections(graph: Graph, tiling: Tiling, *, merge: bool) -> None:
    """Rewrite the operators before each cached attention, in place.

    merge: also compute queries, keys and values of unequal numbers of heads in one product, if heads are not cut.
    """
    rewriter = Rewriter(graph)
    for op in [one for one in graph.ops if isinstance(one, CachedAttention)]:
        _fuse_rotary(rewriter, op)
        if merge and not tiling.cut("heads", op.output.size("heads")):
            _merge(graph, rewriter, op)
    graph.ops = list(rewriter.ops.values())


def _fuse_rotary(rewriter: Rewriter, op: CachedAttention) -> None:
    """Let attention rotate queries and keys, if both are rotated by one table that has a row for each position."""
    tensors = [tensor for tensor, _ in op.operands.parts]
    if len(set(tensors)) < 3 or op.rotary:
        return
    transposes = [rewriter.maker_only_for(tensor, op, Transpose) for tensor in tensors[:2]]
    found: list[Rotary] = []
    for tensor, transpose in zip(tensors, transposes, strict=False):
        rotary = rewriter.maker_only_for(transpose.inputs[0] if transpose else tensor, transpose or op, Rotary)
        if not rotary or rotary.inverse or "batch" not in rotary.inputs[1].axes:
            return
        found.append(rotary)
    if found[0].inputs[1] is not found[1].inputs[1]:
        return
    for number, (rotary, transpose) in enumerate(zip(found, transposes, strict=True)):
        if transpose:
            transpose.inputs = [rotary.inputs[0]]
            rewriter.changed(transpose)
        else:
            tensors[number] = rotary.inputs[0]
    op.read(tensors)
    op.rotate(found[0].inputs[1])
    rewriter.changed(op)
    for rotary in found:
        rewriter.remove(rotary)


class _Projection(NamedTuple):
    """The operators that compute q, k or v from hidden states."""

    product: Contract
    bias: BiasAdd | None
    rest: list[Op]  # further operators, which the merged product replaces

    @property
    def params(self) -> list[Tensor]:
        return [self.product.b, *([self.bias.inputs[1]] if self.bias else [])]

    @property
    def ops(self) -> list[Op]:
        return [self.product, *([self.bias] if self.bias else []), *self.rest]


def _projection(graph: Graph, rewriter: Rewriter, tensor: Tensor, reader: Op) -> _Projection | None:
    """Return the operators that compute an operand of attention.

    None: they are not just a product, a bias and a transpose, or the product cannot merge with others.
    """
    rest: list[Op] = []
    if transpose := rewriter.maker_only_for(tensor, reader, Transpose):
        rest, tensor, reader = [transpose], transpose.inputs[0], transpose
    if bias := rewriter.maker_only_for(tensor, reader, BiasAdd):
        tensor, reader = bias.inputs[0], bias
    product = rewriter.maker_only_for(tensor, reader, Contract)
    if not product or len(product.inputs) > 2 or product.scale != 1 or product.activation:
        return None
    found = _Projection(product, bias, rest)
    own = all(one in graph.params and len(rewriter.readers[one]) == 1 for one in found.params)
    heads = product.output.axes[2:3]
    plain = product.output.axes[:2] == ("batch", "seq") and heads in (("heads",), ("kv_heads",))
    plain = (
        plain and product.b.axes[0] == heads[0] and not any(s.at for p in found.params for s in graph.params[p].sources)
    )
    return found if own and plain else None


def _merge(graph: Graph, rewriter: Rewriter, op: CachedAttention) -> None:
    """Compute q, k and v in one product, whose result has the heads of all three one after the other."""
    tensors = [tensor for tensor, _ in op.operands.parts]
    if len(set(tensors)) < 3:
        return
    found = [one for tensor in tensors if (one := _projection(graph, rewriter, tensor, op))]
    if len(found) < 3 or len({one.product.a for one in found}) > 1 or len({one.bias is None for one in found}) > 1:
        return
    first = found[0]
    weight, *biases = (_merged(graph, params) for params in zip(*(one.params for one in found), strict=True))
    heads = [one.product.output.shape[2] for one in found]
    shape = [*first.product.output.shape[:2], sum(heads), first.product.output.shape[3]]
    axes = ["batch", "seq", AXIS, "head_dim"]
    out = graph.temp(first.product.output.name, axes, shape, first.product.output.dtype)
    product = Contract(first.product.a, weight, out)
    product.name = first.product.name
    olds: list[list[Op]] = [[one.product for one in found]]
    news: list[Op] = [product]
    if biases:
        added = graph.temp(out.name, axes, shape, out.dtype)
        news.append(BiasAdd(out, biases[0], added))
        news[1].name, out = first.product.name.replace("Contract", "BiasAdd"), added
        olds.append([one.bias for one in found if one.bias])
    op.read_parts(out, (heads[0], heads[1]))
    rewriter.changed(op)
    for rest in (one for projection in found for one in reversed(projection.rest)):
        rewriter.remove(rest)
    for old, new in zip(reversed(olds), reversed(news), strict=True):
        rewriter.put(old, new, max(rewriter.order[one] for one in old))


def _merged(graph: Graph, tensors: Sequence[Tensor]) -> Tensor:
    """Replace parameters by one parameter that has their values one after the other along its first axis."""
    params = [graph.params.pop(tensor) for tensor in tensors]
    first = tensors[0]
    sources: list[Source] = []
    start = 0
    for param in params:
        end = start + param.tensor.shape[0]
        rest = (slice(None),) * (len(first.axes) - 1)
        sources += [replace(source, at=(slice(start, end), *rest)) for source in param.sources]
        start = end
    shape = [start, *first.shape[1:]]
    merged = Tensor("+".join(t.name for t in tensors), [AXIS, *first.axes[1:]], shape, first.dtype, "param")
    graph.params[merged] = Param(merged, params[0].init, tuple(sources))
    for tensor in tensors:
        del graph.tensors[tensor.name]
    graph.tensors[merged.name] = merged
    return merged
