"""Runs a program as one task on each GPU: a CUDA graph of all its kernels on this GPU (csrc/cuda_graph_cuda.cpp)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nntile_py import _core
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution.program import Program, Store, programs
from nntile_py.execution.python_task import bound
from nntile_py.execution.runtime import Runtime
from nntile_py.tiles import Access, TaskList, Tile, device_model
from nntile_py.tiles.dtypes import is_scaled
from nntile_py.tiles.task import Task

SHARE = 4  # graphs, and the weights that stay on the GPU for them, take at most 1 / SHARE of runtime.cuda_memory
MOST_TASKS = 4096  # longer programs are not faster as a graph
LEAST = 16  # least number of entries of an axis that a graph computes, see `rounded`
TURNS, RUNS = 3, 4  # number of measurements with and without a graph, and number of runs in each measurement
# If tasks take more seconds than this on average, a graph gains nothing. LONG is for forward passes, whose tasks are
# timed; with longer tasks, the choice of a graph's kernels would take minutes. LONG_STEP is for training steps, whose
# tasks are estimated.
LONG, LONG_STEP = 1e-4, 5e-5
# Kinds of persistent tiles that a forward pass's graph may both read and write. The first runs repeat the tasks to time
# kernels, so the inputs of these runs must leave such tiles unchanged (see Decoder._program).
CHANGED = ("cache", "input")


class Roles(NamedTuple):
    """The persistent tiles of a program that runs as one task, by their roles. All other tiles are internal.

    Attributes:
        weights: weights that the program only reads.
        accesses: all other tiles (inputs and outputs), with access modes.
    """

    weights: list[Tile]
    accesses: list[Access]


def roles(tasks: TaskList) -> Roles:
    """Return the roles of a program's persistent tiles.

    The first access to a tile, and whether a later task writes it, determine its role.
    """
    modes: dict[Tile, str] = {}
    for access in (access for part in _parts(tasks) for access in part.accesses if access.tile.persistent):
        before = modes.setdefault(access.tile, access.mode)
        if before == "R" != access.mode:
            modes[access.tile] = "RW"
    weights = [tile for tile, mode in modes.items() if mode == "R" and tile.kind == "param"]
    return Roles(weights, [Access(tile, mode) for tile, mode in modes.items() if tile not in {*weights}])


def changed_roles(tasks: TaskList) -> Roles:
    """Return the result of `roles`, but with the weights as inputs instead of weights that stay on the GPU.

    Other programs may then write the weights between two runs of the program.
    """
    weights, accesses = roles(tasks)
    return Roles([], [*(Access(tile, "R") for tile in weights), *accesses])


class Share(NamedTuple):
    """The tasks of a program that one worker runs.

    Attributes:
        worker: Number of the worker.
        numbers: Numbers of the tasks in the program's list.
        tasks: The tasks.
    """

    worker: int
    numbers: list[int]
    tasks: TaskList


def shares(tasks: TaskList) -> list[Share]:
    """Return the share of each worker. Tasks without a worker count as tasks of worker 0."""
    numbers: dict[int, list[int]] = {}
    for number, task in enumerate(tasks.tasks):
        numbers.setdefault(max(task.worker, 0), []).append(number)
    result = []
    for worker, own in sorted(numbers.items()):
        share = TaskList(tasks.policy, tasks.initialised, tasks.live)
        share.tasks = [tasks.tasks[number] for number in own]
        result.append(Share(worker, own, share))
    return result


def exchange(tasks: TaskList) -> str:
    """Return the reason why workers cannot run their shares independently; an empty text if they can."""
    users: dict[Tile, set[int]] = {}
    written: set[Tile] = set()
    for task in tasks.tasks:
        for access in task.accesses:
            users.setdefault(access.tile, set()).add(task.worker)
            if access.mode != "R":
                written.add(access.tile)
    moved = next((tile for tile in users if len(users[tile]) > 1 and tile in written), None)
    return f"workers exchange {moved}" if moved else ""


def refusal(tasks: TaskList) -> str:
    """Return the reason why a forward pass cannot be one CUDA graph in any runtime; an empty text if it can."""
    if reason := _refusal(tasks) or exchange(tasks):
        return reason
    # A graph computes a rounded number of tokens. The tokens behind the text must not change a scale of other tokens.
    for part in _parts(tasks):
        filled = (part.accesses[number].tile for number, *_ in tasks.live_sizes(part))
        if any(is_scaled(tile.dtype) and tile.scales == 1 for tile in filled):
            return "tokens of packed sequences share the scale of an 8-bit tile"
    for task in tasks.tasks:
        if any(tile.persistent for tile in task.clears):
            return f"{task.op} makes room on the device"
    for access in roles(tasks).accesses:
        if access.mode not in ("R", "W") and access.tile.kind not in CHANGED:
            return f"the program changes {access.tile}, which outlives the program"
    return ""


def training_refusal(lists: Iterable[TaskList]) -> str:
    """Return the reason why the programs of a training step cannot be CUDA graphs; an empty text if they can.

    Unlike a forward pass, a program may change persistent tiles: no run repeats its tasks to choose kernels. The filled
    sizes of its tiles must be the same in every step, so sequences must not be packed.
    """
    for tasks in lists:
        if reason := _refusal(tasks) or ("sequences are packed" if most_filled(tasks) else ""):
            return reason
    return ""


def _refusal(tasks: TaskList) -> str:
    if (count := sum(1 for _ in _parts(tasks))) > MOST_TASKS:
        return f"the program has {count} tasks, and a graph at most {MOST_TASKS}"
    for task in tasks.tasks:
        if task.evicts:
            return f"{task.op} makes room on the device"
    for part in _parts(tasks):
        if bound(part):
            return f"{part.op} runs a task in Python"
        if any(access.mode == "REDUX" for access in part.accesses):
            return f"{part.op} adds by reduction"
    return ""


def rounded(filled: float, most: int) -> int:
    """Return how many entries of an axis a graph computes if a run fills `filled` of `most` entries.

    The number is rounded up so that few graphs serve all runs: to a power of two up to 128, and above to a multiple of
    a step of at least 128. Products choose their algorithms for sizes rounded up to a larger step, a multiple of this
    step (`rounded` in tasks/cublaslt_cuda.cpp). So the algorithms are the same as without a graph. The results beyond
    `filled` are not used.
    """
    n, chosen_for = max(int(filled), LEAST), (most // 16 + 127) // 128 * 128
    step = chosen_for // math.gcd(chosen_for // 128, 4) if chosen_for else 1
    return min(most, 1 << (n - 1).bit_length() if n <= 128 else -(-n // step) * step)


def most_filled(tasks: TaskList) -> dict[str, int]:
    """Return {slot: largest value} for the slots that say how many entries of a tile's axis a run fills."""
    most: dict[str, int] = {}
    for part in _parts(tasks):
        for number, axis, slot in tasks.live_sizes(part):
            size = part.accesses[number].tile.shape[axis]
            most[slot.name] = min(size, most.get(slot.name, size))
    return most


def _parts(tasks: TaskList) -> Iterator[Task]:
    return (part for task in tasks.tasks for part in task.parts or [task])


class CapturedProgram:
    """A program that runs as one CUDA graph on each GPU where that is possible, else as single tasks.

    Args:
        refused: why the program cannot be a graph in this runtime; an empty text if it can.
        captured: False: never use a graph. True: always use a graph; ConfigError if that is not possible. None: the
            first run decides.
        split: Function that returns the roles of the persistent tiles of a share. Its weights stay on the GPU.
        measures: Choose kernels by the time of the whole graph, which runs the program several times. False: the
            kernels, and so the bits of all results, are those of a run without a graph.

    Attributes:
        captured: True: runs are graphs. False: runs are single tasks. None: no run has decided yet.
        reason: Why the program does not run as a graph; empty if it does.
    """

    def __init__(
        self, program: Program, store: Store, refused: str, captured: bool | None,
        split: Callable[[TaskList], Roles] = roles, measures: bool = True,
    ) -> None:  # fmt: skip
        self.program, self._runtime = program, Runtime.current
        self.captured = self._asked = captured
        self._natives: list[Any] = []  # _core.Captured of each GPU
        self.reason = "captured: false" if captured is False else refused
        if self.reason:
            if captured:
                raise ConfigError(f"captured: got true, but {self.reason}; allowed: false, or the default")
            self.captured = False
            return
        self._most = most_filled(program.list)
        self._parts = sum(1 for _ in _parts(program.list))
        self._lists: list[TaskList] = []  # for a profile: one task for each graph
        changing = [number for number, name in enumerate(program.slots) if name not in self._most]
        for worker, numbers, tasks in shares(program.list):
            held, accesses = split(tasks)
            self._lists.append(TaskList())
            flop = sum(task.flop for task in tasks.tasks)
            self._lists[-1].tasks = [Task("captured", [*accesses], op="captured", flop=flop, worker=worker)]
            self._natives.append(_core.Captured(
                program.native, numbers, worker, [store.handle(tile) for tile in held],
                [store.handle(a.tile) for a in accesses], [a.mode for a in accesses], own_bytes(tasks), changing,
                measures,
            ))  # fmt: skip

    @property
    def slots(self) -> list[str]:
        return self.program.slots

    @property
    def graphs(self) -> int:
        """The number of graphs captured so far, on the GPU with the fewest graphs."""
        return min((int(native.graphs) for native in self._natives), default=0)

    def _launch(self, slots: Mapping[str, float]) -> bool:
        """Submit the program as graphs and return True. If a graph is not possible, return False."""
        if broken := next((native.broken for native in self._natives if native.broken), ""):
            return self._without(broken)
        most = (self._runtime.cuda_memory or 0) // SHARE if self._runtime else 0
        if not all(native.hold(most) for native in self._natives):
            return self._without(f"a graph finds no room in {most >> 20} MiB, a {SHARE}th of runtime.cuda_memory")
        of = self._most
        given = [rounded(slots[name], of[name]) if name in of else slots[name] for name in self.program.slots]
        for native, tasks in zip(self._natives, self._lists, strict=True):
            number = native.run([float(value) for value in given])
            if Runtime.watched is not None:
                Runtime.watched.append((number, tasks))
        return True

    def _without(self, reason: str) -> bool:
        """Stop using a graph, for this reason. Always returns False."""
        if self._asked:
            warnings.warn(f"captured: the program is no graph: {reason}; its tasks run one by one", stacklevel=4)
        self.captured, self.reason = False, reason
        self.let_go()
        return False

    def let_go(self) -> None:
        """Wait for all tasks, and free the graphs' memory. The next run reserves memory and captures graphs again."""
        for native in self._natives:
            native.let_go()


class Served(CapturedProgram):
    """A program for forward passes that runs as one CUDA graph on each GPU where that is possible and faster.

    captured: see CapturedProgram. None: the first run measures whether a graph is faster.
    """

    def __init__(
        self, tasks: TaskList, store: Store, *, tf32: bool = False, captured: bool | None = None, checked: bool = False
    ) -> None:
        (program,) = programs([tasks], store, tf32=tf32, checked=checked)
        super().__init__(program, store, _not_here() or refusal(program.list), captured)

    def run(self, slots: Mapping[str, float]) -> None:
        """Submit the program with these values of the slots, as a graph or as single tasks."""
        if self.captured is None and Runtime.watched is None:  # a profile must not show the measurement
            self.captured = self._is_faster(slots)
        if not (self.captured and self._launch(slots)):
            self.program.run(dict(slots))

    def _is_faster(self, slots: Mapping[str, float]) -> bool:
        """Measure and return whether the program is faster as a graph than as single tasks."""

        def tasks() -> None:
            self.program.run(dict(slots))

        def launch() -> None:
            if not self._launch(slots):
                raise TaskError(self.reason)

        _seconds(tasks, 2)  # the first runs load and choose kernels
        if (each := min(_seconds(tasks, 1) for _ in range(TURNS)) / self._parts) > LONG:
            return self._without(too_long(each))
        try:
            _seconds(launch, 2)  # the graph exists from the second run on
            least = {tasks: float("inf"), launch: float("inf")}
            for _ in range(TURNS):
                least = {way: min(before, _seconds(way, RUNS)) for way, before in least.items()}
        except TaskError as error:
            return self._without(str(error))
        return least[launch] < least[tasks] or self._without("a graph is no faster")


class TrainingProgram(CapturedProgram):
    """A program of a training step that runs as one CUDA graph, or as single tasks; see training_programs.

    While a profile is recorded, the program runs as single tasks, which the profile then shows.
    """

    def __init__(self, program: Program, store: Store, refused: str, captured: bool | None) -> None:
        super().__init__(program, store, refused, captured, changed_roles, measures=False)
        self.captured = not self.reason

    def run(self, slots: Mapping[str, float]) -> None:
        """Submit the program with these values of the slots, as a graph or as single tasks."""
        if Runtime.watched is not None or not (self.captured and self._launch(slots)):
            self.program.run(dict(slots))


def training_programs(
    made: Sequence[Program], store: Store, *, captured: bool | None, checked: bool
) -> list[TrainingProgram]:
    """Return the programs of a training step. Either all of them run as CUDA graphs, or none.

    Args:
        captured: see CapturedProgram. None: graphs are used if they fit, and if tasks are estimated to be short.
        checked: the programs check the values that tasks write.
    """
    refused = "" if captured is False else _step_refusal([one.list for one in made], captured, checked)
    return [TrainingProgram(one, store, refused, captured) for one in made]


def _step_refusal(lists: Sequence[TaskList], captured: bool | None, checked: bool) -> str:
    """Return the reason why a training step has no graphs in this runtime; an empty text if it has."""
    if reason := _not_here(most=1) or ("debug.nonfinite checks every task" if checked else training_refusal(lists)):
        return reason
    if reason := _lacks_room(lists, (Runtime.current and Runtime.current.cuda_memory) or 0):
        return reason
    return too_long(seconds) if captured is None and (seconds := _mean_task(lists)) > LONG_STEP else ""


def _not_here(most: int | None = None) -> str:
    """Return the reason why programs cannot run as graphs in this runtime; an empty text if they can.

    Args:
        most: Largest number of GPUs. None: any number; several GPUs need planned placement.
    """
    runtime = Runtime.current
    if not runtime or not runtime.cuda or runtime.cpus or runtime.ranks or (most and runtime.cuda > most):
        return f"a graph needs a runtime of {'one GPU' if most == 1 else 'GPUs'}, no CPU workers and one rank"
    if runtime.cuda > 1 and runtime.placement != "planned":
        return "graphs on several GPUs need runtime.placement: planned"
    return ""


def too_long(seconds: float) -> str:
    """Return the reason why a graph gains nothing if tasks take this many seconds on average."""
    return f"its tasks take {seconds * 1e6:.0f} us on average, where a graph gains nothing"


def own_bytes(tasks: TaskList) -> int:
    """Return the bytes of two copies of a program's temporary tiles: for its graph, and for runs without a graph."""
    return 2 * tasks.temporary_bytes()


def _mean_task(lists: Sequence[TaskList]) -> float:
    """Return the estimated mean seconds of a task."""
    speed = device_model.speed(lists, gpu=True)
    seconds = sum(speed.seconds(task) for tasks in lists for task in tasks.tasks)
    return seconds / max(1, sum(1 for tasks in lists for _ in _parts(tasks)))


def _lacks_room(lists: Sequence[TaskList], room: int) -> str:
    """Return the reason why a GPU of `room` bytes has no room for the graphs of a step; an empty text if they fit.

    Beside the graphs, the GPU holds the persistent tiles, and the temporary tiles of an evaluation or a profile.
    """
    kept = {a.tile.key: a.tile.bytes for tasks in lists for task in tasks.tasks for a in task.accesses
            if a.tile.persistent}  # fmt: skip
    own = sum(map(own_bytes, lists))
    need = max(SHARE * own, sum(kept.values()) + own + max(tasks.temporary_bytes() for tasks in lists))
    return f"graphs need {need >> 20} MiB, and runtime.cuda_memory is {room >> 20} MiB" if need > room else ""


def _seconds(way: Callable[[], None], runs: int) -> float:
    """Return the seconds that `runs` calls of `way` take until all their tasks have ended."""
    Runtime.wait()
    start = time.perf_counter()
    for _ in range(runs):
        way()
    Runtime.wait()
    return time.perf_counter() - start
