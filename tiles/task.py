"""Tiles, and tasks on tiles: the entries of a task list."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from .arguments import NO_ARGS, Slot, TaskArgs
from .dtypes import DTYPES

PYTHON = "python"  # kernel name of a task that Python submits by itself, outside of programs
MONOIDS = ("sum", "softmax", "moments")
PHASES = "backward", "recompute"  # suffixes of operators' names in Task.op; forward tasks have no suffix


class Tile:
    """A tile of a tensor, which becomes one StarPU data handle.

    Persistent tiles outlive the program: weights, optimizer state, inputs. All other tiles are freed after their last
    reader. `monoid` is the operation that combines partial results. `kind` is the kind of the tensor; tensors of
    different kinds may have the same name. `scales` is the number of scales, if tiles of the dtype have scales.
    """

    __slots__ = (
        "axes", "bytes", "dtype", "index", "kind", "monoid", "persistent", "redux", "scales", "shape", "tensor",
    )  # fmt: skip

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
        scales: int = 1,
    ) -> None:
        self.tensor, self.index, self.shape, self.dtype, self.axes = tensor, index, shape, dtype, axes
        self.kind, self.scales = kind, scales
        self.monoid, self.persistent, self.redux = monoid, persistent, False
        self.bytes = DTYPES[dtype].tile_bytes(math.prod(shape), scales)

    @property
    def key(self) -> Hashable:
        """Identity of a persistent tile in all task lists of a step; a temporary tile is its own key."""
        return (self.kind, self.tensor, self.index) if self.persistent else self

    def part(self, axis: str) -> list[int]:
        """Return a list with the tile's index along an axis; the list is empty if the tensor lacks the axis."""
        return [self.index[self.axes.index(axis)]] if axis in self.axes else []

    def __repr__(self) -> str:
        return f"{self.tensor}{list(self.index)}"


@dataclass(slots=True)
class Access:
    tile: Tile
    mode: str  # R, W, RW, ACC; after resolve also COMMUTE and REDUX
    accumulate: bool = False  # the kernel adds to the tile's contents; False for other changes in place
    waits: bool = False  # the task waits for the tile's writer, but its kernel does not get the tile; mode R, last


def R(tile: Tile) -> Access:
    return Access(tile, "R")


def W(tile: Tile) -> Access:
    return Access(tile, "W")


def RW(tile: Tile) -> Access:
    return Access(tile, "RW")


def ACC(tile: Tile) -> Access:
    return Access(tile, "ACC")


@dataclass(slots=True)
class Task:
    """A task: a kernel on tiles.

    Attributes:
        op: name of the graph operator.
        flop: floating-point operations of the kernel.
        frees: tiles that are dead after this task.
        clears: tiles whose contents are discarded before this task.
        evicts: tiles that leave the device after this task, because later tasks need the memory.
        parts: the tasks of a task group, in order; empty for an ordinary task.
        scratch: tiles that only the parts of this task group use. They have no StarPU handles: their memory lasts as
            long as the task. `accesses` does not contain them.
        worker: number of the worker among the workers of its kind (CPU or GPU); -1 lets the scheduler choose.
        delay: number of later tasks of the list that the same worker runs before this task.
        kind: "cpu" or "cuda": only workers of this kind run the task; "": workers of any kind that have a kernel.
    """

    kernel: str
    accesses: list[Access]
    args: TaskArgs = NO_ARGS
    op: str = ""
    flop: float = 0.0
    priority: int = 0
    frees: list[Tile] = field(default_factory=list)
    clears: list[Tile] = field(default_factory=list)
    evicts: list[Tile] = field(default_factory=list)
    parts: list[Task] = field(default_factory=list)
    worker: int = -1
    delay: int = 0
    kind: str = ""
    scratch: list[Tile] = field(default_factory=list)

    @property
    def without_waits(self) -> Task:
        """The task without the accesses that only wait (see Access.waits): its kernel does not get their tiles."""
        seen = [access for access in self.accesses if not access.waits]
        return self if len(seen) == len(self.accesses) else replace(self, accesses=seen)

    @property
    def ints(self) -> tuple[int, ...]:
        return self.args.packed[0]

    @property
    def floats(self) -> tuple[float | Slot, ...]:
        return self.args.packed[1]

    @property
    def bytes(self) -> int:
        """Lower bound on the bytes that the task moves: each tile once, a tile that is read and written twice."""
        return sum(a.tile.bytes * (1 if a.mode in ("R", "W") else 2) for a in self.accesses)


def name_and_phase(op: str) -> tuple[str, str]:
    """Return (name, phase) of the operator of a task: forward, backward or recompute."""
    name, _, phase = op.rpartition(".")
    return (name, phase) if phase in PHASES else (op, "forward")


def live_slot(axis: str, part: int) -> str:
    """Return the name of the slot that holds how many entries of `axis` a step fills in this part of the batch."""
    return f"{axis} of {part}"


class BusyArgs(TaskArgs):
    """Arguments of a task of known duration, for measurements."""

    count: int  # multiply-adds, each of which depends on the previous one


class CombineArgs(TaskArgs):
    monoid: int  # index into MONOIDS


def merge(into: Tile, part: Tile, op: str, worker: int = -1) -> Task:
    """Return a task that combines the partial result `part` into the tile `into`."""
    args = CombineArgs(MONOIDS.index(into.monoid))
    return Task("combine", [Access(into, "RW", True), R(part)], args, op, math.prod(into.shape), worker=worker)
