"""For mkdocs: `::: nt.NAME` in a page is what `nntile_py.NAME` is, wherever in the package it is defined."""

import re
from typing import Any

import nntile_py as nt


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^::: nt\.(\w+)", lambda m: f"::: {nt.HOMES[m[1]]}.{m[1]}", markdown, flags=re.M)
