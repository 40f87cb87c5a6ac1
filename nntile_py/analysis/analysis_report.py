"""An analysis of operators as tables in a terminal, as CSV and as one HTML page that opens without a network."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from nntile_py.analysis import draw
from nntile_py.analysis.counts import Counts
from nntile_py.analysis.operators import Analysis, Peaks, Row, bound_by_memory, unfused
from nntile_py.config.builders import default_layouts
from nntile_py.errors import NNTileError
from nntile_py.system.folders import replace_file
from nntile_py.system.pages import templates
from nntile_py.tasks.op import CATEGORIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nntile_py.analysis.workloads import Work
    from nntile_py.config.run_config import RunConfig

SIGNS = " ".join(f"{of.mark} {of.name}" for of in CATEGORIES)


class Column(NamedTuple):
    """Of a table of rows. `rank`: the higher, the sooner it is left out where there is no room."""

    head: str
    rank: int
    cell: Callable[[Row, Peaks], str]
    means: str


def _number(value: float | None, digits: int = 3) -> str:
    """Three digits that count, without an exponent; nothing where there is none."""
    if value is None:
        return ""
    if 0 < value < 10**-digits:
        return f"<{10**-digits:g}"
    places = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2 if value >= 1 else digits
    return f"{value:,.{places}f}"


def _bound(row: Row, peaks: Peaks) -> str:
    bound = row.memory_bound(peaks)
    return "" if bound is None else "memory" if bound else "flop"


def _axes(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis} {size}" for axis, size in sizes.items())


COLUMNS = (
    Column("operator", 0, lambda r, _: f"{r.category.mark} {r.name}",
           f"{SIGNS}; h*: of all layers; dX, dW: gradients of what it read, of weights"),
    Column("x", 5, lambda r, _: f"{r.count:,}", "how many are alike; figures are of all of them"),
    Column("Gflop", 1, lambda r, _: _number(r.flop / 1e9), "10^9 operations, a multiply-add counted as two"),
    Column("read", 1, lambda r, _: _number(r.read / 1e6), "million words that its tasks read"),
    Column("written", 1, lambda r, _: _number(r.written / 1e6), "million words that its tasks write"),
    Column("least", 4, lambda r, _: _number(r.least / 1e6), "million words if each operand were moved once"),
    Column("flop/word", 3, lambda r, _: _number(r.intensity), "flop for each word that is moved"),
    Column("ms", 0, lambda r, _: _number(r.seconds and r.seconds * 1e3), "median time of it alone"),
    Column("% peak", 1, lambda r, p: _number(r.peak_share(p), 1), "of the peak flop/s"),
    Column("MUE", 1, lambda r, p: _number(r.mue(p), 1),
           "memory usage efficiency, percent: least over moved words, times the share of the peak bytes/s"),
    Column("bound by", 2, _bound, "memory where the MUE is above the share of the peak flop/s"),
    Column("group", 6, lambda r, _: r.group or "", "the fused operator that runs it"),
    Column("holds", 6, lambda r, _: r.title, "what was fused into it"),
    Column("iterates over", 7, lambda r, _: _axes(r.independent), "independent axes"),
    Column("sums over", 7, lambda r, _: _axes(r.reduced), "reduction axes"),
)  # fmt: skip


def render(made: Analysis, console: Console) -> None:
    """The tables, as wide as the console: columns for which there is no room are left out."""
    console.print(f"{made.title}", style="bold", highlight=False)
    for title, rows in (("before fusion", made.operators), ("as they run, after fusion", made.groups)):
        console.print()
        console.print(_fitting(title, rows, made.peaks, console.width))
    console.print()
    console.print(_classes(made))
    console.print()
    for line in (*movement(made), f"Read, written, least: million words. {SIGNS}."):
        console.print(line, highlight=False)


def _filled(rows: Sequence[Row], peaks: Peaks) -> list[tuple[Column, list[str]]]:
    """The columns in which something stands."""
    both = [(column, [column.cell(row, peaks) for row in rows]) for column in COLUMNS]
    same = {"x": "1"}
    return [(column, cells) for column, cells in both if any(cell != same.get(column.head, "") for cell in cells)]


def _fitting(title: str, rows: Sequence[Row], peaks: Peaks, width: int) -> Table:
    from rich.table import Table

    filled = _filled(rows, peaks)
    if not any(row.group for row in rows):  # what runs: what it holds tells more than its group
        filled = [(column, cells) for column, cells in filled if column.head != "group"]
    else:
        filled = [(column, cells) for column, cells in filled if column.head != "holds"]

    def needs(column: Column, cells: Sequence[str]) -> int:
        return max(map(len, (column.head, *cells))) + 2

    while sum(needs(*one) for one in filled) - 2 > width and max(column.rank for column, _ in filled) > 1:
        filled.remove(max(reversed(filled), key=lambda one: one[0].rank))
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column, _ in filled:
        words = column.head in ("operator", "bound by", "group", "holds", "iterates over", "sums over")
        table.add_column(column.head, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for cells in zip(*(cells for _, cells in filled), strict=True):
        table.add_row(*cells)
    return table


def _classes(made: Analysis) -> Table:
    """The paper's Table I."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title="by class, before fusion", title_justify="left")
    heads = ["class", "operators", "Gflop", "% flop", "million words", "least", "ms", "% time"]
    for head in heads if timed(made) else (heads := heads[:6]):
        table.add_column(head, justify="left" if head == "class" else "right")
    for row in class_rows(made):
        table.add_row(*row[: len(heads)])
    return table


def timed(made: Analysis) -> bool:
    return any(row.seconds is not None for row in made.operators)


def class_rows(made: Analysis) -> list[list[str]]:
    """Class, operators, Gflop, % flop, million words moved, least, ms, % time; at the end all, before and after."""
    totals, rows = made.totals(), []
    names = [*((of.name, f"{of.mark} {of.name}") for of in CATEGORIES), ("all", "all"), ("fused", "all, after fusion")]
    for key, told in names:
        t = totals[key]
        moved, least = (t["read_words"] + t["written_words"]) / 1e6, t["least_words"] / 1e6
        share = "" if key == "fused" else f"{t.get('percent_flop', 100.0) or 0:.2f}"
        time = t.get("percent_seconds", 100.0 if key == "all" and t["seconds"] else None)
        rows.append([
            told, f"{t['operators']:,}", _number(t["flop"] / 1e9), share, _number(moved), _number(least),
            _number(t["seconds"] and t["seconds"] * 1e3), "" if time is None else f"{time:.1f}",
        ])  # fmt: skip
    return rows


def movement(made: Analysis) -> list[str]:
    """In words: what fusion saves, how near that is to the least, and what the machine was taken for."""
    t, peaks = made.totals(), made.peaks
    before, after = (t[key]["read_words"] + t[key]["written_words"] for key in ("all", "fused"))
    least = t["fused"]["least_words"]
    lines = [
        f"Fusion moves {t['movement_saved_percent']:.2f} % fewer words: {before / 1e6:,.1f} million before, "
        f"{after / 1e6:,.1f} after; {least / 1e6:,.1f} if each operator after fusion moved each operand once."
    ]
    if t["all"]["seconds"] and t["fused"]["seconds"]:
        a, b = t["all"]["seconds"] * 1e3, t["fused"]["seconds"] * 1e3
        lines.append(f"Operators alone take {a:,.1f} ms before fusion, {b:,.1f} ms after it.")
    flop = "unknown" if peaks.flop is None else f"{peaks.flop / 1e9:,.0f} Gflop/s"
    size = "unknown" if peaks.bytes is None else f"{peaks.bytes / 1e9:,.1f} GB/s"
    return [*lines, f"Peak of all workers: {flop}, {size} ({peaks.source})."]


def write(made: Analysis, folder: Path, config: RunConfig, work: Work) -> list[Path]:
    """operators.csv, groups.csv, analysis.json, the graph before and after fusion (.dot, .svg, .png), report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, bytes] = {}
    graphs, note = [], ""
    for name, title in (("before", "The graph before fusion"), ("after", "The graph as it runs")):
        text = dot_of(made, config, work, name)
        files[f"graph-{name}.dot"] = text.encode()
        try:
            svg = draw.picture(text, "svg")
            files |= {f"graph-{name}.svg": svg, f"graph-{name}.png": draw.picture(text, "png")}
            graphs.append((title, Markup(svg[svg.index(b"<svg") :].decode())))
        except NNTileError as error:  # no graphviz, or a graph that is too large to read
            note = str(error)
    tables = [("Before fusion", made.operators), ("As they run, after fusion", made.groups)]
    files["report.html"] = templates(Path(__file__).parent).get_template("analysis.html.j2").render(
        made=made, graphs=graphs, note=note, classes=class_rows(made), timed=timed(made), lines=movement(made),
        tables=[(title, rows, _filled(rows, made.peaks), _keys(rows, made.peaks)) for title, rows in tables],
    ).encode()  # fmt: skip
    files["analysis.json"] = (json.dumps(made.to_dict(), indent=1) + "\n").encode()
    files |= {"operators.csv": table(made.operators, made.peaks).encode()}
    files |= {"groups.csv": table(made.groups, made.peaks).encode()}
    for name, content in files.items():
        replace_file(folder / name, content)
    return [folder / name for name in files]


def dot_of(made: Analysis, config: RunConfig, work: Work, fusion: str) -> str:
    """The graph in the DOT language, memory-bound operators marked, bytes beside the edges."""

    def bound(counts: Counts) -> bool:
        return bool(bound_by_memory(counts, made.peaks))

    return draw.draw(default_layouts(config), work=work, fusion=fusion, before=unfused(config), bound=bound)


def _keys(rows: Sequence[Row], peaks: Peaks) -> dict[str, list[Any]]:
    """By head of a column: the numbers to sort by, where a cell's text does not tell them."""
    return {
        "x": [row.count for row in rows], "Gflop": [row.flop for row in rows], "read": [row.read for row in rows],
        "written": [row.written for row in rows], "least": [row.least for row in rows],
        "flop/word": [row.intensity for row in rows], "ms": [row.seconds for row in rows],
        "% peak": [row.peak_share(peaks) for row in rows], "MUE": [row.mue(peaks) for row in rows],
    }  # fmt: skip


def table(rows: Sequence[Row], peaks: Peaks) -> str:
    """CSV of all that to_dict tells."""
    out = io.StringIO()
    dicts = [row.to_dict(peaks) for row in rows]
    writer = csv.DictWriter(out, list(dicts[0]), lineterminator="\n")
    writer.writeheader()
    for entry in dicts:
        writer.writerow({key: _axes(of) if isinstance(of, dict) else of for key, of in entry.items()})
    return out.getvalue()
