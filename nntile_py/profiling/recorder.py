"""Run steps of a config under StarPU's task profiling, and convert StarPU's records to a Trace."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.analysis.tile_advice import coarse, sizes
from nntile_py.config.builders import tiling
from nntile_py.config.run_config import RunConfig
from nntile_py.errors import TaskError
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.fusion import every_rule
from nntile_py.graph.step import StepSpec
from nntile_py.profiling.merge_ranks import merge_traces, with_ends
from nntile_py.profiling.trace import REDUCTION, Bus, MessageEnd, TaskInfo, Trace, Worker, stream_starts
from nntile_py.system.clock import clocked
from nntile_py.system.folders import build_info
from nntile_py.tiles.dependencies import TileUse
from nntile_py.tiles.rank_tasks import MessageTask
from nntile_py.tiles.task import PYTHON, Task, name_and_phase
from nntile_py.tiles.tasklist import TaskList
from nntile_py.training.collectives import ranks_of_run
from nntile_py.training.repeated_steps import forward_passes, same_steps
from nntile_py.training.trainer import Trainer

# Columns of the records of execution/csrc/profile.cpp. ready: date at which the scheduler got the task.
COLUMNS = (
    "replay", "task", "worker", "submit", "ready", "pop", "popped", "fetch", "fetched", "start", "end", "released",
    "memory", "main_memory",
)  # fmt: skip
# Members of the struct Passage, a send or a receive, in execution/csrc/profile.h.
PASSAGE = ("replay", "index", "peer", "sends", "tag", "bytes", "posted", "ended")


# StarPU's task profiling takes up to 1.4 us a task. If this would be 5 % of a step, the profile is light (see watched).
LIGHT_BELOW = 30e-6  # seconds of a step divided by the number of its tasks


def run_steps(trainer: Trainer, steps: int, warmup: int) -> Trace:
    """Train on random inputs, `warmup` steps without a profile, then `steps` steps with one; return the trace."""
    inputs = trainer.spec.random_inputs(trainer.batch * trainer.grad_accumulation, seed=0)
    return _run(same_steps(trainer, inputs), trainer.tasks_per_step, steps, warmup, trainer.update_list)


def run_passes(spec: StepSpec, steps: int, warmup: int) -> Trace:
    """Run forward passes one by one, `warmup` without a profile, then `steps` with one; return the trace."""
    evaluation, run = forward_passes(spec, spec.random_inputs(spec.batch, seed=0, training=False), captured=False)
    each = len(evaluation.forward.tasks.tasks)
    return _run(lambda count: [loss for _ in range(count) for loss in run(1)], each, steps, warmup)


def _run(
    run: Callable[[int], Any], tasks: int, steps: int, warmup: int, update: TaskList | None = None
) -> Trace:  # fmt: skip
    """Return the trace of `steps` steps.

    The profile is light if tasks are shorter than LIGHT_BELOW and no worker is a GPU. Without a warm-up it is full.

    Args:
        run: runs a number of steps.
        tasks: approximate number of tasks of a step.
        update: the task list that ends a step; None: each program is a step.
    """
    light, expected = False, tasks * steps
    if warmup:
        run(warmup - 1)  # the first step takes longer
        lists: list[tuple[int, TaskList]] = []
        Runtime.watched = lists
        (seconds,) = clocked(run, 1)
        each = seconds / sum(len(of.tasks) for _, of in lists)
        Runtime.watched = None
        light = each < LIGHT_BELOW and not _core.cuda_workers()
    if all_ranks := ranks_of_run():
        light = bool(all_ranks.of_first(light))
    with watched(expected, light) as recording:
        run(steps)
    return recording.trace(update)


class Recording:
    """Raw data of a profile: task lists in the order of submission, StarPU's records, clocks of several ranks."""

    def __init__(self) -> None:
        self.programs: list[TaskList] = []
        self.native: dict[str, Any] = {}
        self.clocks: list[Any] = []

    def trace(self, update: TaskList | None) -> Trace:
        """Return the trace of all ranks on rank 0, a rank's own trace on other ranks. All ranks must call this."""
        own, all_ranks = make_trace(self.programs, self.native, update), ranks_of_run()
        parts = all_ranks.to_first((own, platform.node())) if all_ranks else None
        if not parts:
            return own
        traces, hosts = zip(*parts, strict=True)
        return merge_traces(traces, hosts, *self.clocks)


@contextmanager
def watched(expected: int = 0, light: bool = False) -> Iterator[Recording]:
    """Profile the programs that run in the context, which all ranks must enter.

    Args:
        expected: number of tasks for whose records memory is allocated beforehand.
        light: record only submission, start and end of each task, on CPU workers.
    """
    recording, all_ranks = Recording(), ranks_of_run()
    if all_ranks:
        all_ranks.barrier()
    _core.profile_begin(expected, light)
    if all_ranks:
        recording.clocks.append(all_ranks.clocks(_core.profile_now))
    runs: list[tuple[int, TaskList]] = []
    Runtime.watched = runs
    try:
        yield recording
        if all_ranks:
            _core.wait_all()
            recording.clocks.append(all_ranks.clocks(_core.profile_now))
    finally:
        Runtime.watched = None
        recording.native = _core.profile_finish()
        recording.programs = [tasks for _, tasks in sorted(runs, key=lambda run: run[0])]


def make_trace(programs: Sequence[TaskList], native: dict[str, Any], update: TaskList | None) -> Trace:
    """Return the trace of the programs of one rank.

    Args:
        programs: task lists in the order of submission.
        native: StarPU's records, from _core.profile_finish.
        update: the task list that ends a step; None: each program is a step.
    """
    infos: list[TaskInfo] = []
    first: dict[int, int] = {}  # by id of a task list: index of its first task in `infos`
    numbers: dict[Any, int] = {}
    offsets, steps, step = [], [], 1
    for tasks in programs:
        if id(tasks) not in first:
            first[id(tasks)] = len(infos)
            infos.extend(_info(task, tasks is update, numbers) for task in tasks.tasks)
        offsets.append(first[id(tasks)])
        between = all(isinstance(task, MessageTask) for task in tasks.tasks)  # messages between two lists: of no step
        steps.append(0 if between else step)
        step += int(not between if update is None else tasks is update)
    infos.append(TaskInfo("", REDUCTION, "", REDUCTION, "", 0.0, 0))
    events = native["events"]
    own = events[:, 0] == 0  # StarPU's own tasks come last
    events = events[np.lexsort((events[:, 3] * own, events[:, 1], events[:, 0], own))]
    column = {name: events[:, k].copy() for k, name in enumerate(COLUMNS)}
    own = column["replay"] == 0
    at = np.maximum(column["replay"] - 1, 0)
    info = np.where(own, len(infos) - 1, np.array([*offsets, 0])[at] + column["task"])
    names = ("name", "kind", "node")
    workers = [
        Worker(**{k: w[k] for k in names}, counters={k: v for k, v in w.items() if k not in names})
        for w in native["workers"]
    ]
    for number, worker in enumerate(workers):
        mine = column["worker"] == number
        if worker.kind != "CPU":
            column["start"][mine] = stream_starts(column["start"][mine], column["end"][mine])
    kept = ("replay", "worker", "submit", "pop", "fetch", "fetched", "start", "end", "released", "memory")
    trace = Trace(
        infos=infos,
        workers=workers,
        nodes=native["nodes"],
        buses=[Bus(**bus) for bus in native["buses"]],
        info=info,
        step=np.where(own, 0, np.array([*steps, 0])[at]),
        main_memory=column["main_memory"],
        light=native["light"],
        **{name: column[name] for name in kept},
    )
    with_ends(trace, _passages(native, infos, offsets, steps), column["replay"], column["task"])
    if trace.light:  # no record of the date at which a worker got a task: estimated as the date at which it was ready
        ends = trace.end.tolist()
        ready = [max((ends[other] for other in before), default=0) for before in trace.before]
        for end in trace.ends:
            for task in end.after:
                ready[task] = max(ready[task], end.ended)
        trace.pop = np.minimum(np.maximum(trace.submit, ready), trace.start)
    return trace


def _passages(
    native: dict[str, Any], infos: Sequence[TaskInfo], offsets: Sequence[int], steps: Sequence[int]
) -> list[tuple[int, int, TaskInfo, MessageEnd]]:
    """Return the sends and receives, sorted by submission and position in the task list.

    Returns:
        For each: number of its program's submission, position in the task list, its task, the send or receive.
    """
    passages = []
    for row in native["messages"][np.lexsort(native["messages"].T[[1, 0]])].tolist():
        record = dict(zip(PASSAGE, row, strict=True))
        replay, index = record.pop("replay"), record.pop("index")
        info = infos[offsets[replay - 1] + index]
        record["sends"] = bool(record["sends"])
        end = MessageEnd(name=info.tiles.partition(" ")[2], step=steps[replay - 1], **record)
        passages.append((replay, index, info, end))
    return passages


def _info(task: Task, updates: bool, numbers: dict[Any, int]) -> TaskInfo:
    name, phase = name_and_phase(task.op)
    phase = "update" if updates else phase
    if task.kernel == PYTHON:
        phase = ""
    layer, _, operator = name.rpartition(".")
    uses = []
    for access in task.accesses:
        number = numbers.setdefault(access.tile.key, len(numbers))
        uses.append(TileUse(number, access.mode, access.accumulate))
    tiles = ", ".join(f"{a.mode} {a.tile!r}" for a in task.accesses)
    parts = tuple(replace(_info(part, updates, {}), uses=(), estimated=True) for part in task.parts)
    return TaskInfo(layer, operator, phase, task.kernel, tiles, task.flop, task.bytes, tuple(uses), parts)


def axes(config: RunConfig, inference: bool = False) -> dict[str, dict[str, int]]:
    """Return for each axis its size, its tile, the number of tiles, and `good`: a tile that makes tasks long enough."""
    own, good, result = tiling(config), coarse(config, inference=inference).tiles, {}
    for axis, size in sizes(config).items():
        tile = own.tile(axis, size)
        result[axis] = {"size": size, "tile": tile, "tiles": -(-size // tile), "good": min(good.get(axis, size), size)}
    return result


def settings(config: RunConfig, inference: bool = False) -> dict[str, Any]:
    """Return the settings of a run on which the advice of diagnosis.py depends.

    `plannable`: whether `runtime.placement: planned` has an effect. `fused`: whether all switches of `fusion` are on.
    `limits`: the limits of memory and of tasks that the config sets.
    """
    runtime, gpus = config.runtime, config.workers if config.runtime.cuda else 0
    return {
        "inference": inference,
        "gpus": gpus,
        "scheduler": runtime.scheduler,
        "planned": config.planned,
        "plannable": gpus > 1 and runtime.cpus in (0, "all"),
        "limits": {key: value for key in ("memory", "cuda_memory", "window") if (value := getattr(runtime, key))},
        "accumulate": config.accumulate,
        "fused": every_rule(True).items() <= config.fusion.model_dump().items(),
        "attention": getattr(config.model, "attention", "vendor"),
        "pack": config.train.pack,
    }


def convert_fxt(folder: Path) -> None:
    """Convert FxT's raw file in `folder` by StarPU's tool to paje.trace and other files, for ViTE and StarVZ."""
    raw = sorted(str(path) for path in folder.glob("prof_file_*"))
    if not raw:
        raise TaskError("--fxt: StarPU wrote no trace, as it was built without FxT (libfxt-dev)")
    info = build_info()
    tool = Path(info["starpu_prefix"]) / "bin" / "starpu_fxt_tool"
    libraries = ":".join(filter(None, [info["starpu_libdir"], os.environ.get("LD_LIBRARY_PATH")]))
    env = os.environ | {"LD_LIBRARY_PATH": libraries}
    ran = subprocess.run([tool, "-i", *raw], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise TaskError(f"--fxt: {tool} failed: {ran.stderr.strip()[-300:]}")
