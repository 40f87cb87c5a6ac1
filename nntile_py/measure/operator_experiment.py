"""Experiments of kind `analysis`: operators as `nntile analyze` counts and measures them, beside a paper's table."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nntile_py.analysis import analysis_report, draw
from nntile_py.analysis.operator_row import OperatorRow
from nntile_py.analysis.operators import Analysis, analyse
from nntile_py.analysis.workloads import preset
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.schema import Count, Section, Switch
from nntile_py.system.pictures import FORMS, files_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nntile_py.config.run_config import RunConfig

MEMORY, FLOP = "#d55e00", "#0072b2"  # colours of what bounds an operator


class PaperRow(Section):
    """A row of the paper's table: Gflop of 2^30, million elements, times in us, as printed."""

    name: str
    ours: list[str]
    """Names of our operators that compute it."""
    gflop: float
    in_: float = Field(alias="in")
    out: float
    mask: Literal["in", "out"] | None = None
    """Which of its counts includes the dropout mask; our kernels draw the mask again."""
    pytorch: float
    us: float | None = None
    mue: float | None = None
    kernel: str = ""
    wrong: str = ""
    """Printed numbers that contradict the shapes."""


class OperatorExperiment(Section):
    """A section of kind `analysis`: what `nntile analyze --work` counts and measures."""

    work: Literal["encoder", "decoder", "mha"]
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    measure: Switch = True
    repeats: Count = 7
    picture: Literal["mue", "graph"] | None = None

    def config(self) -> RunConfig:
        return preset(self.work, [f"{key}={json.dumps(of)}" for key, of in self.set_.items()])


def run(
    part: OperatorExperiment, rows: Sequence[PaperRow], folder: Path
) -> tuple[str, dict[str, bytes], NNTileError | None, list[str]]:
    """Write report.html and its files; returns CSV, pictures by form, why there are none, totals as text."""
    config, work = part.config(), part.work
    made = analyse(config, work)
    if part.measure:
        from nntile_py.profiling.operator_timer import measure

        made = measure(made, config, part.repeats)
    analysis_report.write(made, folder)
    pictures: dict[str, bytes] = {}
    missing = None
    try:
        if part.picture == "graph":
            text = analysis_report.dot_of(made, "before")
            draw.write(text, folder / "plot.dot")
            pictures = {form: draw.picture(text, form) for form in FORMS}
        elif part.picture:
            pictures = files_of(bars(made))
    except draw.NoPicture as error:
        missing = error
    written = compared(made, rows) if rows else analysis_report.table(made.groups, made.peak)
    return written, pictures, missing, _totals(made)


def compared(made: Analysis, rows: Sequence[PaperRow]) -> str:
    """Return the CSV of the paper's rows beside ours; the time of a fused kernel stands in its first row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([
        "operator", "Gflop printed", "Gflop here", "in printed", "read here", "out printed", "written here",
        "PyTorch us printed", "us here unfused", "kernel", "us printed", "us here fused", "MUE printed", "MUE here",
        "% peak here", "memory-bound", "printed wrongly",
    ])  # fmt: skip
    groups, told = {row.name: row for row in made.groups}, set[str]()
    for printed, ours in matched(made, rows):
        names = list(dict.fromkeys(row.group for row in ours if row.group and row.group not in told))
        told |= set(names)
        fused = [groups[name] for name in names]
        writer.writerow([
            printed.name, printed.gflop, f"{sum(row.flop for row in ours) / 2**30:.3f}",
            printed.in_, f"{sum(row.read for row in ours) / 1e6:.1f}",
            printed.out, f"{sum(row.written for row in ours) / 1e6:.1f}",
            f"{printed.pytorch:g}", _us(ours), printed.kernel, _or(printed.us), _us(fused),
            _or(printed.mue), *_reached(made, fused), printed.wrong,
        ])  # fmt: skip
    return out.getvalue()


def matched(made: Analysis, rows: Sequence[PaperRow]) -> Iterator[tuple[PaperRow, list[OperatorRow]]]:
    """Yield each printed row with our rows. Raises ConfigError for the name of an unknown operator."""
    known = {row.name: row for row in made.operators}
    for printed in rows:
        if missing := [name for name in printed.ours if name not in known]:
            raise ConfigError(f"rows: {printed.name}: no operator {missing[0]!r}; allowed: {', '.join(known)}")
        yield printed, [known[name] for name in printed.ours]


def _us(rows: Sequence[OperatorRow]) -> str:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return f"{math.fsum(seconds) * 1e6:.0f}" if rows and len(seconds) == len(rows) else ""


def _or(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _reached(made: Analysis, rows: Sequence[OperatorRow]) -> list[str]:
    """Return MUE, share of the peak and bound of the first row, if measured."""
    if not rows:
        return ["", "", ""]
    mue, share, bound = rows[0].mue(made.peak), rows[0].peak_share(made.peak), rows[0].memory_bound(made.peak)
    told = "" if bound is None else "yes" if bound else "no"
    return [*("" if of is None else f"{of:.1f}" for of in (mue, share)), told]


def _totals(made: Analysis) -> list[str]:
    heads = ["", "operators", "Gflop (10^9)", "% of the flop", "million elements moved", "at least", "ms",
             "% of the time"]  # fmt: skip
    lines = []
    for name, *cells in analysis_report.class_rows(made):
        told = [f"{cell} {head}" for head, cell in zip(heads[1:], cells, strict=True) if cell]
        lines.append(f"{name}: {', '.join(told)}")
    return [*lines, *analysis_report.movement(made)]


def bars(made: Analysis) -> Figure:
    """Draw each operator's memory usage efficiency (MUE) and its share of peak flop/s, in the order of execution."""
    rows = [row for row in made.groups if row.seconds is not None]
    figure = new_figure((9.5, 0.24 * len(rows) + 1.6))
    axes = figure.subplots()
    places = range(len(rows))
    bound = [bool(row.memory_bound(made.peak)) for row in rows]
    colours = [MEMORY if of else FLOP for of in bound]
    for shift, alpha, of in ((-0.19, 1.0, OperatorRow.mue), (0.19, 0.35, OperatorRow.peak_share)):
        shares = [of(row, made.peak) or 0.0 for row in rows]
        axes.barh([place + shift for place in places], shares, 0.36, color=colours, alpha=alpha)
    axes.set_yticks(list(places), [f"{row.name} ({row.title})" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("percent: dark, MUE; light, share of the peak flop/s; orange: memory-bound")
    figure.suptitle(made.title, fontsize=10)
    figure.supxlabel("; ".join(analysis_report.movement(made)[-1:]), fontsize=7, color="#59636e", x=0.01, ha="left")
    return figure
