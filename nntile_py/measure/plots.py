"""Plots of a sweep: lines, bars or a heat map, with error bars for the spread of the repeats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.workloads import FORWARD
from nntile_py.system.load import is_busy
from nntile_py.system.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nntile_py.measure.sweep_spec import Best, Plot

Row = dict[str, Any]
# With at least so many repeats, an error bar covers their middle half, so that one disturbed repeat does not widen it.
QUARTILES = 4
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
HATCHES, STYLES = ("", "///", "..."), ("-", "--", ":")  # of bars, of lines: the next one when the colours repeat
_TIMES = {"seconds": 1.0, "ms": 1e3, "us": 1e6}
_BEST = ("seconds_min", "best ms", "best us")
RATES = ("tokens_per_s", "gflop_per_s")  # metrics that are inversely proportional to the time
_LABELS = {
    "seconds": "time of a step (s)", "ms": "time of a step (ms)", "us": "time of a step (us)",
    "seconds_min": "time of a step (s), best repeat", "best ms": "time of a step (ms), best repeat",
    "best us": "time of a step (us), best repeat", "tokens_per_s": "throughput (tokens/s)",
    "gflop_per_s": "throughput (Gflop/s)", "runtime.cpus": "CPU workers", "runtime.cuda": "GPUs",
    "us_per_task": "time of a step over its tasks (us)", "planned_task_us": "planned time of a task (us)",
    "measure.alpha": "mean length as a part of the longest (alpha)",
    "train.batch": "batch", "train.seq": "sequence length", "fusion": "", "tasks": "tasks of a step",
    "peak_mib": "memory at peak (MiB)", "measure.nodes": "nodes", "gpus": "GPUs",
}  # fmt: skip


def spread(row: Row, metric: str = "seconds") -> tuple[float, float] | None:
    """Return the ends of a metric's error bar: the middle half of the repeats, or all repeats if fewer than QUARTILES.

    Returns:
        (low, high); None if the metric is neither a time nor a rate, or was measured only once.
    """
    times = row.get("times", [])
    if metric not in (*_TIMES, *RATES) or len(times) < 2:
        return None
    low, high = min(times), max(times)
    if len(times) >= QUARTILES:
        low, _, high = quantiles(times, n=4, method="inclusive")
    middle = row["seconds"]
    low, high = min(low, middle), max(high, middle)  # the median of the rounds' medians may lie outside
    if metric in RATES:
        return row[metric] * middle / high, row[metric] * middle / low
    return low * _TIMES[metric], high * _TIMES[metric]


def disturbance(rows: Sequence[Row]) -> str:
    """Return a clause on the cores that other processes kept busy during a measurement; empty if too few to matter."""
    busy = max((row["others"] for row in rows if row.get("others") is not None), default=0.0)
    return f"other processes kept up to {busy:.1f} cores busy" if is_busy(busy) else ""


def caption(rows: list[Row], where: str = "", metrics: Sequence[str] = ("seconds",), bars: bool = True) -> str:
    """Return a picture's caption: number of repeats, meaning of error bars, load by other processes, machine.

    Args:
        where: text on the machine.
        metrics: the metrics in the picture.
        bars: whether the picture has error bars.
    """
    good = [row for row in rows if row["status"] == "ok"]
    repeats, rounds = sorted({len(row.get("times", [])) for row in good} - {0}), {row.get("rounds", 1) for row in good}
    lines = []
    if repeats:
        count = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        turns = f" in {max(rounds)} rounds of all points" if max(rounds, default=1) > 1 else ""
        ends = "the middle half of the repeats" if repeats[0] >= QUARTILES else "all repeats"
        best = {metric in _BEST for metric in metrics}
        shown = " and ".join("best" if of else "median" for of in sorted(best))
        lines.append(f"{shown} of {count} repeats{turns}" if repeats[-1] > 1 else "one repeat")
        lines[-1] += f"; error bars: {ends}" if bars and False in best and repeats[-1] > 1 else ""
    return "\n".join(filter(None, [*lines, disturbance(good), where]))


def figure_of(plots: Sequence[Plot], rows: list[Row], best: Best | None = None, where: str = "") -> Figure:
    """Draw all plots side by side. A plot has a panel for each value of its key `panel`; without data it has no axes.

    Args:
        best: the sweep's metric for the best row.
        where: text on the machine, for the caption.
    """
    panels = [_panels(plot, rows, best) for plot in plots]
    widths = [4.4 * len(own) + 1.5 for own in panels]
    figure = new_figure((max(sum(widths), 6.5), 4.2))
    parts = figure.subfigures(1, len(plots), width_ratios=widths, squeeze=False)[0]
    for part, plot, own in zip(parts, plots, panels, strict=True):
        _draw(part, plot, own, rows, best)
    metrics = [metric for plot in plots for metric in plot.metrics]
    if small := caption(rows, where, metrics, any(plot.kind != "heat" for plot in plots)):
        figure.supxlabel(small, fontsize=7.5, color="#59636e", x=0.01, ha="left")
    return figure


def _panels(plot: Plot, rows: list[Row], best: Best | None) -> list[Any]:
    good, _ = shown_rows(plot, rows, best)
    return (values(good, plot.panel) if plot.panel else []) or [None]


def _draw(figure: Any, plot: Plot, panels: list[Any], rows: list[Row], best: Best | None) -> None:
    good, over = shown_rows(plot, rows, best)
    unit = _unit(plot, good)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=plot.same and plot.kind != "heat")[0]
    highest: list[float] = []
    for axis, panel in zip(axes, panels, strict=True):
        if not good:
            axis.set_axis_off()
            continue
        inside = [row for row in good if plot.panel is None or value(row, plot.panel) == panel]
        highest.append((_heat if plot.kind == "heat" else _lines)(axis, plot, inside, good, unit))
        axis.set_xlabel(label(plot.x) if plot.xlabel is None else plot.xlabel)
        if plot.panel:
            axis.set_title(named(plot.panel, panel), fontsize=10)
    hidden = f"best over {', '.join(over)}" if over else ""
    figure.suptitle(", ".join(filter(None, (plot.title, hidden if good else "no data"))), fontsize=11)
    if plot.kind == "heat" or not good:
        return
    for axis, high in zip(axes, highest, strict=True):
        if plot.ylog:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.06 * (max(highest) if plot.same else high) or 1)
    axes[0].set_ylabel(_y_label(plot, unit, good))
    if plot.series or len(plot.metrics) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8.5, frameon=False)


def shown_rows(plot: Plot, rows: list[Row], best: Best | None = None) -> tuple[list[Row], list[str]]:
    """Choose the rows to draw. Of several rows with the same x, series and panel, only the best by the first y counts.

    Returns:
        The rows to draw, and the keys in which hidden rows differ from them.
    """
    y = plot.metrics[0]
    most = best.of == "greatest" if best and best.metric == y else y.endswith("_per_s") or y == "parallelism"
    places: dict[tuple[str, ...], list[Row]] = {}
    for row in good_rows(plot, rows):
        place = tuple(plain(value(row, key)) for key in (plot.x, plot.series, plot.panel) if key)
        places.setdefault(place, []).append(row)
    keys = dict.fromkeys(key for own in places.values() for row in own for key in row["sets"])
    over = [k for k in keys if any(len({plain(value(row, k)) for row in own}) > 1 for own in places.values())]
    return [(max if most else min)(own, key=lambda row: row[y]) for own in places.values()], over


def good_rows(plot: Plot, rows: list[Row]) -> list[Row]:
    """Return the rows without an error that have all metrics of a plot."""
    return [row for row in rows if row["status"] == "ok" and all(y in row for y in plot.metrics)]


def _unit(plot: Plot, rows: list[Row]) -> tuple[float, str]:
    """Return factor and unit for times: ms if all are below 1 s and the plot sets no label, else (1, "")."""
    short = plot.ylabel is None and all(y in ("seconds", "seconds_min") for y in plot.metrics)
    return (1e3, "(ms)") if short and max((r[y] for r in rows for y in plot.metrics), default=1) < 1 else (1.0, "")


def _y_label(plot: Plot, unit: tuple[float, str], rows: Sequence[Row]) -> str:
    """Return the plot's label of the y axis, or a label derived from its metric."""
    if plot.ylabel is not None:
        return plot.ylabel
    measured = [row.get("measure", {}) for row in rows]
    forward = all(how.get("work") in FORWARD or how.get("phase") == "forward" for how in measured)
    of = label(plot.metrics[0]).replace("a step", "a forward pass" if forward else "a step")
    return of.replace("(s)", unit[1]) if unit[1] else of


def _lines(axis: Any, plot: Plot, rows: list[Row], every: list[Row], unit: tuple[float, str]) -> float:
    """Draw lines or bars with error bars; return the highest point.

    Args:
        rows: the rows of this panel.
        every: the rows of all panels, which have the same x axis.
        unit: factor and unit for times.
    """
    xs = values(every, plot.x)
    numeric = plot.kind == "line" and all(isinstance(x, int | float) and not isinstance(x, bool) for x in xs)
    places = xs if numeric else list(range(len(xs)))
    series = [(of, y) for of in (values(every, plot.series) if plot.series else [None]) for y in plot.metrics]
    highest = 0.0
    for number, (of, y) in enumerate(series):
        own = {plain(value(r, plot.x)): r for r in rows if plot.series is None or value(r, plot.series) == of}
        points = [(at, own[plain(x)]) for at, x in zip(places, xs, strict=True) if plain(x) in own]
        names = [*([named(plot.series, of)] if plot.series else []), *([y] if len(plot.metrics) > 1 else [])]
        text = ", ".join(names) or None
        ys = [row[y] * unit[0] for _, row in points]
        ends = [[end * unit[0] for end in spread(row, y) or (row[y], row[y])] for _, row in points]
        highest = max([highest, *ys, *(high for _, high in ends)])
        below, above = ([abs(end[k] - at) for at, end in zip(ys, ends, strict=True)] for k in (0, 1))
        bars = [below, above] if any((*below, *above)) else None
        colour, where = COLOURS[number % len(COLOURS)], [at for at, _ in points]
        again = number // len(COLOURS) % len(HATCHES)  # the colours repeat
        if plot.kind == "bar":
            width = 0.8 / len(series)
            where = [at + (number - (len(series) - 1) / 2) * width for at in where]
            axis.bar(where, ys, 0.92 * width, yerr=bars, capsize=3, color=colour, label=text,
                     error_kw={"elinewidth": 1}, hatch=HATCHES[again], edgecolor="white", linewidth=0)  # fmt: skip
        else:
            if not numeric:  # side by side, so that error bars do not cover each other
                where = [at + 0.05 * (number - (len(series) - 1) / 2) for at in where]
            axis.errorbar(where, ys, bars, marker=MARKERS[number % len(MARKERS)], markersize=5, capsize=3,
                          color=colour, label=text, linestyle=STYLES[again])  # fmt: skip
    if plot.log and numeric:
        axis.set_xscale("log", base=2)
    axis.set_xticks(places, [named(plot.x, x) if isinstance(x, bool) else plain(x) for x in xs], minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3, axis="y" if plot.kind == "bar" else "both")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return highest


def _heat(axis: Any, plot: Plot, rows: list[Row], every: list[Row], unit: tuple[float, str]) -> float:
    """Draw the first metric as colour; all panels have one colour scale."""
    assert plot.series
    metric, (xs, ys) = plot.metrics[0], (values(every, key) for key in (plot.x, plot.series))
    numbers = {(plain(value(r, plot.x)), plain(value(r, plot.series))): r[metric] * unit[0] for r in rows}
    scale = [row[metric] * unit[0] for row in every]
    cells = [[numbers.get((plain(x), plain(y)), float("nan")) for x in xs] for y in ys]
    image = axis.imshow(cells, cmap="viridis_r", vmin=min(scale), vmax=max(scale), aspect="auto")
    box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
    for (x, y), number in numbers.items():
        at = [plain(of) for of in xs].index(x), [plain(of) for of in ys].index(y)
        axis.text(*at, f"{number:.3g}", ha="center", va="center", fontsize=8, bbox=box)
    for key, of, set_ticks in ((plot.x, xs, axis.set_xticks), (plot.series, ys, axis.set_yticks)):
        set_ticks(range(len(of)), [named(key, v) if isinstance(v, bool) else plain(v) for v in of])
    axis.set_ylabel(label(plot.series))
    axis.figure.colorbar(image, ax=axis, label=_y_label(plot, unit, every))
    return 0.0


def label(key: str) -> str:
    """Return the label of an axis."""
    if key.startswith("tiles."):
        return f"tile size along {key.removeprefix('tiles.')}"
    return _LABELS.get(key, key)


def named(key: str, of: Any) -> str:
    """Return a value as text for a legend, which names the key."""
    if key in ("variant", "measure.contestant"):
        return plain(of)
    if key.partition(".")[0] == "fusion" and isinstance(of, bool):
        what = f"{key.partition('.')[2]} " if "." in key else ""
        return what + ("fused" if of else "naive")
    if key in ("runtime.cuda", "runtime.cpus"):
        return f"{plain(of)} {'GPU' if key.endswith('cuda') else 'worker'}{'s' * (of != 1)}"
    return f"{key.rpartition('.')[2]} {'uncut' if of is None else plain(of)}"


def value(row: Row, key: str) -> Any:
    """Return the value that a row's point has for a key, or the row's metric of this name."""
    return row["sets"].get(key, row.get(key))


def word(key: str, of: Any) -> str:
    """Return a value as text for a table, whose head names the key."""
    return named(key, of).rpartition(" ")[2] if key.startswith("fusion") and isinstance(of, bool) else plain(of)


def values(rows: list[Row], key: str) -> list[Any]:
    """Return the distinct values of a key in the order of the rows.

    Numbers are ascending, with None (uncut) last; true, as in fused, comes before false.
    """
    distinct = list({plain(value(row, key)): value(row, key) for row in rows}.values())
    if all(isinstance(v, bool) for v in distinct):
        return sorted(distinct, reverse=True)
    numbers = [v for v in distinct if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) + (None in distinct) < len(distinct):
        return distinct
    return sorted(numbers) + [v for v in distinct if v is None]


def plain(of: Any) -> str:
    """Return a value as YAML text, but None as `uncut`."""
    return of if isinstance(of, str) else "uncut" if of is None else json.dumps(of)
