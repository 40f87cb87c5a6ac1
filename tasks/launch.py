"""Descriptions of tile tasks on CUDA as lists of Triton launches.

Python describes and compiles the launches of a task once, when it builds the program. C++ starts them at every step.

A function with `@launches("NAME")` in tasks/*_triton.py takes a task of the kernel NAME and returns the task's
launches. A function with `@launches_together("NAME")` takes several such tasks. Their kernels read the addresses of the
tiles from a table. An installation without a GPU has no triton, so only the *_triton.py files import triton, and only
`load` imports these files. Functions with `@triton.jit` have no Python type hints.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nntile_py.tiles import Slot
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import Task

from .dynamic_size import DynamicSize
from .generated import GENERATED, KERNELS

ALIGNMENT = 16  # bytes; vector loads need this alignment; StarPU's device buffers and scratch offsets have it


@dataclass(frozen=True, slots=True)
class TileAddress:
    """A kernel argument: the address of a tile. tile: position of the tile among the task's accesses."""

    tile: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ScratchAddress:
    """A kernel argument: the address `offset` bytes behind the start of the task's scratch block."""

    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Int:
    """A kernel argument: an int32 constant, or int64 with bits=64."""

    value: int
    bits: int = 32


@dataclass(frozen=True, slots=True)
class Float:
    """A kernel argument: an fp32 constant."""

    value: float


@dataclass(frozen=True, slots=True)
class TaskFloat:
    """A kernel argument: the task's float number `position`, read at each submission, as slots change every step."""

    position: int
    dtype: str = "fp32"  # or int64, for seeds: fp32 cannot hold them exactly


@dataclass(frozen=True, slots=True)
class Matrix:
    """A kernel argument: a tile as a contiguous matrix that the kernel accesses through a tensor descriptor (TMA).

    Requires compute capability 9.0 or later. The bytes of a row must be a multiple of 16.

    Args:
        block: rows and columns that one access moves.
    """

    tile: TileAddress
    rows: int
    columns: int
    block: tuple[int, int]


Argument = TileAddress | ScratchAddress | Int | Float | TaskFloat | DynamicSize | Matrix
Parameter = Argument | float  # `launch` turns plain numbers into Int or Float


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Args:
        args: values of the kernel's parameters that are not constexprs, in order.
        early: True: before the kernel waits for the previous kernel (see pdl.py), it reads parameters, or what earlier
            passes have written into a cache. Such a kernel starts before the previous kernel has ended in CUDA graphs
            only. Only forward passes have such kernels: no other kernel of a forward pass's graph writes a parameter,
            and none writes earlier entries of a cache. Without a graph, the previous kernel may write both.
    """

    kernel: Any  # a triton.JITFunction
    grid: tuple[int, int, int]
    args: tuple[Argument, ...]
    constexprs: tuple[tuple[str, Any], ...]
    warps: int = 4
    early: bool = False

    def for_device(self, capability: int) -> bool:
        """Return True if GPUs of this compute capability support the launch (see Matrix)."""
        return capability >= 90 or not any(isinstance(arg, Matrix) for arg in self.args)


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches of a task, in order.

    A task may be computed in several ways: by `launches`, by an element of `others`, or by a C++ kernel of the same
    name. C++ then measures once for each `key` which of the ways is the fastest.

    Args:
        launches: launches of the first way; empty if only the C++ kernel computes the task.
        scratch: bytes of scratch memory that the launches share.
        table: addresses and ints, written as int64 to the beginning of the scratch block before the launches.
        others: launches of each further way.
        key: tasks with equal keys share one measurement and use the same way.
    """

    launches: tuple[Launch, ...]
    scratch: int = 0
    table: tuple[TileAddress | Int, ...] = ()
    others: tuple[tuple[Launch, ...], ...] = ()
    key: str = ""

    @property
    def ways(self) -> list[tuple[Launch, ...]]:
        """The ways to compute the task, each as a tuple of launches; the C++ kernel is not included."""
        return [self.launches, *self.others]


Describe = Callable[[Sequence[Task]], Launches]
LAUNCHES: dict[str, Describe] = {}
TOGETHER: set[str] = set()


def launches(name: str) -> Callable[[Callable[[Task], Launches]], Callable[[Task], Launches]]:
    """Return a decorator that registers a function as the description of the kernel `name`.

    The function takes one task and returns the task's launches.
    """

    def register(describe: Callable[[Task], Launches]) -> Callable[[Task], Launches]:
        LAUNCHES[name] = lambda tasks: describe(*tasks)
        return describe

    return register


def launches_together(name: str) -> Callable[[Describe], Describe]:
    """Return a decorator that registers a function as the description of several tasks of the kernel `name` at once.

    The function takes a list of tasks and returns their common launches. Tiles are numbered through all tasks: first
    the tiles of the first task, then the tiles of the second task, and so on (see `numbered`).
    """

    def register(describe: Describe) -> Describe:
        LAUNCHES[name] = describe
        TOGETHER.add(name)
        return describe

    return register


def together(tasks: Sequence[Task]) -> list[list[Task]]:
    """Split tasks into lists that can share launches. Only kernels with `launches_together` get lists of several tasks.

    Tasks in a list differ only in their tiles. A task that joins an earlier list overtakes the tasks of later lists. So
    a task joins only if it is independent of these tasks and of the tasks in the list.
    """
    runs: list[list[Task]] = []
    for task in tasks:
        chosen: list[Task] = []
        for run in reversed(runs if task.kernel in TOGETHER else []):
            if not all(_apart(other, task) for other in run):
                break
            if _alike(run[0], task):
                chosen = run
                break
        if not chosen:
            runs.append(chosen)
        chosen.append(task)
    return runs


def _alike(a: Task, b: Task) -> bool:
    """Return True if two tasks differ only in their tiles."""
    kinds = [[(x.mode, x.accumulate, x.tile.dtype) for x in task.accesses] for task in (a, b)]
    return (a.kernel, a.ints, a.floats) == (b.kernel, b.ints, b.floats) and kinds[0] == kinds[1]


def _apart(a: Task, b: Task) -> bool:
    """Return True if the tasks are independent: neither writes a tile that the other uses."""
    written = [{x.tile for x in task.accesses if x.mode != "R"} for task in (a, b)]
    return all(written[1 - k].isdisjoint(x.tile for x in task.accesses) for k, task in enumerate((a, b)))


@functools.cache
def load() -> dict[str, Describe]:
    """Import all *_triton.py files and return LAUNCHES."""
    for file in sorted(Path(__file__).parent.glob("*_triton.py")):
        importlib.import_module(f"nntile_py.tasks.{file.stem}")
    return LAUNCHES


def describer(kernel: str) -> Describe | None:
    """Return the function that describes the launches of a kernel; None if the kernel is written in C++ or Python."""
    return load().get(GENERATED if kernel in KERNELS else kernel)


# -- describing


def tile(task: Task, number: int) -> TileAddress:
    """Return the kernel argument for the task's tile number `number`."""
    return TileAddress(number, task.accesses[number].tile.dtype)


def shape(task: Task, number: int) -> tuple[int, ...]:
    """Return the shape of the task's tile number `number`."""
    return task.accesses[number].tile.shape


def numel(task: Task, number: int) -> int:
    """Return the number of elements of the task's tile number `number`."""
    return math.prod(shape(task, number))


def slot(task: Task, value: Slot, dtype: str = "fp32") -> TaskFloat:
    """Return the kernel argument for a slot of the task, whose value changes every step."""
    return TaskFloat(task.floats.index(value), dtype)


def numbered(tasks: Sequence[Task]) -> list[list[TileAddress]]:
    """Return for each task the addresses of its tiles. Tiles are numbered consecutively through all tasks."""
    result: list[list[TileAddress]] = []
    count = 0
    for task in tasks:
        result.append([TileAddress(count + k, access.tile.dtype) for k, access in enumerate(task.accesses)])
        count += len(task.accesses)
    return result


class Scratch:
    """Layout of a task's scratch block. `take` reserves the next part; `bytes` is the size so far."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, count: int, dtype: str) -> ScratchAddress:
        """Reserve memory for `count` elements and return its address."""
        at, size = self.bytes, count * DTYPES[dtype].bytes
        self.bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return ScratchAddress(at, dtype)


def launch(kernel: Any, grid: int | Sequence[int], *args: Parameter, warps: int = 4, **constexprs: Any) -> Launch:
    """Return a launch of a Triton kernel.

    Args:
        grid: number of programs along x, or along x, y and z.
        args: the parameters that are not constexprs. An int becomes int32, or int64 if too large; a float becomes fp32.
    """
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    assert min(x, y, z) > 0 and max(y, z) < 2**16, (kernel, x, y, z)
    constants = tuple(sorted((name, _constant(value)) for name, value in constexprs.items()))
    return Launch(kernel, (x, y, z), tuple(map(_argument, args)), constants, warps)


def elementwise(kernel: Any, task: Task, *args: Parameter, **constexprs: Any) -> Launches:
    """Return one launch of an element-wise kernel: each program computes 1024 consecutive elements of the tiles.

    The kernel's parameters are all tiles of the task, the number of elements of the first tile, `args`, the constexprs,
    and the constexpr BLOCK (1024).
    """
    n = numel(task, 0)
    tiles = [tile(task, k) for k in range(len(task.accesses))]
    return Launches((launch(kernel, ceil_div(n, 1024), *tiles, n, *args, **constexprs, BLOCK=1024),))


def _constant(value: Any) -> Any:
    """Return a constexpr's value in the compiled kernel, with each DynamicSize replaced by its maximum."""
    if isinstance(value, tuple | list):
        return tuple(map(_constant, value))
    return int(value) if isinstance(value, DynamicSize) else value


def _argument(value: Parameter) -> Argument:
    if isinstance(value, DynamicSize):
        return value
    if isinstance(value, int):
        return Int(value, 32 if -(2**31) <= value < 2**31 else 64)
    return Float(value) if isinstance(value, float) else value


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. If a is a DynamicSize, the result is a DynamicSize, or the maximum if impossible."""
    return a.blocks(b) if isinstance(a, DynamicSize) else -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
