"""A tiling: `{axis: tile size}` over named axes. The last tile may be ragged; an axis left out is not cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nntile_py.errors import ConfigError
from nntile_py.typed import plain

AXES = ("batch", "seq", "embed", "heads", "ffn", "vocab")

# Axes that are cut as another one is: attended positions as positions are, heads of keys as those of queries, the other
# side of a square matrix as the first.
_CUT_AS = {"key": "seq", "kv_heads": "heads", "hidden": "embed"}


def cut_as(axis: str) -> str:
    """The axis whose tile size counts for an axis."""
    return _CUT_AS.get(axis, axis)


@dataclass(frozen=True, slots=True)
class Part:
    """One tile's share of an axis: elements offset .. offset + size."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


MOST_TILES = 10**6  # along an axis: more would take minutes to list, and are a mistake


class Tiling:
    """Tile sizes by axis name (elements). Raises ConfigError for an unknown axis or a size that is no positive int."""

    def __init__(self, tiles: Mapping[str, int] | None = None) -> None:
        self.tiles = {axis: plain(size) for axis, size in (tiles or {}).items()}
        self._parts: dict[tuple[str, int], list[Part]] = {}
        self._groups: dict[str, int] = {}
        for axis, size in self.tiles.items():
            if axis not in AXES:
                raise ConfigError(f"tiles.{axis}: unknown axis; allowed are {', '.join(AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"tiles.{axis}: {size!r} is not allowed; a tile size is a positive integer")

    def parts(self, axis: str, size: int) -> list[Part]:
        """The tiles of an axis of `size` elements, in order. Not to be changed: it is kept."""
        if (axis, size) not in self._parts:
            tile = self.tile(axis, size)
            if (count := -(-size // tile)) > MOST_TILES:
                told = f"{count:,} tiles of {size:,} elements; allowed: at most {MOST_TILES:,}"
                raise ConfigError(f"tiles.{cut_as(axis)}: {told}")
            self._parts[axis, size] = [Part(o, min(tile, size - o)) for o in range(0, size, tile)]
        return self._parts[axis, size]

    def tile(self, axis: str, size: int) -> int:
        """The size of all tiles of the axis but the last."""
        tile = self.tiles.get(cut_as(axis))
        return size if tile is None else min(-(-tile // self._groups.get(axis, 1)), size)

    def share(self, axis: str, of: str, size: int, group: int) -> None:
        """Cut `axis` where `of`, of `size` elements, is cut: each `group` elements of it share one of `axis`.

        Raises ConfigError unless the tiles of `of` are whole groups or parts of one.
        """
        tile = self.tile(of, size)
        if tile < size and tile % group and group % tile:
            raise ConfigError(
                f"tiles.{of}: {tile} is not allowed where {group} of them share one of {axis};"
                f" use a multiple of {group}, or a divisor"
            )
        if self._groups.setdefault(axis, group) != group:
            raise ConfigError(f"tiles.{of}: groups of {self._groups[axis]} and of {group} {of} in one model")
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] != axis}

    def cut(self, axis: str, size: int) -> bool:
        """Whether the axis has more than one tile."""
        return len(self.parts(axis, size)) > 1
