"""Timing of single operators: the tasks of an operator run repeatedly on the workers of the runtime."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nntile_py.analysis.counts import looks, lower_single
from nntile_py.analysis.operator_row import OperatorRow
from nntile_py.analysis.operators import Analysis
from nntile_py.analysis.roofline import Peak
from nntile_py.config.builders import default_layouts, step_spec
from nntile_py.config.run_config import RunConfig
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.errors import NNTileError
from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.program import Program, Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.built_step import Evaluation
from nntile_py.graph.graph import Graph
from nntile_py.graph.initial_weights import fill
from nntile_py.profiling.peak_rates import peak_of_workers
from nntile_py.system.clock import Run, clocked, clocked_in_turns, runs_to_measure
from nntile_py.system.load import Load, is_busy
from nntile_py.tasks.op import Lowering, Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import DTYPES

# Values of slots, the scalars that a program gets at each run; other slots are 1.
SLOTS = {"lr": 1e-3, "beta1_correction": 0.1, "beta2_correction": 0.05}
MOST_COPIES = 64  # largest number of copies of an operator's tiles


def measure(analysis: Analysis, config: RunConfig, repeats: int = 7) -> Analysis:
    """Measure each operator, before and after fusion, on the workers of `config`; return the analysis with the times.

    The analysis also gets the peak of all workers; its flop/s are at least the highest flop/s of an operator."""
    with Runtime(**runtime_options(config.runtime.model_dump())):
        timer = OperatorTimer(config, repeats)
        with Load() as load:
            operators = [replace(row, seconds=timer.row_seconds(row)) for row in analysis.operators]
            groups = [replace(row, seconds=timer.row_seconds(row)) for row in analysis.groups]
        peak = _peak(config, [*operators, *groups])
    if is_busy(load.others):
        busy = f"other processes kept {load.others:.1f} cores busy meanwhile: times are too long"
        peak = replace(peak, source=f"{peak.source}; {busy}")
    return replace(analysis, operators=operators, groups=groups, peak=peak)


class OperatorTimer:
    """Times single operators, with the tiles that the config has in default layouts.

    Args:
        repeats: measurements of each operator.
        copies_bytes: least bytes of all copies of an operator's tiles, see `runner`.
    """

    def __init__(self, config: RunConfig, repeats: int, copies_bytes: int = 0) -> None:
        self.config, self.repeats, self.copies_bytes = config, repeats, copies_bytes
        self.cuts = step_spec(default_layouts(config)).cuts
        self._known: dict[Hashable, float] = {}

    def row_seconds(self, row: OperatorRow) -> float:
        """Return the seconds of all operators that a row of the analysis stands for.

        Raises:
            NNTileError: memory is too small for the operators' tiles.
        """
        try:
            return math.fsum(count * self.seconds(op) for op, count in row.ops)
        except MemoryError as error:
            sizes = self.config.train
            less = f"batch={sizes.batch // 2}" if sizes.batch > 1 else f"seq={sizes.seq // 2}"
            need = f"--measure keeps whole tensors in main memory; use smaller sizes, such as --set train.{less}"
            raise NNTileError(f"out of memory at {row.name}: {error}; {need}") from None

    def seconds(self, op: Op) -> float:
        """Return the median seconds of an operator; operators that do the same work are timed once."""
        key = looks(op)
        if key not in self._known:
            run = runner(op, self.cuts, self.config, self.copies_bytes)
            self._known[key] = statistics.median(clocked(run, self.repeats, runs_to_measure(run)))
        return self._known[key]

    def times(self, ops: Iterable[Op]) -> list[list[float]]:
        """Return all measured seconds of each operator; the operators are measured alternately."""
        runs = []
        for op in ops:
            op.fit(self.cuts)
            runs.append(runner(op, self.cuts, self.config, self.copies_bytes))
        return clocked_in_turns(runs, self.repeats, [runs_to_measure(run) for run in runs])


def runner(op: Op, cuts: Tiling, config: RunConfig, copies_bytes: int = 0) -> Run:
    """Return a function that runs the operator's tasks a number of times, on random tiles.

    Args:
        copies_bytes: least bytes of all tiles. If the operator's tiles have fewer bytes, they are copied, and each run
            uses the next copy, so that tiles come from memory, not from a smaller cache.
    """
    owners = list(dict.fromkeys(t.storage for t in [*op.inputs, *op.outputs]))
    before = [(t.name, t.kind) for t in owners]
    for number, tensor in enumerate(owners):  # inputs with distinct names keep their values from run to run
        tensor.name, tensor.kind = f"tensor{number}", "input"
    try:
        lowering = lower_single(op, cuts, config.accumulate)
        size = sum(tensor.elements * DTYPES[tensor.dtype].bytes for tensor in owners)
        values, copies = _random(owners), []
        for _ in range(min(max(math.ceil(copies_bytes / size), 1), MOST_COPIES)):
            store = Store()
            _write(lowering, store, owners, values)
            copies += programs([lowering.tasks], store, config.precision == "tf32")
    finally:
        for tensor, (name, kind) in zip(owners, before, strict=True):
            tensor.name, tensor.kind = name, kind
    run = _in_turn(copies)
    if len(copies) > 1:
        run(len(copies))  # the first run of each copy takes longer
    return run


def small_program(lowered: tuple[Graph, Lowering], config: RunConfig, captured: bool | None = False) -> Run:
    """Return a function that runs a graph's task list on random values.

    Args:
        captured: whether to run the list as a CUDA graph: True, False, or None to choose the faster way.
    """
    graph, lowering = lowered
    tf32 = config.precision == "tf32"
    program = ForwardProgram(Evaluation(graph, {}, lowering), Store(), tf32=tf32, captured=captured)
    write_random(lowering, program.store, [t for t in graph.tensors.values() if t.kind in ("input", "param")])
    return _in_turn([program.served])


def _in_turn(programs: Sequence[Program | Served]) -> Run:
    """Return a function run(count) that runs the next `count` programs, in rotation, each with a new dropout seed."""
    turns, seeds = itertools.cycle(programs), itertools.count(1)

    def run(count: int) -> None:
        for program in itertools.islice(turns, count):
            slots = SLOTS | {"dropout_seed": float(next(seeds))}
            program.run({slot: slots.get(slot, 1.0) for slot in program.slots})
        Runtime.wait()

    return run


def write_random(lowering: Lowering, store: Store, tensors: Sequence[Tensor]) -> None:
    """Write random values: weights within 1 / sqrt(longest axis) of 0 as in a model, integers 0, others 0.1 to 1.

    Larger weights would give softmax exponentials that are slow to compute."""
    _write(lowering, store, tensors, _random(tensors))


def _random(tensors: Sequence[Tensor]) -> list[np.ndarray[Any, Any]]:
    values = [np.empty(tensor.shape, DTYPES[tensor.dtype].numpy) for tensor in tensors]

    def draw(rng: np.random.Generator, block: np.ndarray[Any, Any], number: int) -> None:
        drawn, tensor = rng.random(block.size, np.float32), tensors[number]
        block[:] = (2 * drawn - 1) / math.sqrt(max(tensor.shape)) if tensor.kind == "param" else 0.1 + 0.9 * drawn

    fill(values, 0, draw)
    return values


def _write(lowering: Lowering, store: Store, tensors: Sequence[Tensor], values: Sequence[np.ndarray[Any, Any]]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        store.write(lowering, tensor, value)


def _peak(config: RunConfig, rows: Sequence[OperatorRow]) -> Peak:
    """Return the peak rates of all workers together; the flop/s are at least those of the fastest row."""
    peak = peak_of_workers(config)
    best = max(rows, key=lambda row: row.flop / (row.seconds or math.inf))
    reached = best.flop / best.seconds if best.seconds else 0.0
    return peak.at_least(reached, f"{best.name} reached more in this run")
