"""The dtype of gradients in mixed precision."""

from __future__ import annotations

from collections.abc import Iterable

from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.epilogue import has_free_epilogue
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import is_low


def narrow_gradients(graph: Graph, grads: Iterable[Tensor], tiling: Tiling) -> None:
    """Keep a weight's gradient in bf16 or fp16 if a single product writes all of it, as autocast does.

    A gradient that several tasks add to stays in fp32. A product sums in fp32; where cuBLASLt splits a product, it may
    round the parts.
    """
    if not is_low(graph.dtype):
        return
    makers: dict[Tensor, list[Op]] = {}  # by storage
    for op in graph.ops:
        for out in op.outputs:
            makers.setdefault(out.storage, []).append(op)
    for grad in grads:
        product, *others = makers[grad.storage]
        if others or not isinstance(product, Contract) or product.output is not grad:
            continue
        if has_free_epilogue(product) and not sums_in_parts(product, tiling):
            grad.dtype = graph.dtype


def sums_in_parts(op: Contract, tiling: Tiling) -> bool:
    """Whether several tasks compute each tile of a product, as its summed axes are cut."""
    return any(tiling.cut(axis, op.a.size(axis)) for axis in op.k)
