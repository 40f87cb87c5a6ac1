"""The report of `nntile experiment`: command and machine, the result in the paper, the result here."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nntile_py.measure.plots import Row, named, value, word
from nntile_py.system.load import cores, is_busy
from nntile_py.system.machine import described, machine

if TYPE_CHECKING:
    from nntile_py.measure.experiments import Experiment, Mode

MOST_ROWS = 59  # of a table in a report


def report(
    made: Experiment,
    scale: str,
    rows: list[Row],
    written: str,
    load_before: float,
    mode: Mode | None = None,
    note: str = "",
    totals: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> str:
    """Return the report in Markdown: command and machine, the result in the paper, the result here."""
    where = machine()
    lines = [f"# {made.name}: {made.title}", "", made.shows, ""]
    given = [*(["--mode", mode] if mode else []), *(part for item in sets for part in ("--set", item))]
    lines += [" ".join([f"    nntile experiment {made.name} --scale {scale}", *given]), ""]
    if mode:
        told = "forward, backward and, of a whole model, the update" if mode == "training" else "the forward pass alone"
        lines += [f"Measured here: {mode}, {told}.", ""]
    where = where | ({"gpus": ""} if scale == "cpu" else {})
    lines.append(f"{where['date']}, commit {where['commit']}; {described(where)}.")
    lines += [f"{note[0].upper()}{note[1:]}."] if note else []
    if load_before > 0.3:
        lines.append(f"Load average {load_before:.1f} before the start: something used the machine, or just had.")
    busy = max((row["others"] for row in rows if row.get("others") is not None), default=0.0)
    if is_busy(busy):
        lines.append(
            f"Other processes kept up to {busy:.1f} of {cores()} cores busy while a point was measured: times are too "
            "long, and ratios tell more than times."
        )
    lines += ["", "## The paper", "", made.paper.strip(), "", "## Here", ""]
    if rows:
        keys = list(dict.fromkeys(key for row in rows for key in row["sets"]))
        lines += _markdown(
            [[*keys, *made.columns]] + [
                [*(word(k, value(r, k)) for k in keys), *(_cell(value(r, k)) for k in made.columns)] for r in rows
            ]
        )
        lines += _ratios(made, rows)
    else:
        head, *read = csv.reader(io.StringIO(written))
        lines += _markdown([[_cell(_number(of)) for of in row] for row in (head, *read[:MOST_ROWS])])
        if len(read) > MOST_ROWS:
            lines += ["", f"The first {MOST_ROWS} of {len(read)} rows; the CSV beside this file has all of them."]
        lines += ["", *(f"* {line}" for line in totals)] if totals else []
    return "\n".join([*lines, ""])


def _ratios(made: Experiment, rows: list[Row]) -> list[str]:
    """Return the times of rows that differ only in the key `ratio`, over the time of its first value.

    Ratios are of medians and of best repeats, which noise disturbs less."""
    if not made.ratio:
        return []
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            rest = sets_told({key: of for key, of in row["sets"].items() if key != made.ratio})
            groups.setdefault(rest, {})[json.dumps(row["sets"][made.ratio])] = row
    first = next((json.dumps(row["sets"][made.ratio]) for row in rows), "")
    full = {rest: group for rest, group in groups.items() if first in group and len(group) > 1}
    if not full:
        return []
    others = list(dict.fromkeys(of for group in full.values() for of in group if of != first))
    told = {of: named(made.ratio, json.loads(of)) for of in (first, *others)}
    over = told[others[0]] if len(others) == 1 else "of the others"
    lines = ["", f"Time {over} over time {told[first]}, median (best repeat):", ""]
    for rest, group in full.items():
        found = []
        for of in (of for of in others if of in group):
            median, best = (group[of][metric] / group[first][metric] for metric in ("seconds", "seconds_min"))
            found.append(f"{told[of]} " * (len(others) > 1) + f"{median:.2f} ({best:.2f})")
        lines.append(f"* {rest or 'all'}: {', '.join(found)}")
    return lines


def _markdown(cells: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]


def _number(text: str) -> float | str:
    try:
        return float(text) if "." in text else text
    except ValueError:
        return text


def _cell(of: Any) -> str:
    return f"{of:.4g}" if isinstance(of, float) else "" if of is None else str(of)


def sets_told(sets: dict[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(of)}" for key, of in sets.items())
