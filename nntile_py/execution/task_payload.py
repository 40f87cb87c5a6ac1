"""The payload of a task: its kernel, its kernel launches on a CUDA worker, and the filled part of its tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nntile_py import _core
from nntile_py.errors import TaskError
from nntile_py.execution.python_task import bound
from nntile_py.tasks import launch, launch_binary
from nntile_py.tasks.dynamic_size import with_live_sizes
from nntile_py.tasks.generated import GENERATED, KERNELS
from nntile_py.tasks.scalar import native
from nntile_py.tiles import Slot, TaskList, Tile
from nntile_py.tiles.dtypes import is_scaled
from nntile_py.tiles.task import Task

Lives = Sequence[tuple[int, int, Slot]]
Launched = tuple[list[list[Any]], int, list[tuple[int, int]], str]
NOT_LAUNCHED: Launched = ([], 0, [], "")


def encoded_launches(tasks: list[Task], capability: int | None, lives: Lives = ()) -> Launched:
    """Return the kernel launches by which a CUDA worker runs these tasks together, encoded for C++.

    Tasks have launches if they lack a C++ kernel for CUDA, or if a generated kernel may be faster. All other tasks get
    NOT_LAUNCHED.

    Args:
        capability: compute capability of the device; None: there are no CUDA workers.
        lives: the axes of tiles that a step fills only in part, each with the slot of the filled size.

    Returns:
        The launches of each variant, the bytes of scratch memory, the table of addresses and integers, and the key
        under which the fastest variant is stored. Variants that need more shared memory than the device has are left
        out.
    """
    described = launch.describer(tasks[0].kernel) if capability else None
    if not described or not capability:
        return NOT_LAUNCHED
    description = described([with_live_sizes(tasks[0], lives)] if lives else tasks)
    if not description.launches:
        return NOT_LAUNCHED
    variants = [variant for variant in description.ways if all(one.for_device(capability) for one in variant)]
    if not variants:
        return NOT_LAUNCHED
    compiled = [[(one, launch_binary.compile_launch(one, capability)) for one in variant] for variant in variants]
    room = launch_binary.shared_memory(capability)
    fit = [variant for variant in compiled if all(binary.shared <= room for _, binary in variant)]
    if not fit:
        return NOT_LAUNCHED
    encoded: list[Any] = [[launch_binary.encode(*one) for one in variant] for variant in fit]
    return encoded, description.scratch, launch_binary.encode_table(description), description.key


def body(
    kernel: str,
    name: str,
    places: Sequence[int],
    ints: Sequence[int] = (),
    first_float: int = 0,
    accumulates: int = 0,
    launched: Launched = NOT_LAUNCHED,
    python: Any = None,
    lives: Sequence[tuple[int, int, int]] = (),
) -> tuple[Any, ...]:
    """Return a payload of a task as the tuple that the C++ binding takes, see TaskBody in csrc/kernel.h.

    places: the numbers of the payload's tiles among the task's tiles.
    """
    return kernel, name, list(places), list(ints), first_float, accumulates, *launched, python, list(lives)


def on_cpu_workers(part: Task) -> tuple[str, tuple[int, ...]]:
    """Return the name of the C++ kernel with which CPU workers run a task, and its integers.

    A generated kernel is compiled; its integers begin with its address.

    Raises:
        TaskError: there is no compiler for a generated kernel.
    """
    generated = KERNELS.get(part.kernel)
    if generated is None or not _core.cpu_workers():
        return part.kernel, part.ints
    try:
        return GENERATED, (native.address(generated.source), len(part.floats), *part.ints)
    except native.NoCompiler as error:
        raise TaskError(f"{part.op}: {error}; allowed without a compiler: fusion.found: false") from None


def capability_of_devices() -> int | None:
    """Return the compute capability of the CUDA devices, which are assumed to be alike; None without CUDA workers."""
    if not _core.cuda_workers():
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor


def lives_on_cuda(tasks: TaskList) -> bool:
    """Return whether CUDA workers can compute only the part of the tiles that a step fills (packed sequences).

    For this, the filled part must be the first rows of each tile; otherwise kernels would also sum rows that are not
    filled. In a tile of 8 bits the filled part may also be the first columns, see Quantize. Attention kernels are
    exempt, because they read the offsets of the sequences. Tasks in Python need full tiles.
    """
    for task in (part.without_waits for one in tasks.tasks for part in one.parts or [one]):
        live = tasks.live_sizes(task)
        first = all(_fills_first(task.accesses[number].tile, axis) for number, axis, _ in live)
        if live and (bound(task) or not (first or task.kernel.startswith("attention"))):
            return False
    return True


def _fills_first(tile: Tile, axis: int) -> bool:
    """Return whether a tile that is filled in part along `axis` has the filled part in its first rows or columns."""
    rows, columns = math.prod(tile.shape[:axis]), math.prod(tile.shape[axis + 1 :])
    return rows == 1 or (columns == 1 and is_scaled(tile.dtype))
