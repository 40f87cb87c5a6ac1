"""Sections `cpu` and `gpu` of experiments: base classes, kinds `graph` and `profile`. The result of an experiment."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nntile_py.analysis import draw
from nntile_py.analysis.workloads import Work, build, preset
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.graph.estimate import estimate
from nntile_py.graph.fusion import Fusion
from nntile_py.measure.plots import Row
from nntile_py.measure.sweep_points import overrides_of
from nntile_py.profiling import FILES
from nntile_py.schema import Count, Section
from nntile_py.system.console_tables import csv_text
from nntile_py.system.folders import read, replace_file
from nntile_py.system.pictures import FORMS


@dataclass
class ExperimentResult:
    """Result of an experiment.

    Attributes:
        csv: text of the CSV file with the numbers.
        pictures: contents of the picture files, by suffix.
        no_picture: the error for which there is no picture; None: no error.
        totals: sentences below the table of the report.
        rows: for a sweep, the rows of its points.
    """

    csv: str
    pictures: dict[str, bytes] = field(default_factory=dict)
    no_picture: NNTileError | None = None
    totals: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class ExperimentPart(Section):
    """A section `cpu` or `gpu` of an experiment that is no sweep."""

    set_: dict[str, Any] = Field(default_factory=dict, alias="set")


class PresetPart(ExperimentPart):
    """A section that measures a layer of BERT-large's sizes."""

    work: Literal["encoder", "decoder", "mha"]

    def resolved(self) -> RunConfig:
        return preset(self.work, overrides_of(self.set_))


class ConfigPart(ExperimentPart):
    """A section that runs or draws a config."""

    config: str

    def resolved(self) -> RunConfig:
        return load(self.config, overrides_of(self.set_))


class GraphExperiment(ConfigPart):
    """A section of kind `graph`: a picture as from `nntile graph`."""

    work: Work = "train"
    level: Literal["logical", "tiles"] = "logical"
    layer: int | None = None
    phase: Literal["forward", "backward", "update", "all"] = "all"
    fusion: Literal["before", "after", "both"] = "both"

    def run(self, folder: Path) -> ExperimentResult:
        """Draw the graph; the result's table compares the graph before and after fusion."""
        config, rows = self.resolved(), []
        dot = draw.draw(
            config, level=self.level, work=self.work, layer=self.layer, phase=self.phase, fusion=self.fusion
        )
        pictures, no_picture = drawn(dot, folder)
        for name, fusion in (("before fusion", Fusion.of(False)), ("after fusion", None)):
            built = build(config, self.work, "forward" if self.phase == "forward" else "all", fusion=fusion)
            cost = estimate(built.lists, config.workers)
            operators = sum(len(graph.ops) for graph, _ in built.graphs)
            flop = sum(graph.computed(op, lowering.tiling) for graph, lowering in built.graphs for op in graph.ops)
            rows.append([name, operators, cost.tasks, int(flop), int(built.flop), cost.bytes_moved])
        heads = ["graph", "operators", "tasks", "flop", "flop of products", "bytes moved by tasks"]
        return ExperimentResult(csv_text(heads, rows), pictures, no_picture)


class ProfileExperiment(ConfigPart):
    """A section of kind `profile`: a Gantt chart as from `nntile profile`."""

    work: Literal["train", "inference"] = "train"
    steps: Count = 3

    def run(self, folder: Path, name: str) -> ExperimentResult:
        """Run `nntile profile`; the result's table has a row for each worker."""
        profile = folder / "profile"
        clear_profile(profile)
        config = folder / f"{name}.yaml"
        replace_file(config, self.resolved().to_yaml())
        command = ["profile", str(config), "--steps", str(self.steps), "--out", str(profile), "--work", self.work]
        ran = subprocess.run([sys.executable, "-m", "nntile_py.cli", *command], capture_output=True, text=True)
        if ran.returncode:
            raise NNTileError(f"nntile {' '.join(command)}: {ran.stderr.strip() or ran.stdout.strip()}")
        workers = json.loads((profile / "summary.json").read_text())["workers"]
        keys = [key for key, value in workers[0].items() if not isinstance(value, dict)]
        rows = [[worker.get(key, "") for key in keys] for worker in workers]
        return ExperimentResult(
            csv_text(keys, rows), {form: (profile / f"gantt.{form}").read_bytes() for form in FORMS}
        )


def drawn(dot: str, folder: Path) -> tuple[dict[str, bytes], NNTileError | None]:
    """Write `dot` to plot.dot; return the pictures by suffix, and the error if graphviz could not draw them."""
    draw.write(dot, folder / "plot.dot")
    try:
        return {form: draw.picture(dot, form) for form in FORMS}, None
    except draw.NoPicture as error:
        return {}, error


def _is_summary(path: Path) -> bool:
    try:
        return bool({"findings", "seconds_per_step"} <= json.loads(read(path)).keys())
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def clear_profile(folder: Path) -> None:
    """Delete the profile of an earlier run: `nntile profile` refuses a folder that is not empty.

    Raises:
        ConfigError: the folder holds a file that is not of a profile.
    """
    if not folder.exists():
        return
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    foreign = [path for path in files if path.name not in FILES or not path.is_file()]
    if files and not foreign and not _is_summary(folder / "summary.json"):  # no profile: the files are the user's
        foreign = files
    if foreign:
        raise ConfigError(f"{foreign[0]}: not of an earlier profile, so {folder} is not emptied for a new one: "
                          "move it, or choose another --out")  # fmt: skip
    for path in files:
        path.unlink()
