"""Rules that remove transposes: attention, contractions and sums read and write any order of axes."""

from __future__ import annotations

from collections.abc import Sequence

from nntile_py.graph.passes.epilogue import has_free_epilogue, rebuilt
from nntile_py.graph.passes.precision import sums_in_parts
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.attention import Attention, AttentionGrad
from nntile_py.tasks.cached_attention import CachedAttention
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import BiasAdd, Sum, Transpose
from nntile_py.tasks.op import Op, Tensor, permutation
from nntile_py.tiles import Tiling


def attention_layout(rewriter: Rewriter, op: Op) -> bool:
    """Remove the transposes before or after attention, or before or after its gradient."""
    if isinstance(op, Attention | CachedAttention):
        before = _around_attention(rewriter, op)
    elif isinstance(op, AttentionGrad):
        before = _around_gradient(rewriter, op)
    else:
        return False
    if before is None:
        return False
    rewriter.changed(op)
    for maker in before:
        if maker and not rewriter.readers.get(maker.output) and maker.output.kind == "temp" and maker in rewriter.order:
            rewriter.remove(maker)
    return True


def _around_attention(rewriter: Rewriter, op: Attention | CachedAttention) -> list[Op | None] | None:
    """Let attention read its operands, or write its output, without a transpose.

    Returns the makers of the operands; None if nothing changes.
    """
    of_lse = rewriter.readers.get(op.lse, []) if op.lse else []
    gradient = next((g for g in of_lse if isinstance(g, AttentionGrad)), None)
    before = [rewriter.maker.get(t) for t in op.operands.tensors]
    users = [r for r in rewriter.readers.get(op.output, []) if r is not gradient]
    after = users if op.output.kind == "temp" else []
    if _transpose_alike(before):
        op.read([t.inputs[0] for t in before if t])
    elif _transpose_alike(after) and len(after) == 1:
        op.outputs[0] = after[0].output
        rewriter.remove(after[0])
    else:
        return None
    if gradient and op.lse:
        gradient.inputs = [*op.inputs, op.output, op.lse, gradient.do]
        rewriter.changed(gradient)
    return before


def _around_gradient(rewriter: Rewriter, op: AttentionGrad) -> list[Op | None] | None:
    """Let the gradient of attention read the gradient of the output, or write its outputs, without a transpose.

    Returns the maker of the gradient of the output, in a list; None if nothing changes.
    """
    before = [rewriter.maker.get(op.do)]
    readers = [rewriter.readers.get(t, []) for t in op.outputs]
    after = [r[0] for r in readers if len(r) == 1]
    if _transpose_alike(before) and before[0]:
        op.do = op.inputs[-1] = before[0].inputs[0]
    elif len(after) == len(op.outputs) and _transpose_alike(after):
        op.write([t.output for t in after])
        for transpose in after:
            rewriter.remove(transpose)
    else:
        return None
    return before


def _transpose_alike(ops: Sequence[Op | None]) -> bool:
    """Return whether all operators are transposes with the same permutation."""
    kinds = {tuple(permutation(op.inputs[0].axes, op.output.axes)) if isinstance(op, Transpose) else None for op in ops}
    return len(kinds) == 1 and None not in kinds


def transposed_input(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Contract(Transpose(x), w) and Sum(Transpose(x)): the operator reads x.

    The transpose stays if several products read its output and one of these products would have to copy tiles of x into
    a matrix.
    """
    if not isinstance(op, Contract | Sum):
        return False
    for number, tensor in enumerate(op.inputs[:2]):
        maker = rewriter.maker.get(tensor)
        if not isinstance(maker, Transpose):
            continue
        x = maker.inputs[0]
        products = [reader for reader in rewriter.readers[tensor] if isinstance(reader, Contract)]
        if len(products) > 1 and not all(_reads_matrix(product, tensor, x) for product in products):
            continue
        if isinstance(op, Contract):
            rewriter.replace([op], rebuilt(op, op.output, **{"ab"[number]: x}))
        elif [a for a in x.axes if a in op.output.axes] == list(op.output.axes):
            rewriter.replace([op], Sum(x, op.output))
        else:
            continue
        if not rewriter.readers.get(maker.output) and maker.output.storage.kind == "temp":
            rewriter.remove(maker)
        return True
    return False


def _reads_matrix(product: Contract, tensor: Tensor, x: Tensor) -> bool:
    """Return whether each tile of x is a matrix, maybe transposed, for a product that reads x instead of `tensor`."""
    side = 0 if product.a is tensor else 1
    changed = rebuilt(product, product.output, **{"ab"[side]: x})
    groups = [group for group in (changed.batch, changed.n if side else changed.m, changed.k) if group]
    starts = [x.axes.index(group[0]) for group in groups]
    return all(list(x.axes[at : at + len(group)]) == list(group) for at, group in zip(starts, groups, strict=True))


def transposed_output(rewriter: Rewriter, op: Op, tiling: Tiling) -> bool:
    """Fuse Transpose(Contract) and Transpose(BiasAdd(Contract)): the product writes the transposed order.

    This is GEMM + reshape, algorithm 4 of the NNTile report. If the summed axes are cut, partial products are added in
    the order of the product, and the last one writes the transposed order.
    """
    if not isinstance(op, Transpose):
        return False
    gemm = rewriter.maker_only_for(op.inputs[0], op, Contract)
    if gemm and has_free_epilogue(gemm) and not gemm.inputs[2:]:
        rewriter.replace([gemm, op], rebuilt(gemm, op.output, reshape=sums_in_parts(gemm, tiling)))
        return True
    add = rewriter.maker_only_for(op.inputs[0], op, BiasAdd)
    inner = rewriter.maker_only_for(add.inputs[0], add, Contract) if add else None
    if not (add and inner and has_free_epilogue(inner)):
        return False
    bias = add.inputs[1]
    if [a for a in op.output.axes if a in bias.axes] != list(bias.axes):
        return False
    # The transpose moves before the bias, so both can be fused into the contraction.
    moved = Tensor(add.output.name, op.output.axes, op.output.shape, op.output.dtype)
    rewriter.replace([inner], rebuilt(inner, moved, reshape=sums_in_parts(inner, tiling)))
    rewriter.replace([add, op], BiasAdd(moved, bias, op.output))
    return True
