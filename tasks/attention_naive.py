"""Attention as separate operators, with the scores stored in memory."""

from __future__ import annotations

from collections.abc import Sequence

from .attention_operands import Operands
from .attention_repeat import repeat_heads
from .contract import Contract, contract
from .elementwise import dropout as dropout_of
from .elementwise import rename, unpack
from .mask import Mask
from .op import GraphLike, Tensor
from .softmax import Softmax


def scores_axes(queries: Sequence[str]) -> list[str]:
    """Return the axes of the scores: the queries' axes without seq and head_dim, then seq and key."""
    return [*(a for a in queries if a not in ("seq", "head_dim")), "seq", "key"]


def naive(g: GraphLike, operands: Operands, mask: Mask, dropout: float, scale: float | None = None) -> Tensor:
    """Add operators for scores, softmax and weighted sum to the graph. Return the weighted sum, with the axes of q."""
    packed = dict.fromkeys(t for t, index in operands.parts if index >= 0)
    slices = {t: unpack(g, t, "qkv") for t in packed}
    q, k, v = (slices[t][index] if index >= 0 else t for t, index in operands.parts)
    if "kv_heads" in k.axes:
        k, v = (repeat_heads(g, t, q.size("heads")) for t in (k, v))
    if "seq" in k.axes:
        k, v = rename(g, k, seq="key"), rename(g, v, seq="key")
    sizes = {**q.sizes, **k.sizes}
    axes = scores_axes(q.axes)
    scores = g.temp("scores", axes, [sizes[a] for a in axes], q.dtype, band=mask.band)
    g.add(Contract(q, k, scores, scale=q.size("head_dim") ** -0.5 if scale is None else scale))
    p = g.temp("softmax", axes, scores.shape, scores.dtype, band=mask.band)
    p = g.add(Softmax(scores, p, mask)).output
    if dropout:
        p = dropout_of(g, p, dropout)
        p.band = mask.band
    return contract(g, p, v, q.axes)
