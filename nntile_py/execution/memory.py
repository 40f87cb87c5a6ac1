"""How the tiles of a running Runtime use its memory: eviction plans, groups of tasks, and the peak on a GPU."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Sequence

from nntile_py import _core
from nntile_py.errors import say_once
from nntile_py.execution.memory_checks import (
    check_offload,
    has_room_for_evictions,
    main_memory,
    task_bytes,
    tight_group_bytes,
)
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.recompute_choice import Room
from nntile_py.tiles import TaskList
from nntile_py.tiles.eviction import Offloaded, is_planned, room_in_turn
from nntile_py.tiles.residents import residents

DROPPED = (
    "note: main memory has no room for the tiles of an eviction plan, so StarPU chooses the tiles that leave the GPU; "
    "steps take less time with a larger runtime.memory"
)


def group_bytes(runtime: Runtime, tight: bool) -> int:
    """Return the most bytes that the tiles of a group of tasks may take.

    The groups that a worker takes at once, and one more group, must fit together. tight: see `tight_group_bytes`.
    """
    if tight:
        return tight_group_bytes(runtime)
    most = (runtime.cuda_memory or 0) // (int(os.environ["STARPU_CUDA_PIPELINE"]) + 1)
    return min(most, task_bytes(runtime) or 0)


def room_to_plan(runtime: Runtime, lists: Sequence[TaskList]) -> float:
    """Return the bytes of GPU memory for which evictions are planned.

    0: there is no plan, because no tile has to leave the GPU or because the order of tasks is not known.
    """
    if not is_planned(runtime.cuda, runtime.cpus, runtime.disk):
        return 0
    return room_in_turn(lists, runtime.cuda_memory or 0)


def residents_of_step(
    runtime: Runtime, lists: Sequence[TaskList], offload: Collection[Offloaded]
) -> frozenset[Hashable]:
    """Return the keys of a step's residents: tiles that programs hold between runs, see tiles/residents.py.

    With one worker there are no residents, because StarPU's work on tiles is then hidden behind the kernels. With
    several ranks, a disk or `offload`, all tiles move one by one.
    """
    planned = runtime.placement == "planned" and runtime.cuda + runtime.cpus > 1
    if not planned or runtime.ranks or runtime.disk or offload:
        return frozenset()
    return residents(lists, runtime.cuda * (runtime.cuda_memory or 0) if runtime.cuda else main_memory(runtime))


def limit_evictions(lists: Sequence[TaskList], runtime: Runtime, offload: Collection[Offloaded]) -> None:
    """Drop the eviction plan if main memory has no room for its tiles: StarPU then chooses which tiles to evict.

    The tiles of `offload` still leave the GPU between uses. A warning reports that the plan is dropped.

    Raises:
        TaskError: There is no room for the tiles of `offload`.
    """
    if has_room_for_evictions(lists, runtime):
        return
    check_offload(lists, runtime, offload)
    say_once(DROPPED)


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
