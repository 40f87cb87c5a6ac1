"""Softmax of materialised attention scores over the attended positions (axis key), cut or not: the naive attention."""

from __future__ import annotations

import numpy as np

from nntile_py.tiles import ACC, R, Tile, W

from .op import Array, GraphLike, Lowering, Op, Tensor, wide


def causal_mask(scores: Array) -> Array:
    """True where key <= seq, for an array [..., seq, key]."""
    return np.asarray(np.tri(scores.shape[-2], scores.shape[-1], dtype=bool))


class Softmax(Op):
    """p = softmax(scores over key), with key > seq left out if the scores are causal; axes end in seq, key.

    maxsumexp of each tile, combined over the keys, then exp(score - max) / sumexp (Alg. 1 of the NNTile report).
    """

    def __init__(self, scores: Tensor, out: Tensor) -> None:
        assert scores.axes[-2:] == ("seq", "key"), scores
        super().__init__([scores], [out])

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        p = self.output
        out = g.temp("softmax_grad", p.axes, p.shape, p.dtype, causal=p.causal)
        return [g.add(SoftmaxGrad(p, grads[0], out)).output]

    def flop(self) -> float:
        return 5.0 * self.output.words

    def lower(self, low: Lowering) -> None:
        scores = self.inputs[0]
        for index, keys in rows_of_keys(low, scores):
            shape = low.shape(scores, keys[0])[:-1]
            state = Tile(f"{self.name}.maxsumexp", tuple(index.values()), (*shape, 2), wide(scores.dtype), "softmax")
            for at in keys:
                low.emit("maxsumexp", [ACC(state), R(low.tile(scores, at))], diagonal(low, scores, at))
            for at in keys:
                accesses = [W(low.tile(self.output, at)), R(low.tile(scores, at)), R(state)]
                low.emit("softmax", accesses, diagonal(low, scores, at))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        scores = np.where(causal_mask(inputs[0]), inputs[0], -np.inf) if self.inputs[0].causal else inputs[0]
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True),)


class SoftmaxGrad(Op):
    """dscores = p * (dp - sum over key of p dp)."""

    def __init__(self, p: Tensor, dp: Tensor, out: Tensor) -> None:
        super().__init__([p, dp], [out])

    def flop(self) -> float:
        return 4.0 * self.output.words

    def lower(self, low: Lowering) -> None:
        p, dp = self.inputs
        for index, keys in rows_of_keys(low, p):
            sums = Tile(f"{self.name}.sums", tuple(index.values()), low.shape(p, keys[0])[:-1], wide(p.dtype))
            for at in keys:
                low.emit("softmax_grad_sums", [ACC(sums), R(low.tile(p, at)), R(low.tile(dp, at))])
            for at in keys:
                tiles = [low.tile(t, at) for t in (p, dp)]
                low.emit("softmax_grad", [W(low.tile(self.output, at)), *map(R, tiles), R(sums)])

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        p, dp = inputs
        if self.inputs[0].causal:
            dp = np.where(causal_mask(dp), dp, 0.0)
        return (p * (dp - (p * dp).sum(-1, keepdims=True)),)


def rows_of_keys(low: Lowering, scores: Tensor) -> list[tuple[dict[str, int], list[dict[str, int]]]]:
    """For each tile index over the axes before key: the indices of the tiles along key that exist."""
    result = []
    for index in low.indices(scores, scores.axes[:-1]):
        keys = [index | {"key": k} for k in range(len(low.parts(scores, "key")))]
        result.append((index, [at for at in keys if not low.empty(scores, at)]))
    return result


def diagonal(low: Lowering, scores: Tensor, at: dict[str, int]) -> list[int]:
    """[whether the tile is cut by the causal diagonal, seq offset - key offset]."""
    seq, key = low.part(scores, "seq", at), low.part(scores, "key", at)
    return [int(scores.causal and key.end > seq.offset + 1), seq.offset - key.offset]
