"""Attention with relative positions, without scores in memory: kernels add products with embeddings of distances.

Axes: as in attention.py; queries, keys and values have the same positions and heads. The products content_to_position
and position_to_content have the axes of the queries, with `relative` in the place of head_dim. The index has the axis
distance, see relative.py. A task covers whole sequences: rows of the batch, or segments of a bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import R, TaskArgs, Tiling, W

from .attention import Attention, AttentionGrad, check_row_numbers, cut_positions, scores_dropout
from .attention_dropout import ScoresDropout
from .attention_operands import BHSD, Operands, as_bhsd, checked, from_bhsd, order_of
from .attention_tasks import AttentionArgs, AttentionGradArgs
from .mask import Mask, masked_softmax
from .op import Array, GraphLike, Index, Lowering, Tensor, accumulation_dtype, require


class RelativeAttentionArgs(TaskArgs):
    """Arguments of attention_relative."""

    queries: bool  # True: the task has a tile of content_to_position
    keys: bool  # True: the task has a tile of position_to_content
    order: tuple[int, int, int, int]  # positions of b, h, s and relative among the axes of these tiles; -1: missing
    attention: AttentionArgs


class RelativeAttentionGradArgs(TaskArgs):
    """Arguments of attention_relative_grad."""

    queries: bool
    keys: bool
    order: tuple[int, int, int, int]
    attention: AttentionGradArgs


@dataclass(frozen=True)
class DistanceTerms:
    """The terms of the scores that depend on distances. `index` and the products have the meaning of RelativeScores."""

    index: Tensor
    content_to_position: Tensor | None
    position_to_content: Tensor | None

    @property
    def products(self) -> list[Tensor]:
        return [t for t in (self.content_to_position, self.position_to_content) if t]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The positions of batch, heads, seq and relative among the axes of the products; -1: no batch."""
        return order_of(_with_head_dim(self.products[0].axes))

    def check(self, q: Tensor) -> None:
        """Raise ValueError if the terms do not fit the queries q."""
        rule = "relative_attention: queries [.., seq, ..] need an int64 index of 2 seq - 1 distances"
        fits = (self.index.axes, self.index.dtype) == (("distance",), "int64")
        require(fits and self.index.shape == (2 * q.size("seq") - 1,), rule, q, self.index)
        require(bool(self.products), "relative_attention: needs one product with embeddings of distances", q)
        rule = "relative_attention: a product has the sizes of the queries, relative in the place of head_dim, and the"
        rule += " axes of the other product"
        sizes = {axis: size for axis, size in q.sizes.items() if axis not in ("qkv", "head_dim")}
        for product in self.products:
            own = {axis: size for axis, size in product.sizes.items() if axis != "relative"}
            require(own == sizes and product.axes == self.products[0].axes, rule, q, product)
            require(product.axes[-1] == "relative", "relative_attention: `relative` must be the last axis", product)


class RelativeAttention(Attention):
    """o = softmax(scale (q k^T + c + p), masked) v; lse [b, h, s]: log-sum-exp of the scores.

    c[s, t] = content_to_position[s, r] and p[s, t] = position_to_content[t, r] for query s and key t, with r =
    index[t - s + seq - 1]. One of both may be missing. The axes seq, relative and distance are never cut. Dropout and
    queries without keys: as in Attention. Source: He et al. 2021, "DeBERTa: Decoding-enhanced BERT with disentangled
    attention", eq. 4.

    Args:
        terms: the index and both products. The index must not decrease. It must contain each number between its first
            and its last.
        mask: without a causal mask and without a window.
    """

    colours: ClassVar = {"forward": "#006d2c"}
    picks = "qkv", "kv_heads", "distance", "relative"

    def __init__(
        self, operands: Operands, terms: DistanceTerms, out: Tensor, lse: Tensor, *, mask: Mask,
        dropout: ScoresDropout | None = None, scale: float | None = None,
    ) -> None:  # fmt: skip
        self.terms = terms
        super().__init__(operands, out, lse, mask=mask, backend="segments", dropout=dropout, scale=scale)
        q, keys = operands.parts[0][0], operands.parts[1][0]
        terms.check(q)
        rule = "relative_attention: keys must have the positions and the heads of the queries"
        require("seq" in keys.axes and "heads" in keys.axes, rule, q, keys)
        rule = "relative_attention: got a causal mask or a window; allowed: all keys, padding or segments"
        require(not (mask.causal or mask.window), rule, q)

    @property
    def data(self) -> list[Tensor]:
        """Inputs besides q, k and v: the index, the products, tensors of the mask, and row numbers for dropout."""
        return [self.terms.index, *self.terms.products, *super().data]

    @property
    def kernel(self) -> str:
        return "attention_relative"

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        d_qkv = [g.temp("qkv_grad", t.axes, t.shape, t.dtype) for t in self.operands.tensors]
        d_products = [g.temp("relative_grad", t.axes, t.shape, t.dtype) for t in self.terms.products]
        g.add(RelativeAttentionGrad(self, grads[0], [*d_qkv, *d_products]))
        return [*d_qkv, None, *d_products, *[None for _ in super().data]]

    def products(self) -> float:
        return super().flop()

    def flop(self) -> float:
        return super().flop() * (1 + len(self.terms.products) / (4 * self.output.size("head_dim")))

    def fit(self, tiling: Tiling) -> None:
        self.mask.fit(tiling)
        if cut_positions(tiling, self.output.size("seq"), self.output.size("seq")):
            need = "none: this graph is for whole sequences, see Graph's cuts, or has packed ones"
            raise ConfigError(f"tiles.seq: got {tiling.tiles['seq']}; allowed with relative positions: {need}")

    def of_terms(self, lowering: Lowering, at: Index) -> tuple[list[Tensor], Index]:
        """Return the tensors of the terms, and the tile index of these tensors for the query tile `at`."""
        return [self.terms.index, *self.terms.products], at | {"relative": 0, "distance": 0}

    @property
    def which(self) -> tuple[bool, bool, tuple[int, int, int, int]]:
        """Whether there are content_to_position and position_to_content, and the order of their axes."""
        return self.terms.content_to_position is not None, self.terms.position_to_content is not None, self.terms.order

    def lower(self, lowering: Lowering) -> None:
        for at in self.tiles_of_queries(lowering):
            (key,) = self.pairs(lowering, at)
            tiles, qkv = self.operands.tiles(lowering, at, key)
            terms, whole = self.of_terms(lowering, at)
            _, limits, more = self.masked(lowering, at, key)
            accesses = [W(lowering.tile(self.output, at)), W(lowering.tile(self.lse, at)), *map(R, tiles)]
            accesses += [*(R(lowering.tile(t, whole)) for t in terms), *more]
            args = AttentionArgs(self.out_order, False, qkv, self.scale, limits)
            flop = self.pair_flop(lowering, at, key)
            lowering.emit(self.kernel, accesses, RelativeAttentionArgs(*self.which, args), flop=flop)

    # -- reference

    def rows(self, index: Array) -> Array:
        """Return an array [seq, key]: the position along `relative` of each pair of a query and a key."""
        seq = self.output.size("seq")
        return np.asarray(index[np.arange(seq) - np.arange(seq)[:, None] + seq - 1], int)

    def probabilities(self, q: Array, k: Array, data: Sequence[Array]) -> tuple[Array, Array]:
        count, seq = len(self.terms.products), np.arange(q.shape[2])
        rows, products = self.rows(data[0]), [as_bhsd(x, self.terms.order) for x in data[1 : 1 + count]]
        scores = q @ k.swapaxes(-1, -2)
        if self.terms.content_to_position:
            scores = scores + products[0][..., seq[:, None], rows]
        if self.terms.position_to_content:
            scores = scores + products[-1][..., seq, rows]
        allowed = self.mask.allowed({"seq": len(seq), "key": len(seq)}, [*BHSD[:3], "key"], data[1 + count :])
        p, lse = masked_softmax(self.scale * scores, allowed)
        return p, lse[..., 0]


class RelativeAttentionGrad(AttentionGrad):
    """Gradient of RelativeAttention; with ds, dq, dk and dv as in AttentionGrad.

    - d content_to_position[s, r] = sum of ds[s, t] over all keys t with index[t - s + seq - 1] = r
    - d position_to_content[t, r] = sum of ds[s, t] over all queries s with index[t - s + seq - 1] = r
    """

    colours: ClassVar = {"backward": "#9e4f7d"}
    picks = ("distance",)
    forward: RelativeAttention

    def write(self, outs: Sequence[Tensor]) -> None:
        """Replace the tensors that receive the gradients.

        outs: tensors for q, k and v, or for q, k, v and the products. Without the latter, those of the products stay.
        """
        count = len(self.forward.operands.tensors)
        self.outputs = [*outs, *self.outputs[len(outs) :]]
        self.grads = self.forward.operands.on(self.outputs[:count])

    def products(self) -> float:
        return 2.5 * self.forward.products()

    def lower(self, lowering: Lowering) -> None:
        fwd = self.forward
        for at in fwd.tiles_of_queries(lowering):
            (key,) = fwd.pairs(lowering, at)
            read = [R(lowering.tile(t, at)) for t in (self.do, fwd.output, fwd.lse)]
            tiles, qkv = fwd.operands.tiles(lowering, at, key)
            outs, grads = self.grads.tiles(lowering, at, key)
            terms, whole = fwd.of_terms(lowering, at)
            products = [lowering.tile(t, whole) for t in self.outputs[len(fwd.operands.tensors) :]]
            _, limits, more = fwd.masked(lowering, at, key)
            accesses = [*read, *map(R, tiles), *map(W, outs), *(R(lowering.tile(t, whole)) for t in terms)]
            accesses += [*map(W, products), *more]
            do_order = order_of(self.do.axes)
            args = AttentionGradArgs(do_order, fwd.out_order, False, qkv, grads, fwd.scale, limits)
            flop = 2.5 * fwd.pair_flop(lowering, at, key)
            lowering.emit(f"{fwd.kernel}_grad", accesses, RelativeAttentionGradArgs(*fwd.which, args), flop=flop)

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        fwd = self.forward
        ds, _ = self.score_gradient(inputs, seed)
        index, *products = inputs[len(fwd.operands.tensors) :][: 1 + len(fwd.terms.products)]
        of_rows = (fwd.rows(index)[..., None] == np.arange(products[0].shape[-1])).astype(float)  # [seq, key, relative]
        queries, keys, order = fwd.which
        sums = {"s": queries, "t": keys}
        found = [np.einsum(f"...st,str->...{axis}r", ds, of_rows) for axis, there in sums.items() if there]
        return *super().reference(*inputs, seed=seed), *(from_bhsd(x, order) for x in found)


def _with_head_dim(axes: Sequence[str]) -> list[str]:
    return ["head_dim" if axis == "relative" else axis for axis in axes]


def relative_attention(
    g: GraphLike, q: Tensor, k: Tensor, v: Tensor, mask: Mask, index: Tensor, content_to_position: Tensor | None,
    position_to_content: Tensor | None, dropout: float = 0.0, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(scale (q k^T + terms of the distances), masked) v, with q's axes. Formula: see RelativeAttention.

    Args:
        q: axes batch, heads, seq, head_dim in any order; batch may be missing. k and v have the same axes.
        dropout: probability of a zero among the attention probabilities.
        scale: factor of the scores; None: 1 / sqrt(head_dim).

    Raises:
        ValueError: the tensors do not fit one another.
    """
    dropout *= g.training
    check_row_numbers(g, dropout, mask, "segments")
    operands = checked(g, q, k, v, mask)
    sizes = {"batch": 1, "key": q.size("seq")} | q.sizes
    out = g.temp("attention", q.axes, q.shape, q.dtype)
    lse = g.temp("lse", BHSD[:3], [sizes[a] for a in BHSD[:3]], accumulation_dtype(q.dtype))
    drops = scores_dropout(g, dropout, q.axes, sizes, mask) if dropout else None
    terms = DistanceTerms(index, content_to_position, position_to_content)
    return g.add(RelativeAttention(operands, terms, out, lse, mask=mask, dropout=drops, scale=scale)).output
