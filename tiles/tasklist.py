"""The flat list of tile tasks that a graph lowers to, and the passes over that list.

An operator emits tasks with access modes R, W, RW or ACC ("add my contribution to this tile"). `TaskList.resolve` then
replaces ACC by StarPU's modes as the accumulation policy says, frees each tile after its last reader, and sets each
task's priority to the longest path from the task to the end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Literal, Protocol, get_args

from .arguments import NO_ARGS, Slot, TaskArgs
from .task import Access, Task, Tile, live_slot, merge
from .tiling import cut_as

Policy = Literal["chain", "commute", "redux", "tree"]  # the order in which partial sums of a tile are added
POLICIES: tuple[str, ...] = get_args(Policy)


class PythonKernel(Protocol):
    """A kernel that the decorator `nt.task` returns, see execution/python_task.py."""

    def emitted(self, accesses: Sequence[Access], args: TaskArgs) -> str: ...


class TaskList:
    """Tasks in submission order.

    Attributes:
        policy: accumulation policy.
        initialised: tiles that hold data before the first task.
        sums: initialised tiles that the tasks add to, such as the gradients of earlier micro-batches.
        live: axes along which a step fills only part of a tile; a slot, see `live_slot`, holds the filled size.
    """

    def __init__(self, policy: str = "chain", initialised: Iterable[Tile] = (), live: Iterable[str] = ()) -> None:
        if policy not in POLICIES:
            raise ValueError(f"accumulate: got {policy!r}; allowed: {', '.join(POLICIES)}")
        self.policy = policy
        self.initialised = set(initialised)
        self.sums: set[Tile] = set()
        self.live = frozenset(live)
        self.tasks: list[Task] = []

    def emit(
        self,
        kernel: str | PythonKernel,
        accesses: Sequence[Access],
        args: TaskArgs = NO_ARGS,
        op: str = "",
        flop: float | None = None,
    ) -> None:
        """Append a task.

        Args:
            kernel: name of a kernel in C++ or Triton, or a kernel of `nt.task`.
            flop: floating-point operations; default: one for each element of the largest tile.
        """
        if flop is None:
            flop = max(math.prod(a.tile.shape) for a in accesses)
        if not isinstance(kernel, str):
            kernel = kernel.emitted(accesses, args)
        self.tasks.append(Task(kernel, list(accesses), args, op, flop))

    def live_sizes(self, task: Task) -> list[tuple[int, int, Slot]]:
        """Return (number of the access, number of the tile's axis, slot) for each axis that a step fills in part."""
        return [
            (number, k, Slot(live_slot(cut_as(axis), *a.tile.part("batch"))))
            for number, a in enumerate(task.accesses) if self.live
            for k, axis in enumerate(a.tile.axes) if cut_as(axis) in self.live
        ]  # fmt: skip

    def resolve(self) -> TaskList:
        """Set access modes and priorities, insert merges, free dead tiles. To be called once, after the last `emit`."""
        self._redirect_overwrites_of_sums()
        self._accumulate()
        self._liveness()
        self._priorities()
        return self

    # -- accumulation

    def _redirect_overwrites_of_sums(self) -> None:
        """Give a task that overwrites a tile of `sums` a tile of its own, and add that tile to the sum at the end."""
        parts: dict[Tile, Tile] = {}
        for task in self.tasks:
            for access in task.accesses:
                tile = access.tile
                if access.mode == "W" and tile in self.sums and tile not in parts:
                    parts[tile] = Tile(f"{tile.tensor}.part", tile.index, tile.shape, tile.dtype, tile.monoid)
                access.tile = parts.get(tile, tile)
        self.tasks += [merge(tile, part, self.tasks[-1].op) for tile, part in parts.items()]

    def _accumulate(self) -> None:
        """Replace ACC by the modes of the accumulation policy; insert the merges of the tree policy."""
        written = set(self.initialised)
        runs = self._run_lengths()
        trees: dict[Tile, list[tuple[int, Tile, Task]]] = {}  # partial sums: (level, tile, writer)
        out: list[Task] = []
        for number, task in enumerate(self.tasks):
            merges: list[Task] = []
            for access in task.accesses:
                tile = access.tile
                if access.mode != "ACC":
                    if tile in trees:
                        self._finish_tree(trees.pop(tile), out)
                    if access.mode in ("W", "RW"):
                        written.add(tile)
                    continue
                first, length = runs[number, id(tile)]
                if first and tile in trees:
                    self._finish_tree(trees.pop(tile), out)
                fresh = first and tile not in written
                written.add(tile)
                access.accumulate = not fresh
                # Under redux, mark every persistent tile: another program may add several contributions to it.
                tile.redux |= tile.persistent and self.policy == "redux"
                if self.policy == "chain" or length == 1:
                    access.mode = "W" if fresh else "RW"
                elif self.policy == "commute":
                    access.mode = "W" if fresh else "COMMUTE"
                elif self.policy == "redux":
                    tile.redux = True
                    if fresh and tile.persistent:  # a reduction adds to the contents: discard the old ones
                        task.clears.append(tile)
                    access.mode, access.accumulate = "REDUX", True
                elif first:
                    access.mode = "W" if fresh else "RW"
                    trees[tile] = [(0, tile, task)]
                else:  # tree: each further contribution has its own tile; equal levels merge as in a binary counter
                    part = Tile(f"{tile.tensor}.part", tile.index, tile.shape, tile.dtype, tile.monoid, axes=tile.axes)
                    access.tile, access.mode, access.accumulate = part, "W", False
                    stack = trees[tile]
                    stack.append((0, part, task))
                    while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
                        level, right, _ = stack.pop()
                        merges.append(merge(stack[-1][1], right, task.op, task.worker))
                        stack[-1] = (level + 1, stack[-1][1], task)
            out.append(task)
            out.extend(merges)
        for stack in trees.values():
            self._finish_tree(stack, out)
        self.tasks = out

    def _run_lengths(self) -> dict[tuple[int, int], tuple[bool, int]]:
        """Map each ACC access, by (task number, tile id), to (whether it begins a run, length of the run)."""
        return {
            (number, id(tile)): (position == 0, len(run))
            for tile, run, _ in self.runs()
            for position, (number, _) in enumerate(run)
        }

    def runs(self) -> Iterator[tuple[Tile, list[tuple[int, Access]], bool]]:
        """Yield each run of an unresolved list: (tile, contributions, whether the run is the tile's last use).

        A run is a sequence of ACC accesses to a tile without an access of another mode between them. A contribution is
        a pair (task number, access).
        """
        begun: dict[Tile, list[tuple[int, Access]]] = {}
        for number, task in enumerate(self.tasks):
            for access in task.accesses:
                if access.mode == "ACC":
                    begun.setdefault(access.tile, []).append((number, access))
                elif access.tile in begun:
                    yield access.tile, begun.pop(access.tile), False
        yield from ((tile, run, True) for tile, run in begun.items())

    @staticmethod
    def _finish_tree(stack: list[tuple[int, Tile, Task]], out: list[Task]) -> None:
        """Append tasks to `out` that merge the remaining partial sums of `stack` into its first tile."""
        while len(stack) > 1:
            _, right, task = stack.pop()
            out.append(merge(stack[-1][1], right, task.op, task.worker))

    # -- liveness and priorities

    def _liveness(self) -> None:
        """Free each temporary tile after the last task that uses it."""
        last: dict[Tile, Task] = {}
        for task in self.tasks:
            for access in task.accesses:
                if not access.tile.persistent:
                    last[access.tile] = task
        for tile, task in last.items():
            task.frees.append(tile)

    def _priorities(self) -> None:
        """Set each task's priority to the length of the longest path from the task to the end.

        The length is in microseconds of a nominal worker: 10 Gflop/s, 1 GB/s. A task of
        recompute that waits for a gradient gets the lowest priority of all tasks up to this task. The earlier tasks
        then run first and free their tiles.
        """
        next_writer: dict[Tile, float] = {}  # path length of the next task that writes the tile
        readers: dict[Tile, float] = {}  # longest path of the tasks that read the tile before that write
        for task in reversed(self.tasks):
            below = 0.0
            for access in task.accesses:
                below = max(below, next_writer.get(access.tile, 0.0))
                if access.mode != "R":
                    below = max(below, readers.get(access.tile, 0.0))
            rank = below + task.flop * 1e-4 + task.bytes * 1e-3 + 1.0
            for access in task.accesses:
                if access.mode == "R":
                    readers[access.tile] = max(rank, readers.get(access.tile, 0.0))
                else:
                    next_writer[access.tile], readers[access.tile] = rank, 0.0
            task.priority = min(int(rank), 2**31 - 1)
        lowest = 2**31 - 1
        for task in self.tasks:
            lowest = min(lowest, task.priority)
            if any(access.waits for access in task.accesses):
                task.priority = lowest

    def forget(self, tiles: Iterable[Tile]) -> None:
        """Discard the contents of these tiles from a previous run when this list begins; the list overwrites them."""
        self.tasks[0].clears += tiles

    # -- reports

    def ends(self, axis: str) -> dict[Hashable, int]:
        """Return {key of a persistent tile without this axis: the part of the axis that was added to the tile last}."""
        last_part: dict[Hashable, int] = {}
        for task in self.tasks:
            parts = [part for access in task.accesses for part in access.tile.part(axis)]
            for access in task.accesses:
                tile = access.tile
                if parts and access.mode != "R" and tile.persistent and not tile.part(axis):
                    last_part[tile.key] = parts[0]
        return last_part

    def peak_bytes(self, kept: int | None = None) -> int:
        """Return the largest number of bytes alive at once if the tasks run in order.

        Args:
            kept: bytes of all persistent tiles, also of other programs; default: the persistent tiles of this list.
        """
        if kept is None:
            tiles = {a.tile for t in self.tasks for a in t.accesses if a.tile.persistent} | self.initialised
            kept = sum(tile.bytes for tile in tiles)
        forgotten = {tile for task in self.tasks[:1] for tile in task.clears if tile.persistent}
        return self._peak(
            kept - sum(tile.bytes for tile in forgotten), lambda tile: not tile.persistent or tile in forgotten
        )

    def temporary_bytes(self) -> int:
        """Return the largest number of bytes of temporary tiles that are alive at once if the tasks run in order."""
        return self._peak(0, lambda tile: not tile.persistent)

    def _peak(self, now: int, counts: Callable[[Tile], bool]) -> int:
        """Return the largest sum of `now` and the bytes of all live tiles for which `counts` returns True.

        A tile is live from its first access until it is freed.
        """
        peak, alive = now, set[Tile]()
        for task in self.tasks:
            for access in task.accesses:
                if access.tile not in alive and counts(access.tile):
                    alive.add(access.tile)
                    now += access.tile.bytes
            peak = max(peak, now)
            for tile in task.frees:
                alive.discard(tile)
                now -= tile.bytes
        return peak

    def digest(self) -> str:
        """Return a hash of the list: lists with equal hashes run the same tasks on the same tiles in the same order."""
        h = hashlib.sha256()
        for text in self.described():
            h.update(text.encode())
        return h.hexdigest()

    def described(self) -> Iterator[str]:
        """Yield each task as text that is the same in all processes."""
        numbers: dict[Tile, int] = {}
        for task in self.tasks:
            accesses = [
                (numbers.setdefault(a.tile, len(numbers)), a.tile.shape, _format(a.tile), a.mode, a.accumulate)
                for a in task.accesses
            ]
            discarded = [
                sorted(numbers.setdefault(tile, len(numbers)) for tile in tiles) for tiles in (task.clears, task.frees)
            ]
            yield repr((task.kernel, accesses, task.ints, task.floats, task.priority, discarded))


def _format(tile: Tile) -> object:
    """Return the dtype of a tile, with the number of scales if there are several."""
    return tile.dtype if tile.scales == 1 else (tile.dtype, tile.scales)
