"""Experiments of kind `capacity`: the largest GPT that each contestant trains, and the speed of each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from nntile_py.measure.capacity import MODELS, config_of, heads, parameters, settings, tried
from nntile_py.measure.contestants import OURS
from nntile_py.measure.experiment_parts import ExperimentPart, ExperimentResult
from nntile_py.measure.sweep_points import overrides_of
from nntile_py.measure.sweep_spec import Measure
from nntile_py.schema import Count, Natural, Positive, only
from nntile_py.system.console_tables import csv_text
from nntile_py.system.load import Load, is_busy
from nntile_py.system.pictures import files_of, new_figure

if TYPE_CHECKING:
    from rich.console import Console

    from nntile_py.config.run_config import RunConfig

Row = Mapping[str, Any]
Model = Annotated[str, *only(", ".join(MODELS), lambda name: name if name in [*MODELS] else None)]


class CapacityExperiment(ExperimentPart):
    """A section of kind `capacity`."""

    work: ClassVar = "train"
    models: Annotated[list[Model], Field(min_length=1)]
    """Models from small to large, as in `nntile bench capacity`."""
    contestants: Annotated[list[Literal["nntile", "ddp", "fsdp2", "fsdp2_offload"]], Field(min_length=1)]
    cuda: Natural = 1
    """GPUs; 0: the CPU, with no bound of memory."""
    cuda_memory: Positive = 20.0
    """GiB of each GPU that a contestant may take."""
    rounds: Count = 3
    time_limit: Positive = 120.0
    """Seconds of a start, and of a turn."""

    def resolved(self) -> RunConfig:
        """Return the config of the smallest model."""
        return self._config(self.models[0])

    def _config(self, model: str) -> RunConfig:
        return config_of(model, [*settings(self.cuda), *overrides_of(self.set_)])

    def run(self, folder: Path, console: Console) -> ExperimentResult:
        """For each contestant, train larger and larger models until one fails. Writes no files to `folder`."""
        configs = {model: self._config(model) for model in self.models}
        how = Measure(gpu_memory=int(self.cuda_memory * 2**30) if self.cuda else None)
        rows = []
        with Load() as load:
            for row in tried(self.contestants, configs, 0, how, self.rounds, self.time_limit, 0.0, 0.0):
                rows.append(row)
                console.print(f"{row['model']}, {row['contestant']}: {row.get('error') or 'trains'}", highlight=False)
        flop = {model: _flop_per_token(config) for model, config in configs.items()}
        notes = largest(rows, self.contestants)
        if is_busy(load.others):
            notes.append(f"Other processes kept {load.others:.1f} cores busy: times are too long.")
        own = heads(self.cuda)
        columns = [own[0], "parameters", *own[1:4], "Tflop/s", *own[4:], "error"]
        table = csv_text(columns, [_cells(row, flop) for row in rows])
        return ExperimentResult(table, self._picture(rows), totals=notes)

    def _picture(self, rows: Sequence[Row]) -> dict[str, bytes]:
        """Draw tokens per second by model for each contestant; a model that does not train has a cross."""
        figure = new_figure((7, 3.8))
        axes = figure.subplots()
        models = list(dict.fromkeys(row["model"] for row in rows))
        width = 0.8 / len(self.contestants)
        for number, name in enumerate(self.contestants):
            shift = (number - (len(self.contestants) - 1) / 2) * width
            own = [row for row in rows if row["contestant"] == name]
            good = [row for row in own if "error" not in row]
            places = [models.index(row["model"]) + shift for row in good]
            axes.bar(places, [row["tokens_per_s"] for row in good], 0.92 * width, label=name)
            bad = [models.index(row["model"]) + shift for row in own if "error" in row]
            low = axes.get_xaxis_transform()  # crosses stand above the bottom of the picture
            axes.plot(bad, [0.03] * len(bad), "x", color="black", transform=low)
        axes.set_xticks(range(len(models)), models)
        axes.set_yscale("log")
        axes.set_ylabel("tokens/s (cross: does not train)")
        axes.set_xlabel("GPT with so many parameters")
        axes.legend(fontsize=8)
        return files_of(figure)


def largest(rows: Sequence[Row], contestants: Sequence[str]) -> list[str]:
    """Return sentences: each contestant's largest model, then nntile_py's size and speed compared with each peer's."""
    good = {(row["contestant"], row["model"]): row for row in rows if "error" not in row}
    best: dict[str, Row] = {}
    for (name, _), row in good.items():
        if name not in best or row["parameters"] > best[name]["parameters"]:
            best[name] = row
    names = {name: best[name]["model"] if name in best else "none of these" for name in contestants}
    lines = [f"{name}: the largest model that trains is {model}." for name, model in names.items()]
    for name, row in best.items():
        if name == OURS or OURS not in best:
            continue
        text = f"nntile trains {best[OURS]['parameters'] / row['parameters']:.1f} times the parameters of {name}"
        if same := good.get((OURS, row["model"])):
            speed = same["tokens_per_s"] / row["tokens_per_s"]
            text += f"; its speed on {row['model']} is {speed:.2f} of {name}'s"
        lines.append(f"{text}.")
    return lines


def _flop_per_token(config: RunConfig) -> float:
    """Return the flop of a training step for each token: 6 for each parameter, and attention."""
    model = config.model
    return float(6 * parameters(config) + 12 * model.layers * model.embed * config.train.seq)


def _cells(row: Row, flop: Mapping[str, float]) -> list[str]:
    first = [row["model"], str(row["parameters"]), row["contestant"]]
    if "error" in row:
        return [*first, "no", "", "", "", "", "", row["error"]]
    rate = row["tokens_per_s"]
    return [
        *first, "yes", f"{rate:.1f}", f"{rate * flop[row['model']] / 1e12:.3f}", f"{row['seconds']['median']:.3f}",
        f"{row['peak_mib'] / 1024:.2f}", f"{row['host_mib'] / 1024:.2f}", "",
    ]  # fmt: skip
