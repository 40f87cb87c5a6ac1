"""Loads Jinja templates of HTML pages."""

from pathlib import Path

import jinja2
from markupsafe import Markup, escape


def templates(folder: Path) -> jinja2.Environment:
    """Return a Jinja environment with the templates of `folder` and with their common base, page.html.j2.

    An undefined name in a template is an error. The filter `code` turns `text` in backquotes into <code>text</code>."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["code"] = code
    return environment


def code(text: str) -> Markup:
    """Return HTML in which text between backquotes became <code>text</code>; the rest is escaped."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(p) if k % 2 else p for k, p in enumerate(parts))
