"""The part of an attention mask that depends only on positions. It decides which tiles are fully masked."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nntile_py.tiles import TileRange


@dataclass(frozen=True)
class Band:
    """Which keys a query attends to, by position.

    Args:
        causal: only keys up to the query's position.
        window: only the last `window` keys up to the query's position.
        two_sided: the window instead has the keys less than `window` positions before or after the query.
    """

    causal: bool = False
    window: int | None = None
    two_sided: bool = False

    def area(self, seq: TileRange, key: TileRange) -> float:
        """Return the number of attended pairs in the tile, to count flop. Pairs on the causal diagonal count half."""
        diagonal = max(min(seq.end, key.end) - max(seq.offset, key.offset), 0) if self.causal else 0
        return self.pairs(seq, key) - diagonal / 2

    def pairs(self, seq: TileRange, key: TileRange) -> int:
        """Return the number of attended pairs of positions in the tile."""
        if not (self.causal or self.window):
            return seq.size * key.size

        def below(x: int) -> int:  # elements of a triangle of x rows
            return x * (x + 1) // 2 if x > 0 else 0

        def from_on(distance: int) -> int:  # pairs in the tile with seq - key >= distance
            corners = [(seq.end, key.offset), (seq.offset, key.offset), (seq.end, key.end), (seq.offset, key.end)]
            a, b, c, d = (below(s - k - distance) for s, k in corners)
            return a - b - c + d

        if self.two_sided and self.window:
            return from_on(1 - self.window) - from_on(self.window)
        return from_on(0) - (from_on(self.window) if self.window else 0)

    def empty(self, seq: TileRange, key: TileRange) -> bool:
        """Return whether the tile is fully masked."""
        first, end = self.reach(seq)
        return key.end <= first or key.offset >= end

    def reach(self, seq: TileRange) -> tuple[int, float]:
        """Return begin and end of the keys to which the tile's queries attend; the end may be infinite."""
        first = max(seq.offset - self.window + 1, 0) if self.window else 0
        end = seq.end - 1 + self.window if self.two_sided and self.window else math.inf
        return first, seq.end if self.causal else end

    def cuts_causal(self, seq: TileRange, key: TileRange) -> bool:
        """Return whether the causal diagonal crosses the tile."""
        return self.causal and key.end > seq.offset

    def cuts_window(self, seq: TileRange, key: TileRange) -> bool:
        """Return whether the window masks at least one (query, key) pair of the tile."""
        if not self.window:
            return False
        return key.offset <= seq.end - 1 - self.window or (self.two_sided and key.end - 1 >= seq.offset + self.window)

    def allowed(self, seq: int, key: int) -> np.ndarray[Any, Any]:
        """Return a boolean array [seq, key]: whether the query attends to the key."""
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
    """Return the fraction of all (query, key) pairs that lie in tiles which are not fully masked.

    tiles: tile sizes along seq and key.
    """
    pairs = 0
    for offset in range(0, seq, tiles[0]):
        part = TileRange(offset, min(tiles[0], seq - offset))
        first, end = band.reach(part)
        last = min(-(-int(min(end, key)) // tiles[1]) * tiles[1], key)
        pairs += part.size * (last - first // tiles[1] * tiles[1])
    return pairs / (seq * key)
