"""Points of a sweep, in a process of their own: each line of stdin says what to measure, each answer is one of JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nntile_py import _core
from nntile_py.analysis import cluster_plan
from nntile_py.analysis.plan import estimate
from nntile_py.analysis.workloads import FORWARD, Built, build, of_evaluation, of_step, small_graph, spec_of
from nntile_py.config.builders import build_model, step_spec, tiling
from nntile_py.config.run_config import RunConfig, runtime_options
from nntile_py.errors import NNTileError
from nntile_py.execution import memory
from nntile_py.execution.mpi import ranks
from nntile_py.execution.runtime import Runtime
from nntile_py.measure.config_peer import inputs_of, torch_side
from nntile_py.measure.sweep_spec import METRICS, Measure
from nntile_py.measure.torch_layer import WORKS, torch_layer
from nntile_py.profiling.operator_timer import runner, small_program
from nntile_py.system import launcher as system
from nntile_py.system.clock import clocked
from nntile_py.system.load import Load, among
from nntile_py.tasks.op import CATEGORIES
from nntile_py.training.collectives import ranks_of_run
from nntile_py.training.repeated_steps import forward_passes, same_steps


def main() -> int:
    """Status 0, or 1 at the first point that fails, with {"error": ...}. All points have one `runtime`.

    Of several ranks the first is asked and answers."""
    try:
        with ExitStack() as running:  # StarPU, from the first point that needs it
            for line in _asked():
                what = json.loads(line)
                result = measure(RunConfig.model_validate(what["config"]), Measure(**what["measure"]), running)
                if system.leads():
                    print("\n" + json.dumps(result), flush=True)
                gc.collect()  # the point's tiles: the next one needs their place
    except (NNTileError, MemoryError, OSError) as error:
        system.failing()
        print("\n" + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def _asked() -> Iterator[str]:
    """Lines of stdin, which the first rank has for all."""
    if system.started()[1] == 1:
        yield from sys.stdin
        return
    every = ranks()
    while line := every.from_first(sys.stdin.readline() if system.leads() else ""):
        yield line


def measure(config: RunConfig, how: Measure, running: ExitStack) -> dict[str, Any]:
    """The metrics of a point. Starts the runtime, which stops with `running`."""
    _forget_peak()
    if how.contestant != "nntile":
        if config.runtime.cuda:
            memory.forget_gpu_peak()
        if how.work in WORKS:
            options = {"captured": bool(how.captured), "autotune": how.autotune, "stacked": how.stacked}
            return _timed(config, how, torch_layer(config, how.work, how.phase, how.contestant, **options))
        return _timed(config, how, torch_side(config, inputs_of(config, how.work, how.alpha), how.contestant, how.work))
    machines = how.gpus_per_node, how.network, how.gpus_per_nic
    if on := cluster_plan.requested_cluster(config, how.nodes, *machines, name="measure.{}".format):
        return _on_nodes(config, on, how)
    whole = how.how == "run" and how.work in ("train", *FORWARD)  # made with what runs it
    built = None if whole else build(config, how.work, how.phase)
    if how.how != "plan" and Runtime.current is None:
        running.enter_context(Runtime(**runtime_options(config.runtime.model_dump()), mpi=True))
    if whole:
        built, step = (_training if how.work == "train" else _forward)(config, how)
    assert built is not None
    plan = estimate(built.lists, config.workers, gpu=config.runtime.cuda != 0)
    facts = {"tasks": plan.tasks, "flop": built.flop, "bytes_moved": plan.bytes_moved, "peak_bytes": plan.peak_bytes}
    facts |= {"parallelism": plan.parallelism, "planned_task_us": plan.mean_task * 1e6}
    if how.how == "plan":
        return facts | {"seconds": plan.seconds}
    if how.how == "operators":
        return facts | _operators(config, how)
    timed = _timed(config, how, step if whole else small_program(built.graphs[0], config, how.captured))
    seconds = timed["seconds"]
    rates = {"gflop_per_s": built.flop / seconds / 1e9, "us_per_task": seconds / max(plan.tasks, 1) * 1e6}
    return facts | timed | rates


def _on_nodes(config: RunConfig, on: cluster_plan.Cluster, how: Measure) -> dict[str, Any]:
    """What `nntile plan --nodes` tells."""
    made = cluster_plan.plan_cluster(config, on, strong=how.strong)
    told = {key: of for key, of in made.to_dict().items() if key in METRICS["nodes"] and of is not None}
    return told | {"seconds": made.step_seconds, "gpus": on.nodes * on.workers, "limit": made.limit}


def _timed(config: RunConfig, how: Measure, step: Callable[[int], Any]) -> dict[str, Any]:
    """What is known of every contestant."""
    with Load() as load:
        times = _times(step, how)
    all_ranks = ranks_of_run()
    loads = all_ranks.to_first(load) if all_ranks else [load]
    others = among(loads)["others"] if loads else None
    seconds = statistics.median(times)
    tokens = how.alpha * config.train.batch * config.train.seq
    tokens *= config.train.grad_accumulation if how.work == "train" else 1
    return {
        "seconds": seconds, "seconds_min": min(times), "seconds_max": max(times),
        "ms": seconds * 1e3, "us": seconds * 1e6, "best ms": min(times) * 1e3, "best us": min(times) * 1e6,
        "tokens_per_s": tokens / seconds, "times": times, "peak_mib": _peak_mib(config), "others": others,
    }  # fmt: skip


def _forget_peak() -> None:
    if _core.cuda_workers():  # of the points before
        memory.forget_gpu_peak()
    with suppress(OSError):  # where it is not allowed the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mib(config: RunConfig) -> float:
    """Of main memory, or of the fullest GPU where GPUs work."""
    if config.runtime.cuda:
        return memory.gpu_peak() / 2**20
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _times(step: Callable[[int], Any], how: Measure) -> list[float]:
    if how.warmup:
        step(how.warmup)
    return clocked(step, how.repeats, how.steps)


def _training(config: RunConfig, how: Measure) -> tuple[Built, Callable[[int], Any]]:
    """Steps on random inputs, with fresh weights."""
    from nntile_py.training.run import build_trainer

    trainer = build_trainer(config)
    assert Runtime.current
    Runtime.current.forget(trainer)  # nobody wants the weights back
    run = same_steps(trainer, inputs_of(config, "train", how.alpha, trainer.spec))
    return of_step(trainer.built, config.train.grad_accumulation), run


def _forward(config: RunConfig, how: Measure) -> tuple[Built, Callable[[int], Any]]:
    """Forward passes on random inputs; nothing that only training needs is made."""
    spec = spec_of(config, how.work) if how.work == "attention" else step_spec(config, build_model(config))
    made, run = forward_passes(spec, inputs_of(config, how.work, how.alpha, spec), how.captured)
    return of_evaluation(made), run


def _operators(config: RunConfig, how: Measure) -> dict[str, Any]:
    """Each operator of a small graph alone, tiles in memory beforehand: seconds and flop by class of operator."""
    graph = small_graph(config, how.work, config.fusion, backward=how.phase != "forward")
    cuts = tiling(config)
    classes = {name: {"seconds": 0.0, "flop": 0.0} for name in (category.name for category in CATEGORIES)}
    for op in graph.ops:
        if how.phase in ("all", op.phase):
            entry = classes[op.category.name]
            entry["flop"] += graph.computed(op, cuts)
            entry["seconds"] += min(_times(runner(op, cuts, config), how))  # the least disturbed
    total = {key: sum(entry[key] for entry in classes.values()) for key in ("seconds", "flop")}
    result = {"seconds": total["seconds"]}
    for name, entry in classes.items():
        result |= {f"{name} {key}": value for key, value in entry.items()}
        result |= {f"{name} % {key}": 100 * value / (total[key] or 1.0) for key, value in entry.items()}
    return result
