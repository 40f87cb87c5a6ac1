"""Estimates the time and the memory of task lists without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nntile_py.tiles import TaskList, device_model
from nntile_py.tiles.dependencies import TileUse, critical_path, dependencies
from nntile_py.tiles.placement import Speed


@dataclass(frozen=True)
class Estimate:
    """Cost of task lists that run one after the other.

    Attributes:
        mean_task: mean seconds of a task.
        parallelism: time of all tasks divided by the time of the longest chain of dependent tasks.
        seconds: time of all lists.
        speed: rates of one worker.
    """

    tasks: int
    bytes_moved: int
    peak_bytes: int
    mean_task: float
    parallelism: float
    seconds: float
    speed: Speed


def estimate(lists: Sequence[TaskList], workers: int, gpu: bool = False, speed: Speed | None = None) -> Estimate:
    """Estimate the cost of task lists on workers.

    Args:
        lists: the task lists, in the order in which they run.
        workers: number of CPU workers, or of GPUs.
        gpu: True: the workers are GPUs.
        speed: rates of one worker; None: those of the device model.
    """
    speed = speed or device_model.speed(lists, gpu)
    kept = {a.tile.key: a.tile.bytes for tasks in lists for task in tasks.tasks for a in task.accesses
            if a.tile.persistent}  # fmt: skip
    work, chain, seconds = 0.0, 0.0, 0.0
    for tasks in lists:
        all_tasks, longest = _work_and_chain(tasks, speed)
        work, chain = work + all_tasks, chain + longest
        seconds += max(all_tasks / workers, longest, len(tasks.tasks) * speed.submit)
    count = sum(len(tasks.tasks) for tasks in lists)
    return Estimate(
        tasks=count,
        bytes_moved=sum(task.bytes for tasks in lists for task in tasks.tasks),
        peak_bytes=max(tasks.peak_bytes(sum(kept.values())) for tasks in lists),
        mean_task=work / max(count, 1) - speed.beside,
        parallelism=work / (chain or 1.0),
        seconds=seconds,
        speed=speed,
    )


def _work_and_chain(tasks: TaskList, speed: Speed) -> tuple[float, float]:
    """Return the sum of all tasks' seconds, and the seconds of the longest chain of dependent tasks."""
    seconds = [speed.seconds(task) + speed.beside for task in tasks.tasks]
    before = dependencies([TileUse(a.tile, a.mode) for a in task.accesses] for task in tasks.tasks)
    return sum(seconds), sum(seconds[number] for number in critical_path(before, seconds))
