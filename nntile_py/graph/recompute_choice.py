"""The setting `recompute: auto`, which chooses the value with the fastest estimated step that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nntile_py.errors import ConfigError
from nntile_py.graph.recompute_rule import RECOMPUTE
from nntile_py.system.cgroup import within_machine
from nntile_py.tiles import TaskList, device_model
from nntile_py.tiles.eviction import Offloaded, evicted, is_planned, room_in_turn, share_inside

TASKS_AT_ONCE = 2  # a GPU's memory has room for the tiles of so many tasks, see memory_checks.task_bytes
DISK_S = 1e9  # bytes/s from and to a disk, assumed
AT_REST = 31 / 32  # share of runtime.memory for tiles that have left a GPU; the rest is for tiles in transfer
OF_MACHINE = 0.8  # share of main memory for tiles if runtime.memory is not set; the process has other arrays too
EVICTING = 1.2  # factor on estimates of steps with evictions: measured, these steps take 1.1 to 3 times their estimates
IN_ORDER = 0.9  # share of main memory for a step's peak, which assumes tasks in order; several workers need more


@dataclass(frozen=True)
class Room:
    """The workers and the memory of a run.

    Attributes:
        workers: number of CPU workers, or of GPUs.
        gpu: True: the workers are GPUs.
        bytes: memory for tiles: of all GPUs together, or main memory.
        beyond: bytes for tiles that do not fit: main memory for GPUs, a disk for CPU workers.
        planned: True: evictions are planned, see tiles/eviction.py. False: StarPU chooses the tiles to evict.
        disk: bytes of `beyond` that are on a disk.
        at_rest: bytes of main memory for the tiles that an eviction plan moves from a GPU.
    """

    workers: int
    gpu: bool
    bytes: int
    beyond: int = 0
    planned: bool = False
    disk: int = 0
    at_rest: float = math.inf

    @classmethod
    def of(cls, cpus: int, gpus: int, memory: int | None, cuda_memory: int | None, disk: int = 0) -> Room:
        """Return the workers and the memory of a runtime with these keys.

        Args:
            cpus: number of CPU workers.
            gpus: number of GPUs.
            memory: bytes of `runtime.memory`; None: a share of main memory.
            cuda_memory: bytes of `runtime.cuda_memory`; None: device_model.MEMORY, the value for an H200.
            disk: bytes of `runtime.disk`.
        """
        main = within_machine(memory) if memory else int(OF_MACHINE * within_machine(None))
        if not gpus:
            return cls(cpus, False, main, disk, disk=disk)
        planned, each = is_planned(gpus, cpus, disk), cuda_memory or device_model.MEMORY
        at_rest = within_machine(memory) * share_at_rest(memory)
        return cls(gpus, True, gpus * each, main + disk, planned, disk, at_rest)

    def fits(self, peak: int, lists: Sequence[TaskList]) -> bool:
        """Return whether a step has room. peak: its largest number of bytes alive at once, with tasks in order."""
        if self.gpu and largest_task(lists) > self.bytes // self.workers // TASKS_AT_ONCE:
            return False
        if not self.disk:
            own = share_inside(self.bytes, peak, self.planned) if self.gpu else IN_ORDER * self.bytes
            return peak <= own + self.beyond
        outside, have = (peak - self.bytes, self.beyond) if self.gpu else (peak, self.bytes + self.beyond)
        return needed_with_disk(outside, lists, self.workers) <= have


def share_at_rest(memory: int | None) -> float:
    """Return the share of main memory for tiles that have left a GPU. memory: the value of `runtime.memory`."""
    return AT_REST if memory else OF_MACHINE


def needed_with_disk(peak: int, lists: Iterable[TaskList], workers: int) -> int:
    """Return the bytes that main memory and disk must have together, so that a step does not stall.

    If the disk is full, tiles that have no place there stay in main memory. Beside them, main memory must have room for
    the tiles of one task per worker and one more task.

    Args:
        peak: largest number of bytes alive at once outside of GPUs, with tasks in order.
        lists: the step's tasks.
        workers: number of CPU workers and GPUs.
    """
    return math.ceil(max(peak, 0) / IN_ORDER) + (workers + 1) * largest_task(lists)


def largest_task(lists: Iterable[TaskList]) -> int:
    """Return the bytes of all tiles of a task, for the task with the most bytes."""
    return max((sum(a.tile.bytes for a in task.accesses) for tasks in lists for task in tasks.tasks), default=0)


@dataclass(frozen=True)
class StepEstimate:
    """The estimate for one value of `recompute`.

    Attributes:
        recompute: the value.
        peak_bytes: largest number of bytes alive at once.
        evicted_bytes: bytes that leave the memory in a step and return, counted once.
        seconds: time of a step, from the sum of its tasks' times: less exact than the simulated time of a plan.
        fits: the step can run.
    """

    recompute: str | Sequence[str]
    peak_bytes: int
    evicted_bytes: int
    seconds: float
    fits: bool

    @property
    def values(self) -> str:
        """Text of the value of `recompute`."""
        return self.recompute if isinstance(self.recompute, str) else ", ".join(self.recompute)


def fewer_activations(batch: int, recompute: str | Sequence[str], ranks: int) -> list[str]:
    """Return settings of a run with which activations take less memory, such as "recompute: layer".

    Several ranks have no `auto`, since their memory may differ.

    Args:
        batch: sequences of a micro-batch.
        recompute: the value of the step.
        ranks: number of ranks.
    """
    parts = "train.grad_accumulation: auto" if ranks == 1 else "a larger train.grad_accumulation of a smaller batch"
    again = "recompute: auto" if recompute == "none" and ranks == 1 else "recompute: layer"
    return [parts] * (batch > 1) + [again] * (recompute in ("none", "attention"))


class Steps(Protocol):
    """Protocol: builds a step for a value of `recompute`. StepSpec implements it."""

    @property
    def grad_accumulation(self) -> int: ...

    @property
    def offload(self) -> Sequence[Offloaded]: ...

    def step(self, recompute: str | Sequence[str] | None = None) -> Any: ...


def candidates(spec: Steps, room: Room, values: Sequence[str | Sequence[str]] = RECOMPUTE) -> list[StepEstimate]:
    """Return an estimate for each value of `recompute`, except later values that repeat no operator of the model.

    Raises:
        ConfigError: No step can be built with the first value.
    """
    found = []
    for value in values:
        try:
            step = spec.step(recompute=value)
        except ConfigError:
            if value == values[0]:
                raise
            continue  # the model has no such operators
        lists = step.in_turn(spec.grad_accumulation)
        speed = device_model.speed(lists, room.gpu)
        seconds = 0.0
        for tasks in (one.tasks for one in lists):
            seconds += max(sum(map(speed.seconds, tasks)) / room.workers, len(tasks) * speed.submit)
        peak = step.peak_bytes()
        moved, planned = 0, False
        if room.gpu:
            inside = room_in_turn(lists, room.bytes) if room.planned else 0
            moved, dropped, _ = evicted(lists, inside, spec.offload, room.at_rest)
            planned = room.planned and not dropped
        above = 0 if planned else max(0, peak - moved - room.bytes)  # StarPU moves these bytes twice
        seconds += (moved + 2 * above) / (speed.host_s if room.gpu else DISK_S)
        found.append(StepEstimate(value, peak, moved + above, seconds, room.fits(peak, lists)))
    return found


def fastest(found: Sequence[StepEstimate]) -> StepEstimate:
    """Return the fastest candidate that fits; if none fits, the candidate with the smallest peak.

    The comparison multiplies the times of candidates with evictions by EVICTING.
    """

    def cost(one: StepEstimate) -> float:
        return one.seconds * (EVICTING if one.evicted_bytes else 1) if one.fits else math.inf

    return min(found, key=lambda one: (not one.fits, cost(one), one.peak_bytes))
