"""The worker process of all measurements: sweeps, experiments and the contestants of `nntile bench step`.

A request and its answer are each one line of JSON. A request has one or both of these parts:
    config, measure[, sets, contestant, place]: Start a workload, and warm it up. `config`: a resolved config, or the
        path of a config. `measure`: a section of a sweep. `sets`: a list of KEY=VALUE that override keys of the config,
        only if `config` is a path. `contestant`: replaces the contestant of `measure`. `place`: rank and port of this
        process, for a contestant with a process for each GPU.
    repeats, steps: Time the workload `repeats` times, each time over `steps` steps in flight together.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nntile_py import _core
from nntile_py.analysis import cluster_plan
from nntile_py.analysis.workloads import FORWARD, Built, build, of_evaluation, of_step, small_graph, spec_of
from nntile_py.config.builders import build_model, step_spec, tiling, with_micro_batches
from nntile_py.config.run_config import RunConfig, load
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.errors import NNTileError
from nntile_py.execution import memory
from nntile_py.execution.mpi import ranks
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.estimate import estimate
from nntile_py.graph.packed_flop import PackedFlop
from nntile_py.graph.padding import lengths_of
from nntile_py.graph.step import TILE_DTYPE, StepSpec
from nntile_py.measure.sweep_spec import METRICS, Measure
from nntile_py.measure.workload_inputs import Array, count_tokens, inputs_of, planned_flop
from nntile_py.profiling.operator_timer import runner, small_program
from nntile_py.profiling.peak_rates import largest_flop
from nntile_py.system import launcher
from nntile_py.system.clock import clocked
from nntile_py.system.load import Load, among
from nntile_py.tasks.op import CATEGORIES
from nntile_py.tiles import Tiling, device_model
from nntile_py.training.collectives import ranks_of_run
from nntile_py.training.repeated_steps import filled_pass, forward_passes, same_steps
from nntile_py.training.trainer import Trainer

Run = Callable[[int], Any]  # runs n steps; returns their losses, if it has any
ABOVE_PEAK = 1.25  # rates up to this many times the measured peak are accepted: the peak's measurement is inexact
RESERVE = 2**30  # bytes of measure.gpu_memory for kernels' workspaces; tiles use the rest


def main() -> None:
    """Serve requests until stdin ends or a request fails. The answer to a failed request is {"error": ...}.

    MPI ranks serve each request together; rank 0 reads and answers."""
    with ExitStack() as running:  # stops StarPU, which starts with the first request that needs it
        session: Session | None = None
        try:
            for line in _requests():
                request = json.loads(line)
                answer: dict[str, Any] = {}
                if "config" in request:
                    session = None
                    gc.collect()  # frees the tiles of the earlier request
                    session = Session(request, running)
                    answer |= session.facts
                if "repeats" in request and session and session.run:
                    answer |= session.times(request["repeats"], request["steps"])
                if launcher.leads():
                    print("\n" + json.dumps(answer), flush=True)
        except Exception as error:
            launcher.failing()
            text = f"{type(error).__name__}: {error}".strip()
            if not isinstance(error, NNTileError):  # an internal error: its traceback is needed
                traceback.print_exc()
                text = text.splitlines()[0][:400]
            print("\n" + json.dumps({"error": text}), flush=True)
            if launcher.started()[1] == 1:  # without stopping the runtime, which could wait forever
                sys.stderr.flush()
                os._exit(1)
            running.close()
            sys.exit(1)


def _requests() -> Iterator[str]:
    """Yield the lines of stdin, which rank 0 reads for all ranks."""
    if launcher.started()[1] == 1:
        yield from sys.stdin
        return
    all_ranks = ranks()
    while line := all_ranks.from_first(sys.stdin.readline() if launcher.leads() else ""):
        yield line


class Session:
    """A workload that a request started.

    Attributes:
        run: runs a number of steps; None if there is nothing to time: a plan, or operators that are timed at the start.
        facts: figures that need no timing of `run`.
    """

    def __init__(self, request: Mapping[str, Any], running: ExitStack) -> None:
        source = request["config"]
        config = load(source, request.get("sets", [])) if isinstance(source, str) else RunConfig.model_validate(source)
        config = with_micro_batches(config)
        how = Measure(**request["measure"])
        how = how.model_copy(update={"contestant": request.get("contestant", how.contestant)})
        self.config, self.measure = config, how
        _forget_peak(self.config, self.measure.contestant)
        if self.measure.gpu_memory and config.runtime.cuda:
            self._limit_memory(self.measure.gpu_memory)
        self.run: Run | None
        if self.measure.contestant == "nntile":
            self.run, self.facts = _ours(self.config, self.measure, running)
        else:
            from nntile_py.measure.torch_contestant import torch_contestant

            self.run, self.facts = torch_contestant(self.config, self.measure, request.get("place"))
        losses = self.run(self.measure.warmup) if self.run and self.measure.warmup else None
        if losses:
            if not all(map(math.isfinite, losses)):
                raise NNTileError(f"the losses of the first steps are {', '.join(f'{loss:.4g}' for loss in losses)}")
            self.facts["losses"] = losses

    def _limit_memory(self, most: int) -> None:
        """Limit PyTorch's allocator to `most` bytes of each GPU, and tiles to RESERVE bytes less."""
        import torch

        for device in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
        runtime = self.config.runtime.model_copy(update={"cuda_memory": max(most - RESERVE, RESERVE // 2)})
        self.config = self.config.model_copy(update={"runtime": runtime})

    def times(self, repeats: int, steps: int) -> dict[str, Any]:
        """Time the run `repeats` times, each time over `steps` steps; return its metrics, with flop/s if known."""
        assert self.run
        with Load() as load:
            times = clocked(self.run, repeats, steps)
        all_ranks = ranks_of_run()
        loads = all_ranks.to_first(load) if all_ranks else [load]
        seconds, facts, host = statistics.median(times), self.facts, _host_mib()
        hosts = (all_ranks.to_first(host) if all_ranks else None) or [host]
        metrics = {
            "seconds": seconds, "seconds_min": min(times), "seconds_max": max(times),
            "ms": seconds * 1e3, "us": seconds * 1e6, "best ms": min(times) * 1e3, "best us": min(times) * 1e6,
            "tokens_per_s": facts["tokens"] / seconds, "times": times,
            "peak_mib": memory.gpu_peak() / 2**20 if self.config.runtime.cuda else max(hosts), "host_mib": sum(hosts),
            "others": among(loads)["others"] if loads else None,
        }  # fmt: skip
        if "flop" in facts:
            check_rate(self.config, facts["flop"] / seconds)
            metrics |= {"gflop_per_s": facts["flop"] / seconds / 1e9}
            metrics |= {"us_per_task": seconds / max(facts["tasks"], 1) * 1e6}
        return metrics


def check_rate(config: RunConfig, flop_per_s: float) -> None:
    """Raise NNTileError if the flop/s exceed ABOVE_PEAK times the workers' peak: the flop count is then wrong.

    The peak is determined, on CPUs by a measurement, only if the flop/s are above those that plans assume.
    """
    gpu = config.runtime.cuda != 0
    if flop_per_s <= config.workers * device_model.worker(TILE_DTYPE[config.precision], gpu).flop_s:
        return
    peak = largest_flop(config)
    for _ in range(0 if gpu else 4):  # other programs may have disturbed the measurement
        if peak and flop_per_s > ABOVE_PEAK * peak:
            peak = max(peak, largest_flop(config) or 0.0)
    if peak and flop_per_s > ABOVE_PEAK * peak:
        rate, most = (f"{value / 1e9:,.0f} Gflop/s" for value in (flop_per_s, peak))
        raise NNTileError(f"{rate} are more than the workers' peak of {most}: the flop are counted wrongly")


def _forget_peak(config: RunConfig, contestant: str) -> None:
    """Reset the peaks of GPU memory and main memory."""
    if _core.cuda_workers() or (config.runtime.cuda and contestant != "nntile"):
        memory.forget_gpu_peak()
    with suppress(OSError):  # not permitted: the peak is then that of the process since its start
        Path("/proc/self/clear_refs").write_text("5")


def _host_mib() -> float:
    """Return the peak of this process's main memory, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


# -- the contestant nntile


def _ours(config: RunConfig, how: Measure, running: ExitStack) -> tuple[Run | None, dict[str, Any]]:
    """Start or plan nntile_py's workload; return the function that runs steps (None: nothing to time), and the facts.

    The runtime stops with `running`.
    """
    network = how.gpus_per_node, how.network, how.gpus_per_nic
    if cluster := cluster_plan.requested_cluster(config, how.nodes, *network, name="measure.{}".format):
        return None, _on_nodes(config, cluster, how)
    model = how.how == "run" and how.work in ("train", *FORWARD)  # _training and _forward build it
    built = None if model else build(config, how.work, how.phase)
    if how.how != "plan" and Runtime.current is None:
        running.enter_context(Runtime(**runtime_options(config.runtime.model_dump()), mpi=True))
    run: Run | None = None
    tokens = round(how.alpha * config.train.batch * config.train.seq)
    if model:
        built, run, tokens = (_training if how.work == "train" else _forward)(config, how)
    assert built is not None
    plan = estimate(built.lists, config.workers, gpu=config.runtime.cuda != 0)
    flop = built.flop if model else planned_flop(config, how.work, how.alpha, built)
    facts = {"tasks": plan.tasks, "flop": flop, "bytes_moved": plan.bytes_moved, "peak_bytes": plan.peak_bytes}
    facts |= {"parallelism": plan.parallelism, "planned_task_us": plan.mean_task * 1e6}
    if how.how == "plan":
        return None, facts | {"seconds": plan.seconds}
    if how.how == "operators":
        return None, facts | _operators(config, how)
    return run or small_program(built.graphs[0], config, how.captured), facts | {"tokens": tokens}


def _on_nodes(config: RunConfig, cluster: cluster_plan.Cluster, how: Measure) -> dict[str, Any]:
    """Return the metrics of a step simulated on several nodes, as by `nntile plan --nodes`."""
    plan = cluster_plan.plan_cluster(config, cluster, strong=how.strong)
    metrics = {key: value for key, value in plan.to_dict().items() if key in METRICS["nodes"] and value is not None}
    return metrics | {"seconds": plan.step_seconds, "gpus": cluster.nodes * cluster.workers, "limit": plan.limit}


def _training(config: RunConfig, how: Measure) -> tuple[Built, Run, int]:
    """Build training steps: return graphs with task lists, the function that runs steps, and a step's token count.

    Inputs are random, weights are initial weights.
    """
    model = build_model(config)
    spec = step_spec(config, model)
    inputs = inputs_of(config, "train", how.alpha, spec)
    trainer = Trainer.of_spec(
        tight_bins(spec, inputs) if spec.pack else spec, seed=config.seed, check_finite=config.debug.nonfinite
    )
    assert Runtime.current
    Runtime.current.forget(trainer)  # its weights are not read back
    built, filled = of_step(trainer.built, config.train.grad_accumulation), trainer.filled(inputs)
    if spec.pack:
        built.flop = trainer.built.packed_flop(filled)
    return built, same_steps(trainer, filled), count_tokens(config, "train", inputs)


def _forward(config: RunConfig, how: Measure) -> tuple[Built, Run, int]:
    """Build forward passes: return graphs with task lists, the function that runs passes, and a pass's token count.

    Inputs are random. Tensors that only training needs do not exist.
    """
    spec = spec_of(config, how.work) if how.work == "attention" else step_spec(config, build_model(config))
    inputs = inputs_of(config, how.work, how.alpha, spec)
    filled = filled_pass(spec, inputs)
    evaluation, run = forward_passes(spec, filled, how.captured)
    built = of_evaluation(evaluation)
    if spec.pack:
        built.flop = PackedFlop.of(evaluation.graph)(filled)
    return built, run, count_tokens(config, how.work, inputs)


def tight_bins(spec: StepSpec, inputs: Mapping[str, Array]) -> StepSpec:
    """Return a packed step with bins that are just large enough for these inputs.

    So nntile_py's bins are about as long as PyTorch's packed arrays, which hold exactly the tokens. A bin's length is a
    multiple of train.seq."""
    lengths, parts = lengths_of(inputs, spec.seq), spec.grad_accumulation
    least = math.ceil(sum(lengths) / (spec.seq * spec.rows * parts))
    for size in range(least, spec.capacity // spec.seq):
        narrow = replace(spec, batch=spec.rows * size, tiling=Tiling({**spec.tiling.tiles, "batch": size}))
        with suppress(ValueError):  # the sequences do not fit
            bins_of(narrow).places(lengths, parts)
            return narrow
    return spec


def _operators(config: RunConfig, how: Measure) -> dict[str, Any]:
    """Time each operator of a small graph by itself; return seconds and flop by class of operator."""
    graph = small_graph(config, how.work, config.fusion, backward=how.phase != "forward")
    cuts = tiling(config)
    classes = {name: {"seconds": 0.0, "flop": 0.0} for name in (category.name for category in CATEGORIES)}
    for op in graph.ops:
        if how.phase in ("all", op.phase):
            run, entry = runner(op, cuts, config), classes[op.category.name]
            if how.warmup:
                run(how.warmup)
            entry["flop"] += graph.computed(op, cuts)
            entry["seconds"] += min(clocked(run, how.repeats, how.steps))  # the time that was disturbed least
    total = {key: sum(entry[key] for entry in classes.values()) for key in ("seconds", "flop")}
    result = {"seconds": total["seconds"]}
    for name, entry in classes.items():
        result |= {f"{name} {key}": value for key, value in entry.items()}
        result |= {f"{name} % {key}": 100 * value / (total[key] or 1.0) for key, value in entry.items()}
    return result


if __name__ == "__main__":
    main()
