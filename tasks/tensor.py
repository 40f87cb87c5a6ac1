"""Tensors of a graph: named axes with sizes. Their values lie in tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nntile_py.tiles import TileRange, Tiling

from .band import ALL, Band, share_in_tiles


class Tensor:
    """A tensor of the graph: named axes with sizes, a dtype, a kind. Its values lie in tiles, not in this object.

    Args:
        kind: `input`, `param`, `grad` (of a parameter), `state` (of the optimizer), `scalar` (kept for the host),
            `output` (of an evaluation, kept for the host), `cache` (kept between passes of a generation), `temp`
            (freed after its last reader).
        monoid: operation that combines contributions to a tile: `sum`, `softmax` or `moments`.
        storage: the tensor that owns the tiles. For an operator that works in place, the output has the storage of the
            input.
        band: for a tensor with the axes seq and key: only tiles that overlap this band of an attention mask exist.
        scaled: for an 8-bit dtype: number of leading axes of a tile whose entries have scales of their own; 0: a tile
            has one scale.
    """

    def __init__(
        self,
        name: str,
        axes: Sequence[str],
        shape: Sequence[int],
        dtype: str,
        kind: str = "temp",
        *,
        monoid: str = "sum",
        storage: Tensor | None = None,
        band: Band = ALL,
        scaled: int = 0,
    ) -> None:
        if len(set(axes)) != len(axes):
            raise ValueError(f"{name}: an axis is named twice in {', '.join(axes)}")
        if len(axes) != len(shape):
            raise ValueError(f"{name}: {len(axes)} axes ({', '.join(axes)}) for {len(shape)} sizes {list(shape)}")
        self.name, self.axes, self.shape = name, tuple(axes), tuple(map(int, shape))
        self.sizes = dict(zip(self.axes, self.shape, strict=True))
        self.dtype, self.kind, self.monoid, self.band, self.scaled = dtype, kind, monoid, band, scaled
        self.storage: Tensor = storage.storage if storage else self
        self.requires_grad = kind == "param"

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements within the band of the attention mask; without a band, the number of all elements."""
        if not self.banded:
            return self.numel
        seq, key = self.size("seq"), self.size("key")
        return self.numel // (seq * key) * self.band.pairs(TileRange(0, seq), TileRange(0, key))

    @property
    def banded(self) -> bool:
        """True if only the tiles within a band of an attention mask exist."""
        return self.band != ALL and {"seq", "key"} <= {*self.axes}

    def filled(self, cuts: Tiling) -> float:
        """Return the fraction of the elements in existing tiles; tiles outside the band of the mask do not exist."""
        if not self.banded:
            return 1.0
        seq, key = self.size("seq"), self.size("key")
        return share_in_tiles(self.band, seq, key, (cuts.tile("seq", seq), cuts.tile("key", key)))

    @property
    def persistent(self) -> bool:
        """True if the tiles outlive the program."""
        return self.storage.kind != "temp"

    def __repr__(self) -> str:
        return f"{self.name}[{', '.join(f'{a} {s}' for a, s in self.sizes.items())}]"


def require(fits: bool, rule: str, *tensors: Tensor | None) -> None:
    """Raise ValueError unless `fits` is true. The message has the operator's rule and the tensors that break it."""
    if not fits:
        raise ValueError(f"{rule}; got {', '.join(str(t) for t in tensors if t)}")
