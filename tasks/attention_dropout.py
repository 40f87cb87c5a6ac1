"""Dropout of the probabilities inside of attention over packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nntile_py.tiles import Slot

from .elementwise import DropoutArgs
from .op import Array, Tensor
from .scalar.evaluate import dropout_hash


@dataclass(frozen=True)
class ScoresDropout:
    """Of the probabilities of packed sequences: the mask that the padded [batch, heads, seq, key] would have.

    draws [batch, seq]: the place of each token in the padded [batch, seq]. longest: the padded seq.
    """

    p: float
    key: int
    draws: Tensor
    longest: int

    def strides(self, heads: int) -> tuple[int, int, int, int]:
        """Of the padded probabilities."""
        return heads * self.longest**2, self.longest**2, self.longest, 1

    def args(self, first_head: int, heads: int) -> DropoutArgs:
        """Of a task whose heads begin at this one."""
        steps = self.strides(heads)
        return DropoutArgs(self.key, True, first_head * steps[1], steps, Slot("dropout_seed"), self.p)

    def factors(self, heads: int, draws: Array, offsets: Array, seed: int) -> Array:
        """mask / (1 - p) [batch, heads, seq, key] of the pairs of a segment, 1 for the others."""
        batch, seq = draws.shape
        result, step = np.ones((batch, heads, seq, seq)), self.strides(heads)
        for row, of_row in enumerate(np.broadcast_to(offsets, (batch, offsets.shape[-1]))):
            for start, end in pairwise(of_row):
                if start == end:
                    continue
                at = np.arange(end - start)
                of_heads = draws[row, start] * heads * self.longest + np.arange(heads)[:, None, None] * step[1]
                index = (of_heads + at[:, None] * step[2] + at).astype(np.uint64)
                keep = dropout_hash(index, self.key, seed) >= np.uint64(int(self.p * 2**32))
                result[row, :, start:end, start:end] = keep / (1 - self.p)
        return result
