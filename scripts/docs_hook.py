"""A hook of mkdocs: replaces `::: nt.NAME` in a page by `::: nntile_py.MODULE.NAME`, the module that defines NAME."""

import re
from typing import Any

import nntile_py as nt


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^::: nt\.(\w+)", lambda m: f"::: {nt.HOMES[m[1]]}.{m[1]}", markdown, flags=re.M)
