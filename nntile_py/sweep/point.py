"""Points of a sweep, in a process of their own: each line of stdin says what to measure, each answer is one of JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nntile_py import _core
from nntile_py.analysis.plan import estimate
from nntile_py.analysis.workloads import Built, build, of_step, small_graph
from nntile_py.config.run import RunConfig, runtime_options
from nntile_py.config.spec import build_model, predicted, tiling
from nntile_py.errors import NNTileError
from nntile_py.execution import memory
from nntile_py.execution.program import Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.declared import random_inputs
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.profiling.alone import SLOTS, clocked, runner, write_random
from nntile_py.sweep.spec import Measure
from nntile_py.system.load import Load
from nntile_py.tasks.op import CATEGORIES, Lowering


def main() -> int:
    """Status 0, or 1 at the first point that fails, with {"error": ...}. All points have one `runtime`."""
    try:
        with ExitStack() as running:  # StarPU, from the first point that needs it
            for line in sys.stdin:
                what = json.loads(line)
                result = measure(RunConfig.model_validate(what["config"]), Measure(**what["measure"]), running)
                print("\n" + json.dumps(result), flush=True)
                gc.collect()  # the point's tiles: the next one needs their place
    except (NNTileError, MemoryError, OSError) as error:
        print("\n" + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def measure(config: RunConfig, how: Measure, running: ExitStack) -> dict[str, Any]:
    """The metrics of a point. Starts the runtime, which stops with `running`."""
    _forget_peak()
    unequal = how.work == "inference" and (config.train.pack or how.alpha < 1)  # sequences: a Trainer knows of them
    trains = how.how == "run" and (how.work == "train" or unequal)
    built = None if trains else build(config, how.work, how.phase)
    if how.how != "plan" and Runtime.current is None:
        running.enter_context(Runtime(**runtime_options(config.runtime.model_dump())))
    if trains:
        built, step = _training(config, how)
    assert built is not None
    plan = estimate(built.lists, config.workers, gpu=config.runtime.cuda != 0)
    facts = {"tasks": plan.tasks, "flop": built.flop, "bytes_moved": plan.bytes_moved, "peak_bytes": plan.peak_bytes}
    facts |= {"parallelism": plan.parallelism, "planned_task_us": plan.mean_task * 1e6}
    if how.how == "plan":
        return facts | {"seconds": plan.seconds}
    if how.how == "operators":
        return facts | _operators(config, how)
    if not trains:
        step = _inference(config, built) if how.work == "inference" else _program(built.graphs[0], config)
    with Load() as load:
        times = _times(step, how)
    seconds = statistics.median(times)
    tokens = how.alpha * config.train.batch * config.train.seq
    tokens *= config.train.grad_accumulation if how.work == "train" else 1
    return facts | {
        "seconds": seconds, "seconds_min": min(times), "seconds_max": max(times),
        "ms": seconds * 1e3, "us": seconds * 1e6, "best ms": min(times) * 1e3, "best us": min(times) * 1e6,
        "tokens_per_s": tokens / seconds, "gflop_per_s": built.flop / seconds / 1e9,
        "us_per_task": seconds / max(plan.tasks, 1) * 1e6, "times": times,
        "peak_mib": _peak_mib(), "others": load.others,
    }  # fmt: skip


def _forget_peak() -> None:
    if _core.cuda_workers():  # of the points before
        memory.forget_gpu_peak()
    with suppress(OSError):  # where it is not allowed the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    """Of main memory, or of the fullest GPU where GPUs work."""
    if _core.cuda_workers():
        return memory.gpu_peak() / 2**20
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _times(step: Callable[[int], None], how: Measure) -> list[float]:
    if how.warmup:
        step(how.warmup)
    return clocked(step, how.repeats, how.steps)


def _training(config: RunConfig, how: Measure) -> tuple[Built, Callable[[int], None]]:
    """Steps, or evaluations, on random inputs, with fresh weights."""
    from nntile_py.training.loop import build_trainer

    trainer = build_trainer(config)
    assert Runtime.current
    Runtime.current.forget(trainer)  # nobody wants the weights back
    rows = config.train.batch * (config.train.grad_accumulation if how.work == "train" else 1)
    inputs = trainer.spec.random_inputs(rows, config.seed, how.alpha, predicted(config))

    def run(count: int) -> None:
        if how.work != "train":
            for _ in range(count):
                trainer.evaluate(inputs)
            return
        for pending in [trainer.submit(inputs) for _ in range(count)]:
            pending.result()

    return of_step(trainer.built, config.train.grad_accumulation), run


def _inference(config: RunConfig, built: Built) -> Callable[[int], None]:
    """Forward passes with a loss on random inputs; nothing that only training needs is made."""
    graph, low = built.graphs[0]
    weights, store = build_model(config).weights, Store()
    (program,) = programs([low.tasks], store, config.precision == "tf32")
    for param in built.params:
        store.write(low, param.tensor, param.value(weights))
    inputs = random_inputs(graph, config.train.batch, config.seed)
    for name, one in graph.inputs.items():
        if (value := one.filled(config.train.batch)) is not None and name not in inputs:
            store.write(low, one.tensor, value)
    scales = {one.scale: 1.0 / inputs[name].size for name, one in graph.inputs.items() if one.scale}

    def run(count: int) -> None:
        for _ in range(count):
            for name, value in inputs.items():
                store.write(low, graph.inputs[name].tensor, value)
            program.run(scales)
            Runtime.wait()

    return run


def _program(made: tuple[Graph, Lowering], config: RunConfig) -> Callable[[int], None]:
    """The task list of a small graph, on random values."""
    graph, low = made
    store = Store()
    write_random(low, store, [t for t in graph.tensors.values() if t.kind in ("input", "param")])
    (program,) = programs([low.tasks], store, config.precision == "tf32")

    def run(count: int) -> None:
        for _ in range(count):
            program.run({slot: SLOTS.get(slot, 1.0) for slot in program.slots})
        Runtime.wait()

    return run


def _operators(config: RunConfig, how: Measure) -> dict[str, Any]:
    """Each operator of a small graph alone, tiles in memory beforehand: seconds and flop by class of operator."""
    graph = small_graph(config, how.work, Fusion.of(config.fusion.model_dump()), backward=how.phase != "forward")
    cuts = tiling(config)
    classes = {name: {"seconds": 0.0, "flop": 0.0} for name in (category.name for category in CATEGORIES)}
    for op in graph.ops:
        if how.phase in ("all", op.phase):
            entry = classes[op.category.name]
            entry["flop"] += op.flop()
            entry["seconds"] += min(_times(runner(op, cuts, config), how))  # the least disturbed
    total = {key: sum(entry[key] for entry in classes.values()) for key in ("seconds", "flop")}
    result = {"seconds": total["seconds"]}
    for name, entry in classes.items():
        result |= {f"{name} {key}": value for key, value in entry.items()}
        result |= {f"{name} % {key}": 100 * value / total[key] for key, value in entry.items()}
    return result
