"""Sizes that a step gives: how much of a tile of packed sequences is filled, as CUDA kernels are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nntile_py.tiles import Access, Slot, Tile
from nntile_py.tiles.tasklist import Task


class DynamicSize(int):
    """A size that follows how much of a tile a step fills: ceil(filled * factor / divisor) * times.

    As an int it is the largest that it can be. What it is in a step is known where a launch has it as an argument or in
    its grid; elsewhere the largest is right, too: kernels that compute the whole tile compute more than is needed.
    """

    most: int  # of what can be filled
    position: int  # number of the task's float that says how much is
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
        """How many blocks of `size` there are in it."""
        if self.times > 1 or isinstance(size, DynamicSize):
            return -(-int(self) // size)
        return DynamicSize(self.most, self.position, self.factor, self.divisor * size)

    @property
    def formula(self) -> tuple[int, int, int, int]:
        return self.position, self.factor, self.divisor, self.times

    def filled(self, size: int) -> int:
        """What it is where this much is filled."""
        return -(-size * self.factor // self.divisor) * self.times


def with_live_sizes(task: Task, lives: Sequence[tuple[int, int, Slot]]) -> Task:
    """The same with tiles whose shapes have DynamicSize sizes.

    lives: (number of the access, axis, slot); the slots' values follow the task's own floats. Of an axis that is not a
    tile's outermost nothing is said: what is filled does not lie together.
    """
    shapes = [list(access.tile.shape) for access in task.accesses]
    for k, (number, axis, _) in enumerate(lives):
        if math.prod(shapes[number][:axis]) == 1:
            shapes[number][axis] = DynamicSize(shapes[number][axis], len(task.floats) + k)
    tiles = [
        Tile(a.tile.tensor, a.tile.index, tuple(sizes), a.tile.dtype, a.tile.monoid, axes=a.tile.axes)
        for a, sizes in zip(task.accesses, shapes, strict=True)
    ]
    accesses = [Access(tile, a.mode, a.accumulate) for tile, a in zip(tiles, task.accesses, strict=True)]
    return replace(task, accesses=accesses)
