"""The part of an attention mask that positions alone decide: known before a step, so that tiles can be left out."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nntile_py.tiles import Part


@dataclass(frozen=True)
class Band:
    """Which keys are attended to by position: all; `causal`: key <= seq; and of those the last `window`.

    two_sided: those less than `window` positions away, before and after."""

    causal: bool = False
    window: int | None = None
    two_sided: bool = False

    def area(self, seq: Part, key: Part) -> float:
        """What flop are counted by: pairs in the tile, those of the causal diagonal by half, as is customary."""
        diagonal = max(min(seq.end, key.end) - max(seq.offset, key.offset), 0) if self.causal else 0
        return self.pairs(seq, key) - diagonal / 2

    def pairs(self, seq: Part, key: Part) -> int:
        """Pairs of positions in the tile that are attended to."""
        if not (self.causal or self.window):
            return seq.size * key.size

        def below(x: int) -> int:  # places in a triangle of x rows
            return x * (x + 1) // 2 if x > 0 else 0

        def from_on(distance: int) -> int:  # pairs of the tile with seq - key >= distance
            corners = [(seq.end, key.offset), (seq.offset, key.offset), (seq.end, key.end), (seq.offset, key.end)]
            a, b, c, d = (below(s - k - distance) for s, k in corners)
            return a - b - c + d

        if self.two_sided and self.window:
            return from_on(1 - self.window) - from_on(self.window)
        return from_on(0) - (from_on(self.window) if self.window else 0)

    def empty(self, seq: Part, key: Part) -> bool:
        """Whether nothing in the tile is attended to."""
        first, end = self.reach(seq)
        return key.end <= first or key.offset >= end

    def reach(self, seq: Part) -> tuple[int, float]:
        """The first key that a position of the tile attends to, and the one after the last, were there so many."""
        first = max(seq.offset - self.window + 1, 0) if self.window else 0
        end = seq.end - 1 + self.window if self.two_sided and self.window else math.inf
        return first, seq.end if self.causal else end

    def cuts_causal(self, seq: Part, key: Part) -> bool:
        """Whether the tile reaches the diagonal."""
        return self.causal and key.end > seq.offset

    def cuts_window(self, seq: Part, key: Part) -> bool:
        """Whether keys of the tile are too far back for its last query, or too far ahead for its first."""
        if not self.window:
            return False
        return key.offset <= seq.end - 1 - self.window or (self.two_sided and key.end - 1 >= seq.offset + self.window)

    def allowed(self, seq: int, key: int) -> np.ndarray[Any, Any]:
        """[seq, key]: whether the key is attended to."""
        distance = np.arange(seq)[:, None] - np.arange(key)
        everywhere = np.full((seq, key), True)
        if self.causal:
            everywhere &= distance >= 0
        if self.two_sided:
            distance = abs(distance)
        return everywhere & (distance < self.window) if self.window else everywhere


ALL = Band()


@functools.cache
def share_in_tiles(band: Band, seq: int, key: int, tiles: tuple[int, int]) -> float:
    """The share of all pairs that lie in tiles [seq, key] of this size that are not empty."""
    found = 0
    for offset in range(0, seq, tiles[0]):
        part = Part(offset, min(tiles[0], seq - offset))
        first, end = band.reach(part)
        last = min(-(-int(min(end, key)) // tiles[1]) * tiles[1], key)
        found += part.size * (last - first // tiles[1] * tiles[1])
    return found / (seq * key)
