"""Shows progress messages during long work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

EVERY = 10.0  # seconds between two messages if the output is not a terminal

Tell = Callable[[str], None]


@contextmanager
def telling(console: Console, every: float = EVERY) -> Iterator[Tell]:
    """Context manager: yield a function tell(text) that shows a progress message.

    On a terminal the message replaces the previous message. Otherwise a line is printed at most every `every` seconds.
    """
    last = -every

    def tell(text: str) -> None:
        nonlocal last
        status.update(text)
        if not console.is_terminal and time.monotonic() - last >= every:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
            last = time.monotonic()

    with console.status("") as status:
        yield tell


def progress_bar(console: Console) -> Progress:
    """Return a context manager that shows a bar for each task: done and total number, time so far, time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(TextColumn("{task.description}", markup=False), *columns, console=console)
