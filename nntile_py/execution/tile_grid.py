"""The division of an array into tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True, order=True)
class TileGrid:
    """A division of an array of shape `shape` into tiles of `sizes`. The last tile of an axis may be smaller."""

    shape: Ints
    sizes: Ints

    @property
    def grid(self) -> Ints:
        """The number of tiles along each axis, at least one."""
        return tuple(max(1, -(-length // size)) for length, size in zip(self.shape, self.sizes, strict=True))

    def __iter__(self) -> Iterator[Ints]:
        """Yield the indices of the tiles, row by row."""
        return itertools.product(*map(range, self.grid))

    def where(self, index: Ints) -> Slices:
        """Return the slices of the array that the tile with this index holds."""
        cut = zip(index, self.sizes, self.shape, strict=True)
        return tuple(slice(i * size, min((i + 1) * size, length)) for i, size, length in cut)

    def pieces(self, where: Slices) -> list[tuple[Ints, Slices, Slices]]:
        """Return the tiles that hold the part `where` of the array.

        For each tile: its index, then the elements that it shares with the part, as slices of the part and of the tile.
        """
        pieces = []
        near = [range(w.start // s, max(w.stop - 1, w.start) // s + 1) for w, s in zip(where, self.sizes, strict=True)]
        for index in itertools.product(*near):
            both = list(zip(where, self.where(index), strict=True))
            common = [(max(part.start, tile.start), min(part.stop, tile.stop)) for part, tile in both]
            inside = (
                tuple(slice(a - pair[k].start, b - pair[k].start) for (a, b), pair in zip(common, both, strict=True))
                for k in (0, 1)
            )
            pieces.append((index, *inside))
        return pieces  # type: ignore[return-value]

    def __str__(self) -> str:
        return shape_text(self.sizes)


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text, such as "2 x 3"."""
    return " x ".join(map(str, shape)) or "scalar"
