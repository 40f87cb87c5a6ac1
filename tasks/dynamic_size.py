"""Sizes that change with each step: how much of a tile of packed sequences is filled, as arguments of CUDA kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nntile_py.tiles import Access, Slot, Tile
from nntile_py.tiles.task import Task


class DynamicSize(int):
    """A size that depends on the part of a tile that a step fills: ceil(filled * factor / divisor) * times.

    The value as an int is the maximum. Arguments and grids of launches get the size of the current step. Code that uses
    the maximum instead is correct too, but its kernels then compute the whole tile.
    """

    most: int  # maximum of `filled`
    position: int  # number of the task's float that is `filled`
    factor: int
    divisor: int
    times: int

    def __new__(cls, most: int, position: int, factor: int = 1, divisor: int = 1, times: int = 1) -> DynamicSize:
        self = super().__new__(cls, -(-most * factor // divisor) * times)
        self.most, self.position, self.factor, self.divisor, self.times = most, position, factor, divisor, times
        return self

    def __mul__(self, other: int) -> int:
        if isinstance(other, DynamicSize):
            return int(self) * int(other)
        if self.divisor > 1:
            return DynamicSize(self.most, self.position, self.factor, self.divisor, self.times * other)
        return DynamicSize(self.most, self.position, self.factor * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        exact = self.divisor == 1 and not isinstance(other, DynamicSize) and self.factor % other == 0
        return DynamicSize(self.most, self.position, self.factor // other) if exact else int(self) // other

    def blocks(self, size: int) -> int:
        """Return how many blocks of `size` elements cover this size."""
        if self.times > 1 or isinstance(size, DynamicSize):
            return -(-int(self) // size)
        return DynamicSize(self.most, self.position, self.factor, self.divisor * size)

    @property
    def formula(self) -> tuple[int, int, int, int]:
        return self.position, self.factor, self.divisor, self.times

    def filled(self, size: int) -> int:
        """Return this size as an int, for a step that fills `size` entries of the tile."""
        return -(-size * self.factor // self.divisor) * self.times


def with_live_sizes(task: Task, lives: Sequence[tuple[int, int, Slot]]) -> Task:
    """Return the task with DynamicSize in the shapes of its tiles.

    Only a tile's outermost axis, apart from axes of size 1, becomes a DynamicSize: the filled part of another axis is
    not contiguous.

    Args:
        lives: (number of the access, axis of its tile, slot with the filled size). The slots' values follow the task's
            own floats.
    """
    shapes = [list(access.tile.shape) for access in task.accesses]
    for k, (number, axis, _) in enumerate(lives):
        if math.prod(shapes[number][:axis]) == 1:
            shapes[number][axis] = DynamicSize(shapes[number][axis], len(task.floats) + k)
    tiles = [
        Tile(
            a.tile.tensor,
            a.tile.index,
            tuple(sizes),
            a.tile.dtype,
            a.tile.monoid,
            axes=a.tile.axes,
            scales=a.tile.scales,
        )
        for a, sizes in zip(task.accesses, shapes, strict=True)
    ]
    accesses = [Access(tile, a.mode, a.accumulate) for tile, a in zip(tiles, task.accesses, strict=True)]
    return replace(task, accesses=accesses)
