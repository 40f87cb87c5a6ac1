"""Experiments of kind `layouts`: operators in all layouts, the cheapest choice for all of them, and a step in it."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nntile_py.analysis.layouts import STACKED, Found, graph_of, shown, told, violins
from nntile_py.analysis.workloads import preset
from nntile_py.config.run import runtime_options
from nntile_py.config.spec import step_spec
from nntile_py.config.spec import timings as opened
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.arrange import arrange
from nntile_py.graph.lowering import lower
from nntile_py.graph.timings import Timings
from nntile_py.profiling.alone import clocked
from nntile_py.profiling.layouts import tune
from nntile_py.schema import Count, Section
from nntile_py.sweep.point import small_program
from nntile_py.system.pictures import files_of

if TYPE_CHECKING:
    from rich.console import Console

    from nntile_py.config.run import RunConfig


class LaidOut(Section):
    """What `nntile layouts tune --work` is to measure."""

    work: Literal["encoder", "decoder", "mha"]
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    repeats: Count = 5

    def config(self) -> RunConfig:
        return preset(self.work, [f"{key}={json.dumps(of)}" for key, of in self.set_.items()])


def run(part: LaidOut, folder: Path, console: Console) -> tuple[str, dict[str, bytes], list[str]]:
    """Leaves timings.jsonl, from which it goes on; returns CSV, the violins by form, and sums in words."""
    config = part.config()
    timings = opened(config, folder / "timings.jsonl", new=True)
    with console.status("") as status:
        _, others = tune(
            config, part.work, timings, part.repeats, lambda k, n: status.update(f"{k} of {n} operators in layouts")
        )
    found = shown(config, part.work, timings)
    best = min(found, key=lambda of: of.seconds)
    lines = [*map(told, found), _worst(best), *_steps(config, part, timings, found)]
    if others:
        lines.append(f"Other processes kept {others:.1f} cores busy as operators were measured: times are too long.")
    return _csv(found), files_of(violins(best, timings)), lines


def _worst(of: Found) -> str:
    """How much layouts matter, and the choice of all together."""
    timed = [line for line in of.lines if line.best]  # a Transpose that its neighbours make needless takes none
    spread = max(timed, key=lambda line: line.worst / line.best)
    gain = max(timed, key=lambda line: line.default / line.best)
    times, percent = spread.worst / spread.best, 100 * (gain.default / gain.best - 1)
    return (f"The worst layout of {spread.name} takes {times:.1f} times the best; the default one of {gain.name} "
            f"{percent:.0f} % more than the best.")  # fmt: skip


def _csv(found: Sequence[Found]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    times = [f"{what} ms" for what in ("default", "chosen", "turning", "best", "worst")]
    writer.writerow(["Q, K, V", "operator", "x", "layouts", *times, "chosen"])
    for of in found:
        for line in of.lines:
            took = (line.default, line.chosen, line.turning, line.best, line.worst)
            cells = [STACKED[of.stacked], line.name, line.count, line.layouts, *(f"{ms:.4f}" for ms in took)]
            writer.writerow([*cells, line.layout])
    return out.getvalue()


def _steps(config: RunConfig, part: LaidOut, timings: Timings, found: Sequence[Found]) -> list[str]:
    """Forward and backward as they run, in the default layouts and in those that were chosen, in turns."""
    cuts, lines = step_spec(config).cuts, []
    with Runtime(**runtime_options(config.runtime.model_dump())):
        steps: dict[str, Callable[[int], None]] = {}
        for of in found:
            for searched in (False, True):
                graph = graph_of(config, part.work, of.stacked)
                if searched:
                    arrange(graph, timings, cuts, config.accumulate)
                low = lower(graph, cuts, config.accumulate)
                name = f"{STACKED[of.stacked]}, {'searched' if searched else 'default'}"
                steps[name] = small_program((graph, low), config)
                steps[name](1)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(max(part.repeats, 5)):
            for name, step in steps.items():
                times[name] += clocked(step, 1)
        for name, of_step in times.items():
            ms = sorted(1e3 * t for t in of_step)
            lines.append(f"A step of {part.work}, {name} layouts: median {statistics.median(ms):.3f} ms "
                         f"({ms[0]:.3f} to {ms[-1]:.3f}, {len(ms)} runs in turns).")  # fmt: skip
        steps.clear()
    return lines
