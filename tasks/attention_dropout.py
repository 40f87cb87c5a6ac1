"""Dropout of attention probabilities inside attention kernels, which do not store the probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nntile_py.tiles import Slot

from .elementwise import DropoutArgs
from .op import Array, Tensor
from .scalar.evaluate import dropout_hash

Steps = tuple[int, int, int, int]


def steps_of(order: Sequence[str], sizes: dict[str, int]) -> Steps:
    """Return the strides of batch, heads, seq and key in probabilities with axes `order`; 0 for a missing axis."""
    steps, step = dict.fromkeys(("batch", "heads", "seq", "key"), 0), 1
    for axis in reversed(order):
        steps[axis], step = step, step * sizes[axis]
    return steps["batch"], steps["heads"], steps["seq"], steps["key"]


@dataclass(frozen=True)
class ScoresDropout:
    """The dropout mask of attention probabilities: a hash of the index of each probability.

    The mask equals the mask of the operator Dropout on probabilities stored in memory.

    Args:
        p: probability of a zero.
        key: number of this dropout in the graph.
        steps: strides of the index along batch, heads, seq and key.
        row_numbers: for packed sequences, [batch, seq]: the position of each token in the padded batch [batch, seq].
            The index then counts the padded probabilities [batch, heads, seq, key].
    """

    p: float
    key: int
    steps: Steps
    row_numbers: Tensor | None = None

    def args(self, batch: int, head: int) -> DropoutArgs:
        """Return the arguments of a task whose tile begins at this sequence and head."""
        first = head * self.steps[1] + (0 if self.row_numbers else batch * self.steps[0])
        return DropoutArgs(self.key, self.row_numbers is not None, first, self.steps, Slot("dropout_seed"), self.p)

    def factors(self, sizes: Sequence[int], data: Sequence[Array], seed: int) -> Array:
        """Return mask / (1 - p) as an array [batch, heads, seq, key].

        For packed sequences, only pairs within a segment have a mask; all other entries are 1.
        """
        if not self.row_numbers:
            return self._kept(0, sizes, seed)
        offsets, row_numbers = data[-2:]
        result = np.ones(sizes)
        for row, of_row in enumerate(np.broadcast_to(offsets, (sizes[0], offsets.shape[-1]))):
            for start, end in pairwise(of_row):
                if start < end:
                    first = int(row_numbers[row, start]) * (self.steps[0] // self.steps[2])
                    pairs = self._kept(first, (1, sizes[1], end - start, end - start), seed)
                    result[row, :, start:end, start:end] = pairs[0]
        return result

    def _kept(self, first: int, sizes: Sequence[int], seed: int) -> Array:
        index = np.full((1, 1, 1, 1), first)
        for axis, (size, step) in enumerate(zip(sizes, self.steps, strict=True)):
            index = index + (np.arange(size) * step).reshape([-1 if k == axis else 1 for k in range(4)])
        keep = dropout_hash(index.astype(np.uint64), self.key, seed) >= np.uint64(int(self.p * 2**32))
        return np.asarray(keep / (1 - self.p))
