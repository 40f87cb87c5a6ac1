"""Check whether a planned step fits into memory. A plan refuses the steps that a run refuses before its first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nntile_py.config.builders import room
from nntile_py.errors import TaskError
from nntile_py.execution import memory_checks
from nntile_py.execution.disk import kept_kinds
from nntile_py.graph.recompute_choice import share_at_rest
from nntile_py.system.cgroup import machine_memory
from nntile_py.tiles import TaskList, device_model
from nntile_py.tiles.eviction import evicted, room_in_turn
from nntile_py.tiles.task_groups import GROUP_SECONDS, grouped

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig
    from nntile_py.graph.built_step import Step


class Alternative(Protocol):
    """Protocol: the estimate of a step with one of the values that `auto` compares."""

    @property
    def fits(self) -> bool: ...

    @property
    def peak_bytes(self) -> int: ...


@dataclass(frozen=True)
class _Disk:
    size: int
    kept: frozenset[str]


@dataclass(frozen=True)
class _Workers:
    """The workers and the memory of a config, see memory_checks.Workers."""

    cpus: int
    cuda: int
    memory: int | None
    cuda_memory: int | None
    disk: _Disk | None
    ranks: None = None

    @classmethod
    def of(cls, config: RunConfig) -> _Workers:
        runtime, workers = config.runtime, room(config)
        cpus_with_gpus = 0 if runtime.cpus == "all" else int(runtime.cpus)
        cpus, cuda = (cpus_with_gpus, workers.workers) if workers.gpu else (workers.workers, 0)
        disk = _Disk(runtime.disk.size, kept_kinds(runtime.disk.kinds)) if runtime.disk else None
        # As in Room.of: without a GPU to ask, the plan assumes the memory of an H200.
        return cls(cpus, cuda, runtime.memory, runtime.cuda_memory or device_model.MEMORY, disk)


class Evictions(NamedTuple):
    """The tiles that a step evicts from a GPU.

    Attributes:
        bytes: bytes that leave the GPU and return.
        moved: bytes of transfers. Tiles that StarPU chooses count twice, as other tiles already wait for their room.
        needs: bytes of main memory that an eviction plan needs, if main memory has less; 0: StarPU chooses no tiles.
    """

    bytes: int
    moved: int
    needs: int


def evictions(config: RunConfig, lists: Sequence[TaskList], peak: int) -> Evictions:
    """Return the tiles that a run on one GPU evicts.

    Args:
        config: The config, with one GPU, no CPU workers and no disk.
        lists: The step's task lists, in the order in which they run.
        peak: Bytes of the step at its peak.
    """
    memory, (workers, main) = config.runtime.cuda_memory, _workers_and_memory(config)
    room = room_in_turn(lists, memory) if memory else 0
    if memory and room:  # groups of tasks as in a run, so that run and plan compare the same bytes
        most, scratch, groups = memory_checks.tight_group_bytes(workers), not config.debug.nonfinite, {}
        for key, tasks in {id(tasks): tasks for tasks in lists}.items():
            speed = device_model.speed([tasks], gpu=True)
            groups[key] = grouped(tasks, speed.flop_s, speed.bytes_s, GROUP_SECONDS, most, True, scratch)
        lists = [groups[id(tasks)] for tasks in lists]
    moved, dropped, outside = evicted(lists, room, config.offload, memory_checks.memory_at_rest(workers, main))
    if not dropped:
        return Evictions(moved, moved, 0)
    above = max(0, peak - moved - (memory or 0))
    return Evictions(moved + above, moved + 2 * above, math.ceil(outside / share_at_rest(workers.memory)))


def _workers_and_memory(config: RunConfig) -> tuple[_Workers, int]:
    """Return the workers of a config, and the main memory of the machine for which the plan is made."""
    workers, machine = _Workers.of(config), machine_memory()
    return workers, max(workers.memory or 0, machine)  # a larger runtime.memory is the memory of another machine


def refusal(config: RunConfig, step: Step, choices: Mapping[str, Sequence[Alternative]]) -> str:
    """Return why a run of the config would not fit into memory; an empty text if a run fits.

    Args:
        config: The config, with a number of micro-batches.
        step: The planned step.
        choices: {name of a choice: the estimates that `auto` has compared}.
    """
    workers, main = _workers_and_memory(config)
    other = main > machine_memory()  # the plan is for a machine with more memory
    try:
        memory_checks.check_step(step, workers, main)
        if workers.cuda:
            lists = step.in_turn(config.train.grad_accumulation)
            memory_checks.check_offload(lists, workers, config.offload, main)
        for lowering in step.lists:
            memory_checks.check_tasks(lowering.tasks, workers, in_step=True)
    except TaskError as error:
        hint = "" if workers.memory else "; to plan for another machine, set runtime.memory to its main memory"
        return f"{error}{hint}"
    for what, rows in choices.items() if not other else ():  # the estimates assume the memory of this machine
        if rows and not any(one.fits for one in rows):
            peak = min(one.peak_bytes for one in rows) / 2**20
            need = "a larger runtime.memory or runtime.cuda_memory, or a smaller train.batch or train.seq"
            least = f"the smallest peak is {peak:,.0f} MiB"
            return f"out of memory: by estimate, no choice of {what} fits: {least}; allowed: {need}"
    return ""
