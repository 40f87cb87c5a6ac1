"""The report of `nntile experiment`: command, machine, the paper's result, and the result that was measured here."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nntile_py.measure.plots import Row, disturbance, named, value, word
from nntile_py.system.load import cores
from nntile_py.system.machine import described, machine

if TYPE_CHECKING:
    from nntile_py.measure.experiment_parts import ExperimentResult
    from nntile_py.measure.experiments import Experiment, Mode

MOST_ROWS = 59  # largest number of rows of a table in a report


def report(
    experiment: Experiment, scale: str, result: ExperimentResult, load_before: float,
    mode: Mode | None = None, note: str = "", sets: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the report in Markdown.

    Args:
        scale: `cpu` or `gpu`.
        load_before: load average of the machine before the run.
        note: a sentence on points that were left out.
    """
    rows, where = result.rows, machine()
    options = [*(["--mode", mode] if mode else []), *(part for item in sets for part in ("--set", item))]
    lines = [f"# {experiment.name}: {experiment.title}", "", experiment.shows, ""]
    lines += [" ".join([f"    nntile experiment {experiment.name} --scale {scale}", *options]), ""]
    if mode:
        training = "forward pass, backward pass and, for a whole model, the update"
        lines += [f"Measured here: {mode}, {training if mode == 'training' else 'the forward pass only'}.", ""]
    where = where | ({"gpus": ""} if scale == "cpu" else {})
    lines.append(f"{where['date']}, commit {where['commit']}; {described(where)}.")
    lines += [f"{note[0].upper()}{note[1:]}."] if note else []
    if load_before > 0.3:
        lines.append(f"Load average {load_before:.1f} before the start: other programs ran then, or shortly before.")
    if busy := disturbance(rows):
        lines.append(f"{busy.capitalize()} of {cores()} meanwhile: times are too long; ratios are less affected.")
    lines += ["", "## The paper", "", experiment.paper.strip(), "", "## Here", ""]
    if rows:
        keys = list(dict.fromkeys(key for row in rows for key in row["sets"]))
        cells = [
            [*(word(k, value(r, k)) for k in keys), *(_cell(value(r, k)) for k in experiment.columns)] for r in rows
        ]
        lines += [*_markdown([[*keys, *experiment.columns], *cells]), *_ratios(experiment, rows)]
    else:
        head, *cells = csv.reader(io.StringIO(result.csv))
        lines += _markdown([[_cell(_number(text)) for text in row] for row in (head, *cells[:MOST_ROWS])])
        if len(cells) > MOST_ROWS:
            lines += ["", f"The first {MOST_ROWS} of {len(cells)} rows; the CSV beside this file has all of them."]
        lines += ["", *(f"* {line}" for line in result.totals)] if result.totals else []
    return "\n".join([*lines, ""])


def _ratios(experiment: Experiment, rows: list[Row]) -> list[str]:
    """Return lines that compare rows with different values of the key `experiment.ratio` and equal other keys.

    A line has the time for each other value of the key, divided by the time for the first value: the ratio of the
    medians, then the ratio of the best repeats, which noise disturbs less."""
    key = experiment.ratio
    if not key:
        return []
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            rest = sets_text({other: of for other, of in row["sets"].items() if other != key})
            groups.setdefault(rest, {})[json.dumps(row["sets"][key])] = row
    first = next((json.dumps(row["sets"][key]) for row in rows), "")
    full = {rest: group for rest, group in groups.items() if first in group and len(group) > 1}
    if not full:
        return []
    others = list(dict.fromkeys(of for group in full.values() for of in group if of != first))
    names = {of: named(key, json.loads(of)) for of in (first, *others)}
    divided = f"Time of {names[others[0]]}" if len(others) == 1 else "Times"
    lines = ["", f"{divided} divided by the time of {names[first]}, median (best repeat):", ""]
    for rest, group in full.items():
        ratios = []
        for of in (of for of in others if of in group):
            median, best = (group[of][metric] / group[first][metric] for metric in ("seconds", "seconds_min"))
            ratios.append(f"{names[of]} " * (len(others) > 1) + f"{median:.2f} ({best:.2f})")
        lines.append(f"* {rest or 'all'}: {', '.join(ratios)}")
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


def sets_text(sets: dict[str, Any]) -> str:
    """Return keys and values as text, without the axes that are not cut; `uncut` if nothing else is left."""
    cut = {key: of for key, of in sets.items() if of is not None or not key.startswith("tiles.")}
    return ", ".join(f"{key} {json.dumps(of)}" for key, of in cut.items()) or ("uncut" if sets else "")
