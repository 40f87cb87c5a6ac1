"""`nntile eval`: measure one or several trained models on a file, and show the measures in one table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from nntile_py.config.inference_config import inference_config, model_fields
from nntile_py.config.table_models import OF_TABLES
from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.evaluation import aim_of, measure, windows_of
from nntile_py.inference.open_model import open_model
from nntile_py.system.console_tables import plain_table
from nntile_py.system.progress import progress_bar

# {measure: (title of the column, format)}
_COLUMNS = {
    "step": ("step", "d"), "tokens": ("tokens", ",d"), "texts": ("texts", ",d"),
    "words": ("words", ",d"), "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".2f"), "bits_per_byte": ("bits/byte", ".4f"), "accuracy": ("accuracy", ".4f"),
    "mrr": ("MRR", ".4f"),
    "f1": ("F1", ".4f"), "f1_macro": ("F1, mean of classes", ".4f"), "cut": ("cut texts", ",d"),
    "seconds": ("s", ".1f"),
}  # fmt: skip


def evaluate_runs(
    runs: Sequence[str], data: Path, sizes: tuple[int | None, int | None, int | None], overrides: Sequence[str],
    console: Console, done: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Measure models one after the other, each with the workers and tiles of its run's config, or of --set.

    Args:
        runs: Folders, see open_model.
        data: A text file or a folder of text files, or a table for classifiers.
        sizes: The options --seq, --stride and --batch; None: the default.
        overrides: The options --set.
        console: Shows progress.
        done: Called with the measures of each model.

    Raises:
        ConfigError: A folder, the file or an option is wrong.
    """
    seq, stride, batch = sizes
    fields = model_fields(overrides)
    if not data.exists():
        need = "a text file or a folder of text files, or a table for a classifier"
        raise ConfigError(f"--data: {data} is no such file or folder; allowed: {need}")
    for run in runs:
        opened = open_model(run, fields)
        config = inference_config(opened.config, [*overrides, *([f"train.batch={batch}"] if batch else [])])
        windows = windows_of(opened, config, seq, stride)
        begun = time.perf_counter()
        with Runtime(**config.runtime), progress_bar(console) as progress:
            bar = progress.add_task(str(run), total=None)

            def advance(units: str, number: int, total: int, bar: Any = bar, run: str = run) -> None:
                progress.update(bar, description=f"{run}: {units}", total=total, advance=number)

            measures = measure(opened, data, config, windows, advance)
        facts = {"run": str(run), "folder": str(opened.folder), "step": opened.step, "predicts": aim_of(opened)}
        if facts["predicts"] not in OF_TABLES:
            facts |= {"seq": windows.seq, "stride": windows.stride}
        done(facts | measures | {"seconds": time.perf_counter() - begun})


def table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Return the measures of all models as one table."""
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    result = plain_table(["run", *(_COLUMNS[name][0] for name in names)], text=["run"])
    for row in rows:
        cells = (format(row[name], _COLUMNS[name][1]) if row.get(name) is not None else "" for name in names)
        result.add_row(Text(row["run"]), *cells)
    return result


def as_json(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the measures without infinity and nan, which JSON lacks: they become null."""
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
