"""The pages that users read: README, CONTRIBUTING and docs/, and what they say to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path | str, kind: str) -> list[str]:
    """The fenced blocks of a kind: sh, yaml, python."""
    text = page if isinstance(page, str) else page.read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)


def commands(page: Path) -> list[list[str]]:
    """The shell commands of a page, in words: of blocks marked sh and of indented ones."""
    indented = re.findall(r"^    (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    lines = [*"".join(blocks(page, "sh")).splitlines(), *indented]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def named(text: str) -> str | None:
    """The file that a block is, by its first line: `# name.yaml`."""
    match = re.match(r"# ([\w.-]+)\n", text)
    return match[1] if match else None
