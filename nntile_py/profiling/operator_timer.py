"""Operators by themselves: each with its own tasks, over and over, on the workers of the runtime that is up."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.analysis.counts import alone, looks
from nntile_py.analysis.operators import Analysis, Peaks, Row
from nntile_py.config.builders import default_layouts, step_spec
from nntile_py.config.run_config import RunConfig, runtime_options
from nntile_py.errors import NNTileError
from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.program import Program, Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.graph import Graph
from nntile_py.graph.step import Evaluation
from nntile_py.models.init import fill
from nntile_py.profiling.recorder import known_peak
from nntile_py.profiling.trace_analysis import Peak
from nntile_py.system.clock import clocked, runs_to_measure
from nntile_py.system.load import Load, is_busy
from nntile_py.tasks.op import Lowering, Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import DTYPES

SLOTS = {"lr": 1e-3, "beta1_correction": 0.1, "beta2_correction": 0.05}  # others: 1
COPIES = 64  # of an operator's tiles, at most


def measure(made: Analysis, config: RunConfig, repeats: int = 7) -> Analysis:
    """The same with the median seconds of each row, before and after fusion, on the workers of `config`.

    The peaks are those of the profiler's roofline, of all workers; at least what an operator reached."""
    with Runtime(**runtime_options(config.runtime.model_dump())):
        clock = _Clock(config, repeats)
        with Load() as load:
            operators = [replace(row, seconds=clock.row(row)) for row in made.operators]
            groups = [replace(row, seconds=clock.row(row)) for row in made.groups]
        peaks = _peaks(config, [*operators, *groups])
    if is_busy(load.others):
        told = f"{peaks.source}; other processes kept {load.others:.1f} cores busy meanwhile: times are too long"
        peaks = replace(peaks, source=told)
    return replace(made, operators=operators, groups=groups, peaks=peaks)


class _Clock:
    """Times operators; what looks alike, once."""

    def __init__(self, config: RunConfig, repeats: int) -> None:
        self.config, self.repeats = config, repeats
        self.cuts = step_spec(default_layouts(config)).cuts
        self._known: dict[Hashable, float] = {}

    def row(self, row: Row) -> float:
        """NNTileError: there is not enough memory for its tiles."""
        try:
            return math.fsum(count * self.seconds(op) for op, count in row.ops)
        except MemoryError as error:
            sizes = self.config.train
            less = f"batch={sizes.batch // 2}" if sizes.batch > 1 else f"seq={sizes.seq // 2}"
            need = f"--measure has its tensors whole in main memory; use smaller sizes, such as --set train.{less}"
            raise NNTileError(f"out of memory at {row.name}: {error}; {need}") from None

    def seconds(self, op: Op) -> float:
        key = looks(op)
        if key not in self._known:
            run = runner(op, self.cuts, self.config)
            self._known[key] = statistics.median(clocked(run, self.repeats, runs_to_measure(run)))
        return self._known[key]


def runner(op: Op, cuts: Tiling, config: RunConfig, room: int = 0) -> Callable[[int], None]:
    """What runs the operator's tasks so many times, its tiles in memory beforehand.

    room: bytes that its tiles are to take at least. Where they take less there are copies of them, and each run takes
    the next one: then what they hold comes from memory, not from a cache of less than these bytes."""
    owners = list(dict.fromkeys(t.storage for t in [*op.inputs, *op.outputs]))
    before = [(t.name, t.kind) for t in owners]
    for number, tensor in enumerate(owners):  # all of it lives from run to run, under names that do not clash
        tensor.name, tensor.kind = f"tensor{number}", "input"
    try:
        low = alone(op, cuts, config.accumulate)
        own = sum(tensor.elements * DTYPES[tensor.dtype].bytes for tensor in owners)
        values, made = _random(owners), []
        for _ in range(min(max(math.ceil(room / own), 1), COPIES)):
            store = Store()
            _write(low, store, owners, values)
            made += programs([low.tasks], store, config.precision == "tf32")
    finally:
        for tensor, (name, kind) in zip(owners, before, strict=True):
            tensor.name, tensor.kind = name, kind
    run = _each(made)
    if len(made) > 1:
        run(len(made))  # each one's first run takes longer
    return run


def small_program(
    made: tuple[Graph, Lowering], config: RunConfig, captured: bool | None = False
) -> Callable[[int], None]:
    """The task list of a small graph, on random values. captured: as a CUDA graph, see Served."""
    graph, low = made
    tf32 = config.precision == "tf32"
    program = ForwardProgram(Evaluation(graph, {}, low), Store(), tf32=tf32, captured=captured)
    write_random(low, program.store, [t for t in graph.tensors.values() if t.kind in ("input", "param")])
    return _each([program.served])


def _each(made: Sequence[Program | Served]) -> Callable[[int], None]:
    """What runs so many programs, each in its turn. Every run has a seed of its own."""
    turns, seeds = itertools.cycle(made), itertools.count(1)

    def run(count: int) -> None:
        for program in itertools.islice(turns, count):
            slots = SLOTS | {"dropout_seed": float(next(seeds))}
            program.run({slot: slots.get(slot, 1.0) for slot in program.slots})
        Runtime.wait()

    return run


def write_random(low: Lowering, store: Store, tensors: Sequence[Tensor]) -> None:
    """Numbers from 0.1 to 1; zeros where they are whole; weights from -1 to 1 over the root of their longest axis, as a
    model's are in size: from larger ones softmax gets numbers whose exponentials are slow."""
    _write(low, store, tensors, _random(tensors))


def _random(tensors: Sequence[Tensor]) -> list[np.ndarray[Any, Any]]:
    values = [np.empty(tensor.shape, DTYPES[tensor.dtype].numpy) for tensor in tensors]

    def draw(rng: np.random.Generator, block: np.ndarray[Any, Any], number: int) -> None:
        drawn, tensor = rng.random(block.size, np.float32), tensors[number]
        block[:] = (2 * drawn - 1) / math.sqrt(max(tensor.shape)) if tensor.kind == "param" else 0.1 + 0.9 * drawn

    fill(values, 0, draw)
    return values


def _write(low: Lowering, store: Store, tensors: Sequence[Tensor], values: Sequence[np.ndarray[Any, Any]]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        store.write(low, tensor, value)


def _peaks(config: RunConfig, rows: Sequence[Row]) -> Peaks:
    gpus = _core.cuda_workers()
    count = gpus or config.workers
    peak: Peak = known_peak("CUDA" if gpus else "CPU", _device() if gpus else "", count, config)
    best = max(rows, key=lambda row: row.flop / (row.seconds or math.inf))
    reached = best.flop / best.seconds if best.seconds else 0.0
    flop = None if peak.flop is None else count * peak.flop
    source = peak.source
    if flop is not None and reached > flop:
        source += f"; it gave {flop / 1e9:,.1f} Gflop/s, {best.name} reached more in this run"
        flop = reached
    return Peaks(flop, None if peak.bytes is None else count * peak.bytes, source)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name(0)
