"""The flat list of tile tasks that a graph lowers to, and the passes over it.

An operator emits tasks whose accesses are R, W, RW or ACC: "add my contribution to this tile". `TaskList.resolve`
turns ACC into StarPU's access modes by the accumulation policy, frees each tile after its last reader and ranks the
tasks by the longest path that still follows them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from .arguments import NO_ARGS, Slot, TaskArgs
from .dtypes import DTYPES
from .tiling import cut_as

Policy = Literal["chain", "commute", "redux", "tree"]  # how partial sums of a tile meet
POLICIES: tuple[str, ...] = get_args(Policy)
PYTHON = "python"  # the kernel of tasks outside of programs
MONOIDS = ("sum", "softmax", "moments")


class Tile:
    """A tile of a tensor: what becomes one StarPU data handle.

    `persistent` tiles outlive the program (weights, optimizer state, inputs); the others are freed after their last
    reader. `monoid` says how partial results combine. `kind` is the tensor's: names are unique within a kind alone.
    """

    __slots__ = ("axes", "bytes", "dtype", "index", "kind", "monoid", "persistent", "redux", "shape", "tensor")

    def __init__(
        self,
        tensor: str,
        index: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: str,
        monoid: str = "sum",
        persistent: bool = False,
        axes: tuple[str, ...] = (),
        kind: str = "",
    ) -> None:
        self.tensor, self.index, self.shape, self.dtype, self.axes = tensor, index, shape, dtype, axes
        self.kind = kind
        self.monoid, self.persistent, self.redux = monoid, persistent, False
        self.bytes = math.prod(shape) * DTYPES[dtype].bytes

    @property
    def key(self) -> Hashable:
        """The same for one tile in all lists of a step: by kind, name and index if it outlives them."""
        return (self.kind, self.tensor, self.index) if self.persistent else self

    def part(self, axis: str) -> list[int]:
        """Which part of the axis the tile is of, if of one."""
        return [self.index[self.axes.index(axis)]] if axis in self.axes else []

    def __repr__(self) -> str:
        return f"{self.tensor}{list(self.index)}"


@dataclass(slots=True)
class Access:
    tile: Tile
    mode: str  # R, W, RW, ACC; after resolve also COMMUTE and REDUX
    accumulate: bool = False  # the kernel adds to what the tile holds


def R(tile: Tile) -> Access:
    return Access(tile, "R")


def W(tile: Tile) -> Access:
    return Access(tile, "W")


def RW(tile: Tile) -> Access:
    return Access(tile, "RW", True)


def ACC(tile: Tile) -> Access:
    return Access(tile, "ACC")


@dataclass(slots=True)
class Task:
    """One task: a kernel on tiles. `op` is the graph operator's name; flop is the kernel's own work."""

    kernel: str
    accesses: list[Access]
    args: TaskArgs = NO_ARGS
    op: str = ""
    flop: float = 0.0
    priority: int = 0
    frees: list[Tile] = field(default_factory=list)  # tiles of no use after this task
    clears: list[Tile] = field(default_factory=list)  # tiles whose old contents go before this task
    evicts: list[Tile] = field(default_factory=list)  # tiles that others will need the room of, on the device it ran on
    parts: list[Task] = field(default_factory=list)  # of a group: the tasks that it stands for, in order
    worker: int = -1  # the one that it has to run on, counted among its kind; -1: the scheduler's choice
    delay: int = 0  # how many tasks that are submitted after it go before it on its worker

    @property
    def ints(self) -> tuple[int, ...]:
        return self.args.packed[0]

    @property
    def floats(self) -> tuple[float | Slot, ...]:
        return self.args.packed[1]

    @property
    def bytes(self) -> int:
        """The fewest bytes that the task moves: each tile once, twice where it is read and written."""
        return sum(a.tile.bytes * (1 if a.mode in ("R", "W") else 2) for a in self.accesses)


class PythonKernel(Protocol):
    """What `nt.task` makes; see execution/python_task.py."""

    def emitted(self, accesses: Sequence[Access], args: TaskArgs) -> str: ...


class TaskList:
    """Tasks in submission order. `initialised` are the tiles that hold data before the first task, `sums` those of
    them that the tasks add to, such as the gradients of the micro-batches before.

    live: axes of which a tile holds as many entries as a step says, by the slot `live_slot` of its part of the batch.
    """

    def __init__(self, policy: str = "chain", initialised: Iterable[Tile] = (), live: Iterable[str] = ()) -> None:
        if policy not in POLICIES:
            raise ValueError(f"accumulate: {policy!r} is not allowed; use one of {', '.join(POLICIES)}")
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
        """Append a task. Without `flop` one operation per element of the largest tile is assumed.

        kernel: a name under which C++ or Triton has one, or what `nt.task` made.
        """
        if flop is None:
            flop = max(math.prod(a.tile.shape) for a in accesses)
        if not isinstance(kernel, str):
            kernel = kernel.emitted(accesses, args)
        self.tasks.append(Task(kernel, list(accesses), args, op, flop))

    def live_sizes(self, task: Task) -> list[tuple[int, int, Slot]]:
        """The tiles of a task whose size along an axis is a step's: (number of the access, axis, slot)."""
        return [
            (number, k, Slot(live_slot(cut_as(axis), *a.tile.part("batch"))))
            for number, a in enumerate(task.accesses) if self.live
            for k, axis in enumerate(a.tile.axes) if cut_as(axis) in self.live
        ]  # fmt: skip

    def resolve(self) -> TaskList:
        """Fix the access modes, insert merges, free dead tiles, set priorities. Call once, after the last emit."""
        self._add_what_is_written()
        self._accumulate()
        self._liveness()
        self._priorities()
        return self

    # -- accumulation

    def _add_what_is_written(self) -> None:
        """What a task writes anew, into a tile that is a sum, goes into a tile of its own, added at the end."""
        parts: dict[Tile, Tile] = {}
        for task in self.tasks:
            for access in task.accesses:
                tile = access.tile
                if access.mode == "W" and tile in self.sums and tile not in parts:
                    parts[tile] = Tile(f"{tile.tensor}.part", tile.index, tile.shape, tile.dtype, tile.monoid)
                access.tile = parts.get(tile, tile)
        self.tasks += [merge(tile, part, self.tasks[-1].op) for tile, part in parts.items()]

    def _accumulate(self) -> None:
        written = set(self.initialised)
        runs = self._run_lengths()
        trees: dict[Tile, list[tuple[int, Tile, Task]]] = {}  # what was added so far, who made it
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
                if self.policy == "chain" or length == 1:
                    access.mode = "W" if fresh else "RW"
                elif self.policy == "commute":
                    access.mode = "W" if fresh else "COMMUTE"
                elif self.policy == "redux":
                    tile.redux = True
                    if fresh and tile.persistent:  # a reduction adds to what the tile holds
                        task.clears.append(tile)
                    access.mode, access.accumulate = "REDUX", True
                elif first:
                    access.mode = "W" if fresh else "RW"
                    trees[tile] = [(0, tile, task)]
                else:  # tree: each further contribution into a tile of its own, equals merged as in a binary counter
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
        """For each ACC access, by (task number, tile): whether it opens a run of contributions, the run's length."""
        return {
            (number, id(tile)): (position == 0, len(run))
            for tile, run, _ in self.runs()
            for position, (number, _) in enumerate(run)
        }

    def runs(self) -> Iterator[tuple[Tile, list[tuple[int, Access]], bool]]:
        """Of the list before it is resolved: each tile's contributions up to its next other use, with their tasks'
        numbers; whether no such use follows."""
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
        while len(stack) > 1:
            _, right, task = stack.pop()
            out.append(merge(stack[-1][1], right, task.op, task.worker))

    # -- liveness and priorities

    def _liveness(self) -> None:
        last: dict[Tile, Task] = {}
        for task in self.tasks:
            for access in task.accesses:
                if not access.tile.persistent:
                    last[access.tile] = task
        for tile, task in last.items():
            task.frees.append(tile)

    def _priorities(self) -> None:
        """Priority = the longest chain of work, in microseconds of a nominal worker, from the task to the end."""
        next_writer: dict[Tile, float] = {}  # its rank
        readers: dict[Tile, float] = {}  # the highest rank of the readers before it
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

    def forget(self, tiles: Iterable[Tile]) -> None:
        """Free what these tiles hold from a run before, when this list begins: it writes them before it reads them."""
        self.tasks[0].clears += tiles

    # -- reports

    def ends(self, axis: str) -> dict[Hashable, int]:
        """Which part of the axis was added last to each tile that outlives the program and is not cut along it."""
        found: dict[Hashable, int] = {}
        for task in self.tasks:
            parts = [part for access in task.accesses for part in access.tile.part(axis)]
            for access in task.accesses:
                tile = access.tile
                if parts and access.mode != "R" and tile.persistent and not tile.part(axis):
                    found[tile.key] = parts[0]
        return found

    def peak_bytes(self, kept: int | None = None) -> int:
        """Bytes alive at the worst point when the tasks run in order.

        `kept`: bytes of all persistent tiles, those of other programs too; default: of this list's.
        """
        if kept is None:
            tiles = {a.tile for t in self.tasks for a in t.accesses if a.tile.persistent} | self.initialised
            kept = sum(tile.bytes for tile in tiles)
        forgotten = {tile for task in self.tasks[:1] for tile in task.clears if tile.persistent}
        now = peak = kept - sum(tile.bytes for tile in forgotten)
        alive: set[Tile] = set()
        for task in self.tasks:
            for access in task.accesses:
                if access.tile not in alive and (not access.tile.persistent or access.tile in forgotten):
                    alive.add(access.tile)
                    now += access.tile.bytes
            peak = max(peak, now)
            for tile in task.frees:
                alive.discard(tile)
                now -= tile.bytes
        return peak

    def digest(self) -> str:
        """A hash of the whole program: equal digests run the same tasks on the same tiles in the same order."""
        h = hashlib.sha256()
        for text in self.described():
            h.update(text.encode())
        return h.hexdigest()

    def described(self) -> Iterator[str]:
        """Each task in words that do not differ between processes."""
        numbers: dict[Tile, int] = {}
        for task in self.tasks:
            accesses = [
                (numbers.setdefault(a.tile, len(numbers)), a.tile.shape, a.tile.dtype, a.mode, a.accumulate)
                for a in task.accesses
            ]
            gone = [
                sorted(numbers.setdefault(tile, len(numbers)) for tile in tiles) for tiles in (task.clears, task.frees)
            ]
            yield repr((task.kernel, accesses, task.ints, task.floats, task.priority, gone))


def live_slot(axis: str, part: int) -> str:
    """The slot that says how many entries along `axis` this part of the batch has in a step."""
    return f"{axis} of {part}"


class BusyArgs(TaskArgs):
    """Of a task of a known length, for measurements."""

    count: int  # of multiply-adds, each of which waits for the one before


class CombineArgs(TaskArgs):
    monoid: int  # its place in MONOIDS


def merge(into: Tile, part: Tile, op: str, worker: int = -1) -> Task:
    """Adds one partial result to another."""
    args = CombineArgs(MONOIDS.index(into.monoid))
    return Task("combine", [RW(into), R(part)], args, op, math.prod(into.shape), worker=worker)
