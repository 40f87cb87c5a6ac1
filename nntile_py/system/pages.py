"""HTML pages made of templates."""

from pathlib import Path

import jinja2


def templates(folder: Path) -> jinja2.Environment:
    """Those of a folder; a name that a page is not given is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
