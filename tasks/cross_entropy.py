"""Cross-entropy loss over an axis of classes, which may be cut. The gradient overwrites the logits."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, RW, R, Slot, TaskArgs, W

from .op import NORMALIZATION, Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype

IGNORED = -100


class CrossEntropyArgs(TaskArgs):
    gradient: bool  # overwrite the logits by their gradient
    scale: Slot


class CrossEntropyStateArgs(TaskArgs):
    first: int  # first class of the tile
    classes: int  # classes of the whole tensor


class CrossEntropyLossArgs(TaskArgs):
    scale: Slot


class CrossEntropyGradArgs(TaskArgs):
    first: int  # first class of the tile
    scale: Slot


class CrossEntropy(Op):
    """loss = (sum over rows of log sum_c exp(logits) - logits[label]) * scale; rows with label -100 are ignored.

    The last axis of the logits is the classes; the labels have all other axes. The scale is a slot: 1 / (number of
    labels that are not ignored, in all micro-batches of the step). With an earlier loss `before`, the new loss is added
    to `before`. Outputs: loss, fp64 [1]; lse [...], the log-sum-exp of each row, fp32 for 16-bit logits. The fusion
    pass sets `fused` if the classes are not cut: the same task then overwrites the logits by their gradient.
    """

    category = NORMALIZATION
    colours: ClassVar = {"forward": "#7a5195"}

    def __init__(
        self, logits: Tensor, labels: Tensor, loss: Tensor, lse: Tensor, before: Tensor | None = None,
        scale: str = "loss_scale",
    ) -> None:  # fmt: skip
        assert logits.axes[:-1] == labels.axes, (logits, labels)
        super().__init__([t for t in (logits, labels, before) if t], [loss, lse])
        self.classes, self.lse, self.scale = logits.axes[-1], lse, Slot(scale)
        self.fused: CrossEntropyGrad | None = None

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        logits, labels = self.inputs[:2]
        out = g.temp("logits_grad", logits.axes, logits.shape, logits.dtype, storage=logits)
        return [g.add(CrossEntropyGrad(logits, labels, self.lse, out, self.scale.name)).output, None]

    def flop(self) -> float:
        return 4.0 * self.inputs[0].numel

    def lower(self, lowering: Lowering) -> None:
        logits, labels = self.inputs[:2]
        loss = lowering.tile(self.output, {"one": 0})
        for index in lowering.indices(labels):
            label, lse = lowering.tile(labels, index), lowering.tile(self.lse, index)
            parts = lowering.parts(logits, self.classes)
            tiles = [lowering.tile(logits, index | {self.classes: k}) for k in range(len(parts))]
            if len(parts) == 1:
                access = RW(tiles[0]) if self.fused else R(tiles[0])
                args = CrossEntropyArgs(bool(self.fused), self.scale)
                lowering.emit("cross_entropy", [access, R(label), W(lse), ACC(loss)], args)
                continue
            state = lowering.scratch(f"{self.name}.state", index, (*lse.shape, 2), lse.dtype, "softmax")
            picked = lowering.scratch(f"{self.name}.picked", index, lse.shape, lse.dtype)
            for part, tile in zip(parts, tiles, strict=True):
                state_args = CrossEntropyStateArgs(part.offset, logits.size(self.classes))
                lowering.emit("cross_entropy_state", [ACC(state), ACC(picked), R(tile), R(label)], state_args)
            accesses = [W(lse), ACC(loss), R(state), R(picked), R(label)]
            lowering.emit("cross_entropy_loss", accesses, CrossEntropyLossArgs(self.scale))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        logits, labels, before = inputs[0], inputs[1].astype(int), sum(inputs[2:])
        top = logits.max(-1, keepdims=True)
        lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
        kept = labels != IGNORED
        picked = np.take_along_axis(logits, np.where(kept, labels, 0)[..., None], -1)[..., 0]
        return np.array([((lse - picked) * kept).sum() / max(kept.sum(), 1)]) + before, lse


class CrossEntropyGrad(Op):
    """dlogits = (exp(logits - lse) - onehot(label)) * scale, in place; zero where the label is -100."""

    category = NORMALIZATION
    colours: ClassVar = {"backward": "#8c564b"}

    def __init__(self, logits: Tensor, labels: Tensor, lse: Tensor, out: Tensor, scale: str = "loss_scale") -> None:
        super().__init__([logits, labels, lse], [out])
        self.classes, self.scale, self.fused = logits.axes[-1], Slot(scale), False

    def flop(self) -> float:
        return 4.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        if self.fused:
            return
        logits, labels, lse = self.inputs
        for index in lowering.indices(logits):
            accesses = [RW(lowering.tile(logits, index)), R(lowering.tile(labels, index)), R(lowering.tile(lse, index))]
            args = CrossEntropyGradArgs(lowering.part(logits, self.classes, index).offset, self.scale)
            lowering.emit("cross_entropy_grad", accesses, args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        logits, labels, lse = inputs[0], inputs[1].astype(int), inputs[2]
        p = np.exp(logits - lse[..., None])
        kept = labels != IGNORED
        onehot = np.zeros_like(p)
        np.put_along_axis(onehot, np.where(kept, labels, 0)[..., None], 1.0, axis=-1)
        return ((p - onehot) * kept[..., None] / max(kept.sum(), 1),)


def loss_tensor(g: GraphLike, before: Tensor | None) -> Tensor:
    """Return the tensor for an operator's loss: a new tensor, or one in the tile of `before`, an earlier loss.

    An operator with `before` adds its own loss to this tile.
    """
    if before:
        return g.temp("loss", before.axes, before.shape, before.dtype, storage=before)
    if g.loss:
        raise ValueError("loss: the graph has a loss already; pass it as `loss` to the function that adds another loss")
    return g.named("loss", ["one"], [1], "scalar", "fp64")


def cross_entropy(
    g: GraphLike, logits: Tensor, labels: Tensor, *, loss: Tensor | None = None, scale: str = "loss_scale"
) -> Tensor:
    """Return the cross-entropy over the last axis of the logits, plus an earlier `loss` if given, as fp64 [1].

    Args:
        labels: int64, with the other axes of the logits; -100 is ignored.
        scale: name of the slot with 1 / (number of labels that are not ignored).

    Raises:
        ValueError: axes or sizes of the labels do not fit.
    """
    if logits.axes[:-1] != labels.axes or logits.shape[:-1] != labels.shape:
        raise ValueError(f"cross_entropy: the labels {labels} need the axes of {logits} but the last one")
    lse = g.temp("lse", labels.axes, labels.shape, accumulation_dtype(logits.dtype))
    return g.add(CrossEntropy(logits, labels, loss_tensor(g, loss), lse, loss, scale)).output
