"""`nntile experiment`: reproduce a figure or a table of a paper, from one YAML to picture, CSV and report."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntile_py.config.run_config import RunConfig, load, runtime_options
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure import layout_experiment, operator_experiment
from nntile_py.measure.experiments import EXPERIMENTS, Experiment, GraphExperiment, Mode, ProfileExperiment
from nntile_py.measure.layout_experiment import LayoutExperiment
from nntile_py.measure.operator_experiment import OperatorExperiment
from nntile_py.measure.plots import figure_of
from nntile_py.measure.results import table
from nntile_py.measure.sweep_report import report, sets_told
from nntile_py.measure.sweep_spec import Sweep, points
from nntile_py.profiling import FILES
from nntile_py.system.console_tables import plain_table
from nntile_py.system.folders import replace_file
from nntile_py.system.machine import described, machine
from nntile_py.system.pictures import FORMS, files_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# -- planning


def plan(made: Experiment, scale: str, mode: Mode | None = None, sets: Sequence[str] = ()) -> RenderableType:
    """Check and plan every point without running it."""
    from nntile_py.analysis.plan import Estimate, estimate
    from nntile_py.analysis.workloads import build

    heads = ("point", "tasks", "Tflop", "GB moved", "GiB peak", "us a task", "parallel")
    shown = plain_table(heads, text=["point"])
    known: dict[str, tuple[Estimate, float]] = {}
    for told, config, work, phase in _planned(made.part(scale, mode, sets), made.kind):
        key = json.dumps([config.model_dump(exclude={"runtime"}), work, phase], default=str)
        if key not in known:  # tasks do not depend on the number of workers
            built = build(config, work, phase)
            known[key] = estimate(built.lists, config.workers, gpu=config.runtime.cuda != 0), built.flop
        of, flop = known[key]
        cells = [f"{of.tasks:,}", f"{flop / 1e12:.3g}", f"{of.bytes_moved / 1e9:.3g}", f"{of.peak_bytes / 2**30:.3g}"]
        shown.add_row(told, *cells, f"{of.mean_task * 1e6:,.0f}", f"{of.parallelism:.1f}")
    return shown


def _planned(part: Any, kind: str) -> Iterator[tuple[str, RunConfig, Any, Any]]:
    if kind != "sweep":
        yield "", _config(part), getattr(part, "work", "train"), "all"
        return
    for point in points(part):
        if point.config is None:
            raise ConfigError(f"{point.sets}: {point.error}")
        short = {key.rpartition(".")[2]: of for key, of in point.sets.items()}
        if point.measure.contestant == "nntile":  # PyTorch's points have no plan
            yield sets_told(short).replace('"', ""), point.config, point.measure.work, point.measure.phase


# -- running


def run(
    made: Experiment, scale: str, folder: Path, results: Path | None, console: Console, mode: Mode | None = None,
    sets: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """Run an experiment; returns the files of the result: picture, CSV, report. So does an interrupted sweep."""
    part, load_before = made.part(scale, mode, sets), os.getloadavg()[0]
    part, note = _on_gpus_there(part) if scale == "gpu" else (part, "")
    if note:
        console.print(note)
    for told, config, _, _ in _planned(part, made.kind):
        if config.runtime.cuda and made.kind != "graph" and getattr(part, "measure", True):
            _need_gpus(config, told or made.name)
    if folder.resolve() == EXPERIMENTS.resolve():  # the config of a profile would overwrite the experiment's YAML
        raise ConfigError(f"--out: {folder} holds the experiments themselves; allowed: any other folder")
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, bytes] = {}
    rows, interrupted, missing, totals = [], None, None, list[str]()
    if made.kind == "sweep":
        from nntile_py.measure.runner import run as run_sweep

        try:
            rows = run_sweep(part, folder, console)
        except KeyboardInterrupt as error:
            if not (folder / "results.json").is_file():
                raise
            interrupted, rows = error, json.loads((folder / "results.json").read_text())["rows"]
            fewest = min((row.get("rounds", 1) for row in rows), default=0)
            turns = f", some in {fewest} of {part.rounds} rounds" if fewest < part.rounds else ""
            there = f"interrupted with {len(rows)} of {len(points(part))} points measured{turns}"
            there += "; the same command goes on"
            note = ". ".join(filter(None, (note, there.capitalize())))
        plots, drawn, count = part.plots, sum(row["status"] == "ok" for row in rows), len(points(part))
        if drawn < count:  # visible in the picture, too
            some = f"({drawn} of {count} points)"
            plots = [plot.model_copy(update={"title": f"{plot.title} {some}".strip()}) for plot in plots]
        where = machine()
        pictures = files_of(figure_of(plots, rows, part.best, f"{described(where)}, {where['date']}")) if plots else {}
        written = table(rows)
    elif made.kind == "graph":
        written, pictures, missing = _draw(part, folder)
        note = ". ".join(filter(None, (note, f"No picture: {missing}" if missing else "")))
    elif made.kind == "analysis":
        written, pictures, missing, totals = operator_experiment.run(part, made.rows, folder)
    elif made.kind == "layouts":
        written, pictures, totals = layout_experiment.run(part, folder, console)
    else:
        written, pictures = _profile(part, folder, made.name)
    failed = [row for row in rows if row["status"] != "ok"]
    text = report(made, scale, rows, written, load_before, mode, note, totals, sets)
    target = results or folder
    stem = f"{date.today().isoformat()}-{made.name}" if results else made.name
    stem += f"-{mode}" if mode else ""
    stem += f"-{scale}" if results and scale != "cpu" else ""  # beside those of the same day
    files = {
        **{f"{stem}.{form}": content for form, content in pictures.items()},
        f"{stem}.csv": written.encode(),
        f"{stem}.md": text.encode(),
    }
    for name, content in files.items():
        replace_file(target / name, content)
    if interrupted:
        raise interrupted
    if missing:
        raise NNTileError(f"{missing}; no picture was made, written are {', '.join(files)} in {target}, and "
                          f"{folder / 'plot.dot'}")  # fmt: skip
    if failed:
        raise NNTileError(f"{len(failed)} of {len(rows)} points failed, the first: {failed[0]['error']}")
    return [target / name for name in files]


def _draw(part: GraphExperiment, folder: Path) -> tuple[str, dict[str, bytes], NNTileError | None]:
    """Write plot.dot; returns the CSV, the pictures by form, and the error that prevents pictures."""
    from nntile_py.analysis import draw
    from nntile_py.analysis.plan import estimate
    from nntile_py.analysis.workloads import build
    from nntile_py.graph.fusion import Fusion

    config, out = _config(part), io.StringIO()
    dot = draw.draw(config, level=part.level, work=part.work, layer=part.layer, phase=part.phase, fusion=part.fusion)
    draw.write(dot, folder / "plot.dot")
    missing, pictures = None, {}
    try:
        pictures = {form: draw.picture(dot, form) for form in FORMS}
    except draw.NoPicture as error:
        missing = error
    writer = csv.writer(out)
    writer.writerow(["graph", "operators", "tasks", "flop", "bytes moved by tasks"])
    for name, fusion in (("before fusion", Fusion.of(False)), ("after fusion", None)):
        built = build(config, part.work, "forward" if part.phase == "forward" else "all", fusion=fusion)
        count = sum(len(graph.ops) for graph, _ in built.graphs)
        of = estimate(built.lists, config.workers)
        writer.writerow([name, count, of.tasks, int(built.flop), of.bytes_moved])
    return out.getvalue(), pictures, missing


def _profile(part: ProfileExperiment, folder: Path, name: str) -> tuple[str, dict[str, bytes]]:
    """Run `nntile profile`; returns the CSV of the workers and the Gantt chart by form."""
    _clear(folder / "profile")
    config = folder / f"{name}.yaml"
    config.write_text(_config(part).to_yaml())
    command = ["profile", str(config), "--steps", str(part.steps), "--out", str(folder / "profile")]
    command += ["--work", part.work]
    made = subprocess.run([sys.executable, "-m", "nntile_py.cli", *command], capture_output=True, text=True)
    if made.returncode:
        raise NNTileError(f"nntile {' '.join(command)}: {made.stderr.strip() or made.stdout.strip()}")
    summary = json.loads((folder / "profile" / "summary.json").read_text())
    out = io.StringIO()
    workers = [w for w in _sequence(summary.get("workers")) if isinstance(w, dict)]
    nested = {k for w in workers for k, of in w.items() if isinstance(of, dict | list)}
    keys = [k for k in dict.fromkeys(k for w in workers for k in w) if k not in nested]
    writer = csv.writer(out)
    writer.writerow(keys)
    writer.writerows([[w.get(k, "") for k in keys] for w in workers])
    return out.getvalue(), {form: (folder / "profile" / f"gantt.{form}").read_bytes() for form in FORMS}


def _clear(folder: Path) -> None:
    """Delete the profile of an earlier run, and nothing else: `nntile profile` refuses a folder that is not empty."""
    if not folder.exists():
        return
    found = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    others = [path for path in found if path.name not in FILES or not path.is_file()]
    if found and not any(path.name == "summary.json" for path in found):  # a config.yaml alone is the user's
        others = others or found
    if others:
        raise ConfigError(f"{others[0]}: not of an earlier profile, so {folder} is not emptied for a new one: "
                          "move it, or choose another --out")  # fmt: skip
    for path in found:
        path.unlink()


def _sequence(of: Any) -> list[Any]:
    """Return a list, or a mapping by name as a list of mappings with that name."""
    if isinstance(of, dict):
        return [{"worker": name} | (entry if isinstance(entry, dict) else {}) for name, entry in of.items()]
    return list(of or [])


# -- small things


def _config(part: GraphExperiment | ProfileExperiment | OperatorExperiment | LayoutExperiment) -> RunConfig:
    if isinstance(part, OperatorExperiment | LayoutExperiment):
        return part.config()
    return load(part.config, [f"{key}={json.dumps(of)}" for key, of in part.set_.items()])


def _on_gpus_there(part: Any) -> tuple[Any, str]:
    """Return a sweep or profile limited to this machine's GPUs, and a note of the change.

    Without GPUs it is unchanged: it is refused later, or needs none."""
    import torch

    there = torch.cuda.device_count()
    here = f"this machine has {there} GPU{'s' * (there != 1)}"
    if isinstance(part, ProfileExperiment):
        asked = part.set_.get("runtime.cuda", 0)
        if not 0 < there < asked:
            return part, ""
        less = part.model_copy(update={"set_": part.set_ | {"runtime.cuda": there}})
        return less, f"runtime.cuda {there} instead of {asked}; {here}"
    counts = part.grid.get("runtime.cuda", []) if isinstance(part, Sweep) and part.grid else []
    kept = [count for count in counts if count <= there]
    if not kept or kept == counts:
        return part, ""
    left = ", ".join(str(count) for count in counts if count not in kept)
    return part.model_copy(
        update={"grid": part.grid | {"runtime.cuda": kept}}
    ), f"left out: runtime.cuda {left}; {here}"


def _need_gpus(config: RunConfig, told: str) -> None:
    """Raise NNTileError if GPUs are missing, once, before any point is measured."""
    import torch

    from nntile_py.execution.runtime import Runtime

    there = torch.cuda.device_count()
    if config.workers > there:
        need = f"{config.workers} GPU{'s' * (config.workers > 1)}"
        raise NNTileError(f"{told}: needs {need}, this machine has {there}; --plan runs nothing")
    Runtime(**runtime_options(config.runtime.model_dump()))
