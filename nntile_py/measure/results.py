"""Results of a sweep: results.csv, plots, and results.json with the best row and the rows that may be as good."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from nntile_py.measure.plots import RATES, Row, disturbance, figure_of, good_rows, plain, spread, word
from nntile_py.measure.sweep_report import sets_text
from nntile_py.measure.sweep_spec import VARIANT
from nntile_py.system.console_tables import csv_text, plain_table
from nntile_py.system.folders import read, replace_file
from nntile_py.system.machine import described, machine
from nntile_py.system.pictures import FORMS, save_figure

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nntile_py.measure.sweep_spec import Best, Sweep

_NOT_IN_CSV = ("id", "sets", "measure", "times", "started", "by_round")
_SHOWN = 5  # errors, or rows as good as the best, that a message lists


def pooled(rows: list[Row]) -> Row:
    """Join the rows of a point's rounds into one row; return the first failed row if a round failed.

    A metric is the median over the rounds. A minimum is the least of all rounds; a maximum or peak is the greatest.
    """
    failed = next((row for row in rows if row["status"] != "ok"), None)
    if failed or len(rows) == 1:
        return failed or rows[0]
    result = rows[0] | {"rounds": len(rows), "times": [t for row in rows for t in row.get("times", [])]}
    result["by_round"] = [row["seconds"] for row in rows]
    for key, value in rows[0].items():
        if isinstance(value, float):
            least, most = key.startswith("best") or key.endswith("_min"), key.endswith("_max") or key.startswith("peak")
            pool = min if least else max if most else statistics.median
            result[key] = pool([row[key] for row in rows if row.get(key) is not None])
    return result


def best_row(rows: list[Row], best: Best) -> Row | None:
    """Return the row with the least, or greatest, value of the metric; rows with an error do not count."""
    good = [row for row in rows if row["status"] == "ok" and best.metric in row]
    return (min if best.of == "least" else max)(good, key=lambda row: row[best.metric], default=None)


def within_spread(rows: list[Row], best: Best) -> list[Row]:
    """Return the rows that may be as good as the best row: the range of their metric overlaps the best row's range.

    A range covers all rounds. So one disturbed round does not decide which point is the best.
    """
    chosen = best_row(rows, best)
    own = chosen and _range(chosen, best.metric)
    if not own:
        return []
    others = [(row, _range(row, best.metric)) for row in rows if row["status"] == "ok" and row is not chosen]
    alike = [row for row, of in others if of and of[0] <= own[1] and of[1] >= own[0]]
    return sorted(alike, key=lambda row: row[best.metric], reverse=best.of == "greatest")


def _range(row: Row, metric: str) -> tuple[float, float] | None:
    """Return (low, high) of a time or rate over all rounds; after one round, over its repeats. None: measured once."""
    rounds, seconds = row.get("by_round", []), row.get("seconds")
    if len(rounds) < 2 or not seconds or not (within := spread(row, metric)):
        return spread(row, metric)
    ends = [row[metric] * ((seconds / of) if metric in RATES else (of / seconds)) for of in rounds]
    return min(*ends, within[0]), max(*ends, within[1])


def gain(row: Row, base: Row) -> tuple[float, float, float]:
    """Return the speed-up of a row over `base`: median, minimum and maximum over the rounds."""
    pairs = list(zip(base.get("by_round", []), row.get("by_round", []), strict=False))
    ratios = [before / after for before, after in pairs] or [base["seconds"] / row["seconds"]]
    return statistics.median(ratios), min(ratios), max(ratios)


def summary(sweep: Sweep, rows: list[Row]) -> RenderableType:
    """Return a table of the rows for the terminal, with the errors of failed rows below the table."""
    from rich.console import Group
    from rich.text import Text

    keys = list(dict.fromkeys(key for row in rows for key in row["sets"]))
    keys = [key for key in keys if len({plain(row["sets"].get(key)) for row in rows}) > 1]
    metrics = list(dict.fromkeys([sweep.best.metric, "seconds_min", "tasks", "gflop_per_s"]))
    if sweep.has_peers:
        ratios = dict.fromkeys(key for row in rows for key in row if key.endswith((" ms", " ratio", " error")))
        metrics = ["ms", *(key for key in ratios if not key.startswith("best")), "peak_mib"]
    shown = plain_table((*(key.rpartition(".")[2] for key in keys), *metrics, "status"))
    best = best_row(rows, sweep.best)
    for row in rows:
        cells = [word(key, row["sets"].get(key, "")) for key in keys]
        cells += [f"{row[m]:.4g}" if isinstance(row.get(m), float) else str(row.get(m, "")) for m in metrics]
        shown.add_row(*cells, row["status"], style="bold green" if row is best else None)
    failed = [row for row in rows if row["status"] != "ok"]
    lines = [f"{row['status']}: {sets_text(row['sets'])}: {row['error']}" for row in failed[:_SHOWN]]
    lines += [f"and {len(failed) - _SHOWN} more, in results.csv"] if len(failed) > _SHOWN else []
    return Group(shown, *map(Text, lines))


def best_options(rows: list[Row], best: Best, baseline: Row | None = None) -> str:
    """Return the keys and values of the best row as options of a command: --set KEY=VALUE.

    Args:
        baseline: the row of the config's own values, which need no option.
    """
    row, own_values = best_row(rows, best), baseline["sets"] if baseline else {}
    if row and row is baseline:
        return "the config's own"
    sets = [(key, of) for key, of in (row["sets"] if row else {}).items() if own_values.get(key, ...) != of]
    texts = ((key, f"{key}={'null' if of is None else plain(of)}") for key, of in sets)
    own = (VARIANT, "measure.")  # keys of the sweep, not of a config
    return " ".join(text if key.startswith(own) else f"--set {text}" for key, text in texts) or "none"


def best_text(rows: list[Row], best: Best, baseline: Row | None = None) -> str:
    """Return the sweep's recommendation as text: the best row, or that no row is clearly the best.

    Args:
        baseline: the row of the config's own tiles; the text then names the speed-up over it.
    """
    chosen, alike = best_row(rows, best), within_spread(rows, best)
    lines = [f"best: {best_options(rows, best, baseline)}"]
    if chosen and alike:
        keys = [k for k, of in chosen["sets"].items() if any(row["sets"].get(k) != of for row in rows)]
        each = [
            ", ".join(f"{k.rpartition('.')[2]} {word(k, row['sets'].get(k))}" for k in keys)
            + f" ({row[best.metric]:.4g})"
            for row in alike[:_SHOWN]
        ]
        each += [f"and {len(alike) - _SHOWN} more"] if len(alike) > _SHOWN else []
        lines = [f"no clear winner; {best.of} {best.metric}: {best_options(rows, best, baseline)}"]
        lines.append(f"within the spread of: {'; '.join(each)}")
    elif chosen and len(rows) > 1 and not spread(chosen, best.metric):
        lines.append("measured once: measure.repeats and rounds show whether the difference is more than noise")
    if chosen and (busy := disturbance(rows)):
        lines.append(f"{busy}: measure again before you rely on this")
    if chosen and baseline:
        lines.append(_gain_text(chosen, baseline, bool(alike) if chosen is baseline else baseline in alike))
    return "\n".join(lines)


def _gain_text(chosen: Row, baseline: Row, alike: bool) -> str:
    own = f"the config's own tiles ({baseline['seconds']:.4g} s)"
    if chosen is baseline:
        return f"{own} are {'among the fastest' if alike else 'the best'}: keep them"
    middle, least, most = gain(chosen, baseline)
    text = f"{middle:.2f} times as fast as {own}, by round {least:.2f} to {most:.2f}"
    return f"{text}: no clear gain, keep them" if alike or least < 1 else text


def write_results(sweep: Sweep, rows: list[Row], folder: Path) -> list[str]:
    """Write results.json, results.csv and the plots, each atomically; return messages about plots without data."""
    best, where = best_row(rows, sweep.best), machine()
    earlier = _plots_of(folder)
    alike = [row["sets"] for row in within_spread(rows, sweep.best)]
    result = {"machine": where, "sweep": sweep.model_dump(by_alias=True), "best": best, "within_spread": alike}
    replace_file(folder / "results.json", json.dumps(result | {"rows": rows}, indent=1).encode())
    replace_file(folder / "results.csv", table(rows).encode())
    messages = []
    rows = [row | {"sets": sweep.set_ | row["sets"]} for row in rows]  # plots may name keys that all points share
    for number, plot in enumerate(sweep.plots):
        if good_rows(plot, rows):
            name = plot.title or Path(sweep.config).stem
            hardware = f"{described(where)}, {where['date']}"
            figure = figure_of([plot.model_copy(update={"title": name})], rows, sweep.best, hardware)
            save_figure(figure, folder / _stem(number))
        else:
            messages.append(f"{_stem(number)}.png: not drawn, no point has {', '.join(plot.metrics)}")
    drawn = {number for number, plot in enumerate(sweep.plots) if good_rows(plot, rows)}
    for number in {*range(earlier)} - drawn:  # pictures of earlier rows, or of an earlier sweep with more plots
        for form in FORMS:
            (folder / f"{_stem(number)}.{form}").unlink(missing_ok=True)
    return messages


def _plots_of(folder: Path) -> int:
    """Return the number of plots of the earlier sweep whose results.json is in the folder; 0 without one."""
    try:
        return len(json.loads(read(folder / "results.json"))["sweep"]["plots"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0


def _stem(number: int) -> str:
    return f"plot{number + 1 if number else ''}"


def table(rows: list[Row]) -> str:
    """Return the text of results.csv: a line for each row, with the keys that points set, status, metrics, error."""
    keys = list(dict.fromkeys(key for row in rows for key in row["sets"]))
    others = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in (*_NOT_IN_CSV, "error")]
    cells = [
        [*(plain(row["sets"].get(key, "")) for key in keys), *(row.get(key, "") for key in [*others, "error"])]
        for row in rows
    ]
    return csv_text([*keys, *others, "error"], cells)
