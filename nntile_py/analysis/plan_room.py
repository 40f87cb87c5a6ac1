"""Check whether a planned step fits into memory. A plan refuses the steps that a run refuses before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nntile_py.config.builders import room
from nntile_py.errors import TaskError
from nntile_py.execution import memory_checks
from nntile_py.execution.disk import kept_kinds
from nntile_py.system.cgroup import machine_memory
from nntile_py.tiles import device_model

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


def refusal(config: RunConfig, step: Step, choices: Mapping[str, Sequence[Alternative]]) -> str:
    """Return why a run of the config would not fit into memory; an empty text if a run fits.

    Args:
        config: The config, with a number of micro-batches.
        step: The planned step.
        choices: {name of a choice: the estimates that `auto` has compared}.
    """
    workers, machine = _Workers.of(config), machine_memory()
    other = (workers.memory or 0) > machine  # the plan is for a machine with more memory
    main = workers.memory if other else machine
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
