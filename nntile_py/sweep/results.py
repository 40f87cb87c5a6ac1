"""What a sweep leaves: results.csv, results.json with the best row, and its plots."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntile_py.system.folders import replace_file

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nntile_py.sweep.spec import Best, Plot, Sweep

Row = dict[str, Any]
_NOT_IN_CSV = ("id", "sets", "measure", "times", "started")
_TIMES = {"seconds": 1.0, "ms": 1e3, "us": 1e6}
_TOLD = 5  # errors
_LABELS = {
    "seconds": "time (s)", "ms": "time (ms)", "us": "time (us)", "tokens_per_s": "throughput (tokens/s)",
    "runtime.cpus": "CPU workers", "runtime.cuda": "GPUs", "gflop_per_s": "Gflop/s",
}  # fmt: skip


def pooled(rows: list[Row]) -> Row:
    """One row of those of a point's rounds: medians, and extremes of extremes. The first that failed, if one did."""
    failed = next((row for row in rows if row["status"] != "ok"), None)
    if failed or len(rows) == 1:
        return failed or rows[0]
    result = rows[0] | {"rounds": len(rows), "times": [t for row in rows for t in row.get("times", [])]}
    for key, value in rows[0].items():
        if isinstance(value, float):
            least, most = key.startswith("best") or key.endswith("_min"), key.endswith("_max") or key.startswith("peak")
            of = min if least else max if most else statistics.median
            result[key] = of([row[key] for row in rows])
    return result


def best_row(rows: list[Row], best: Best) -> Row | None:
    """The good row with the least or greatest metric."""
    good = [row for row in rows if row["status"] == "ok" and best.metric in row]
    return (min if best.of == "least" else max)(good, key=lambda row: row[best.metric], default=None)


def summary(sweep: Sweep, rows: list[Row]) -> RenderableType:
    """A table of the rows, with what failed below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    keys = list(dict.fromkeys(key for row in rows for key in row["sets"]))
    keys = [key for key in keys if len({_text(row["sets"].get(key)) for row in rows}) > 1]
    metrics = list(dict.fromkeys([sweep.best.metric, "seconds_min", "tasks", "gflop_per_s"]))
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in (*(key.rpartition(".")[2] for key in keys), *metrics, "status"):
        shown.add_column(column, justify="right", overflow="fold")
    best = best_row(rows, sweep.best)
    for row in rows:
        cells = [_text(row["sets"].get(key, "")) for key in keys]
        cells += [f"{row[m]:.4g}" if isinstance(row.get(m), float) else str(row.get(m, "")) for m in metrics]
        shown.add_row(*cells, row["status"], style="bold green" if row is best else None)
    failed = [row for row in rows if row["status"] != "ok"]
    lines = [f"{row['status']}: {row['sets']}: {row['error']}" for row in failed[:_TOLD]]
    lines += [f"and {len(failed) - _TOLD} more, in results.csv"] if len(failed) > _TOLD else []
    return Group(shown, *map(Text, lines))


def best_options(rows: list[Row], best: Best) -> str:
    """The best row as options of a command."""
    row = best_row(rows, best)
    sets = row["sets"].items() if row else []
    return " ".join(f"--set {key}={'null' if of is None else _text(of)}" for key, of in sets) or "none"


def write_results(sweep: Sweep, rows: list[Row], folder: Path) -> list[str]:
    """All files: each is complete, or as it was. Returns what is to be told: plots that have nothing to show."""
    from nntile_py.system.machine import machine

    best = best_row(rows, sweep.best)
    result = {"machine": machine(), "sweep": sweep.model_dump(by_alias=True), "best": best, "rows": rows}
    replace_file(folder / "results.json", json.dumps(result, indent=1).encode())
    replace_file(folder / "results.csv", table(rows).encode())
    told = []
    rows = [row | {"sets": sweep.set_ | row["sets"]} for row in rows]  # plots may name what all points share
    for number, plot in enumerate(sweep.plots):
        path = folder / _picture(number)
        if _good(plot, rows):
            replace_file(path, draw_plot(plot, rows, sweep.best))
        else:
            path.unlink(missing_ok=True)  # one of before is not of these rows
            told.append(f"{path.name}: not drawn, no point has {', '.join(plot.metrics)}")
    number = len(sweep.plots)
    while (more := folder / _picture(number)).exists():  # of a sweep that had more of them
        more.unlink()
        number += 1
    return told


def _picture(number: int) -> str:
    return f"plot{number + 1 if number else ''}.png"


def table(rows: list[Row]) -> str:
    """CSV: what was set, how it ended, the metrics."""
    keys = list(dict.fromkeys(key for row in rows for key in row["sets"]))
    others = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in (*_NOT_IN_CSV, "error")]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*keys, *others, "error"])
    for row in rows:
        sets = [_text(row["sets"].get(key, "")) for key in keys]
        writer.writerow([*sets, *(row.get(key, "") for key in others), row.get("error", "")])
    return out.getvalue()


def draw_plot(plot: Plot, rows: list[Row], best: Best | None = None) -> bytes:
    """A PNG: lines, bars or a heat map, a panel for each value of `panel`; without axes if there is nothing to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good, over = shown_rows(plot, rows, best)
    panels = _values(good, plot.panel) if plot.panel else [None]
    figure = Figure(figsize=(4.8 * max(len(panels), 1) + 0.6, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False, sharey=plot.same and plot.kind != "heat")[0]
    highest: list[float] = []
    for axis in axes if not good else []:
        axis.set_axis_off()
    for axis, panel in zip(axes, panels if good else [], strict=False):
        inside = [row for row in good if plot.panel is None or value(row, plot.panel) == panel]
        highest.append((_heat if plot.kind == "heat" else _lines)(axis, plot, inside))
        axis.set_xlabel(plot.xlabel or _LABELS.get(plot.x, plot.x))
        if plot.panel:
            axis.set_title(name(plot.panel, panel), fontsize=10)
    if plot.kind != "heat" and good:
        for axis, high in zip(axes, highest, strict=True):  # one disturbed repeat's error bar is not to hide the rest
            axis.set_ylim(0, 1.3 * (max(highest) if plot.same else high) or 1)
        axes[0].set_ylabel(plot.ylabel or _LABELS.get(plot.metrics[0], plot.metrics[0]))
    hidden = f"best over {', '.join(over)}" if over else ""
    figure.suptitle(", ".join(filter(None, (plot.title, hidden if good else "no data"))), fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, dpi=130)
    return out.getvalue()


def shown_rows(plot: Plot, rows: list[Row], best: Best | None = None) -> tuple[list[Row], list[str]]:
    """The best good row of each place, by the first y, and the keys in which those that it hides differ from it."""
    y = plot.metrics[0]
    most = best.of == "greatest" if best and best.metric == y else y.endswith("_per_s") or y == "parallelism"
    places: dict[tuple[str, ...], list[Row]] = {}
    for row in _good(plot, rows):
        place = tuple(_text(value(row, key)) for key in (plot.x, plot.series, plot.panel) if key)
        places.setdefault(place, []).append(row)
    keys = dict.fromkeys(key for own in places.values() for row in own for key in row["sets"])
    over = [k for k in keys if any(len({_text(value(row, k)) for row in own}) > 1 for own in places.values())]
    return [(max if most else min)(own, key=lambda row: row[y]) for own in places.values()], over


def _good(plot: Plot, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok" and all(y in row for y in plot.metrics)]


def value(row: Row, key: str) -> Any:
    """What a row set a key to, or its metric of that name."""
    return row["sets"].get(key, row.get(key))


def name(key: str, of: Any) -> str:
    """A value as a legend tells it."""
    if key.startswith("fusion") and isinstance(of, bool):
        return "fused" if of else "naive"
    if key in ("runtime.cuda", "runtime.cpus"):
        return f"{_text(of)} {'GPU' if key.endswith('cuda') else 'worker'}{'s' * (of != 1)}"
    return f"{key.rpartition('.')[2]} {'uncut' if of is None else _text(of)}"


def _lines(axis: Any, plot: Plot, rows: list[Row]) -> float:
    """Returns the highest y."""
    xs = _values(rows, plot.x)
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in xs)
    places = xs if numeric and plot.kind == "line" else range(len(xs))
    series = [(of, y) for of in (_values(rows, plot.series) if plot.series else [None]) for y in plot.metrics]
    highest = 0.0
    for number, (of, y) in enumerate(series):
        mine = {_text(value(r, plot.x)): r for r in rows if plot.series is None or value(r, plot.series) == of}
        here = [(at, mine[_text(x)]) for at, x in zip(places, xs, strict=True) if _text(x) in mine]
        told = [name(plot.series, of)] if plot.series else []
        label = ", ".join([*told, *([y] if len(plot.metrics) > 1 else [])]) or None
        ys = [row[y] for _, row in here]
        highest = max([highest, *ys])
        if plot.kind == "bar":
            width = 0.8 / len(series)
            axis.bar([at + (number - (len(series) - 1) / 2) * width for at, _ in here], ys, width, label=label)
        elif y in _TIMES and all("seconds_min" in row for _, row in here):
            low, high = (
                [abs(r[e] - r["seconds"]) * _TIMES[y] for _, r in here] for e in ("seconds_min", "seconds_max")
            )
            axis.errorbar([at for at, _ in here], ys, [low, high], marker="o", capsize=3, label=label)
        else:
            axis.plot([at for at, _ in here], ys, marker="o", label=label)
    if plot.log:
        axis.set_xscale("log", base=2)
    names = [name(plot.x, x) if isinstance(x, bool) else _text(x) for x in xs]
    axis.set_xticks(list(places), names, minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    if plot.series or len(plot.metrics) > 1:
        axis.legend(fontsize=8, framealpha=0.6)
    return highest


def _heat(axis: Any, plot: Plot, rows: list[Row]) -> float:
    assert plot.series
    xs, ys = _values(rows, plot.x), _values(rows, plot.series)
    found = {(_text(value(r, plot.x)), _text(value(r, plot.series))): r[plot.metrics[0]] for r in rows}
    nan = float("nan")
    image = axis.imshow([[found.get((_text(x), _text(y)), nan) for x in xs] for y in ys], cmap="viridis_r")
    for column, x in enumerate(xs):
        for line, y in enumerate(ys):
            if (_text(x), _text(y)) in found:
                number = found[_text(x), _text(y)]
                box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
                axis.text(column, line, f"{number:.3g}", ha="center", va="center", fontsize=8, bbox=box)
    axis.set_xticks(range(len(xs)), [_text(x) for x in xs])
    axis.set_yticks(range(len(ys)), [_text(y) for y in ys])
    axis.set_ylabel(_LABELS.get(plot.series, plot.series))
    axis.figure.colorbar(image, ax=axis, label=plot.ylabel or _LABELS.get(plot.metrics[0], plot.metrics[0]))
    return 0.0


def _values(rows: list[Row], key: str) -> list[Any]:
    """The values of a key in the order of the points; numbers in their own, uncut last."""
    found = list({_text(value(row, key)): value(row, key) for row in rows}.values())
    numbers = [v for v in found if isinstance(v, int | float) and not isinstance(v, bool)]
    return sorted(numbers) + [v for v in found if v is None] if len(numbers) + (None in found) == len(found) else found


def _text(of: Any) -> str:
    return of if isinstance(of, str) else "uncut" if of is None else json.dumps(of)
