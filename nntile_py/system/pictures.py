"""Figures of matplotlib, and their files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nntile_py.system.folders import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("png", "svg", "pdf")


def new_figure(inches: tuple[float, float]) -> Figure:
    """Make an empty figure that needs no screen. Its parts do not overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, stem: Path, forms: Sequence[str] = FORMS) -> None:
    """Write the figure in each form, to `stem` with the form as suffix. An existing file is replaced as a whole."""
    for form, content in files_of(figure, forms).items():
        replace_file(stem.with_name(f"{stem.name}.{form}"), content)


def files_of(figure: Figure, forms: Sequence[str] = FORMS) -> dict[str, bytes]:
    """Return the file's content for each form. The same figure gives the same bytes."""
    files = {}
    for form in forms:
        out = io.BytesIO()
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(out, format=form, dpi=150, metadata=undated.get(form))
        files[form] = out.getvalue()
    return files
