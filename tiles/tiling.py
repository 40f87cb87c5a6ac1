"""A tiling `{axis: tile size}` over named axes. The last tile may be smaller; an axis that is left out is not cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nntile_py.errors import ConfigError
from nntile_py.typed import plain

AXES = ("batch", "seq", "embed", "heads", "ffn", "vocab")
_OWN = re.compile(r"d\d+")  # axes of captured modules whose size has no name in the module's config

# Axes that take the tile size of another axis: key positions from seq, the heads of keys from the heads of queries, the
# second axis of a square matrix from its first axis.
_CUT_AS = {"key": "seq", "kv_heads": "heads", "hidden": "embed"}


def is_tile_size(size: object) -> bool:
    """Return whether a value from a file can be a tile size."""
    return type(size) is int and 0 < size < 2**63


def cut_as(axis: str) -> str:
    """Return the axis from which the given axis takes its tile size.

    Axes of captured modules that must be cut alike have one name before a dot: seq, seq.2.
    """
    axis = axis.partition(".")[0]
    return _CUT_AS.get(axis, axis)


@dataclass(frozen=True, slots=True)
class TileRange:
    """The elements `offset` to `offset + size` of an axis, which one tile holds."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


MOST_TILES = 10**6  # bound on the tiles of an axis: listing more would take minutes; they are a mistake


class Tiling:
    """Tile sizes in elements, by axis name.

    Raises:
        ConfigError: an unknown axis, or a size that is not a positive integer.
    """

    def __init__(self, tiles: Mapping[str, int] | None = None) -> None:
        self.tiles = {axis: plain(size) for axis, size in (tiles or {}).items()}
        self._parts: dict[tuple[str, int], list[TileRange]] = {}
        self._groups: dict[str, int] = {}
        self._sizes: dict[str, int] = {}  # tile sizes of axes that operators cut, see `cut_into`
        for axis, size in self.tiles.items():
            if axis not in AXES and not _OWN.fullmatch(str(axis)):
                raise ConfigError(f"tiles.{axis}: unknown axis; allowed: {', '.join(AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"tiles.{axis}: got {size!r}; allowed: a positive integer")

    def check_axes(self, axes: Iterable[str]) -> None:
        """Raise ConfigError if a tile size is for an axis of a captured module, such as d0, that is not in `axes`."""
        own = sorted({cut_as(axis) for axis in axes if _OWN.fullmatch(cut_as(axis))})
        for axis in self.tiles:
            if axis not in (*AXES, *own):
                raise ConfigError(f"tiles.{axis}: no axis of this model; allowed: {', '.join((*AXES, *own))}")

    def parts(self, axis: str, size: int) -> list[TileRange]:
        """Return the tiles of an axis of `size` elements, in order. The list is cached: do not change it."""
        if (axis, size) not in self._parts:
            tile = self.tile(axis, size)
            if (count := -(-size // tile)) > MOST_TILES:
                message = f"{count:,} tiles of {size:,} elements; allowed: at most {MOST_TILES:,}"
                raise ConfigError(f"tiles.{cut_as(axis)}: {message}")
            self._parts[axis, size] = [TileRange(o, min(tile, size - o)) for o in range(0, size, tile)]
        return self._parts[axis, size]

    def tile(self, axis: str, size: int) -> int:
        """Return the size of all tiles of the axis except the last."""
        tile = self.tiles.get(cut_as(axis)) or self._sizes.get(axis)
        return size if tile is None else min(-(-tile // self._groups.get(axis.partition(".")[0], 1)), size)

    def share(self, axis: str, of: str, size: int, group: int) -> None:
        """Cut `axis` at the boundaries of the axis `of`: `group` elements of `of` share one element of `axis`.

        Args:
            size: elements of the axis `of`.

        Raises:
            ConfigError: a tile of `of` is neither a multiple of `group` nor a divisor.
        """
        axis, of = axis.partition(".")[0], of.partition(".")[0]
        tile = self.tile(of, size)
        if tile < size and tile % group and group % tile:
            raise ConfigError(
                f"tiles.{of}: got {tile}, and {group} {of} share one of {axis};"
                f" allowed: a multiple or a divisor of {group}"
            )
        if self._groups.setdefault(axis, group) != group:
            raise ConfigError(f"tiles.{of}: groups of {self._groups[axis]} and of {group} {of} in one model")
        self._parts = {key: parts for key, parts in self._parts.items() if key[0].partition(".")[0] != axis}

    def cut_into(self, axis: str, tile: int) -> None:
        """Cut an axis into tiles of `tile` elements. Operators call this method for axes that users do not cut."""
        assert self._sizes.setdefault(axis, tile) == tile, f"two operators cut {axis} into different tiles"
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] != axis}

    def cut(self, axis: str, size: int) -> bool:
        """Whether the axis has more than one tile."""
        return self.tile(axis, size) < size  # computed without listing the tiles: there may be many
