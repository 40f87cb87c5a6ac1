"""What a task runs: its kernel, what CUDA workers launch in its place, how much of its tiles is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nntile_py import _core
from nntile_py.errors import TaskError
from nntile_py.execution.python_task import bound
from nntile_py.tasks import launch
from nntile_py.tasks.dynamic_size import with_live_sizes
from nntile_py.tasks.generated import GENERATED, KERNELS
from nntile_py.tasks.scalar import native
from nntile_py.tiles import Slot, TaskList
from nntile_py.tiles.tasklist import Task

Lives = Sequence[tuple[int, int, Slot]]
Launched = tuple[list[list[Any]], int, list[tuple[int, int]], str]
NOT_LAUNCHED: Launched = ([], 0, [], "")


def encoded_launches(tasks: list[Task], capability: int | None, lives: Lives = ()) -> Launched:
    """What a CUDA worker launches for tasks that have no C++ kernel there, or may be faster than that: for each way its
    launches, bytes of scratch, the table, the key of the choice. Only ways that fit in its shared memory."""
    described = launch.describer(tasks[0].kernel) if capability else None
    if not described or not capability:
        return NOT_LAUNCHED
    made = described([with_live_sizes(tasks[0], lives)] if lives else tasks)
    if not made.launches:
        return NOT_LAUNCHED
    ways = [way for way in made.ways if all(one.for_device(capability) for one in way)]
    if not ways:
        return NOT_LAUNCHED
    compiled = [[(one, launch.compile_launch(one, capability)) for one in way] for way in ways]
    room = launch.shared_memory(capability)
    fit = [way for way in compiled if all(binary.shared <= room for _, binary in way)]
    if not fit:
        return NOT_LAUNCHED
    encoded: list[Any] = [[launch.encode(*one) for one in way] for way in fit]
    return encoded, made.scratch, launch.encode_table(made), made.key


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
    """What a task runs, as the binding takes it: a kernel on the tiles at `places` of the task's; see TaskBody."""
    return kernel, name, list(places), list(ints), first_float, accumulates, *launched, python, list(lives)


def on_cpu_workers(part: Task) -> tuple[str, tuple[int, ...]]:
    """The C++ kernel of a task and its ints. One that is generated is compiled here. Raises TaskError: it cannot be."""
    made = KERNELS.get(part.kernel)
    if made is None or not _core.cpu_workers():
        return part.kernel, part.ints
    try:
        return GENERATED, (native.address(made.source), len(part.floats), *part.ints)
    except native.NoCompiler as error:
        raise TaskError(f"{part.op}: {error}; allowed without a compiler: fusion.found: false") from None


def capability_of_devices() -> int | None:
    """Of the CUDA workers' devices, which are taken to be alike; None where there are none."""
    if not _core.cuda_workers():
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor


def lives_on_cuda(tasks: TaskList) -> bool:
    """Whether CUDA workers can compute just what a step fills.

    Where that is not in a tile's first rows, kernels would add what lies behind it; attention looks at the offsets of
    segments. Tasks in Python want whole tiles.
    """
    for task in (part for one in tasks.tasks for part in one.parts or [one]):
        live = tasks.live_sizes(task)
        first = all(math.prod(task.accesses[number].tile.shape[:axis]) == 1 for number, axis, _ in live)
        if live and (bound(task) or not (first or task.kernel.startswith("attention"))):
            return False
    return True
