"""Experiments of kind `layouts`: operators in all layouts, the cheapest choice for all, and a step in that choice."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nntile_py.analysis.layout_analysis import STACKED, LayoutResult, layout_results, sums, violins
from nntile_py.analysis.workloads import preset
from nntile_py.config.builders import timings as opened
from nntile_py.config.run_config import runtime_options
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.timings import Timings
from nntile_py.profiling.layout_timer import compare, tune
from nntile_py.schema import Count, Section
from nntile_py.system.pictures import files_of
from nntile_py.system.progress import telling

if TYPE_CHECKING:
    from rich.console import Console

    from nntile_py.config.run_config import RunConfig


class LayoutExperiment(Section):
    """A section of kind `layouts`: what `nntile layouts tune --work` measures."""

    work: Literal["encoder", "decoder", "mha"]
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    repeats: Count = 5

    def config(self) -> RunConfig:
        return preset(self.work, [f"{key}={json.dumps(of)}" for key, of in self.set_.items()])


def run(part: LayoutExperiment, folder: Path, console: Console) -> tuple[str, dict[str, bytes], list[str]]:
    """Write timings.jsonl, from which a later run continues; returns CSV, violin plots by form, and totals as text."""
    config = part.config()
    timings = opened(config, folder / "timings.jsonl", new=True)
    with telling(console) as tell:
        tuned = tune(config, part.work, timings, part.repeats, tell)
    found = layout_results(config, part.work, timings)
    best = min(found, key=lambda of: of.seconds)
    lines = [*map(sums, found), _worst(best), *_steps(config, part, timings, found)]
    if tuned.others:
        told_others = f"Other processes kept {tuned.others:.1f} cores busy as operators were measured"
        lines.append(f"{told_others}: times are too long.")
    return _csv(found), files_of(violins(best, timings)), lines


def _worst(of: LayoutResult) -> str:
    """Return the largest effect of a layout, and the largest gain over the default layout."""
    timed = [line for line in of.lines if line.best]  # a Transpose that layouts make needless takes no time
    spread = max(timed, key=lambda line: line.worst / line.best)
    gain = max(timed, key=lambda line: line.default / line.best)
    times, percent = spread.worst / spread.best, 100 * (gain.default / gain.best - 1)
    return (f"The worst layout of {spread.name} takes {times:.1f} times the best; the default one of {gain.name} "
            f"{percent:.0f} % more than the best.")  # fmt: skip


def _csv(found: Sequence[LayoutResult]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    times = [f"{what} ms" for what in ("default", "chosen", "transposes", "best", "worst")]
    writer.writerow(["Q, K, V", "operator", "x", "layouts", *times, "chosen"])
    for of in found:
        for line in of.lines:
            took = (line.default, line.chosen, line.transposes, line.best, line.worst)
            cells = [STACKED[of.stacked], line.name, line.count, line.layouts, *(f"{ms:.4f}" for ms in took)]
            writer.writerow([*cells, line.layout or "needless"])
    return out.getvalue()


def _steps(config: RunConfig, part: LayoutExperiment, timings: Timings, found: Sequence[LayoutResult]) -> list[str]:
    """Time forward and backward passes in default and in searched layouts, in turns."""
    lines = []
    with Runtime(**runtime_options(config.runtime.model_dump())):
        for of in found:
            comparison = of.comparison or compare(config, part.work, timings, of.stacked, of.program)
            if of.program and not of.comparison:
                timings.add_comparison(comparison)
            for layouts in ("default", "searched"):
                ms = sorted(1e3 * t for t in getattr(comparison, layouts))
                lines.append(f"A step of {part.work}, {STACKED[of.stacked]}, {layouts} layouts: median "
                             f"{statistics.median(ms):.3f} ms ({ms[0]:.3f} to {ms[-1]:.3f}, {len(ms)} runs in turns"
                             f"{', slower beyond noise' * (layouts == 'searched' and comparison.slower)}"
                             ").")  # fmt: skip
    return lines
