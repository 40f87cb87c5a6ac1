"""The kind of worker, CPU or CUDA, that runs each task of a heterogeneous run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from nntile_py.errors import ConfigError

from .dtypes import is_low
from .task import Task
from .tasklist import TaskList


def check_workers(on_cpu: Sequence[str] | None, cpus: int | str | None, cuda: int | str, placement: str | None) -> None:
    """Check that a run with GPUs and `on_cpu` has CPU workers, and that `placement` is not planned.

    Args:
        on_cpu: patterns of tasks for CPU workers, or None.
        cpus: number of CPU workers. With GPUs, None and "all" mean no CPU workers.
        cuda: number of GPUs, or "all". Without GPUs, `on_cpu` has no effect.
        placement: "planned", "scheduler", or None for the default.

    Raises:
        ConfigError: there are no CPU workers, or the placement is planned.
    """
    if on_cpu is None or not cuda:
        return
    if cpus in (None, 0, "all"):
        raise ConfigError(f"runtime.cpus: got {cpus} with runtime.on_cpu; allowed: a number of CPU workers")
    if placement == "planned":
        raise ConfigError("runtime.placement: got planned with runtime.on_cpu; allowed: scheduler")


def assign_kinds(lists: Iterable[TaskList], on_cpu: Sequence[str] | None) -> None:
    """Set the kind of worker of each task: CPU if the task matches a pattern of `on_cpu`, else CUDA.

    Args:
        lists: task lists; the attribute `kind` of their tasks is set.
        on_cpu: patterns with * and ? for names of operators or kernels. None: workers of both kinds may run each task.

    Raises:
        ConfigError: a matching task has bf16 or fp16 tiles, for which there are no CPU kernels.
    """
    for task in (task for task_list in lists for task in task_list.tasks):
        pattern = next((pattern for pattern in on_cpu or () if _matches(task, pattern)), None)
        task.kind = "" if on_cpu is None else "cuda" if pattern is None else "cpu"
        if pattern is None:
            continue
        if low := next((access.tile.dtype for access in task.accesses if is_low(access.tile.dtype)), None):
            name, need = f"{task.op} ({task.kernel})", "operators on fp32 tiles, or precision: fp32 or tf32"
            raise ConfigError(f"runtime.on_cpu: {pattern!r} matches {name}, which has {low} tiles; allowed: {need}")


def check_patterns(lists: Sequence[TaskList], on_cpu: Sequence[str] | None) -> None:
    """Check that each pattern of `on_cpu` matches a task.

    Raises:
        ConfigError: a pattern matches no task.
    """
    tasks = [task for task_list in lists for task in task_list.tasks]
    for pattern in on_cpu or ():
        if not any(_matches(task, pattern) for task in tasks):
            kernels = ", ".join(sorted({task.kernel for task in tasks}))
            raise ConfigError(
                f"runtime.on_cpu: {pattern!r} matches no task of the step; allowed: names of operators, as `nntile"
                f" graph` draws them, and of kernels: {kernels}"
            )


def _matches(task: Task, pattern: str) -> bool:
    return fnmatchcase(task.op, pattern) or fnmatchcase(task.kernel, pattern)
