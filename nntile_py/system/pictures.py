"""Creates matplotlib figures without a display, and writes them to files."""

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
    """Return an empty matplotlib figure of this width and height. It needs no display; its parts do not overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, stem: Path, forms: Sequence[str] = FORMS) -> None:
    """Write the figure to STEM.png, STEM.svg, ...: one file for each of `forms`. Existing files are replaced."""
    for form, content in files_of(figure, forms).items():
        replace_file(stem.with_name(f"{stem.name}.{form}"), content)


def files_of(figure: Figure, forms: Sequence[str] = FORMS) -> dict[str, bytes]:
    """Return {form: content of the figure's file}, such as for png and svg. Equal figures give equal bytes."""
    files = {}
    for form in forms:
        out = io.BytesIO()
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(out, format=form, dpi=150, metadata=undated.get(form))
        files[form] = out.getvalue()
    return files
