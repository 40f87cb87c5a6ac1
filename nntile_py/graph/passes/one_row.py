"""Pass for generation of one text: products of a single row become Gemv operators, with their norms and gates.

Such a pass reads each weight once, so memory limits its speed, and each further kernel is a gap in which no weight is
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.gated import Gated
from nntile_py.tasks.gemv import NORMS, Gemv, InputNorm
from nntile_py.tasks.norm import Norm
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import is_scaled


def fuse_one_row(graph: Graph, tiling: Tiling) -> None:
    """Rewrite the products of one row of a forward graph, in place."""
    rewriter = Rewriter(graph)
    for rule in (partial(_product, tiling=tiling), _norm, _gate):
        rewriter.apply(rule)
    graph.ops = list(rewriter.ops.values())


def _product(rewriter: Rewriter, op: Op, tiling: Tiling) -> bool:
    """Replace a Contract of one row and a parameter, if the sums are uncut and the parameter is stored row by row."""
    if not isinstance(op, Contract) or op.b.kind != "param" or op.batch or any((op.pre, op.aux, op.bias_grad)):
        return False
    x, out = op.a, op.output
    n = tuple(axis for axis in out.axes if axis in op.n)
    k = tuple(axis for axis in x.axes if axis in op.k)
    one_row = all(out.size(axis) == 1 for axis in op.m) and op.b.axes == (*n, *k)
    cut = any(tiling.cut(axis, x.size(axis)) for axis in k)
    dtypes = {t.dtype for t in (*op.inputs, out)}
    beside = (op.bias is None or op.bias.axes == n) and (op.residual is None or op.residual.axes == out.axes)
    if not (one_row and beside) or cut or len(dtypes) > 1 or is_scaled(x.dtype) or out.banded:
        return False
    options = {name: getattr(op, name) for name in ("scale", "bias", "residual", "activation")}
    return rewriter.replace([op], Gemv(x, op.b, out, **options))


def _norm(rewriter: Rewriter, op: Op) -> bool:
    """Let products normalise their input themselves, if only products read the norm's result."""
    if not isinstance(op, Norm) or op.residual or op.kernel not in NORMS:
        return False
    x, (y, statistics) = op.inputs[0], op.outputs
    readers: Sequence[Op] = rewriter.readers.get(y, [])
    fits = [isinstance(r, Gemv) and not r.norm and r.x is y and r.k == x.axes[-1:] for r in readers]
    alone = y.kind == "temp" and not rewriter.readers.get(statistics) and x.dtype == y.dtype
    if not (readers and alone and all(fits)) or any(w.dtype != x.dtype for w in op.inputs[1:]):
        return False
    for reader in [one for one in readers if isinstance(one, Gemv)]:
        rewriter.replace([reader], _changed(reader, reader.output, x=x, norm=InputNorm.of(op)))
    rewriter.remove(op)
    return True


def _gate(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Gated(Gemv, up): the product applies the activation and multiplies by `up`."""
    if not isinstance(op, Gated):
        return False
    product = rewriter.maker_only_for(op.inputs[0], op, Gemv)
    if not product or product.activation or product.factor:
        return False
    return rewriter.replace([product, op], _changed(product, op.output, activation=op.act, factor=op.inputs[1]))


def _changed(op: Gemv, out: Tensor, **changes: Any) -> Gemv:
    """Return a copy of a product that writes `out`, with some operands or options changed."""
    keep = ("scale", "norm", "bias", "residual", "activation", "factor")
    options: dict[str, Any] = {"x": op.x} | {name: getattr(op, name) for name in keep} | changes
    return Gemv(options.pop("x"), op.weight, out, **options)
