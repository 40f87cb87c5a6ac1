"""Rules that fuse bias, residual, activation and their gradients into the epilogue of a contraction."""

from __future__ import annotations

from typing import Any

from nntile_py.graph.passes.rewriter import Rewriter, Rule
from nntile_py.tasks.activation import Activation, ActivationGrad
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Add, BiasAdd, Sum
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles.dtypes import is_low, is_scaled


def has_free_epilogue(op: Op | None) -> bool:
    """Return whether an operator is a contraction in which at most a bias and a residual are fused behind the sum."""
    return isinstance(op, Contract) and op.activation is None and op.aux is None and op.bias_grad is None


def takes_activation(op: Op | None) -> bool:
    """Return whether a product can also apply an activation.

    Products of 8 bits cannot. Their activations join groups of greedy fusion.
    """
    return isinstance(op, Contract) and has_free_epilogue(op) and not is_scaled(op.a.dtype)


def rebuilt(op: Contract, out: Tensor, **changes: Any) -> Contract:
    """Return a copy of a contraction that writes `out`, with some operands or options changed."""
    keep = ("scale", "bias", "residual", "activation", "pre", "aux", "bias_grad", "reshape")
    options = {name: getattr(op, name) for name in keep} | changes
    a, b = options.pop("a", op.a), options.pop("b", op.b)
    return Contract(a, b, out, **options)


def bias(rewriter: Rewriter, op: Op) -> bool:
    """Fuse BiasAdd(Contract): the product adds the bias."""
    if not isinstance(op, BiasAdd):
        return False
    gemm = rewriter.maker_only_for(op.inputs[0], op, Contract)
    if not (gemm and has_free_epilogue(gemm) and gemm.bias is None and gemm.residual is None):
        return False
    rewriter.replace([gemm, op], rebuilt(gemm, op.output, bias=op.inputs[1]))
    return True


def bias_grad(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Sum(dy), a bias gradient, into a contraction that sums x dy over the same axes, so dy is read only once."""
    if not isinstance(op, Sum) or is_low(op.inputs[0].dtype):  # cuBLASLt would read dy twice, slower than a Sum alone
        return False
    dy = op.inputs[0]
    summed = {axis for axis in dy.axes if axis not in op.output.axes}
    for reader in rewriter.readers[dy]:
        if not (isinstance(reader, Contract) and has_free_epilogue(reader)) or set(reader.k) != summed or reader.batch:
            continue
        side = 0 if reader.a is dy else 1
        columns = reader.m if side == 0 else reader.n
        if columns == list(op.output.axes):
            return rewriter.replace([reader, op], rebuilt(reader, reader.output, bias_grad=(side, op.output)))
    return False


def residual(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Add(Contract, r): the product adds r to its result."""
    for gemm, _, other in rewriter.summands(op, Contract) if isinstance(op, Add) else ():
        if has_free_epilogue(gemm) and gemm.residual is None and not op.output.band.causal:
            return rewriter.replace([gemm, op], rebuilt(gemm, op.output, residual=other))
    return False


def activation(rewriter: Rewriter, op: Op) -> bool:
    """Fuse Activation(Contract): the product applies the activation.

    The product also writes the activation's input if the backward pass reads it.
    """
    if not isinstance(op, Activation):
        return False
    x = op.inputs[0]
    gemm = rewriter.maker.get(x)
    readers = [r for r in rewriter.readers[x] if r is not op]
    if not (isinstance(gemm, Contract) and takes_activation(gemm)) or any(r.phase == "forward" for r in readers):
        return False
    kept = readers or x.persistent
    rewriter.replace([gemm, op], rebuilt(gemm, op.output, activation=op.act, pre=x if kept else None))
    return True


def where_free(rule: Rule) -> Rule:
    """Limit a rule to activations that a product applies at no cost: in bf16 and fp16 only gelu_new.

    Greedy fusion joins the other activations with their neighbours, above all with dropout, into one pass over memory.
    Gradients of activations have few such neighbours, so products apply all of these gradients. With this choice a
    training step of BERT base with 32 768 tokens takes 45.5 instead of 47.4 ms on an H200.
    """
    return lambda rewriter, op: (
        (not is_low(op.output.dtype) or getattr(op, "act", "") == "gelu_new") and rule(rewriter, op)
    )  # fmt: skip


def activation_grad(rewriter: Rewriter, op: Op) -> bool:
    """Fuse ActivationGrad(Contract, x): the product multiplies its result by the activation's derivative at x."""
    if not isinstance(op, ActivationGrad):
        return False
    gemm = rewriter.maker_only_for(op.inputs[0], op, Contract)
    if not (gemm and takes_activation(gemm) and not gemm.inputs[2:]):
        return False
    rewriter.replace([gemm, op], rebuilt(gemm, op.output, activation=op.act, aux=op.inputs[1]))
    return True
