"""`nntile experiment`: reproduce a figure or a table of a paper, from one YAML to picture, CSV and report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntile_py.analysis.workloads import build
from nntile_py.config.run_config import RunConfig
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.graph.estimate import Estimate, estimate
from nntile_py.measure.experiment_parts import ExperimentResult, ProfileExperiment
from nntile_py.measure.experiments import EXPERIMENTS, Experiment, Mode
from nntile_py.measure.plots import figure_of
from nntile_py.measure.results import table
from nntile_py.measure.runner import run as run_sweep
from nntile_py.measure.sweep_points import points
from nntile_py.measure.sweep_report import report, sets_text
from nntile_py.measure.sweep_spec import Sweep
from nntile_py.measure.workload_inputs import planned_flop
from nntile_py.system.console_tables import plain_table
from nntile_py.system.folders import replace_file
from nntile_py.system.machine import described, machine
from nntile_py.system.pictures import files_of
from nntile_py.system.units import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# -- planning


def plan(
    experiment: Experiment, scale: str, mode: Mode | None = None, sets: Sequence[str] = ()
) -> RenderableType:  # fmt: skip
    """Check and plan every point without running it; return the table of plans."""
    heads = ("point", "tasks", "Tflop", "GB moved", "GiB peak", "us a task", "parallel")
    planned = plain_table(heads, text=["point"])
    known: dict[str, tuple[Estimate, float]] = {}
    for label, config, work, phase, alpha in _planned(experiment.part(scale, mode, sets), experiment.kind):
        key = json.dumps([config.model_dump(exclude={"runtime"}), work, phase, alpha], default=str)
        if key not in known:  # tasks do not depend on the number of workers
            built = build(config, work, phase)
            of_lists = estimate(built.lists, config.workers, gpu=config.runtime.cuda != 0)
            known[key] = of_lists, planned_flop(config, work, alpha, built)
        of, flop = known[key]
        cells = [f"{of.tasks:,}", f"{flop / 1e12:.3g}", f"{of.bytes_moved / 1e9:.3g}", f"{of.peak_bytes / 2**30:.3g}"]
        planned.add_row(label, *cells, f"{of.mean_task * 1e6:,.0f}", f"{of.parallelism:.1f}")
    return planned


def _planned(part: Any, kind: str) -> Iterator[tuple[str, RunConfig, Any, Any, float]]:
    """Yield label, config, work, phase and alpha of each point that nntile_py runs; only a sweep has several points."""
    if kind != "sweep":
        yield "", part.resolved(), getattr(part, "work", "train"), "all", 1.0
        return
    for point in points(part):
        if point.config is None:
            raise ConfigError(f"{point.sets}: {point.error}")
        short = {key.rpartition(".")[2]: of for key, of in point.sets.items()}
        if point.measure.contestant == "nntile":  # PyTorch's points have no plan
            label, how = sets_text(short).replace('"', ""), point.measure
            yield label, point.config, how.work, how.phase, how.alpha


# -- running


def run(
    experiment: Experiment, scale: str, folder: Path, results: Path | None, console: Console,
    mode: Mode | None = None, sets: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """Run an experiment; return the paths of its result files: picture, CSV, report.

    An interrupted sweep writes the same files for the points that it has measured.

    Args:
        scale: `cpu` or `gpu`: the section of the experiment's YAML.
        folder: for the files of the run.
        results: for the result files, with the date in their names; None: `folder`, without the date.
    """
    part, load_before = experiment.part(scale, mode, sets), os.getloadavg()[0]
    part, note = _on_present_gpus(part) if scale == "gpu" else (part, "")
    if note:
        console.print(note)
    for label, config, *_ in _planned(part, experiment.kind):
        if config.runtime.cuda and experiment.kind != "graph" and getattr(part, "measure", True):
            _need_gpus(config, label or experiment.name)
    if folder.resolve() == EXPERIMENTS.resolve():  # the config of a profile would overwrite the experiment's YAML
        raise ConfigError(f"--out: {folder} holds the experiments themselves; allowed: any other folder")
    folder.mkdir(parents=True, exist_ok=True)
    interrupted = None
    if experiment.kind == "sweep":
        result, partial, interrupted = _sweep(part, folder, console)
        note = ". ".join(filter(None, (note, partial)))
    else:
        more: dict[str, tuple[Any, ...]] = {"profile": (experiment.name,), "analysis": (experiment.rows,)}
        more |= dict.fromkeys(("layouts", "selection", "capacity"), (console,))
        result = part.run(folder, *more.get(experiment.kind, ()))
    missing = result.no_picture
    if missing and experiment.kind == "graph":
        note = ". ".join(filter(None, (note, f"No picture: {missing}")))
    text = report(experiment, scale, result, load_before, mode, note, sets)
    target = results or folder
    stem = f"{date.today().isoformat()}-{experiment.name}" if results else experiment.name
    stem += f"-{mode}" if mode else ""
    stem += f"-{scale}" if results and scale != "cpu" else ""  # so as not to replace results of the scale cpu
    files = {f"{stem}.{form}": content for form, content in result.pictures.items()}
    files |= {f"{stem}.csv": result.csv.encode(), f"{stem}.md": text.encode()}
    for name, content in files.items():
        replace_file(target / name, content)
    if interrupted:
        raise interrupted
    if missing:
        raise NNTileError(f"{missing}; no picture was made, written are {', '.join(files)} in {target}, and "
                          f"{folder / 'plot.dot'}")  # fmt: skip
    if failed := [row for row in result.rows if row["status"] != "ok"]:
        raise NNTileError(f"{len(failed)} of {len(result.rows)} points failed, the first: {failed[0]['error']}")
    return [target / name for name in files]


def _sweep(sweep: Sweep, folder: Path, console: Console) -> tuple[ExperimentResult, str, KeyboardInterrupt | None]:
    """Run a sweep; return its result. After an interruption, also return a note and the KeyboardInterrupt."""
    interrupted, note, count = None, "", len(points(sweep))
    try:
        rows = run_sweep(sweep, folder, console)
    except KeyboardInterrupt as error:
        if not (folder / "results.json").is_file():
            raise
        interrupted, rows = error, json.loads((folder / "results.json").read_text())["rows"]
        fewest = min((row.get("rounds", 1) for row in rows), default=0)
        turns = f", some in {fewest} of {sweep.rounds} rounds" if fewest < sweep.rounds else ""
        note = f"Interrupted with {len(rows)} of {count} points measured{turns}; the same command goes on"
    plots, measured = sweep.plots, sum(row["status"] == "ok" for row in rows)
    if measured < count:  # the title of the picture gives the numbers
        some = f"({measured} of {count} points)"
        plots = [plot.model_copy(update={"title": f"{plot.title} {some}".strip()}) for plot in plots]
    where = machine()
    pictures = files_of(figure_of(plots, rows, sweep.best, f"{described(where)}, {where['date']}")) if plots else {}
    return ExperimentResult(table(rows), pictures, rows=rows), note, interrupted


def _on_present_gpus(part: Any) -> tuple[Any, str]:
    """Return a sweep or profile limited to this machine's GPUs, and a note of the change.

    On a machine without GPUs the sweep or profile stays unchanged: it needs none, or `_need_gpus` refuses it."""
    import torch

    present = torch.cuda.device_count()
    here = f"this machine has {counted(present, 'GPU')}"
    if isinstance(part, ProfileExperiment):
        asked = part.set_.get("runtime.cuda", 0)
        if not 0 < present < asked:
            return part, ""
        less = part.model_copy(update={"set_": part.set_ | {"runtime.cuda": present}})
        return less, f"runtime.cuda {present} instead of {asked}; {here}"
    counts = part.grid.get("runtime.cuda", []) if isinstance(part, Sweep) and part.grid else []
    kept = [count for count in counts if count <= present]
    if not kept or kept == counts:
        return part, ""
    left_out = ", ".join(str(count) for count in counts if count not in kept)
    less = part.model_copy(update={"grid": part.grid | {"runtime.cuda": kept}})
    return less, f"left out: runtime.cuda {left_out}; {here}"


def _need_gpus(config: RunConfig, label: str) -> None:
    """Check GPUs and runtime options once, before any point is measured.

    Raises:
        NNTileError: the machine has fewer GPUs than the config needs.
    """
    import torch

    from nntile_py.execution.runtime import Runtime

    present = torch.cuda.device_count()
    if config.workers > present:
        need = counted(config.workers, "GPU")
        raise NNTileError(f"{label}: needs {need}, this machine has {present}; --plan runs nothing")
    Runtime(**runtime_options(config.runtime.model_dump()))
