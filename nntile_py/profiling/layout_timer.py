"""Operators in every layout, each run alone and timed, into the database by which layouts are searched; whole steps in
the layouts that are chosen, beside the default ones.

An operator's tiles are cycled through copies, so that they come from memory: in a step many do, as what lies between
two uses of a tile is more than a cache holds. In cache, transpositions looked cheaper than they are there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nntile_py.analysis.layout_analysis import Key, Stacked, graph_of, own_stacked, timing, variants, wanted, widened
from nntile_py.analysis.workloads import FORWARD, Work
from nntile_py.config.builders import build_model, default_layouts, step_spec
from nntile_py.config.run_config import RunConfig, runtime_options
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import SearchedLayouts, arrange, search
from nntile_py.graph.layouts import laid, layout_of
from nntile_py.graph.lowering import lower
from nntile_py.graph.timings import LayoutComparison, Timings
from nntile_py.profiling.operator_timer import runner, small_program
from nntile_py.system.clock import clocked, runs_to_measure
from nntile_py.system.load import Load, is_busy
from nntile_py.system.machine import cache_bytes
from nntile_py.system.progress import Tell
from nntile_py.tasks.op import Op
from nntile_py.tiles import Tiling
from nntile_py.training.repeated_steps import same_steps
from nntile_py.training.trainer import Trainer

AGAIN = 3  # times that what is chosen by then is measured again
TURNS = 5, 25  # of whole steps: at least, at most
COMPARED = 5.0  # seconds that these take, if they are not at least so many
Step = Callable[[int], object]


@dataclass(frozen=True)
class Tuned:
    """measured: how many operators in layouts; others: how many cores other processes kept busy meanwhile, where that
    is too many; comparison: on the config's own program, None where that has the default layouts anyway."""

    measured: int
    others: float | None
    comparison: LayoutComparison | None


def tune(
    config: RunConfig, work: Work, timings: Timings, repeats: int, tell: Tell, *,
    own_alone: bool = False,
) -> Tuned:  # fmt: skip
    """Measure what the timings lack, in the order in which the search needs it; what is there stays. Then what was
    chosen once more, in turns with the default layouts; then whole steps of the config, for a comparison.

    own_alone: only for the config's own algebraic fusion. Waits for others who measure into the same file."""
    plain = default_layouts(config)
    with timings.alone():
        own = graph_of(plain, work, own_stacked(plain))
        graphs = [own] if own_alone else [graph for _, graph in variants(plain, work)]
        todo: dict[Key, Op] = {}
        for graph in graphs:
            todo |= {key: op for key, op in wanted(graph, timings, plain).items() if key not in todo}
        program = None if todo else _chosen(own, timings, plain).program
        if not todo and (program in (None, *timings.comparisons) or work in FORWARD):
            return Tuned(0, None, timings.comparisons.get(program or ""))
        with Runtime(**runtime_options(plain.runtime.model_dump())), Load() as load:
            clock = _Clock(plain, repeats)
            for number, (key, op) in enumerate(todo.items()):
                tell(f"{number} of {len(todo)} operators in their layouts")
                timings.add(timing(key, *clock.times([op])))
            clock.again(graphs, timings, tell)
            program = _chosen(own, timings, plain).program
            if program not in (None, *timings.comparisons) and work not in FORWARD:  # which have the default layouts
                tell("whole steps in default and in searched layouts, in turns")
                timings.add_comparison(compare(plain, work, timings, own_stacked(plain), program))
    return Tuned(len(todo), load.others if is_busy(load.others) else None, timings.comparisons.get(program or ""))


class _Clock:
    def __init__(self, config: RunConfig, repeats: int) -> None:
        self.config, self.repeats = config, repeats
        self.cuts: Tiling = step_spec(config).cuts
        self.room = 2 * cache_bytes(bool(config.runtime.cuda))

    def times(self, ops: Iterable[Op]) -> list[list[float]]:
        """Of each operator; of several in turns, so that what slows the machine down for a while slows all of them."""
        runs = []
        for op in ops:
            op.fit(self.cuts)
            run = runner(op, self.cuts, self.config, self.room)
            runs.append((run, runs_to_measure(run)))
        found: list[list[float]] = [[] for _ in runs]
        for _ in range(self.repeats):
            for times, (run, count) in zip(found, runs, strict=True):
                times += clocked(run, 1, count)
        return found

    def again(self, graphs: Sequence[Graph], timings: Timings, tell: Tell) -> None:
        """Of many layouts that take the same the one that counts as the best was lucky. So what is chosen is measured
        in turns with the default layout; these times count, and what is chosen by them is measured so, too."""
        for turn, graph in itertools.product(range(AGAIN), graphs):
            unsure = dict(_unsure(graph, timings, self.config))
            for number, (keys, ops) in enumerate(unsure.items()):
                tell(f"{number} of {len(unsure)} chosen layouts beside the default ones, turn {turn + 1} of {AGAIN}")
                for key, times in zip(keys, self.times(ops), strict=True):
                    timings.add(replace(timing(key, times), turns=True))


def _chosen(graph: Graph, timings: Timings, config: RunConfig) -> SearchedLayouts:
    return search(graph, timings, step_spec(config).cuts, config.accumulate)


def _unsure(
    graph: Graph, timings: Timings, config: RunConfig
) -> Iterator[tuple[tuple[Key, Key], tuple[Op, Op]]]:
    """Layouts that are chosen and were not measured in turns with the default one, with that."""
    chosen = _chosen(graph, timings, config)
    for row in chosen.rows:
        key, width = (row.operator, row.layout, chosen.widths[row.op]), chosen.widths[row.op]
        first = row.operator, row.default, None
        known = timings.known.get(row.operator, {}).get(key[1:])
        if known and not known.turns and key != first:
            made = laid(row.op, chosen.layouts[row.op])
            plain = laid(row.op, layout_of(row.op))
            yield (first, key), (plain, widened(made, width) if width else made)


# -- whole steps


def compare(config: RunConfig, work: Work, timings: Timings, stacked: Stacked, program: str | None) -> LayoutComparison:
    """Steps in the default layouts and in the searched ones, in turns; program: see SearchedLayouts. TaskError: both
    together find no room."""
    prepare, uncompared = _training if work == "train" else _small, timings.without_comparisons()
    steps = [prepare(config, work, of, stacked) for of in (None, uncompared)]
    for step in steps:
        step(1)  # the first one takes longer
    start = time.perf_counter()
    for step in steps:
        step(1)
    turns = min(max(math.ceil(COMPARED / (time.perf_counter() - start)), TURNS[0]), TURNS[1])
    times: list[list[float]] = [[], []]
    for turn in range(turns):
        for which in (turn % 2, 1 - turn % 2):  # each of them first as often
            times[which] += clocked(steps[which], 1)
    return LayoutComparison(program or "", *map(tuple, times))


def _small(config: RunConfig, work: Work, timings: Timings | None, stacked: Stacked) -> Step:
    graph, cuts = graph_of(config, work, stacked), step_spec(config).cuts
    if timings:
        arrange(graph, timings, cuts, config.accumulate)
    return small_program((graph, lower(graph, cuts, config.accumulate)), config)


def _training(config: RunConfig, work: Work, timings: Timings | None, stacked: Stacked) -> Step:
    """With the update of the weights, on random inputs."""
    spec = step_spec(config, build_model(config))
    spec = replace(spec, timings=timings, fusion=spec.fusion.changed(qkv=stacked))
    trainer = Trainer.of_spec(spec, seed=config.seed)
    assert Runtime.current
    Runtime.current.forget(trainer)  # nobody wants the weights back
    return same_steps(trainer, trainer.spec.random_inputs(trainer.batch * trainer.grad_accumulation, seed=0))
