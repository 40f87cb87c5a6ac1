"""The dtype of gradients of weights in bf16 and fp16."""

from __future__ import annotations

from collections.abc import Iterable

from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.epilogue import has_free_epilogue
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import is_low


def narrow_gradients(graph: Graph, grads: Iterable[Tensor], tiling: Tiling) -> None:
    """Store a weight's gradient in bf16 or fp16 if a single product computes it, as PyTorch's autocast does.

    A gradient to which several tasks add stays in fp32. The product itself sums in fp32, but cuBLASLt may round partial
    sums if it splits the product.
    """
    if not is_low(graph.dtype):
        return
    makers: dict[Tensor, list[Op]] = {}  # {storage: the operators that write it}
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
    """Return whether the summed axes of a product are cut, so that several tasks add to each tile."""
    return any(tiling.cut(axis, op.a.size(axis)) for axis in op.k)
