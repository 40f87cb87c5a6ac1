"""Tables and lists of names with values for a terminal; tables as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def plain_table(
    heads: Iterable[str], *, text: Collection[str] = (), rigid: Collection[str] = (), title: str | None = None,
    overflow: Literal["fold", "ellipsis"] = "fold",
) -> Table:  # fmt: skip
    """Return an empty rich table with bold column heads and without ruled lines.

    Args:
        heads: The column heads.
        text: Heads of text columns, which are aligned left; other columns hold numbers and are aligned right.
        rigid: Heads of columns whose cells are never wrapped.
        title: A title above the table.
        overflow: Whether cells that are too wide are wrapped (fold) or cut off (ellipsis).
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for head in heads:
        left = head in text
        table.add_column(head, justify="left" if left else "right", overflow=overflow, no_wrap=head in rigid)
    return table


def csv_text(heads: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """Return column heads and rows as CSV text."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([heads, *rows])
    return out.getvalue()


def facts(values: Mapping[str, str]) -> RenderableType:
    """Return a table with a row for each name and its value. A long value is wrapped within its column."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=18)
    for name, value in values.items():
        grid.add_row(Text(name), Text(value))
    return grid
