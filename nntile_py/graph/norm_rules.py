"""Rules that bring what stands before or behind a norm, or its gradient, into it."""

from __future__ import annotations

from typing import Any

from nntile_py.graph.rewriter import Uses
from nntile_py.tasks.elementwise import Add, Dropout, Sum
from nntile_py.tasks.layer_norm import LayerNormGrad
from nntile_py.tasks.norm import Norm, NormGrad
from nntile_py.tasks.op import Op
from nntile_py.tiles import Tiling


def norm_bias_grad(uses: Uses, op: Op) -> bool:
    """Sum(LayerNormGrad's dx, or its dropout) over all rows: summed where it is made, instead of reading it again."""
    if not isinstance(op, Sum):
        return False
    summed = op.inputs[0]
    norm = uses.maker.get(summed)
    if not isinstance(norm, LayerNormGrad) or norm.bias or op.output.axes != summed.axes[-1:]:
        return False
    if summed is not (norm.dropout or norm).output:
        return False
    return _into_gradient(uses, norm, op, dbias=op.output)


def _into_gradient(uses: Uses, norm: LayerNormGrad, op: Op, **changes: Any) -> bool:
    """The norm's gradient with what `op` did, where the norm stood and not op: others read dx before."""
    dy, x, statistics, gamma = norm.inputs[:4]
    dx, dgamma, dbeta = norm.outputs[:3]
    options = {"add": norm.extra, "dbias": norm.bias, "dropout": norm.dropout} | changes
    uses.replace([norm], LayerNormGrad(dy, x, statistics, gamma, dx, dgamma, dbeta, **options))
    uses.remove(op)
    return True


def norm_residual(uses: Uses, op: Op, tiling: Tiling) -> bool:
    """Norm(Add(x, r)) or LayerNorm(Add(Dropout(x), r)) where the sum also goes on as the residual stream.

    Where embed is cut the norm is several tasks, none of which would save the dropout's: it stays.
    """
    if not isinstance(op, Norm) or op.residual:
        return False
    add = uses.maker.get(op.inputs[0])
    if not isinstance(add, Add) or add.phase != "forward":
        return False
    first = min(uses.order[r] for r in uses.readers[add.output])
    if uses.order[op] != first:  # somebody needs the sum before the norm
        return False
    x, r = add.inputs
    dropout = None
    if op.takes_dropout and not tiling.cut(x.axes[-1], x.shape[-1]):
        dropout = uses.made_for(x, add, Dropout)
        if not dropout and (dropout := uses.made_for(r, add, Dropout)):
            x, r = r, x
    x, old = (dropout.inputs[0], [op, add, dropout]) if dropout else (x, [op, add])
    uses.replace(old, op.onto(x, r, add.output, **({"dropout": dropout} if dropout else {})))
    return True


def norm_grad_add(uses: Uses, op: Op) -> bool:
    """Add(NormGrad's dx, g): the residual stream's gradient is added where dx is made."""
    if not isinstance(op, Add):
        return False
    for mine, other in ((0, 1), (1, 0)):
        norm = uses.made_for(op.inputs[mine], op, NormGrad)
        if norm and norm.extra is None and norm.output is op.inputs[mine]:
            return uses.replace([norm, op], norm.plus(op.inputs[other], op.output))
    return False


def norm_grad_dropout(uses: Uses, op: Op) -> bool:
    """Dropout(LayerNormGrad's dx), a branch's gradient: made where dx is, which goes on as the residual stream's."""
    norm = uses.maker.get(op.inputs[0]) if isinstance(op, Dropout) else None
    if not isinstance(norm, LayerNormGrad) or norm.output is not op.inputs[0] or norm.dropout:
        return False
    return _into_gradient(uses, norm, op, dropout=op)
