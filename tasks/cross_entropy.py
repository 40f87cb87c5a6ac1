"""Cross-entropy over a vocabulary that may be cut, its gradient in place of the logits."""

from __future__ import annotations

import numpy as np

from nntile_py.tiles import ACC, RW, R, Slot, Tile, W

from .op import Array, GraphLike, Lowering, Op, Tensor, wide

IGNORED = -100


class CrossEntropy(Op):
    """loss = (sum over rows of log sum_v exp(logits) - logits[label]) * scale; rows labelled -100 are left out.

    The scale is the slot `loss_scale`: 1 / (labels that count, in all micro-batches of the step). Outputs: loss, fp64
    [1]; lse [...], fp32 for bf16 logits: log-sum-exp of each row. With `fused` (set by the fusion pass where the
    vocabulary is not cut) the same task overwrites the logits by their gradient.
    """

    def __init__(self, logits: Tensor, labels: Tensor, loss: Tensor, lse: Tensor) -> None:
        assert logits.axes[-1] == "vocab", logits
        super().__init__([logits, labels], [loss, lse])
        self.lse = lse
        self.fused: CrossEntropyGrad | None = None

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        logits, labels = self.inputs
        out = g.temp("logits_grad", logits.axes, logits.shape, logits.dtype, storage=logits)
        return [g.add(CrossEntropyGrad(logits, labels, self.lse, out)).output, None]

    def flop(self) -> float:
        return 4.0 * self.inputs[0].words

    def lower(self, low: Lowering) -> None:
        logits, labels = self.inputs
        loss = low.tile(self.output, {"one": 0})
        scale = Slot("loss_scale")
        for index in low.indices(labels):
            label, lse = low.tile(labels, index), low.tile(self.lse, index)
            parts = low.parts(logits, "vocab")
            tiles = [low.tile(logits, index | {"vocab": k}) for k in range(len(parts))]
            if len(parts) == 1:
                access = RW(tiles[0]) if self.fused else R(tiles[0])
                low.emit("cross_entropy", [access, R(label), W(lse), ACC(loss)], [int(bool(self.fused))], [scale])
                continue
            state = Tile(f"{self.name}.state", tuple(index.values()), (*lse.shape, 2), lse.dtype, "softmax")
            picked = Tile(f"{self.name}.picked", tuple(index.values()), lse.shape, lse.dtype)
            for part, tile in zip(parts, tiles, strict=True):
                ints = [part.offset, logits.size("vocab")]
                low.emit("cross_entropy_state", [ACC(state), ACC(picked), R(tile), R(label)], ints)
            accesses = [W(lse), ACC(loss), R(state), R(picked), R(label)]
            low.emit("cross_entropy_loss", accesses, [], [scale])

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        logits, labels = inputs[0], inputs[1].astype(int)
        top = logits.max(-1, keepdims=True)
        lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
        kept = labels != IGNORED
        picked = np.take_along_axis(logits, np.where(kept, labels, 0)[..., None], -1)[..., 0]
        return np.array([((lse - picked) * kept).sum() / max(kept.sum(), 1)]), lse


class CrossEntropyGrad(Op):
    """dlogits = (exp(logits - lse) - onehot(label)) * loss_scale, zero where the label is -100; in place."""

    def __init__(self, logits: Tensor, labels: Tensor, lse: Tensor, out: Tensor) -> None:
        super().__init__([logits, labels, lse], [out])
        self.fused = False

    def flop(self) -> float:
        return 4.0 * self.output.words

    def lower(self, low: Lowering) -> None:
        if self.fused:
            return
        logits, labels, lse = self.inputs
        for index in low.indices(logits):
            accesses = [RW(low.tile(logits, index)), R(low.tile(labels, index)), R(low.tile(lse, index))]
            low.emit("cross_entropy_grad", accesses, [low.part(logits, "vocab", index).offset], [Slot("loss_scale")])

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        logits, labels, lse = inputs[0], inputs[1].astype(int), inputs[2]
        p = np.exp(logits - lse[..., None])
        kept = labels != IGNORED
        onehot = np.zeros_like(p)
        np.put_along_axis(onehot, np.where(kept, labels, 0)[..., None], 1.0, axis=-1)
        return ((p - onehot) * kept[..., None] / max(kept.sum(), 1),)


def cross_entropy(g: GraphLike, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss, fp64 [1], of logits [..., vocab] and labels (int64, -100: left out); see CrossEntropy."""
    loss = g.named("loss", ["one"], [1], "scalar", "fp64")
    lse = g.temp("lse", labels.axes, labels.shape, wide(logits.dtype))
    return g.add(CrossEntropy(logits, labels, loss, lse)).output
