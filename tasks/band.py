"""The part of an attention mask that positions alone decide: known before a step, so that tiles can be left out."""

from __future__ import annotations

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
        """Pairs of positions in the tile that are attended to, those of the diagonal counted by half."""
        if not (self.causal or self.window):
            return float(seq.size * key.size)

        def below(x: int) -> int:  # places in a triangle of x rows
            return x * (x + 1) // 2 if x > 0 else 0

        def from_on(distance: int) -> int:  # pairs of the tile with seq - key >= distance
            corners = [(seq.end, key.offset), (seq.offset, key.offset), (seq.end, key.end), (seq.offset, key.end)]
            a, b, c, d = (below(s - k - distance) for s, k in corners)
            return a - b - c + d

        if self.two_sided and self.window:
            return float(from_on(1 - self.window) - from_on(self.window))
        diagonal = max(min(seq.end, key.end) - max(seq.offset, key.offset), 0)
        return from_on(0) - (from_on(self.window) if self.window else 0) - diagonal / 2

    def empty(self, seq: Part, key: Part) -> bool:
        """Whether nothing in the tile is attended to."""
        late = self.causal and key.offset >= seq.end
        late = late or bool(self.two_sided and self.window and key.offset >= seq.end - 1 + self.window)
        return late or bool(self.window and key.end <= seq.offset - self.window + 1)

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
