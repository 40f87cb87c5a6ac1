"""Compare runs: results, speed, and the keys in which their configs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nntile_py.checkpoint.format import MODEL
from nntile_py.checkpoint.resume import flattened
from nntile_py.checkpoint.run_folder import METRICS, SAMPLE, read_metrics
from nntile_py.errors import ConfigError
from nntile_py.training.curves import Curves, curves_of, smoothed

_NOT_COMPARED = ("out", "sample", "profile", "debug")  # sections that change no result


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder as it was recorded.

    Attributes:
        folder: The folder.
        config: {dotted key: value} of its config.yaml.
        lines: The lines of metrics.jsonl.
        curves: The curves of these lines.
    """

    folder: Path
    config: Mapping[str, Any]
    lines: list[dict[str, Any]]
    curves: Curves

    @property
    def name(self) -> str:
        """The folder's name, for tables and legends."""
        return self.folder.name

    def summary(self) -> dict[str, Any]:
        """Return results of the run; None where a value is unknown."""
        curves = self.curves
        last = curves.parts()[-1]  # losses that can be compared with the last one
        measured = last.held_out
        best = min(range(len(measured)), key=measured.__getitem__, default=None)
        tokens, seconds = self.tokens(), sum(line.get("step_time_s", 0.0) for line in self.lines)
        waited = sum(line.get("data_wait_s", 0.0) for line in self.lines)
        return {
            "run": self.name,
            "steps": self.lines[-1]["step"],
            "smoothed_loss": smoothed(last.loss)[-1] if last.loss else None,
            "held_out_loss": measured[-1] if measured else None,
            "best_held_out_loss": None if best is None else measured[best],
            "best_step": None if best is None else last.measured[best],
            "tokens": round(tokens),
            "tokens_per_s": tokens / seconds if seconds else None,
            "seconds": seconds,
            "data_wait_share": waited / seconds if seconds else None,
            "parameters": parameters(self.folder / MODEL),
            "memory_bytes": max((line.get("memory_bytes") or 0 for line in self.lines), default=0) or None,
            "machine": ", then ".join(dict.fromkeys(m for line in self.lines if (m := line.get("machine")))) or None,
        }

    def sample(self) -> str:
        """Return the text that the model wrote at the end of the run; "" if there is none."""
        try:
            return (self.folder / SAMPLE).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    def tokens(self) -> float:
        """Return the number of tokens that all steps have read."""
        return float(sum(line.get("tokens_per_s", 0.0) * line.get("step_time_s", 0.0) for line in self.lines))


def read_run(folder: Path) -> RecordedRun:
    """Read what a run has recorded.

    Raises:
        ConfigError: The folder is not that of a run, or the run has no finished step.
    """
    need = "the folder of a run of `nntile train`"
    if not folder.is_dir():
        what = " is a file" if folder.is_file() else ": no such folder"
        raise ConfigError(f"RUN: {folder}{what}; allowed: {need}")
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        lines = read_metrics(folder / METRICS)
    except (OSError, ValueError, yaml.YAMLError):
        raise ConfigError(f"RUN: {folder} has no readable config.yaml and {METRICS}; allowed: {need}") from None
    if not lines or not isinstance(tree, dict):
        raise ConfigError(f"RUN: {folder / METRICS} has no finished step; allowed: {need}")
    return RecordedRun(folder, flattened(tree), lines, curves_of(lines))


def parameters(weights: Path) -> int | None:
    """Return the number of values in a file of weights, without reading the values; None without a readable file."""
    try:
        with weights.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return None
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return {dotted key: its value in each config} of the keys that differ; None where a config lacks the key."""
    keys = sorted({key for config in configs for key in config})
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {
        key: row for key, row in values.items()
        if key.partition(".")[0] not in _NOT_COMPARED and any(value != row[0] for value in row)
    }  # fmt: skip
