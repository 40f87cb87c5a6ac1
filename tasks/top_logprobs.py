"""Log-probabilities of chosen tokens and of the most probable tokens, computed on the device that has the logits.

Axes: batch, vocab; ring (positions of a sequence, see Sample), entry (of a page table), rank (the chosen token is rank
0, the most probable token is rank 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import RW, R, TaskArgs

from .cached_attention import COUNT, PAST
from .op import Array, Lowering, Op, Tensor, require

MOST_RANKED = 20  # largest number of most probable tokens of a position, as in OpenAI's API


class TopLogProbsArgs(TaskArgs):
    tokens: int  # the most probable tokens are searched among this many first columns of the logits
    paged: bool  # True: the task has the tile of the page table
    advanced: bool  # True: Sample has already added the new tokens to the page table


class TopLogProbs(Op):
    """Compute the log-softmax of logits at the chosen token and at the most probable tokens.

    value[r] = logits[id[r]] - log(sum_c exp(logits[c])), where id[0] is the chosen token and id[1], id[2], ... are the
    tokens with the largest logits, in falling order. Of equal logits, the first one comes first. The sum has all
    columns of the logits.

    With a page table, each row of logits [batch, ..., vocab] has one position, and column p % ring of the outputs gets
    the result for position p of a sequence. Columns of other positions, and rows without new tokens, do not change.
    Without a page table, logits [batch, seq, vocab] and chosen tokens [batch, seq] have the same positions. The outputs
    do not change where the chosen token is negative.

    Args:
        chosen: int64 [batch, ring] or [batch, seq], the chosen tokens.
        values: [batch, ring, rank] or [batch, seq, rank], written in place; fp64 for fp64 logits, else fp32.
        ids: int64, with the axes of `values`, written in place.
        table: int64 [batch, entry], the page table, see CachedAttention.
        tokens: The most probable tokens are among the first `tokens` columns; None: all columns.
        advanced: Sample has already added the new tokens to the page table.
        after: Tensors of `values` and `ids` after the operator, in their storage.
    """

    independent = True
    colours: ClassVar = {"forward": "#c49c94"}

    def __init__(
        self, logits: Tensor, chosen: Tensor, values: Tensor, ids: Tensor, table: Tensor | None, tokens: int | None,
        after: Sequence[Tensor], *, advanced: bool = False,
    ) -> None:  # fmt: skip
        rows = chosen.shape[0] if table else chosen.numel
        require(logits.numel == rows * logits.shape[-1], "top_logprobs: each position needs logits", logits, chosen)
        self.tokens, self.advanced, self.table = tokens or logits.shape[-1], advanced, table
        require(values.shape[-1] <= self.tokens + 1, "top_logprobs: more ranks than tokens", logits, values)
        super().__init__([logits, chosen, values, ids, *([table] if table else [])], after)

    def flop(self) -> float:
        return 3.0 * self.inputs[0].numel

    def lower(self, lowering: Lowering) -> None:
        logits, chosen, values, ids = self.inputs[:4]
        args = TopLogProbsArgs(self.tokens, self.table is not None, self.advanced)
        zeros = {axis: 0 for tensor in self.inputs for axis in tensor.axes}
        for at in lowering.indices(chosen):
            index = zeros | at
            accesses = [RW(lowering.tile(t, index)) for t in (values, ids)]
            accesses += [R(lowering.tile(t, index)) for t in (logits, chosen, *([self.table] if self.table else []))]
            lowering.emit("top_logprobs", accesses, args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        logits, values, ids = inputs[0].reshape(-1, inputs[0].shape[-1]), inputs[2].copy(), inputs[3].copy()
        ring = inputs[1].shape[1] if self.table else 1
        chosen = inputs[1].reshape(-1, ring).astype(int)
        of_rows, ids_of_rows = (x.reshape(-1, ring, x.shape[-1]) for x in (values, ids))
        for row, x in enumerate(logits):
            past, count = inputs[4][row, [PAST, COUNT]].astype(int) if self.table else (0, 1)
            column = (past if self.advanced else past + count) % ring
            if not count or chosen[row, column] < 0:
                continue
            order = np.argsort(-x[: self.tokens], kind="stable")[: values.shape[-1] - 1]
            ranked = np.array([chosen[row, column], *order])
            ids_of_rows[row, column] = ranked
            of_rows[row, column] = x[ranked] - x.max() - np.log(np.exp(x - x.max()).sum())
        return values, ids
