"""Memory checks before the first step: whether a run fits. Messages name the tensors and the keys to change."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from nntile_py import _core
from nntile_py.errors import TaskError
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.recompute_choice import OF_MACHINE, TASKS_AT_ONCE, Room, needed_with_disk
from nntile_py.system.cgroup import within_machine
from nntile_py.tasks.optimizer import MASTERS
from nntile_py.tiles import AXES, TaskList, Tile, cut_as
from nntile_py.tiles.eviction import Offloaded, mark_evictions, room_in_turn
from nntile_py.tiles.residents import residents

if TYPE_CHECKING:
    from nntile_py.graph.built_step import Step

MIB = 2**20
TIGHT_GROUPS = 64  # number of task groups whose tiles fit on a GPU together, if not all tiles of a step fit


def main_memory(runtime: Runtime) -> int:
    """Return the bytes of main memory and disk that tiles may take."""
    return within_machine(runtime.memory) + (runtime.disk.size if runtime.disk else 0)


def task_bytes(runtime: Runtime) -> int | None:
    """Return the most bytes that the tiles of one task may take; None: no bound, because no memory evicts tiles.

    The bound leaves room for other tasks. While a worker waits for room for its next task, it already holds some of
    this task's tiles, and other workers read tiles in the same memory or fetch tiles into it.
    """
    bounds = [(runtime.cuda_memory or 0) // TASKS_AT_ONCE] if runtime.cuda else []
    if runtime.disk and runtime.memory:  # all tiles pass through main memory
        bounds.append(runtime.memory // (runtime.cuda + runtime.cpus + 1))
    return min(bounds, default=None)


def group_bytes(runtime: Runtime, tight: bool) -> int:
    """Return the most bytes that the tiles of a group of tasks may take.

    The groups that a worker takes at once, and one more group, must fit together. tight: not all tiles of a step fit,
    so the tiles of the next group arrive while the tiles of the last group leave.
    """
    most = (runtime.cuda_memory or 0) // (TIGHT_GROUPS if tight else int(os.environ["STARPU_CUDA_PIPELINE"]) + 1)
    return min(most, task_bytes(runtime) or 0)


def room_to_plan(runtime: Runtime, lists: Sequence[TaskList]) -> float:
    """Return the bytes of GPU memory for which evictions are planned.

    0: there is no plan, because no tile has to leave the GPU or because the order of tasks is not known.
    """
    if runtime.cuda != 1 or runtime.cpus or runtime.disk:
        return 0
    return room_in_turn(lists, runtime.cuda_memory or 0)


def held_by_tasks(runtime: Runtime, lists: Sequence[TaskList], offload: Collection[Offloaded]) -> frozenset[Hashable]:
    """Return the keys of tiles that the programs of a step hold for their task between runs, see tiles/residents.py.

    None on one worker: the runtime's time for tiles is hidden behind the kernels.
    """
    planned = runtime.placement == "planned" and runtime.cuda + runtime.cpus > 1
    if not planned or runtime.ranks or runtime.disk or offload:
        return frozenset()
    return residents(lists, runtime.cuda * (runtime.cuda_memory or 0) if runtime.cuda else main_memory(runtime))


def has_room_for_evictions(lists: Sequence[TaskList], runtime: Runtime) -> bool:
    """Return whether main memory has room for the tiles that an eviction plan moves there.

    The initial values of persistent tiles, except gradients, need room too.
    """
    tasks = [task for one in lists for task in one.tasks]
    held = {a.tile.key: a.tile.bytes for task in tasks for a in task.accesses if a.tile.persistent}
    for cleared in {tile.key for task in tasks for tile in task.clears}:
        held.pop(cleared, None)
    held |= {tile.key: tile.bytes for task in tasks for tile in task.evicts}
    room = main_memory(runtime) * (1 if runtime.memory else OF_MACHINE)
    return sum(held.values()) <= room


def limit_evictions(lists: Sequence[TaskList], runtime: Runtime, offload: Collection[Offloaded]) -> None:
    """Drop the eviction plan if main memory has no room for its tiles: StarPU then chooses which tiles to evict.

    The tiles of `offload` still leave the GPU between uses.

    Raises:
        TaskError: There is no room for the tiles of `offload`.
    """
    if has_room_for_evictions(lists, runtime):
        return
    if mark_evictions(lists, math.inf, offload) and not has_room_for_evictions(lists, runtime):
        raise TaskError(
            f"offload: main memory has no room for the tiles of {', '.join(offload)}; allowed: fewer kinds, or a larger"
            " runtime.memory"
        )


def room(runtime: Runtime) -> Room:
    """Return the workers and the memory of a runtime, for the choice of `recompute: auto`."""
    disk = runtime.disk.size if runtime.disk else 0
    return Room.of(runtime.cpus, runtime.cuda, runtime.memory, runtime.cuda_memory, disk)


def gpu_peak() -> int:
    """Return the peak bytes of this process on its fullest GPU: tiles and workspaces of kernels."""
    import torch

    return max(torch.cuda.max_memory_allocated(device) for device in _devices())


def forget_gpu_peak() -> None:
    """Reset the peak that `gpu_peak` returns."""
    import torch

    torch.cuda.init()  # before this call, PyTorch has no counters
    for device in _devices():
        torch.cuda.reset_peak_memory_stats(device)


def _devices() -> range:
    """Return the GPUs of the runtime, or all GPUs if no runtime is running."""
    import torch

    return range(_core.cuda_workers() or torch.cuda.device_count())


def check_tasks(tasks: TaskList, runtime: Runtime) -> None:
    """Raise TaskError if the tiles of a single task do not fit into the memory of the worker that runs it."""
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
    raise TaskError(
        f"out of memory: {tasks.tasks[number].op} works on {held[number] / MIB:.1f} MiB of tiles at once, and "
        f"runtime.{key} = {(have or 0) / MIB:.1f} MiB has room for {limit / MIB:.1f}; "
        f"{largest(a.tile for a in tasks.tasks[number].accesses)}"
    )


def check_lists(lists: Sequence[TaskList], runtime: Runtime) -> None:
    """Raise TaskError if the tiles of this rank's part of a step do not fit into its memory."""
    tiles = {a.tile.key: a.tile for one in lists for task in one.tasks for a in task.accesses if a.tile.persistent}
    kept, have = sum(tile.bytes for tile in tiles.values()), main_memory(runtime)
    peak = max(one.peak_bytes(kept) for one in lists)
    devices = runtime.cuda * (runtime.cuda_memory or 0)
    if runtime.disk:
        _check_disk(peak, peak - devices, lists, runtime, largest(tiles.values()))
    if peak > have + devices:
        room = f"runtime.memory has room for {have // MIB}"
        room += f", its GPUs for {devices // MIB}" * (devices > 0)
        raise TaskError(
            f"out of memory: this rank's part of a step needs {_at_least(peak)}, and {room};"
            f" {largest(tiles.values())}, or start more ranks"
        )


def check_step(step: Step, runtime: Runtime) -> None:
    """Raise TaskError if a step's tensors do not fit into main memory, disk and GPUs together."""
    if runtime.ranks:
        return  # each rank holds a part of the tensors, which check_lists checks
    peak, have = step.peak_bytes(), main_memory(runtime)
    room = f"runtime.memory {'and runtime.disk have' if runtime.disk else 'has'} room for {have // MIB}"
    rest = peak
    if runtime.cuda:
        devices = runtime.cuda * (runtime.cuda_memory or 0)
        # Weights are first written to main memory, which also holds the tiles that do not fit on the GPUs.
        name, _ = MASTERS.get(step.graph.dtype, ("", ""))
        tiles = {a.tile for task in step.update.tasks.tasks for a in task.accesses}
        masters = [tile for tile in tiles if name and tile.tensor.endswith(f".{name}")]
        rest = max(peak - devices, sum(tile.bytes for tile in (*step.first.tasks.initialised, *masters)))
        room = f"{-(-rest // MIB)} of it outside of runtime.cuda_memory = {devices // MIB} MiB in all, and {room}"
    if runtime.disk and runtime.disk.kept:
        _check_kept(step, runtime, runtime.disk.kept)
    advice = (
        f"the largest tensors are {step.largest()}. Use a smaller batch or seq, or smaller tiles.batch, tiles.seq and "
        "tiles.vocab, which let activations be freed earlier"
    )
    if runtime.disk:
        _check_disk(peak, rest, [one.tasks for one in step.lists], runtime, advice)
    if rest > have:
        raise TaskError(f"out of memory: a step needs {_at_least(peak)}, {room}; {advice}")


def _check_disk(peak: int, outside: int, lists: Sequence[TaskList], runtime: Runtime, advice: str) -> None:
    """Raise TaskError if runtime.disk.size is too small for a step.

    Args:
        peak: bytes that the step needs.
        outside: bytes of `peak` that are not on GPUs.
        lists: the step's tasks.
        runtime: the runtime, which has a disk.
        advice: end of the error message.
    """
    memory, size = within_machine(runtime.memory), runtime.disk.size if runtime.disk else 0
    need = needed_with_disk(outside, lists, runtime.cuda + runtime.cpus)
    if need > memory + size:
        raise TaskError(
            f"out of memory: runtime.disk.size = {size // MIB} MiB is too small: a step needs {_at_least(peak)}. "
            f"Beside runtime.memory = {memory // MIB} MiB, use a disk of {-(-(need - memory) // MIB)} MiB; {advice}"
        )


def _check_kept(step: Step, runtime: Runtime, kinds: Collection[str]) -> None:
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
    top = sorted(set(tiles), key=lambda tile: -tile.bytes)[:count]
    named: list[str] = []
    keys: dict[str, None] = {}
    for tile in top:
        sizes = dict(zip(tile.axes, tile.shape, strict=False))
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or str(tile.shape)
        named.append(f"{tile} ({tile.bytes / MIB:.1f} MiB: {shape})")
        keys |= {f"tiles.{cut_as(axis)}": None for axis, size in sizes.items() if cut_as(axis) in AXES and size > 1}
    return f"the largest tiles are {', '.join(named)}. Lower {', '.join(keys) or 'the tile sizes'}"
