"""Shows progress messages during long work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nntile_py.system.units import clock_text

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
    """Return a context manager that shows a line for each task: bar, done and total number, time so far, time left.

    The field `unit` of a task says what is counted. The lines disappear at the end of the block; without a terminal
    there are none."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Numbers(ProgressColumn):
        def render(self, task: Task) -> Text:
            total = "?" if task.total is None else f"{task.total:,.0f}"
            left = "" if task.time_remaining is None else f", {clock_text(task.time_remaining)} left"
            unit = f"{task.completed:,.0f}/{total} {task.fields.get('unit', '')}"
            return Text(f"{unit.rstrip()}  {clock_text(task.elapsed or 0)} elapsed{left}")

    one_line = Column(max_width=20, no_wrap=True, overflow="ellipsis")
    name = TextColumn("{task.description}", markup=False, table_column=one_line)
    bar = BarColumn(None, table_column=Column(ratio=1))
    return Progress(name, bar, Numbers(), console=console, transient=True, expand=True, disable=not console.is_terminal)
