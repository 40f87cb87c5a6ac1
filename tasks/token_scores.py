"""Scores from which the host computes log-probabilities of given tokens, without logits of the whole vocabulary."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, R

from .cross_entropy import IGNORED, CrossEntropyStateArgs
from .op import NORMALIZATION, Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype


class TokenScores(Op):
    """For each row of logits: m = max_c logits, s = sum_c exp(logits - m), and p = logits[target].

    The log-probability of the target is p - m - log(s), and the target is the most likely class if p = m. The last axis
    of the logits is the classes, and may be cut; the targets have all other axes. Outputs: state [..., stat 2], m and
    s; picked [...], p, which is 0 where the target is -100. Both are fp32 for 16-bit logits.
    """

    category = NORMALIZATION
    colours: ClassVar = {"forward": "#ddcc77"}

    def __init__(self, logits: Tensor, targets: Tensor, state: Tensor, picked: Tensor) -> None:
        if logits.axes[:-1] != targets.axes or logits.shape[:-1] != targets.shape:
            raise ValueError(f"token_scores: the targets {targets} need the axes of {logits} but the last one")
        super().__init__([logits, targets], [state, picked])
        self.classes = logits.axes[-1]

    def flop(self) -> float:
        return 3.0 * self.inputs[0].numel

    def lower(self, lowering: Lowering) -> None:
        logits, targets = self.inputs
        for index in lowering.indices(targets):
            state = lowering.tile(self.outputs[0], index | {"stat": 0})
            picked, target = lowering.tile(self.outputs[1], index), lowering.tile(targets, index)
            for number, part in enumerate(lowering.parts(logits, self.classes)):
                tile = lowering.tile(logits, index | {self.classes: number})
                args = CrossEntropyStateArgs(part.offset, logits.size(self.classes))
                lowering.emit("cross_entropy_state", [ACC(state), ACC(picked), R(tile), R(target)], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        logits, targets = inputs[0], inputs[1].astype(int)
        top, kept = logits.max(-1), targets != IGNORED
        picked = np.take_along_axis(logits, np.where(kept, targets, 0)[..., None], -1)[..., 0]
        return np.stack([top, np.exp(logits - top[..., None]).sum(-1)], -1), picked * kept


def token_scores(g: GraphLike, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs `state` [..., stat 2] and `picked` [...] of TokenScores.

    Args:
        logits: [..., classes].
        targets: int64, with the other axes of the logits; -100 is ignored.

    Raises:
        ValueError: axes or sizes of the targets do not fit.
    """
    dtype = accumulation_dtype(logits.dtype)
    state = g.temp("state", [*targets.axes, "stat"], [*targets.shape, 2], dtype, monoid="softmax")
    made = g.add(TokenScores(logits, targets, state, g.temp("picked", targets.axes, targets.shape, dtype)))
    return made.outputs[0], made.outputs[1]
