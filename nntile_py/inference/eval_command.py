"""`nntile eval`: measure one or several trained models on a file, and show the measures in one table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from nntile_py.config.inference_config import InferenceConfig, inference_config, model_fields
from nntile_py.config.table_models import CLASSIFICATION, OF_TABLES
from nntile_py.data.rows import is_dataset
from nntile_py.data.text_pairs import read_pairs
from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.conversations import instructions_for
from nntile_py.inference.evaluation import NOUNS, Windows, aim_of, labelled_rows, measure, windows_of
from nntile_py.inference.open_model import OpenedModel, no_tokenizer, open_model
from nntile_py.system.progress import progress_bar

# {measure: (title of the column, format)}
_COLUMNS = {
    "step": ("step", "d"), "tokens": ("tokens", ",d"), "texts": ("texts", ",d"),
    "words": ("words", ",d"), "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".2f"), "bits_per_byte": ("bits/byte", ".4f"), "accuracy": ("accuracy", ".4f"),
    "mrr": ("MRR", ".4f"),
    "f1": ("F1", ".4f"), "f1_macro": ("macro F1", ".4f"), "cut": ("cut", ",d"),
    "seconds": ("s", ".1f"),
}  # fmt: skip


class _Prepared(NamedTuple):
    """A model that fits the data, and how to measure it."""

    opened: OpenedModel
    config: InferenceConfig
    windows: Windows


def evaluate_runs(
    runs: Sequence[str], data: Path, sizes: tuple[int | None, int | None, int | None], overrides: Sequence[str],
    console: Console, done: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Measure models one after the other, each with the workers and tiles of its run's config, or of --set.

    All folders are checked before the first measurement.

    Args:
        runs: Folders, see open_model.
        data: A text file, a folder of text files, or a table.
        sizes: The options --seq, --stride and --batch; None: the default.
        overrides: The options --set.
        console: Shows progress.
        done: Called with the measures of each model.

    Raises:
        ConfigError: A folder, the file or an option is wrong.
    """
    fields = model_fields(overrides)
    if not data.exists():
        need = "a text file, a folder of text files, or a table"
        raise ConfigError(f"--data: {data} is no such file or folder; allowed: {need}")

    def prepared(run: str) -> _Prepared:
        opened = open_model(run, fields)
        seq, stride, batch = sizes
        config = inference_config(opened.config, [*overrides, *([f"train.batch={batch}"] if batch else [])])
        windows = _windows(opened, data, config, seq, stride)
        _check_data(opened, data, config)
        return _Prepared(opened, config, windows)

    for run in runs[1:]:  # the first folder is checked below, right before its measurement
        prepared(run)
    for number, run in enumerate(runs, 1):
        opened, config, windows = prepared(run)
        begun = time.perf_counter()
        with Runtime(**config.runtime), progress_bar(console) as progress:
            place = f"{number} of {len(runs)}: " if len(runs) > 1 else ""
            bar = progress.add_task(f"{place}{Path(run).absolute().name}", total=None)

            def advance(units: str, count: int, total: int, bar: Any = bar) -> None:
                progress.update(bar, unit=units, total=total, advance=count)

            measures = measure(opened, data, config, windows, advance)
        facts: dict[str, Any] = {"run": str(run)}
        if opened.folder != Path(run):
            facts["folder"] = str(opened.folder)
        facts |= {"step": opened.step, "predicts": aim_of(opened)}
        if facts["predicts"] not in OF_TABLES:
            facts |= {"seq": windows.seq, "stride": windows.stride}
        done(facts | measures | {"seconds": time.perf_counter() - begun})


def _windows(
    opened: OpenedModel, data: Path, config: InferenceConfig, seq: int | None, stride: int | None
) -> Windows:
    """Return how the data are read. A conversation is one window. Raises ConfigError as `windows_of` does."""
    windows = windows_of(opened, config, seq, stride)
    if not instructions_for(opened, data, config, aim_of(opened) == "causal"):
        return windows
    if stride is not None:
        need = "no --stride, as a conversation is one window"
        raise ConfigError(f"--stride: got {stride} for conversations; allowed: {need}")
    return windows._replace(stride=windows.seq)


def _check_data(opened: OpenedModel, data: Path, config: InferenceConfig) -> None:
    """Raise ConfigError if a model has no tokenizer, or if its kind of model cannot be measured on the data."""
    aim = aim_of(opened)
    if opened.tokenizer is None:
        raise no_tokenizer(opened.folder)
    if aim in OF_TABLES and data.is_dir() and not is_dataset(data):
        raise ConfigError(f"--data: {data} is a folder; allowed for {NOUNS[aim]}: a table")
    if aim == CLASSIFICATION:
        labelled_rows(opened, data, config)
    elif aim in OF_TABLES:
        read_pairs("--data", str(data), config.data.texts)


def table(rows: Sequence[dict[str, Any]], width: float = math.inf) -> str:
    """Return the measures of all models as a table.

    Args:
        rows: The measures of each model.
        width: Characters of a line. In a wider table, the name of each run has a line of its own.
    """
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    cells = [[_COLUMNS[name][0] for name in names]]
    for row in rows:
        cells.append([format(row[name], _COLUMNS[name][1]) if row.get(name) is not None else "" for name in names])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    runs = ["run", *(row["run"] for row in rows)]
    longest = max(map(cell_len, runs))
    if longest + 2 + len(lines[0]) <= width:
        return "\n".join(f"{set_cell_size(run, longest)}  {line}" for run, line in zip(runs, lines, strict=True))
    return "\n".join(f"{run}\n  {line}" for run, line in zip(runs, lines, strict=True))


def as_json(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the measures without infinity and nan, which JSON lacks: they become null."""
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
