"""Softmax over the axis key of attention scores that are stored in memory, for the attention backend `naive`.

The axis key may be cut into several tiles.
"""

from __future__ import annotations

import math

from nntile_py.tiles import ACC, R, TaskArgs, Tiling, W

from .mask import Limits, Mask, masked_softmax
from .op import NORMALIZATION, Array, GraphLike, Index, Lowering, Op, Tensor, accumulation_dtype
from .scalar.expression import Definition, Element, Output, exp, largest, select, total


class SoftmaxLimits(TaskArgs):
    """Masks of a tile apart from the causal mask."""

    rows: int  # rows of the tile (queries of all heads) per sequence of the batch; for padding
    limits: Limits


class SoftmaxArgs(TaskArgs):
    """Arguments of maxsumexp and softmax, on tiles [.., seq, key]."""

    diagonal: bool  # True: keys after the query are masked (causal mask)
    shift: int  # position of the tile's first query minus position of the tile's first key
    masked: SoftmaxLimits | None  # None: no other masks


class Softmax(Op):
    """p = softmax over key of the scores that the mask allows; p is 0 for masked scores. The last axes are seq, key.

    For each tile, one task adds the tile's (max, sumexp) to the state of its rows; then a second task computes
    exp(score - max) / sumexp (Alg. 1 of the NNTile report). Tiles outside the mask's band do not exist.
    """

    category = NORMALIZATION

    def __init__(self, scores: Tensor, out: Tensor, mask: Mask) -> None:
        assert scores.axes[-2:] == ("seq", "key"), scores
        assert scores.band == out.band == mask.band, (scores, out, mask)
        super().__init__([scores, *mask.inputs], [out])
        self.mask = mask

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        p = self.output
        out = g.temp("softmax_grad", p.axes, p.shape, p.dtype, band=p.band)
        return [g.add(SoftmaxGrad(p, grads[0], out)).output, *[None for _ in self.mask.inputs]]

    def flop(self) -> float:
        return 5.0 * self.output.numel

    def fit(self, tiling: Tiling) -> None:
        self.mask.fit(tiling)

    def lower(self, lowering: Lowering) -> None:
        scores = self.inputs[0]
        for index, keys in rows_of_keys(lowering, scores):
            shape = lowering.shape(scores, keys[0])[:-1]
            dtype = accumulation_dtype(scores.dtype)
            state = lowering.scratch(f"{self.name}.maxsumexp", index, (*shape, 2), dtype, "softmax")
            for at in keys:
                accesses = [ACC(state), R(lowering.tile(scores, at)), *self.mask.accesses(lowering, at)]
                lowering.emit("maxsumexp", accesses, self._args(lowering, at))
            for at in keys:
                accesses = [W(lowering.tile(self.output, at)), R(lowering.tile(scores, at)), R(state)]
                lowering.emit("softmax", [*accesses, *self.mask.accesses(lowering, at)], self._args(lowering, at))

    def _args(self, lowering: Lowering, at: Index) -> SoftmaxArgs:
        scores, band = self.inputs[0], self.mask.band
        seq, key = lowering.part(scores, "seq", at), lowering.part(scores, "key", at)
        limits = self.mask.limits(seq, key)
        after = scores.axes[scores.axes.index("batch") + 1 : -1] if "batch" in scores.axes else scores.axes[:-1]
        rows = math.prod(lowering.part(scores, axis, at).size for axis in after)
        diagonal = band.causal and key.end > seq.offset + 1
        return SoftmaxArgs(diagonal, seq.offset - key.offset, SoftmaxLimits(rows, limits) if limits else None)

    def scalar(self) -> Definition | None:
        if self.mask.segments:  # no formula: the segment of a position must be searched
            return None
        axes, x = self.output.axes, Element(0, self.output.axes)
        allowed = self.mask.condition()
        top = largest(x if allowed is None else select(allowed, x, -math.inf), "key")
        e = exp(x - top)
        if allowed is None:
            return Definition(self.output.sizes, (Output(0, axes, e * (1 / total(e, "key"))),))
        e = select(allowed, e, 0.0)  # in a fully masked row e is not finite: select makes it 0
        sums = total(e, "key")
        return Definition(self.output.sizes, (Output(0, axes, e * (1 / select(sums > 0, sums, 1.0))),))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        scores = self.inputs[0]
        return (masked_softmax(inputs[0], self.mask.allowed(scores.sizes, scores.axes, inputs[1:]))[0],)


class SoftmaxGrad(Op):
    """Gradient of Softmax: dscores = p * (dp - sum over key of p * dp)."""

    category = NORMALIZATION

    def __init__(self, p: Tensor, dp: Tensor, out: Tensor) -> None:
        super().__init__([p, dp], [out])

    def flop(self) -> float:
        return 4.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        p, dp = self.inputs
        for index, keys in rows_of_keys(lowering, p):
            shape = lowering.shape(p, keys[0])[:-1]
            sums = lowering.scratch(f"{self.name}.sums", index, shape, accumulation_dtype(p.dtype))
            for at in keys:
                lowering.emit("softmax_grad_sums", [ACC(sums), R(lowering.tile(p, at)), R(lowering.tile(dp, at))])
            for at in keys:
                tiles = [lowering.tile(t, at) for t in (p, dp)]
                lowering.emit("softmax_grad", [W(lowering.tile(self.output, at)), *map(R, tiles), R(sums)])

    def scalar(self) -> Definition:
        axes = self.output.axes
        p, dp = Element(0, axes), Element(1, axes)
        return Definition(self.output.sizes, (Output(0, axes, p * (dp - total(p * dp, "key"))),))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        p, dp = inputs
        return (p * (dp - (p * dp).sum(-1, keepdims=True)),)


def rows_of_keys(lowering: Lowering, scores: Tensor) -> list[tuple[dict[str, int], list[dict[str, int]]]]:
    """Return for each row of tiles: its index without the axis key, and the indices of its existing tiles along key."""
    result = []
    for index in lowering.indices(scores, scores.axes[:-1]):
        keys = [index | {"key": k} for k in range(len(lowering.parts(scores, "key")))]
        result.append((index, [at for at in keys if not lowering.empty(scores, at)]))
    return result


def softmax(g: GraphLike, scores: Tensor, mask: Mask) -> Tensor:
    """Add a Softmax to the graph; return the softmax over key of the allowed scores [.., seq, key], 0 if masked."""
    p = g.temp("softmax", scores.axes, scores.shape, scores.dtype, band=mask.band)
    return g.add(Softmax(scores, p, mask)).output
