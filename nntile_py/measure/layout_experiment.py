"""Experiments of kind `layouts`: time operators in all layouts, search the fastest layouts, time a step in these."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nntile_py.analysis.layout_analysis import STACKED, LayoutResult, layout_results, sums, violins
from nntile_py.config.builders import timings as opened
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.timings import Timings
from nntile_py.measure.experiment_parts import ExperimentResult, PresetPart
from nntile_py.profiling.layout_timer import compare, tune
from nntile_py.schema import Count
from nntile_py.system.console_tables import csv_text
from nntile_py.system.pictures import files_of
from nntile_py.system.progress import telling

if TYPE_CHECKING:
    from rich.console import Console

    from nntile_py.config.run_config import RunConfig


class LayoutExperiment(PresetPart):
    """A section of kind `layouts`: operators that are timed as by `nntile layouts tune --work`."""

    repeats: Count = 5

    def run(self, folder: Path, console: Console) -> ExperimentResult:
        """Time the operators in all layouts; timings.jsonl holds the times, from which a later run continues."""
        config = self.resolved()
        timings = opened(config, folder / "timings.jsonl", new=True)
        with telling(console) as tell:
            tuned = tune(config, self.work, timings, self.repeats, tell)
        results = layout_results(config, self.work, timings)
        best = min(results, key=lambda result: result.seconds)
        lines = [*map(sums, results), _worst(best), *_steps(config, self, timings, results)]
        if tuned.others:
            busy = f"Other processes kept {tuned.others:.1f} cores busy while operators were timed"
            lines.append(f"{busy}: times are too long.")
        return ExperimentResult(_csv(results), files_of(violins(best, timings)), totals=lines)


def _worst(result: LayoutResult) -> str:
    """Return a sentence on the operators with the largest ratio of worst to best, and of default to best layout."""
    timed = [line for line in result.lines if line.best]  # a Transpose that layouts make needless takes no time
    spread = max(timed, key=lambda line: line.worst / line.best)
    gain = max(timed, key=lambda line: line.default / line.best)
    times, percent = spread.worst / spread.best, 100 * (gain.default / gain.best - 1)
    return (f"The worst layout of {spread.name} takes {times:.1f} times the best; the default one of {gain.name} "
            f"{percent:.0f} % more than the best.")  # fmt: skip


def _csv(results: Sequence[LayoutResult]) -> str:
    times = ("default", "chosen", "transposes", "best", "worst")
    rows = [
        [STACKED[result.stacked], line.name, line.count, line.layouts,
         *(f"{getattr(line, time):.4f}" for time in times), line.layout or "needless"]
        for result in results for line in result.lines
    ]  # fmt: skip
    return csv_text(["Q, K, V", "operator", "x", "layouts", *(f"{time} ms" for time in times), "chosen"], rows)


def _steps(config: RunConfig, part: LayoutExperiment, timings: Timings, results: Sequence[LayoutResult]) -> list[str]:
    """Return sentences with times of a forward and backward pass in default and searched layouts, timed alternately."""
    lines = []
    with Runtime(**runtime_options(config.runtime.model_dump())):
        for result in results:
            comparison = result.comparison or compare(config, part.work, timings, result.stacked, result.program)
            if result.program and not result.comparison:
                timings.add_comparison(comparison)
            for layouts in ("default", "searched"):
                ms = sorted(1e3 * t for t in getattr(comparison, layouts))
                lines.append(f"A step of {part.work}, {STACKED[result.stacked]}, {layouts} layouts: median "
                             f"{statistics.median(ms):.3f} ms ({ms[0]:.3f} to {ms[-1]:.3f}, {len(ms)} runs in turns"
                             f"{', slower beyond noise' * (layouts == 'searched' and comparison.slower)}"
                             ").")  # fmt: skip
    return lines
