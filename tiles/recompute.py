"""Recompute: the backward pass repeats tasks of the forward pass, whose results are not kept in memory.

A segment is a set of forward tasks, such as those of a layer. Tiles that only the segment and the backward pass read
are freed after their last forward reader. The tasks that compute these tiles are repeated, on new tiles, before the
first backward task that reads one of the tiles. Kernels, arguments and order are the same, so all results have the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from .task import Access, Task, Tile
from .tasklist import TaskList

SUFFIX = ".recompute"  # of the operator's name, for repeated tasks
SMALL = 16  # tiles of at most 1 / SMALL of a segment's largest tile, such as a norm's statistics, are kept


@dataclass
class _Uses:
    """The tasks that use a tile, by number."""

    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


def recompute(
    tasks: TaskList, backward: int, segment_of: Callable[[Task], Hashable | None], *, shared: bool = False
) -> int:
    """Repeat forward tasks of an unresolved list before the backward tasks that read their results.

    Args:
        backward: number of the first backward task.
        segment_of: returns the segment of a forward task; None: its results are kept.
        shared: True: also tiles that other forward tasks read are computed again. False: they are kept.

    Returns:
        The number of repeated tasks.
    """
    uses: dict[Tile, _Uses] = {}
    for number, task in enumerate(tasks.tasks):
        for access in task.accesses:
            known = uses.setdefault(access.tile, _Uses())
            if access.mode != "W":
                known.reads.append(number)
            if access.mode != "R":
                known.writes.append(number)
    segments: dict[Hashable, list[int]] = {}
    for number, task in enumerate(tasks.tasks[:backward]):
        if (key := segment_of(task)) is not None:
            segments.setdefault(key, []).append(number)
    inserted: dict[int, list[Task]] = {}
    for members in segments.values():
        _Segment(tasks.tasks, backward, set(members), uses, shared).repeat(inserted)
    result: list[Task] = []
    for number, task in enumerate(tasks.tasks):
        result += [*inserted.get(number, []), task]
    tasks.tasks = result
    return sum(map(len, inserted.values()))


class _Segment:
    """A segment of an unresolved list; `repeat` makes its repeated tasks."""

    def __init__(
        self, tasks: Sequence[Task], backward: int, members: set[int], uses: dict[Tile, _Uses], shared: bool
    ) -> None:
        self.tasks, self.backward, self.members, self.uses, self.shared = tasks, backward, members, uses, shared
        self._repeatable: dict[int, bool] = {}
        self._largest = max((tile.bytes for n in members for tile in self._written(n)), default=0)

    def repeat(self, inserted: dict[int, list[Task]]) -> None:
        """Add the repeated tasks to `inserted` {number of the task before which they run: tasks}.

        A repeated task that reads no result of another repeated task waits for a gradient that reaches the segment.
        Otherwise the task could run too early, and its results would need memory for longer.
        """
        for number in sorted(self.members):  # in order: most checks use earlier results, so recursion is shallow
            self._can_repeat(number)
        wanted = {tile for n in self.members for tile in self._written(n) if self._for_backward(tile)}
        repeated: set[int] = set()
        for tile in wanted:
            self._collect(tile, repeated)
        if not repeated:
            return
        new = {
            tile: Tile(
                tile.tensor, tile.index, tile.shape, tile.dtype, tile.monoid, axes=tile.axes, kind=tile.kind,
                scales=tile.scales,
            )
            for number in repeated for tile in self._written(number)
        }  # fmt: skip
        readers = sorted({n for tile in new for n in self.uses[tile].reads if n >= self.backward and tile in wanted})
        first = readers[0]
        for number in readers:
            for access in self.tasks[number].accesses:
                if access.tile in wanted:
                    access.tile = new.get(access.tile, access.tile)
        arrived = self._arrived(readers, first)
        copies = inserted.setdefault(first, [])
        for number in sorted(repeated):
            task = self.tasks[number]
            accesses = [Access(new.get(a.tile, a.tile), a.mode, a.accumulate) for a in task.accesses]
            if arrived and not any(access.tile in new and access.mode in ("R", "RW") for access in task.accesses):
                accesses.append(Access(_alike(arrived, task), "R", waits=True))
            copies.append(Task(task.kernel, accesses, task.args, task.op + SUFFIX, task.flop))

    def _written(self, number: int) -> list[Tile]:
        return [access.tile for access in self.tasks[number].accesses if access.mode != "R"]

    def _made_here(self, tile: Tile) -> bool:
        """Return whether a tile is temporary and only tasks of the segment write the tile."""
        return not tile.persistent and self.members.issuperset(self.uses[tile].writes)

    def _for_backward(self, tile: Tile) -> bool:
        """Return whether backward tasks read a tile of the segment that is not kept."""
        return any(n >= self.backward for n in self.uses[tile].reads) and not self._kept(tile)

    def _can_repeat(self, number: int) -> bool:
        """Return whether a repeated task would get equal results: each operand stays or can be computed again."""
        if number not in self._repeatable:
            self._repeatable[number] = False  # for the recursion below, which may reach this task again
            self._repeatable[number] = all(
                self._made_here(access.tile)
                if access.mode != "R"
                else self._stays(access.tile, number) or self._can_be_made(access.tile)
                for access in self.tasks[number].accesses
            )
        return self._repeatable[number]

    def _stays(self, tile: Tile, number: int) -> bool:
        """Return whether no task overwrites a tile after task `number` read it."""
        return max(self.uses[tile].writes, default=-1) < number

    def _can_be_made(self, tile: Tile) -> bool:
        return self._made_here(tile) and all(self._can_repeat(n) for n in self.uses[tile].writes)

    def _collect(self, tile: Tile, repeated: set[int]) -> None:
        """Add to `repeated` all tasks that must run again to compute a tile again.

        A tile needs the tasks that write the tile. Each of these tasks needs all tiles that the task reads. Kept tiles
        need no task.
        """
        waiting = [tile]
        while waiting:
            for number in self.uses[waiting.pop()].writes:
                if number in repeated:
                    continue
                repeated.add(number)
                for access in self.tasks[number].accesses:
                    if not self._kept(access.tile):
                        waiting.append(access.tile)

    def _kept(self, tile: Tile) -> bool:
        """Return whether a tile stays in memory.

        It stays if it is small, if it cannot be computed again, or, unless `shared`, if forward tasks outside of the
        segment read it.
        """
        if tile.bytes * SMALL <= self._largest or not self._can_be_made(tile):
            return True
        return not self.shared and any(n < self.backward for n in {*self.uses[tile].reads} - self.members)

    def _arrived(self, readers: Sequence[int], first: int) -> list[Tile]:
        """Return the gradients that reach the segment: tiles that `readers` read and earlier backward tasks write."""
        found: dict[Tile, None] = {}
        for number in readers:
            for access in self.tasks[number].accesses:
                writes = self.uses[access.tile].writes if access.tile in self.uses else []
                if not access.tile.persistent and any(self.backward <= n < first for n in writes):
                    found[access.tile] = None
        return [*found]


def _alike(tiles: Sequence[Tile], task: Task) -> Tile:
    """Return the first tile with the same part of the batch as the task's tiles; if there is none, the first tile."""
    batch = {part for access in task.accesses for part in access.tile.part("batch")}
    return next((tile for tile in tiles if batch.intersection(tile.part("batch"))), tiles[0])
