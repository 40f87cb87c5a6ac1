"""Tables and lists of facts in a terminal; tables as CSV."""

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
    """Make a table without lines, with bold heads.

    Args:
        text: heads of columns of text, at the left; the other columns hold numbers, at the right.
        rigid: heads of columns that are never wrapped.
        overflow: what happens to cells that are too wide.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for head in heads:
        left = head in text
        table.add_column(head, justify="left" if left else "right", overflow=overflow, no_wrap=head in rigid)
    return table


def csv_text(heads: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([heads, *rows])
    return out.getvalue()


def facts(values: Mapping[str, str]) -> RenderableType:
    """Make a table of names and values; a long value continues on the next line of its column."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=18)
    for name, value in values.items():
        grid.add_row(Text(name), Text(value))
    return grid
