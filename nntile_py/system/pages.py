"""HTML pages made of templates."""

from pathlib import Path

import jinja2
from markupsafe import Markup, escape


def templates(folder: Path) -> jinja2.Environment:
    """Return the templates of a folder, with page.html.j2, which each of them extends.

    A name without a value is an error. The filter `code` writes text between backquotes as <code>."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["code"] = code
    return environment


def code(text: str) -> Markup:
    """Write `text` between backquotes as <code>text</code>."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(p) if k % 2 else p for k, p in enumerate(parts))
