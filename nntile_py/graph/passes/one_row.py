"""Pass for generation of one text: products of a single row become Gemv operators, with their norms and gates.

Such a pass reads each weight once, so the rate of the memory limits its speed. A kernel between two products would be
a time in which no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.gated import Gated
from nntile_py.tasks.gemv import NORMS, Gemv
from nntile_py.tasks.norm import Norm
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import is_scaled


def fuse_one_row(graph: Graph, tiling: Tiling, *, partial_sums: bool) -> None:
    """Rewrite the products of one row of a forward graph, in place.

    partial_sums: also rewrite products whose sums are cut, if only rewritten products read the result. Kernels of GPUs
        do not support this.
    """
    rewriter = Rewriter(graph)
    for rule in (partial(_product, tiling=tiling), _norm, _gate):
        rewriter.apply(rule)
    graph.ops = list(rewriter.ops.values())
    if partial_sums:
        _leave_partial_sums(graph, rewriter, tiling)


def _product(rewriter: Rewriter, op: Op, tiling: Tiling) -> bool:
    """Replace a product of one row and a parameter, if the sums are uncut."""
    if not isinstance(op, Contract) or not _is_of_one_row(op) or _cut_sums(op, tiling):
        return False
    residual = [op.residual] if op.residual else []
    options = {name: getattr(op, name) for name in ("scale", "bias", "activation")}
    return rewriter.replace([op], Gemv([op.a], op.b, [op.output], residual=residual, **options))


def _is_of_one_row(op: Contract) -> bool:
    """Return whether a product is of one row and a parameter that is stored row by row."""
    if op.b.kind != "param" or op.batch or any((op.pre, op.aux, op.bias_grad)):
        return False
    x, out = op.a, op.output
    n = tuple(axis for axis in out.axes if axis in op.n)
    k = tuple(axis for axis in x.axes if axis in op.k)
    one_row = all(out.size(axis) == 1 for axis in op.m) and op.b.axes == (*n, *k)
    dtypes = {t.dtype for t in (*op.inputs, out)}
    beside = (op.bias is None or op.bias.axes == n) and (op.residual is None or op.residual.axes == out.axes)
    return one_row and beside and len(dtypes) == 1 and not is_scaled(x.dtype) and not out.banded


def _cut_sums(op: Contract, tiling: Tiling) -> list[str]:
    """Return the summed axes of a product that are cut."""
    return [axis for axis in op.k if tiling.cut(axis, op.a.size(axis))]


def _norm(rewriter: Rewriter, op: Op) -> bool:
    """Let products normalise their input themselves, if only products read the norm's result."""
    if not isinstance(op, Norm) or op.residual or op.kernel not in NORMS:
        return False
    x, (y, statistics) = op.inputs[0], op.outputs
    readers: Sequence[Op] = rewriter.readers.get(y, [])
    fits = [isinstance(r, Gemv) and not r.norm and r.x == (y,) and r.k == x.axes[-1:] for r in readers]
    alone = y.kind == "temp" and not rewriter.readers.get(statistics) and x.dtype == y.dtype
    if not (readers and alone and all(fits)) or any(w.dtype != x.dtype for w in op.inputs[1:]):
        return False
    for reader in [one for one in readers if isinstance(one, Gemv)]:
        rewriter.replace([reader], _changed(reader, reader.outputs, x=[x], norm=op))
    rewriter.remove(op)
    return True


def _gate(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Gated(Gemv, up): the product applies the activation and multiplies by `up`."""
    if not isinstance(op, Gated):
        return False
    product = rewriter.maker_only_for(op.inputs[0], op, Gemv)
    if not product or product.activation or product.factor:
        return False
    return rewriter.replace([product, op], _changed(product, op.outputs, activation=op.act, factor=op.inputs[1]))


def _leave_partial_sums(graph: Graph, rewriter: Rewriter, tiling: Tiling) -> None:
    """Replace products whose sums are cut along one axis; their readers add the partial sums."""
    products = {op.output: op for op in graph.ops if isinstance(op, Contract) and _leaves_parts(op, tiling)}

    def adds(op: Op, tensor: Tensor) -> bool:
        """Return whether an operator can read a tensor as several addends."""
        if isinstance(op, Gemv):
            return tensor in (*op.x, *op.residual) and tensor is not op.factor
        return op.output in products and tensor is products[op.output].residual

    count = -1
    while count != len(products):  # a product that stays a Contract reads whole tensors
        count = len(products)
        products = {t: op for t, op in products.items() if all(adds(r, t) for r in rewriter.readers.get(t, []))}
    cuts = {t: tiling.parts(axis, op.a.size(axis)) for t, op in products.items() for axis in _cut_sums(op, tiling)}
    parts = {t: [graph.temp(f"{t.name}.part", t.axes, t.shape, t.dtype) for _ in cut] for t, cut in cuts.items()}
    for place, op in enumerate(graph.ops):
        one = op
        if product := products.get(op.output):
            residual = [product.residual] if product.residual else []
            beside: dict[str, Any] = {"scale": product.scale, "bias": product.bias, "residual": residual}
            one = Gemv([product.a], product.b, parts[op.output], parts=cuts[op.output], **beside)
        if isinstance(one, Gemv):
            new = _changed(one, one.outputs, x=_flat(one.x, parts), residual=_flat(one.residual, parts))
            new.name, new.phase = op.name, op.phase
            graph.ops[place] = new


def _leaves_parts(op: Contract, tiling: Tiling) -> bool:
    """Return whether a product's sums are cut along one axis, and its result is a plain sum."""
    plain = op.output.kind == "temp" and op.activation is None
    return plain and _is_of_one_row(op) and len(_cut_sums(op, tiling)) == 1


def _flat(tensors: Sequence[Tensor], parts: Mapping[Tensor, Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors, with each tensor that has parts replaced by the parts."""
    return [part for t in tensors for part in parts.get(t, [t])]


def _changed(op: Gemv, outs: Sequence[Tensor], **changes: Any) -> Gemv:
    """Return a copy of a product that writes `outs`, with some operands or options changed."""
    keep = ("x", "parts", "scale", "norm", "bias", "residual", "activation", "factor")
    options: dict[str, Any] = {name: getattr(op, name) for name in keep} | changes
    return Gemv(options.pop("x"), op.weight, outs, **options)
