"""Rules that fold the operators before or after a norm, or its gradient, into the norm."""

from __future__ import annotations

from typing import Any

from nntile_py.graph.passes.rewriter import Rewriter, Rule
from nntile_py.tasks.elementwise import Add, Dropout, Sum
from nntile_py.tasks.layer_norm import LayerNormGrad
from nntile_py.tasks.norm import Norm, NormGrad
from nntile_py.tasks.op import Op
from nntile_py.tiles import Tiling


def where_rows_are_cut(rule: Rule, tiling: Tiling) -> Rule:
    """Limit a rule to norms over cut rows: their gradient is several tasks, which greedy fusion does not merge."""

    def limited(rewriter: Rewriter, op: Op) -> bool:
        rows = [(x.axes[-1], x.shape[-1]) for x in op.inputs[:1] if x.axes]
        return any(tiling.cut(*row) for row in rows) and rule(rewriter, op)

    return limited


def norm_bias_grad(rewriter: Rewriter, op: Op) -> bool:
    """Sum over all rows of LayerNormGrad's dx, or of its dropout: the gradient also sums the rows that it writes."""
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
    """Fold `op` into the gradient of a norm, at the gradient's position: operators before `op` may read dx."""
    dy, x, statistics, gamma = norm.inputs[:4]
    dx, dgamma, dbeta = norm.outputs[:3]
    options = {"add": norm.extra, "dbias": norm.bias, "dropout": norm.dropout} | changes
    rewriter.replace([norm], LayerNormGrad(dy, x, statistics, gamma, dx, dgamma, dbeta, **options))
    rewriter.remove(op)
    return True


def norm_residual(rewriter: Rewriter, op: Op, tiling: Tiling) -> bool:
    """Norm(Add(x, r)) and LayerNorm(Add(Dropout(x), r)): the norm also writes the sum, the new residual stream.

    The dropout stays where embed is cut: the norm is several tasks then, and none of them would save the dropout's.
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
        dropout = rewriter.sole_maker(x, add, Dropout)
        if not dropout and (dropout := rewriter.sole_maker(r, add, Dropout)):
            x, r = r, x
    x, old = (dropout.inputs[0], [op, add, dropout]) if dropout else (x, [op, add])
    rewriter.replace(old, op.onto(x, r, add.output, **({"dropout": dropout} if dropout else {})))
    return True


def norm_grad_add(rewriter: Rewriter, op: Op) -> bool:
    """Add(NormGrad's dx, g): the gradient of the norm adds g, the gradient of the residual stream."""
    if not isinstance(op, Add):
        return False
    for mine, other in ((0, 1), (1, 0)):
        norm = rewriter.sole_maker(op.inputs[mine], op, NormGrad)
        if norm and norm.extra is None and norm.output is op.inputs[mine]:
            return rewriter.replace([norm, op], norm.plus(op.inputs[other], op.output))
    return False


def norm_grad_dropout(rewriter: Rewriter, op: Op) -> bool:
    """Dropout(LayerNormGrad's dx): the gradient of the norm writes dx, for the residual stream, and its dropout."""
    norm = rewriter.maker.get(op.inputs[0]) if isinstance(op, Dropout) else None
    if not isinstance(norm, LayerNormGrad) or norm.output is not op.inputs[0] or norm.dropout:
        return False
    return _into_gradient(rewriter, norm, op, dropout=op)
