"""`nntile layouts tune`: time operators in every layout for the layout search, then whole steps in the chosen layouts.

A timed operator cycles through copies of its tiles, so that it reads them from memory, as in a step. With tiles in a
cache, transpositions would look cheaper than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nntile_py.analysis.layout_analysis import (
    Stacked,
    TimingKey,
    graph_of,
    missing_timings,
    own_stacked,
    timing,
    variants,
    widened,
)
from nntile_py.analysis.workloads import FORWARD, Work
from nntile_py.config.builders import build_model, default_layouts, step_spec, tiling
from nntile_py.config.run_config import RunConfig
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import SearchedLayouts, arrange, search
from nntile_py.graph.layouts import laid, layout_of
from nntile_py.graph.lowering import check_count, lower
from nntile_py.graph.timings import LayoutComparison, Timings
from nntile_py.profiling.operator_timer import OperatorTimer, small_program
from nntile_py.system.clock import Run, clocked_in_turns, repeats_that_last
from nntile_py.system.load import Load, is_busy
from nntile_py.system.machine import cache_bytes
from nntile_py.system.progress import Tell
from nntile_py.tasks.op import Op
from nntile_py.training.repeated_steps import same_steps
from nntile_py.training.trainer import Trainer

ROUNDS = 3  # rounds in which chosen layouts are measured again
TURNS = 5, 25  # least and greatest number of measurements of a whole step
STEP_SECONDS = 5.0  # all measurements of whole steps last about so long, within the bounds of TURNS


@dataclass(frozen=True)
class TuneResult:
    """Result of `tune`.

    Attributes:
        measured: number of timings that were added, each of one operator in one layout.
        others: number of cores that other processes kept busy; None if too few to matter.
        comparison: times of the config's own steps in default and in searched layouts; None if the search chooses the
            default layouts.
    """

    measured: int
    others: float | None
    comparison: LayoutComparison | None


def tune(
    config: RunConfig, work: Work, timings: Timings, repeats: int, tell: Tell, *,
    own_alone: bool = False,
) -> TuneResult:  # fmt: skip
    """Measure the operators that `timings` lacks, then the chosen layouts again, then whole steps of the config.

    The function first waits for other processes that write to the same file of timings.

    Args:
        repeats: measurements of each operator in each layout.
        tell: shows a line of progress.
        own_alone: measure only operators for the config's own fusion of Q, K and V. False: for each fusion of them.
    """
    plain = default_layouts(config)
    with timings.exclusive():
        own = graph_of(plain, work, own_stacked(plain))
        check_count(own, tiling(plain), plain.accumulate)
        graphs = [own] if own_alone else [graph for _, graph in variants(plain, work)]
        todo: dict[TimingKey, Op] = {}
        for graph in graphs:
            todo |= {key: op for key, op in missing_timings(graph, timings, plain).items() if key not in todo}
        program = None if todo else _chosen(own, timings, plain).program
        if not todo and (program in (None, *timings.comparisons) or work in FORWARD):
            return TuneResult(0, None, timings.comparisons.get(program or ""))
        with Runtime(**runtime_options(plain.runtime.model_dump())), Load() as load:
            timer = OperatorTimer(plain, repeats, copies_bytes=2 * cache_bytes(bool(plain.runtime.cuda)))
            for number, (key, op) in enumerate(todo.items()):
                tell(f"{number} of {len(todo)} operators in their layouts")
                timings.add(timing(key, *timer.times([op])))
            time_chosen(timer, graphs, timings, tell)
            program = _chosen(own, timings, plain).program
            if program not in (None, *timings.comparisons) and work not in FORWARD:  # FORWARD: no searched layouts
                tell("whole steps in default and in searched layouts, alternating")
                timings.add_comparison(compare(plain, work, timings, own_stacked(plain), program))
    others = load.others if is_busy(load.others) else None
    return TuneResult(len(todo), others, timings.comparisons.get(program or ""))


def time_chosen(timer: OperatorTimer, graphs: Sequence[Graph], timings: Timings, tell: Tell) -> None:
    """Measure again the layouts that the search chose, alternating with the default ones; new times replace old times.

    With many equally fast layouts, the measured best is partly luck. After each of ROUNDS rounds the search chooses
    again, and newly chosen layouts are measured in the next round."""
    for turn, graph in itertools.product(range(ROUNDS), graphs):
        unsure = dict(_unsure(graph, timings, timer.config))
        for number, (keys, ops) in enumerate(unsure.items()):
            tell(f"{number} of {len(unsure)} chosen layouts against the default ones, round {turn + 1} of {ROUNDS}")
            for key, times in zip(keys, timer.times(ops), strict=True):
                timings.add(replace(timing(key, times), turns=True))


def _chosen(graph: Graph, timings: Timings, config: RunConfig) -> SearchedLayouts:
    return search(graph, timings, step_spec(config).cuts, config.accumulate)


def _unsure(
    graph: Graph, timings: Timings, config: RunConfig
) -> Iterator[tuple[tuple[TimingKey, TimingKey], tuple[Op, Op]]]:
    """Yield (keys, operators) for each operator whose chosen layout was not yet timed alternating with its default one.

    keys and operators are pairs: default layout, chosen layout.
    """
    chosen = _chosen(graph, timings, config)
    for row in chosen.rows:
        key, width = (row.operator, row.layout, chosen.widths[row.op]), chosen.widths[row.op]
        first = row.operator, row.default, None
        known = timings.known.get(row.operator, {}).get(key[1:])
        if known and not known.turns and key != first:
            op = laid(row.op, chosen.layouts[row.op])
            plain = laid(row.op, layout_of(row.op))
            yield (first, key), (plain, widened(op, width) if width else op)


# -- whole steps


def compare(config: RunConfig, work: Work, timings: Timings, stacked: Stacked, program: str | None) -> LayoutComparison:
    """Return the times of whole steps in default and in searched layouts, measured alternately.

    Args:
        program: digest of the graph and its layouts, see SearchedLayouts.

    Raises:
        TaskError: memory is too small for both programs together.
    """
    prepare, uncompared = _training if work == "train" else _small, timings.without_comparisons()
    steps = [prepare(config, work, of, stacked) for of in (None, uncompared)]
    turns = repeats_that_last(steps, STEP_SECONDS, *TURNS)
    return LayoutComparison(program or "", *map(tuple, clocked_in_turns(steps, turns, [1, 1])))


def _small(config: RunConfig, work: Work, timings: Timings | None, stacked: Stacked) -> Run:
    graph, cuts = graph_of(config, work, stacked), step_spec(config).cuts
    if timings:
        arrange(graph, timings, cuts, config.accumulate)
    return small_program((graph, lower(graph, cuts, config.accumulate)), config)


def _training(config: RunConfig, work: Work, timings: Timings | None, stacked: Stacked) -> Run:
    """Return a function that runs training steps on random inputs, with the update of the weights."""
    spec = step_spec(config, build_model(config))
    spec = replace(spec, timings=timings, fusion=spec.fusion.changed(qkv=stacked))
    trainer = Trainer.of_spec(spec, seed=config.seed)
    assert Runtime.current
    Runtime.current.forget(trainer)  # the weights are not needed afterwards
    return same_steps(trainer, trainer.spec.random_inputs(trainer.batch * trainer.grad_accumulation, seed=0))
