"""Experiments of kind `analysis`: operators as `nntile analyze` counts and measures them, beside a paper's table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from nntile_py.analysis import analysis_report
from nntile_py.analysis.operator_row import OperatorRow
from nntile_py.analysis.operators import Analysis, analyse
from nntile_py.errors import ConfigError
from nntile_py.measure.experiment_parts import ExperimentResult, PresetPart, drawn
from nntile_py.schema import Count, Section, Switch
from nntile_py.system.console_tables import csv_text
from nntile_py.system.pictures import files_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY, FLOP = "#d55e00", "#0072b2"  # colours of memory-bound operators and of others
LOOKS = {1.0: "MUE", 0.35: "share of the peak flop/s"}  # {opacity of a bar: what it shows}


class PaperRow(Section):
    """A row of the paper's table as printed: Gflop of 2^30, million elements, times in us."""

    name: str
    ours: list[str]
    """Names of the operators of this project that do the row's work."""
    gflop: float
    in_: float = Field(alias="in")
    out: float
    mask: Literal["in", "out"] | None = None
    """The printed count, `in` or `out`, that includes a dropout mask. Kernels of this project store no mask."""
    pytorch: float
    us: float | None = None
    mue: float | None = None
    kernel: str = ""
    wrong: str = ""
    """Printed numbers that contradict the shapes."""


class OperatorExperiment(PresetPart):
    """A section of kind `analysis`: operators that are counted and timed as by `nntile analyze --work`."""

    measure: Switch = True
    repeats: Count = 7
    picture: Literal["mue", "graph"] | None = None

    def run(self, folder: Path, rows: Sequence[PaperRow]) -> ExperimentResult:
        """Analyse the operators, and write report.html with its files.

        Args:
            rows: the paper's table; if empty, the CSV has the operators after fusion.
        """
        config = self.resolved()
        analysis = analyse(config, self.work)
        if self.measure:
            from nntile_py.profiling.operator_timer import measure

            analysis = measure(analysis, config, self.repeats)
        analysis_report.write(analysis, folder)
        table = compared(analysis, rows) if rows else analysis_report.table(analysis.groups, analysis.peak)
        result = ExperimentResult(table, totals=_totals(analysis))
        if self.picture == "graph":
            result.pictures, result.no_picture = drawn(analysis_report.dot_of(analysis, "before"), folder)
        elif self.picture:
            result.pictures = files_of(bars(analysis))
        return result


def compared(analysis: Analysis, rows: Sequence[PaperRow]) -> str:
    """Return the CSV with the paper's numbers and ours. The time of a fused kernel is in the first of its rows only."""
    heads = [
        "operator", "Gflop printed", "Gflop here", "in printed", "read here", "out printed", "written here",
        "PyTorch us printed", "us here unfused", "kernel", "us printed", "us here fused", "MUE printed", "MUE here",
        "% peak here", "memory-bound", "printed wrongly",
    ]  # fmt: skip
    lines, groups, shown = [], {row.name: row for row in analysis.groups}, set[str]()
    for printed, ours in matched(analysis, rows):
        names = list(dict.fromkeys(row.group for row in ours if row.group and row.group not in shown))
        shown |= set(names)
        fused = [groups[name] for name in names]
        lines.append([
            printed.name, printed.gflop, f"{sum(row.flop for row in ours) / 2**30:.3f}",
            printed.in_, f"{sum(row.read for row in ours) / 1e6:.1f}",
            printed.out, f"{sum(row.written for row in ours) / 1e6:.1f}",
            f"{printed.pytorch:g}", _us(ours), printed.kernel, _or_empty(printed.us), _us(fused),
            _or_empty(printed.mue), *_reached(analysis, fused), printed.wrong,
        ])  # fmt: skip
    return csv_text(heads, lines)


def matched(analysis: Analysis, rows: Sequence[PaperRow]) -> Iterator[tuple[PaperRow, list[OperatorRow]]]:
    """Yield each row of the paper's table with the analysis's rows of its operators.

    Raises:
        ConfigError: a row of the paper's table names an unknown operator.
    """
    known = {row.name: row for row in analysis.operators}
    for printed in rows:
        if missing := [name for name in printed.ours if name not in known]:
            raise ConfigError(f"rows: {printed.name}: no operator {missing[0]!r}; allowed: {', '.join(known)}")
        yield printed, [known[name] for name in printed.ours]


def _us(rows: Sequence[OperatorRow]) -> str:
    """Return the microseconds of all rows together; an empty text if a row has no time."""
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return f"{math.fsum(seconds) * 1e6:.0f}" if rows and len(seconds) == len(rows) else ""


def _or_empty(value: float | None, form: str = "g") -> str:
    return "" if value is None else f"{value:{form}}"


def _reached(analysis: Analysis, rows: Sequence[OperatorRow]) -> list[str]:
    """Return three texts on the first row, each empty if unknown: MUE, percent of peak flop/s, whether memory-bound."""
    if not rows:
        return ["", "", ""]
    row, peak = rows[0], analysis.peak
    bound = {None: "", True: "yes", False: "no"}[row.memory_bound(peak)]
    return [_or_empty(row.mue(peak), ".1f"), _or_empty(row.peak_share(peak), ".1f"), bound]


def _totals(analysis: Analysis) -> list[str]:
    """Return a line with the sums for each class of operators, then lines on how much data movement fusion saves."""
    heads = ["", "operators", "Gflop (10^9)", "% of the flop", "million elements moved", "at least", "ms",
             "% of the time"]  # fmt: skip
    lines = []
    for name, *cells in analysis_report.class_rows(analysis):
        figures = [f"{cell} {head}" for head, cell in zip(heads[1:], cells, strict=True) if cell]
        lines.append(f"{name}: {', '.join(figures)}")
    return [*lines, *analysis_report.movement(analysis)]


def bars(analysis: Analysis) -> Figure:
    """Draw each operator's memory usage efficiency (MUE) and its share of peak flop/s, in the order of execution."""
    from matplotlib.patches import Patch

    rows = [row for row in analysis.groups if row.seconds is not None]
    figure = new_figure((9.5, 0.24 * len(rows) + 1.6))
    axes = figure.subplots()
    places = range(len(rows))
    colours = [MEMORY if row.memory_bound(analysis.peak) else FLOP for row in rows]
    for shift, alpha, figure_of in zip((-0.19, 0.19), LOOKS, (OperatorRow.mue, OperatorRow.peak_share), strict=True):
        shares = [figure_of(row, analysis.peak) or 0.0 for row in rows]
        axes.barh([place + shift for place in places], shares, 0.36, color=colours, alpha=alpha)
    axes.set_yticks(list(places), [f"{row.name} ({row.title})" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("percent")
    looks = [(MEMORY, "memory-bound: "), (FLOP, "others: ")]
    bars_of = [(colour, alpha, f"{who}{what}") for colour, who in looks for alpha, what in LOOKS.items()]
    patches = [Patch(color=colour, alpha=alpha, label=label) for colour, alpha, label in bars_of]
    axes.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=7)
    figure.suptitle(analysis.title, fontsize=10)
    figure.supxlabel(analysis_report.movement(analysis)[-1], fontsize=7, color="#59636e", x=0.01, ha="left")
    return figure
