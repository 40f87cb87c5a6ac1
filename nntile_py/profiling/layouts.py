"""Operators in every layout, each run alone and timed, into the database by which layouts are searched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from nntile_py.analysis.layouts import Key, timing, variants, wanted
from nntile_py.analysis.workloads import Work
from nntile_py.config.run import RunConfig, runtime_options
from nntile_py.config.spec import step_spec
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.timings import Timings
from nntile_py.profiling.alone import MOST, SHORTEST, clocked, runner
from nntile_py.system.load import Load, is_busy
from nntile_py.tasks.op import Op


def tune(
    config: RunConfig, work: Work, timings: Timings, repeats: int, tell: Callable[[int, int], None]
) -> tuple[int, float | None]:
    """Measure what the timings lack, in the order in which the search needs it; what is there stays. Waits for others
    who measure into the same file.

    Returns how many were measured, and how many cores others kept busy meanwhile, where that is too many."""
    plain = config.model_copy(update={"layout": "default"})
    with timings.alone():
        return _measured(plain, work, timings, repeats, tell)


def _measured(
    plain: RunConfig, work: Work, timings: Timings, repeats: int, tell: Callable[[int, int], None]
) -> tuple[int, float | None]:
    todo: dict[Key, Op] = {}
    for _, graph in variants(plain, work):
        todo |= {key: op for key, op in wanted(graph, timings, plain).items() if key not in todo}
    if not todo:
        return 0, None
    cuts = step_spec(plain).cuts
    with Runtime(**runtime_options(plain.runtime.model_dump())), Load() as load:
        for number, (key, op) in enumerate(todo.items()):
            tell(number, len(todo))
            op.fit(cuts)
            run = runner(op, cuts, plain)
            run(1)  # the first one takes longer
            start = time.perf_counter()
            run(1)
            runs = min(max(math.ceil(SHORTEST / (time.perf_counter() - start)), 1), MOST)
            timings.add(timing(key, clocked(run, repeats, runs)))
    return len(todo), load.others if is_busy(load.others) else None
