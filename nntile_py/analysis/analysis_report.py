"""Show an analysis of operators: tables in a terminal, CSV files, and one HTML page that opens without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from nntile_py.analysis import draw
from nntile_py.analysis.counts import Counts
from nntile_py.analysis.operator_row import OperatorRow, bound_by_memory
from nntile_py.analysis.operators import Analysis, unfused
from nntile_py.analysis.roofline import Peak, rates_text
from nntile_py.errors import NNTileError
from nntile_py.system.console_tables import csv_text, plain_table
from nntile_py.system.folders import replace_file
from nntile_py.system.pages import templates
from nntile_py.tasks.op import CATEGORIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SIGNS = " ".join(f"{of.mark} {of.name}" for of in CATEGORIES)


class Column(NamedTuple):
    """A column of a table of operators.

    Attributes:
        head: the column's heading.
        rank: columns of higher rank are left out first if the terminal is narrow.
        cell: returns the text of the cell in a row.
        meaning: text that explains the column.
        number: returns the number to sort a row by; None for a column of text.
    """

    head: str
    rank: int
    cell: Callable[[OperatorRow, Peak], str]
    meaning: str
    number: Callable[[OperatorRow, Peak], float | None] | None = None


def _number(value: float | None, digits: int = 3) -> str:
    """Format a number with about three significant digits, without exponent; None gives an empty text."""
    if value is None:
        return ""
    if 0 < value < 10**-digits:
        return f"<{10**-digits:g}"
    places = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2 if value >= 1 else digits
    return f"{value:,.{places}f}"


def _numeric(
    head: str, rank: int, number: Callable[[OperatorRow, Peak], float | None], meaning: str, digits: int = 3
) -> Column:
    return Column(head, rank, lambda row, peak: _number(number(row, peak), digits), meaning, number)


def _bound(row: OperatorRow, peak: Peak) -> str:
    bound = row.memory_bound(peak)
    return "" if bound is None else "memory" if bound else "flop"


def _axes(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis} {size}" for axis, size in sizes.items())


COLUMNS = (
    Column("operator", 0, lambda r, _: f"{r.category.mark} {r.name}",
           f"{SIGNS}; h*: of all layers; dX, dW: gradients of inputs, of weights"),
    Column("x", 5, lambda r, _: f"{r.count:,}", "number of equal operators; all figures are sums over them",
           lambda r, _: r.count),
    _numeric("Gflop", 1, lambda r, _: r.flop / 1e9, "10^9 operations; a multiply-add counts as two"),
    _numeric("read", 1, lambda r, _: r.read / 1e6, "million elements that its tasks read"),
    _numeric("written", 1, lambda r, _: r.written / 1e6, "million elements that its tasks write"),
    _numeric("least", 4, lambda r, _: r.least / 1e6, "million elements if each operand were moved once"),
    _numeric("flop/element", 3, lambda r, _: r.intensity, "flop for each element that is moved"),
    _numeric("ms", 0, lambda r, _: r.seconds and r.seconds * 1e3, "median time, measured without other operators"),
    _numeric("% peak", 1, OperatorRow.peak_share, "percent of the peak flop/s", 1),
    _numeric("MUE", 1, OperatorRow.mue,
             "memory usage efficiency, percent: least over moved elements, times the share of the peak bytes/s", 1),
    Column("bound by", 2, _bound, "memory if the MUE is above the share of the peak flop/s"),
    Column("group", 6, lambda r, _: r.group or "", "the fused operator that runs it"),
    Column("holds", 6, lambda r, _: r.title, "the operators that were fused into it"),
    Column("iterates over", 7, lambda r, _: _axes(r.independent), "independent axes"),
    Column("sums over", 7, lambda r, _: _axes(r.reduced), "reduction axes"),
)  # fmt: skip
TEXT = [column.head for column in COLUMNS if column.number is None]


def render(analysis: Analysis, console: Console) -> None:
    """Print the tables and the conclusion of an analysis. On a narrow console, tables have fewer columns."""
    console.print(f"{analysis.title}", style="bold", highlight=False)
    for title, rows in (("before fusion", analysis.operators), ("as they run, after fusion", analysis.groups)):
        console.print()
        console.print(_fitting(title, rows, analysis.peak, console.width))
    console.print()
    console.print(_classes(analysis))
    console.print()
    for line in (*movement(analysis), f"Read, written, least: million elements. {SIGNS}."):
        console.print(line, highlight=False)
    console.print()
    for line in analysis.conclusion():
        console.print(line, highlight=False, markup=False, style="bold" if line.startswith("Conclusion") else None)


def _filled(rows: Sequence[OperatorRow], peak: Peak) -> list[tuple[Column, list[str]]]:
    """Return the columns of COLUMNS that are not empty for these rows, each with the texts of its cells."""
    columns = [(column, [column.cell(row, peak) for row in rows]) for column in COLUMNS]
    empty = {"x": "1"}
    return [(column, cells) for column, cells in columns if any(cell != empty.get(column.head, "") for cell in cells)]


def _fitting(title: str, rows: Sequence[OperatorRow], peak: Peak, width: int) -> Table:
    left_out = "holds" if any(row.group for row in rows) else "group"
    filled = [(column, cells) for column, cells in _filled(rows, peak) if column.head != left_out]

    def needs(column: Column, cells: Sequence[str]) -> int:
        return max(map(len, (column.head, *cells))) + 2

    while sum(needs(*one) for one in filled) - 2 > width and max(column.rank for column, _ in filled) > 1:
        filled.remove(max(reversed(filled), key=lambda one: one[0].rank))
    heads = [column.head for column, _ in filled]
    table = plain_table(heads, text=TEXT, rigid=[head for head in heads if head not in TEXT], title=title)
    for cells in zip(*(cells for _, cells in filled), strict=True):
        table.add_row(*cells)
    return table


def _classes(analysis: Analysis) -> Table:
    """Return a table with sums over each class of operators, as in Table I of Ivanov et al. 2021."""
    table = plain_table(class_heads(analysis), text=["class"], title="by class, before fusion")
    for row in class_rows(analysis):
        table.add_row(*row[: len(table.columns)])
    return table


def class_heads(analysis: Analysis) -> list[str]:
    """Return the headings of the columns of class_rows; those of times only if times were measured."""
    heads = ["class", "operators", "Gflop", "% flop", "million elements", "least", "ms", "% time"]
    return heads if any(row.seconds is not None for row in analysis.operators) else heads[:6]


def class_rows(analysis: Analysis) -> list[list[str]]:
    """Return a row of texts for each class, and for all operators before and after fusion.

    The columns are those of class_heads, always with the times."""
    totals, rows = analysis.totals(), []
    names = [*((of.name, f"{of.mark} {of.name}") for of in CATEGORIES), ("all", "all"), ("fused", "all, after fusion")]
    for key, name in names:
        t = totals[key]
        moved, least = (t["read_elements"] + t["written_elements"]) / 1e6, t["least_elements"] / 1e6
        share = "" if key == "fused" else f"{t.get('percent_flop', 100.0) or 0:.2f}"
        time = t.get("percent_seconds", 100.0 if key == "all" and t["seconds"] else None)
        rows.append([
            name, f"{t['operators']:,}", _number(t["flop"] / 1e9), share, _number(moved), _number(least),
            _number(t["seconds"] and t["seconds"] * 1e3), "" if time is None else f"{time:.1f}",
        ])  # fmt: skip
    return rows


def movement(analysis: Analysis) -> list[str]:
    """Return sentences on the elements that operators move before and after fusion, and on the peak rates."""
    t, peak = analysis.totals(), analysis.peak
    before, after = (t[key]["read_elements"] + t[key]["written_elements"] for key in ("all", "fused"))
    least = t["fused"]["least_elements"]
    lines = [
        f"Fusion moves {t['movement_saved_percent']:.2f} % fewer elements: {before / 1e6:,.1f} million before, "
        f"{after / 1e6:,.1f} after; {least / 1e6:,.1f} if each operator after fusion moved each operand once."
    ]
    if t["all"]["seconds"] and t["fused"]["seconds"]:
        a, b = t["all"]["seconds"] * 1e3, t["fused"]["seconds"] * 1e3
        lines.append(f"Operators, each run by itself, take {a:,.1f} ms before fusion, {b:,.1f} ms after it.")
    count = analysis.config.workers
    each = rates_text(analysis.config, peak.flop and peak.flop / count, peak.bytes and peak.bytes / count)
    every = ""
    if peak.flop is not None and peak.bytes is not None and count > 1:
        every = f", {peak.flop / 1e9:,.0f} Gflop/s and {peak.bytes / 1e9:,.0f} GB/s in all"
    return [*lines, f"Peak: {each}{every} ({peak.source})."]


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write operators.csv, groups.csv, analysis.json, report.html and pictures of the graph into a folder.

    The pictures graph-before and graph-after show the graph before and after fusion, each as .dot, .svg and .png. The
    .svg and .png are left out if graphviz cannot draw them. Returns the paths of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, bytes] = {}
    graphs, note = [], ""
    for name, title in (("before", "The graph before fusion"), ("after", "The graph as it runs")):
        text = dot_of(analysis, name)
        files[f"graph-{name}.dot"] = text.encode()
        try:
            svg = draw.picture(text, "svg")
            files |= {f"graph-{name}.svg": svg, f"graph-{name}.png": draw.picture(text, "png")}
            graphs.append((title, f"graph-{name}", Markup(svg[svg.index(b"<svg") :].decode())))
        except NNTileError as error:  # no graphviz, or a graph that is too large to read
            note = str(error)
    tables = [("Before fusion", analysis.operators), ("As they run, after fusion", analysis.groups)]
    files["report.html"] = templates(Path(__file__).parent).get_template("analysis.html.j2").render(
        analysis=analysis, graphs=graphs, note=note, classes=class_rows(analysis), heads=class_heads(analysis),
        lines=movement(analysis), conclusion=analysis.conclusion(),
        tables=[(title, _filled(rows, analysis.peak), [*_page_rows(rows, analysis.peak)]) for title, rows in tables],
    ).encode()  # fmt: skip
    files["analysis.json"] = (json.dumps(analysis.to_dict(), indent=1) + "\n").encode()
    files |= {"operators.csv": table(analysis.operators, analysis.peak).encode()}
    files |= {"groups.csv": table(analysis.groups, analysis.peak).encode()}
    for name, content in files.items():
        replace_file(folder / name, content)
    return [folder / name for name in files]


def _page_rows(rows: Sequence[OperatorRow], peak: Peak) -> Iterator[tuple[bool, list[tuple[str, float | str | None]]]]:
    """Yield for each row of the HTML page whether the operator is memory-bound, and the cells.

    A cell is its text and the number to sort by; "" for no number."""
    filled = _filled(rows, peak)
    for place, row in enumerate(rows):
        numbers = [column.number and column.number(row, peak) for column, _ in filled]
        texts = [cells[place] for _, cells in filled]
        sort_keys = ["" if number is None else number for number in numbers]
        yield bool(row.memory_bound(peak)), list(zip(texts, sort_keys, strict=True))


def dot_of(analysis: Analysis, fusion: str) -> str:
    """Return the graph of an analysis in the DOT language: memory-bound operators are marked, edges show bytes.

    fusion: `before` or `after`."""

    def bound(counts: Counts) -> bool:
        return bool(bound_by_memory(counts, analysis.peak))

    config, before = analysis.config, unfused(analysis.config)
    return draw.draw(config, work=analysis.work, fusion=fusion, before=before, bound=bound)


def table(rows: Sequence[OperatorRow], peak: Peak) -> str:
    """Return rows of an analysis as CSV text. The columns are the keys of OperatorRow.to_dict."""
    entries = [row.to_dict(peak) for row in rows]
    cells = ([_axes(of) if isinstance(of, dict) else of for of in entry.values()] for entry in entries)
    return csv_text(list(entries[0]), cells)
