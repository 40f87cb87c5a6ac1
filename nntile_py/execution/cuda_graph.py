"""Short programs on one GPU as one task: their kernels are a CUDA graph, launched at once (csrc/captured_cuda.cpp)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from nntile_py import _core
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution.program import Program, Store, programs
from nntile_py.execution.python_task import bound
from nntile_py.execution.runtime import Runtime
from nntile_py.tiles import Access, TaskList, Tile
from nntile_py.tiles.tasklist import Task

SHARE = 4  # graphs, and the weights that stay beside them, take one part in so many of what tiles may take
MOST_TASKS = 4096  # longer programs are no faster
LEAST = 16  # entries that a graph computes where fewer are filled
TURNS, RUNS = 3, 4  # of both ways to run a program: times that are taken, the runs of each
LONG = 1e-4  # seconds of a task on average: launching is hidden, and to choose kernels in a graph takes minutes


class Roles(NamedTuple):
    """What tiles are to a program that is one task: all others are its own."""

    weights: list[Tile]
    accesses: list[Access]  # inputs and outputs


def roles(tasks: TaskList) -> Roles:
    """Of the tiles that outlive a program, by the first access to each and by what writes them."""
    modes: dict[Tile, str] = {}
    for access in (access for part in _parts(tasks) for access in part.accesses if access.tile.persistent):
        before = modes.setdefault(access.tile, access.mode)
        if before == "R" != access.mode:
            modes[access.tile] = "RW"
    weights = [tile for tile, mode in modes.items() if mode == "R" and tile.kind == "param"]
    return Roles(weights, [Access(tile, mode) for tile, mode in modes.items() if tile not in {*weights}])


def refusal(tasks: TaskList) -> str:
    """Why a program cannot be one graph, whatever runtime it has; empty: it can."""
    if (count := sum(1 for _ in _parts(tasks))) > MOST_TASKS:
        return f"it has {count} tasks, and {MOST_TASKS} are allowed"
    for task in tasks.tasks:
        if task.evicts or any(tile.persistent for tile in task.clears):
            return f"{task.op} makes room on the device"
    for part in _parts(tasks):
        if bound(part):
            return f"{part.op} runs a task in Python"
        if any(access.mode == "REDUX" for access in part.accesses):
            return f"{part.op} adds by reduction"
    if changed := [access.tile for access in roles(tasks).accesses if access.mode not in ("R", "W")]:
        return f"it changes {changed[0]}, which outlives it"
    return ""


def rounded(filled: float, most: int) -> int:
    """How many entries a graph computes where a run fills some of `most`: few graphs then serve all runs.

    A power of two, or a multiple of 128, or of more where the most is large: it divides what products choose their
    algorithms for (`rounded` in tasks/cublaslt_cuda.cpp), so theirs are the same as outside of a graph. What lies
    behind the filled is computed for nothing.
    """
    n, chosen_for = max(int(filled), LEAST), (most // 16 + 127) // 128 * 128
    step = chosen_for // math.gcd(chosen_for // 128, 4) if chosen_for else 1
    return min(most, 1 << (n - 1).bit_length() if n <= 128 else -(-n // step) * step)


def most_filled(tasks: TaskList) -> dict[str, int]:
    """Of each slot that says how much of tiles a run fills, how much it can be."""
    most: dict[str, int] = {}
    for part in _parts(tasks):
        for number, axis, slot in tasks.live_sizes(part):
            size = part.accesses[number].tile.shape[axis]
            most[slot.name] = min(size, most.get(slot.name, size))
    return most


def _parts(tasks: TaskList) -> Iterator[Task]:
    return (part for task in tasks.tasks for part in task.parts or [task])


class Served:
    """A program for forward passes, which runs as one CUDA graph where it can and that is faster.

    captured: False: never; True: always, ConfigError where that is not possible; None: where it is faster, as the first
    run finds out. `reason` says why it does not, if it does not."""

    def __init__(
        self, tasks: TaskList, store: Store, *, tf32: bool = False, captured: bool | None = None, checked: bool = False
    ) -> None:
        (self._program,) = programs([tasks], store, tf32=tf32, checked=checked)
        self._runtime, self.captured = Runtime.current, captured
        self._native: Any = None  # what C++ has of it
        self.reason = "captured: false" if captured is False else self._refusal()
        if self.reason:
            if captured:
                raise ConfigError(f"captured: true is not allowed here: {self.reason}; use false, or leave it out")
            self.captured = False
            return
        tasks = self._program.list
        self._most, (weights, accesses) = most_filled(tasks), roles(tasks)
        self._list = TaskList()
        self._tasks, flop = sum(1 for _ in _parts(tasks)), sum(task.flop for task in tasks.tasks)
        self._list.tasks = [Task("captured", accesses, op="captured", flop=flop)]
        self._native = _core.Captured(
            self._program.native, [store.handle(tile) for tile in weights], [store.handle(a.tile) for a in accesses],
            [a.mode for a in accesses], 2 * tasks.peak_bytes(0),  # of a graph, and of runs without one
            [number for number, name in enumerate(self._program.slots) if name not in self._most],
        )  # fmt: skip

    def _refusal(self) -> str:
        runtime = self._runtime
        if not runtime or runtime.cuda != 1 or runtime.cpus:
            return "it needs a runtime of one GPU and no CPU workers"
        return refusal(self._program.list)

    @property
    def program(self) -> Program:
        """The program that runs where no graph does."""
        return self._program

    @property
    def slots(self) -> list[str]:
        return self._program.slots

    @property
    def graphs(self) -> int:
        """How many were captured so far."""
        return int(self._native.graphs) if self._native else 0

    def run(self, slots: Mapping[str, float]) -> None:
        """Submit it."""
        if self.captured is None and Runtime.watched is None:  # else a profile would show the measurement
            self.captured = self._is_faster(slots)
        if not (self.captured and self._launch(slots)):
            self._program.run(dict(slots))

    def _launch(self, slots: Mapping[str, float]) -> bool:
        """Submit it as a graph; False: it cannot be one."""
        if broken := self._native.broken:
            return self._without(broken)
        most = (self._runtime.cuda_memory or 0) // SHARE if self._runtime else 0
        if not self._native.hold(most):
            return self._without(f"it finds no room in {most >> 20} MiB, a {SHARE}th of runtime.cuda_memory")
        of = self._most
        given = [rounded(slots[name], of[name]) if name in of else slots[name] for name in self._program.slots]
        number = self._native.run([float(value) for value in given])
        if Runtime.watched is not None:
            Runtime.watched.append((number, self._list))
        return True

    def _without(self, reason: str) -> bool:
        if self.captured:
            warnings.warn(f"captured: the program is no graph: {reason}; its tasks run one by one", stacklevel=4)
        self.captured, self.reason = False, reason
        self._native.let_go()
        return False

    def _is_faster(self, slots: Mapping[str, float]) -> bool:
        def tasks() -> None:
            self._program.run(dict(slots))

        def launch() -> None:
            if not self._launch(slots):
                raise TaskError(self.reason)

        _seconds(tasks, 2)  # what is measured or loaded once
        if (each := min(_seconds(tasks, 1) for _ in range(TURNS)) / self._tasks) > LONG:
            return self._without(f"its tasks take {each * 1e6:.0f} us on average, where a graph gains nothing")
        try:
            _seconds(launch, 2)  # a graph is there from the second run on
            least = {tasks: float("inf"), launch: float("inf")}
            for _ in range(TURNS):
                least = {way: min(before, _seconds(way, RUNS)) for way, before in least.items()}
        except TaskError as error:
            return self._without(str(error))
        return least[launch] < least[tasks] or self._without("it is no faster")


def _seconds(way: Callable[[], None], runs: int) -> float:
    Runtime.wait()
    start = time.perf_counter()
    for _ in range(runs):
        way()
    Runtime.wait()
    return time.perf_counter() - start
