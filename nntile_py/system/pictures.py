"""Figures of matplotlib, and their files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("png", "svg", "pdf")


def new_figure(inches: tuple[float, float]) -> Figure:
    """An empty one of that width and height, whose parts make room for each other; it needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def files_of(figure: Figure, forms: Sequence[str] = FORMS) -> dict[str, bytes]:
    """By form. The same figure gives the same bytes."""
    files = {}
    for form in forms:
        out = io.BytesIO()
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(out, format=form, dpi=150, metadata=undated.get(form))
        files[form] = out.getvalue()
    return files
