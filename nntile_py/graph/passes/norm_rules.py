"""Rules that fuse the operators before or after a norm, or its gradient, into the norm."""

from __future__ import annotations

from typing import Any

from nntile_py.graph.passes.rewriter import Rewriter, Rule
from nntile_py.tasks.elementwise import Add, Dropout, Sum
from nntile_py.tasks.layer_norm import LayerNormGrad
from nntile_py.tasks.norm import Norm, NormGrad
from nntile_py.tasks.op import Op
from nntile_py.tiles import Tiling


def where_rows_are_cut(rule: Rule, tiling: Tiling) -> Rule:
    """Limit a rule to norms whose rows are cut into several tiles.

    The gradient of such a norm consists of several tasks, which greedy fusion cannot merge.
    """

    def limited(rewriter: Rewriter, op: Op) -> bool:
        rows = [(x.axes[-1], x.shape[-1]) for x in op.inputs[:1] if x.axes]
        return any(tiling.cut(*row) for row in rows) and rule(rewriter, op)

    return limited


def norm_bias_grad(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Sum(LayerNormGrad), or Sum(Dropout(LayerNormGrad)), over all rows.

    The gradient of the norm then also sums the rows that it writes, which gives a bias gradient.
    """
    if not isinstance(op, Sum):
        return False
    summed = op.inputs[0]
    norm = rewriter.maker.get(summed)
    if not isinstance(norm, LayerNormGrad) or norm.bias or op.output.axes != summed.axes[-1:]:
        return False
    if summed is not (norm.dropout or norm).output:
        return False
    return _into_gradient(rewriter, norm, op, dbias=op.output)


def _into_gradient(rewriter: Rewriter, norm: LayerNormGrad, op: Op, **changes: Any) -> bool:
    """Fuse `op` into the gradient of a norm.

    The gradient keeps its position, because operators before `op` may read dx.
    """
    dy, x, statistics, gamma = norm.inputs[:4]
    dx, dgamma, dbeta = norm.outputs[:3]
    options = {"add": norm.extra, "dbias": norm.bias, "dropout": norm.dropout} | changes
    rewriter.replace([norm], LayerNormGrad(dy, x, statistics, gamma, dx, dgamma, dbeta, **options))
    rewriter.remove(op)
    return True


def norm_residual(rewriter: Rewriter, op: Op, tiling: Tiling) -> bool:
    """Fuse Norm(Add(x, r)) and LayerNorm(Add(Dropout(x), r)): the norm also writes the sum, the new residual stream.

    If embed is cut, the norm consists of several tasks, and the dropout is not fused: it remains a task of its own.
    """
    if not isinstance(op, Norm) or op.residual:
        return False
    add = rewriter.maker.get(op.inputs[0])
    if not isinstance(add, Add) or add.phase != "forward":
        return False
    first = min(rewriter.order[r] for r in rewriter.readers[add.output])
    if rewriter.order[op] != first:  # another operator reads the sum before the norm
        return False
    x, r = add.inputs
    dropout = None
    if op.takes_dropout and not tiling.cut(x.axes[-1], x.shape[-1]):
        dropout = rewriter.maker_only_for(x, add, Dropout)
        if not dropout and (dropout := rewriter.maker_only_for(r, add, Dropout)):
            x, r = r, x
    x, old = (dropout.inputs[0], [op, add, dropout]) if dropout else (x, [op, add])
    rewriter.replace(old, op.onto(x, r, add.output, **({"dropout": dropout} if dropout else {})))
    return True


def norm_grad_add(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Add(NormGrad, g): the gradient of the norm adds g, the gradient of the residual stream."""
    for norm, dx, other in rewriter.summands(op, NormGrad) if isinstance(op, Add) else ():
        if norm.extra is None and norm.output is dx:
            return rewriter.replace([norm, op], norm.plus(other, op.output))
    return False


def norm_grad_dropout(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Dropout(LayerNormGrad): the gradient of the norm writes dx, for the residual stream, and Dropout(dx)."""
    norm = rewriter.maker.get(op.inputs[0]) if isinstance(op, Dropout) else None
    if not isinstance(norm, LayerNormGrad) or norm.output is not op.inputs[0] or norm.dropout:
        return False
    return _into_gradient(rewriter, norm, op, dropout=op)
