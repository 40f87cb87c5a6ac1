"""Check whether a step fits into memory, before the first step of a run or in a plan.

Messages name the tensors and the keys to change. This module needs no runtime, so a plan does not import PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from nntile_py.errors import TaskError
from nntile_py.graph.recompute_choice import IN_ORDER, TASKS_AT_ONCE, needed_with_disk, share_at_rest
from nntile_py.system.cgroup import within_machine
from nntile_py.tasks.optimizer import MASTERS
from nntile_py.tiles import AXES, TaskList, Tile, cut_as
from nntile_py.tiles.eviction import Offloaded, is_planned, mark_evictions, outside_peak, share_inside

if TYPE_CHECKING:
    from nntile_py.graph.built_step import Step

MIB = 2**20
TIGHT_GROUPS = 64  # number of task groups whose tiles fit on a GPU together, if not all tiles of a step fit
# Share of a list's temporary tiles that take memory besides those of tasks in order, if any number of tasks may be in
# flight: a GPU then recomputes layers before the gradients of earlier layers are complete. 0.31 to 0.33 in simulated
# steps of Llamas with 32 and 46 layers.
OUT_OF_ORDER = 0.4
# Bound on the tasks in flight if memory has no room for this share. Only tasks in flight can run out of order, so a
# simulated step of a Llama with 46 layers takes only 3 GiB more than with tasks in order. If memory has room, the bound
# costs time: a step of Llama 3.1 8B takes 3 % longer with it.
IN_ORDER_WINDOW = 32
MORE_PARTS = "more micro-batches (train.grad_accumulation) of a smaller train.batch"
FEWER_ACTIVATIONS = f"{MORE_PARTS}, or recompute"


class DiskBound(Protocol):
    """Protocol: the bytes of a disk for tiles, and the kinds of tiles that stay in main memory."""

    @property
    def size(self) -> int: ...

    @property
    def kept(self) -> Collection[str]: ...


class Workers(Protocol):
    """Protocol: the number of workers and the bounds on memory, of a Runtime or of a plan."""

    @property
    def cpus(self) -> int: ...

    @property
    def cuda(self) -> int: ...

    @property
    def memory(self) -> int | None: ...

    @property
    def cuda_memory(self) -> int | None: ...

    @property
    def disk(self) -> DiskBound | None: ...

    @property
    def ranks(self) -> object: ...


def main_memory(runtime: Workers, machine: int | None = None) -> int:
    """Return the bytes of main memory and disk that tiles may take. machine: see `within_machine`."""
    return within_machine(runtime.memory, machine) + (runtime.disk.size if runtime.disk else 0)


def task_bytes(runtime: Workers) -> int | None:
    """Return the most bytes that the tiles of one task may take; None: no bound, because no memory evicts tiles.

    The bound leaves room for other tasks. While a worker waits for room for its next task, it already holds some of
    this task's tiles, and other workers read tiles in the same memory or fetch tiles into it.
    """
    bounds = [(runtime.cuda_memory or 0) // TASKS_AT_ONCE] if runtime.cuda else []
    if runtime.disk and runtime.memory:  # all tiles pass through main memory
        bounds.append(runtime.memory // (runtime.cuda + runtime.cpus + 1))
    return min(bounds, default=None)


def tight_group_bytes(runtime: Workers) -> int:
    """Return the most bytes that the tiles of a group of tasks may take if not all tiles of a step fit on the GPU.

    The tiles of the next group arrive while the tiles of the last group leave.
    """
    return min((runtime.cuda_memory or 0) // TIGHT_GROUPS, task_bytes(runtime) or 0)


def check_tasks(tasks: TaskList, runtime: Workers, *, in_step: bool = False) -> None:
    """Raise TaskError if the tiles of a single task do not fit into the memory of the worker that runs it.

    in_step: True for tasks of a training step. More micro-batches can make the tiles of such tasks smaller.
    """
    limit = task_bytes(runtime)
    if limit is None or not tasks.tasks:
        return
    held = {number: sum(a.tile.bytes for a in task.accesses) for number, task in enumerate(tasks.tasks)}
    number = max(held, key=lambda k: held[k])
    if held[number] <= limit:
        return
    key, have = "memory", runtime.memory
    if runtime.cuda and limit == (runtime.cuda_memory or 0) // TASKS_AT_ONCE:
        key, have = "cuda_memory", runtime.cuda_memory
    tiles = [a.tile for a in tasks.tasks[number].accesses]
    batches = [size for tile in tiles for axis, size in zip(tile.axes, tile.shape, strict=False) if axis == "batch"]
    divides = in_step and max(batches, default=1) > 1
    raise TaskError(
        f"out of memory: {tasks.tasks[number].op} works on {held[number] / MIB:.1f} MiB of tiles at once, and "
        f"runtime.{key} = {(have or 0) / MIB:.1f} MiB has room for {limit / MIB:.1f}; "
        f"{largest(tiles)}{f', or use {MORE_PARTS}' if divides else ''}"
    )


def check_lists(lists: Sequence[TaskList], runtime: Workers) -> None:
    """Raise TaskError if the tiles of this rank's part of a step do not fit into its memory."""
    tiles = {a.tile.key: a.tile for one in lists for task in one.tasks for a in task.accesses if a.tile.persistent}
    kept, have = sum(tile.bytes for tile in tiles.values()), main_memory(runtime)
    peak = max(one.peak_bytes(kept) for one in lists)
    devices = runtime.cuda * (runtime.cuda_memory or 0)
    if runtime.disk:
        _check_disk(peak, peak - devices, lists, runtime, within_machine(runtime.memory), largest(tiles.values()))
    if peak > have + devices:
        # A forward pass is one list, and has no activations that a backward pass reads later.
        more = f", or use {FEWER_ACTIVATIONS}" if len(lists) > 1 and kept < have + devices else ""
        room = f"runtime.memory has room for {have // MIB}"
        room += f", its GPUs for {devices // MIB}" * (devices > 0)
        raise TaskError(
            f"out of memory: this rank's part of a step needs {_at_least(peak)}, and {room};"
            f" {largest(tiles.values())}, or start more ranks{more}"
        )


def check_step(step: Step, runtime: Workers, machine: int | None = None) -> None:
    """Raise TaskError if a step's tensors do not fit into main memory, disk and GPUs together.

    machine: bytes of the main memory of the machine that will run the step; None: of this machine.
    """
    if runtime.ranks:
        return  # each rank holds a part of the tensors, which check_lists checks
    memory, have = within_machine(runtime.memory, machine), main_memory(runtime, machine)
    peak = step.peak_bytes()
    room = f"runtime.memory {'and runtime.disk have' if runtime.disk else 'has'} room for {have // MIB}"
    rest, initial = peak, 0
    if runtime.cuda:
        devices = runtime.cuda * (runtime.cuda_memory or 0)
        # Weights are first written to main memory, which also holds the tiles that do not fit on the GPUs.
        name, _ = MASTERS.get(step.graph.dtype, ("", ""))
        tiles = {a.tile for task in step.update.tasks.tasks for a in task.accesses}
        masters = [tile for tile in tiles if name and tile.tensor.endswith(f".{name}")]
        initial = sum(tile.bytes for tile in (*step.first.tasks.initialised, *masters))
        inside = share_inside(devices, peak, is_planned(runtime.cuda, runtime.cpus, runtime.disk))
        rest = max(peak - inside, initial)
        room = f"{-(-rest // MIB)} of it outside of {inside // MIB} MiB for tiles in runtime.cuda_memory, and {room}"
    if runtime.disk and runtime.disk.kept:
        _check_kept(step, runtime, runtime.disk.kept)
    use = _step_advice(step, have + peak - rest)
    if initial > have:
        use = "The weights are first written to main memory: use a larger runtime.memory, or a smaller model"
    advice = f"the largest tensors are {step.largest()}. {use}"
    if runtime.disk:
        _check_disk(peak, rest, [one.tasks for one in step.lists], runtime, memory, advice)
    if rest > have:
        raise TaskError(f"out of memory: a step needs {_at_least(peak)}, {room}; {advice}")


def memory_at_rest(runtime: Workers, machine: int | None = None) -> float:
    """Return the bytes of main memory for tiles that have left a GPU. machine: see `check_step`."""
    return main_memory(runtime, machine) * share_at_rest(runtime.memory)


def has_room_for_evictions(lists: Sequence[TaskList], runtime: Workers, machine: int | None = None) -> bool:
    """Return whether main memory has room for the tiles that leave a GPU after tasks, by `Task.evicts`."""
    return outside_peak(lists) <= memory_at_rest(runtime, machine)


def window(lists: Sequence[TaskList], runtime: Workers) -> int:
    """Return the bound on the tasks in flight for a step whose tiles do not all fit on the GPU; 0: no bound.

    Args:
        lists: the task lists of a step, each once.
        runtime: its GPU and main memory together have room for the step if tasks run in order.
    """
    tiles = [{access.tile for task in tasks.tasks for access in task.accesses} for tasks in lists]
    kept = {tile.key: tile.bytes for each in tiles for tile in each if tile.persistent}
    temporary = max(sum(tile.bytes for tile in each if not tile.persistent) for each in tiles)
    peak = max(tasks.peak_bytes(sum(kept.values())) for tasks in lists)
    room = main_memory(runtime) + (runtime.cuda_memory or 0)
    return 0 if peak + OUT_OF_ORDER * temporary <= room else IN_ORDER_WINDOW


def check_offload(
    lists: Sequence[TaskList], runtime: Workers, offload: Collection[Offloaded], machine: int | None = None
) -> None:
    """Raise TaskError if main memory has no room for the tiles of `offload`. Sets `Task.evicts` to these tiles alone.

    machine: see `check_step`.
    """
    if mark_evictions(lists, math.inf, offload) and not has_room_for_evictions(lists, runtime, machine):
        raise TaskError(
            f"offload: main memory has no room for the tiles of {', '.join(offload)}; allowed: fewer kinds, or a larger"
            f" runtime.memory{f'; or {FEWER_ACTIVATIONS}' if 'activations' in offload else ''}"
        )


def has_room_for_copy(step: Step, runtime: Workers) -> bool:
    """Return whether memory has room for the tiles of a step and a second copy of its weights (of a Generator)."""
    tiles = {a.tile for lowering in step.lists for task in lowering.tasks.tasks for a in task.accesses}
    weights = sum(tile.bytes for tile in tiles if tile.persistent and tile.kind == "param")
    have = main_memory(runtime) + runtime.cuda * (runtime.cuda_memory or 0)
    # Factor 2: main memory keeps the initial values of tiles on a GPU, and forward passes need tiles of their own.
    return sum(step.kept_tiles().values()) + 2 * weights <= IN_ORDER * have


def _step_advice(step: Step, have: int) -> str:
    """Return the end of a message about a step that needs more than `have` bytes: the keys to change."""
    kept = sum(step.kept_tiles().values())
    if kept > have:
        need = "a smaller model, an optimizer with fewer averages, or more memory"
        return f"Weights, gradients, optimizer state and inputs alone take {-(-kept // MIB)} MiB: use {need}"
    keys = "".join(f"{key}, " for key in step.memory_settings)
    more = "tiles.batch, tiles.seq and tiles.vocab, which let activations be freed earlier"
    return f"Use {keys}a smaller batch or seq, or smaller {more}"


def _check_disk(peak: int, outside: int, lists: Sequence[TaskList], runtime: Workers, memory: int, advice: str) -> None:
    """Raise TaskError if runtime.disk.size is too small for a step.

    Args:
        peak: bytes that the step needs.
        outside: bytes of `peak` that are not on GPUs.
        lists: the step's tasks.
        runtime: the runtime, which has a disk.
        memory: bytes of main memory for tiles.
        advice: end of the error message.
    """
    size = runtime.disk.size if runtime.disk else 0
    need = needed_with_disk(outside, lists, runtime.cuda + runtime.cpus)
    if need > memory + size:
        raise TaskError(
            f"out of memory: runtime.disk.size = {size // MIB} MiB is too small: a step needs {_at_least(peak)}. "
            f"Beside runtime.memory = {memory // MIB} MiB, use a disk of {-(-(need - memory) // MIB)} MiB; {advice}"
        )


def _check_kept(step: Step, runtime: Workers, kinds: Collection[str]) -> None:
    """Raise TaskError if the tiles that may not go to the disk leave no room in main memory for the tiles of tasks.

    kinds: kinds of the tiles that may not go to the disk.
    """
    tasks = [task for one in (step.first, step.update) for task in one.tasks.tasks]
    tiles = {a.tile.key: a.tile for task in tasks for a in task.accesses}
    kept = sum(tile.bytes for tile in tiles.values() if tile.kind in kinds)
    others = max(sum(a.tile.bytes for a in task.accesses if a.tile.kind not in kinds) for task in tasks)
    room = (runtime.memory or 0) - (runtime.cuda + runtime.cpus + 1) * others
    if kept > room:
        raise TaskError(
            f"out of memory: tensors that runtime.disk.kinds keeps off the disk have {-(-kept // MIB)} MiB; beside the"
            f" tiles of tasks, runtime.memory = {(runtime.memory or 0) // MIB} MiB has room for {max(room, 0) // MIB}."
            " Name more kinds in runtime.disk.kinds, or use smaller tiles"
        )


def _at_least(peak: int) -> str:
    return f"at least {-(-peak // MIB)} MiB, and more where workers run ahead of each other"


def largest(tiles: Iterable[Tile], count: int = 3) -> str:
    """Return a text that names the `count` largest tiles, and the keys of the tile sizes to lower."""
    top = sorted(set(tiles), key=lambda tile: (-tile.bytes, str(tile)))[:count]
    named: list[str] = []
    keys: dict[str, None] = {}
    for tile in top:
        sizes = dict(zip(tile.axes, tile.shape, strict=False))
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or str(tile.shape)
        named.append(f"{tile} ({tile.bytes / MIB:.1f} MiB: {shape})")
        keys |= {f"tiles.{cut_as(axis)}": None for axis, size in sizes.items() if cut_as(axis) in AXES and size > 1}
    return f"the largest tiles are {', '.join(named)}. Lower {', '.join(keys) or 'the tile sizes'}"
