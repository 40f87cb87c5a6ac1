"""`nntile experiment`: every YAML is valid, takes the GPUs that are there; what it leaves, what it leaves alone."""

import os
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from test_sweep import nntile

from nntile_py.analysis import draw
from nntile_py.cli import measurements as cli
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure import experiment, experiment_parts, experiments
from nntile_py.measure import runner as sweep_run
from nntile_py.measure import sweep_points as sweep
from nntile_py.measure.experiment_parts import ExperimentResult
from nntile_py.measure.sweep_report import report
from nntile_py.profiling import FILES

CONSOLE = Console(stderr=True)


def test_only_a_profile_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    (folder / "gantt.png").touch()
    with pytest.raises(ConfigError, match=r"profile/mine.txt: not of an earlier profile"):
        experiment.run(experiments.load_experiment("fig09"), "cpu", tmp_path, None, CONSOLE)
    assert (folder / "mine.txt").read_text() == "precious" and (folder / "gantt.png").exists()
    (folder / "mine.txt").rename(tmp_path / "mine.txt")
    (folder / "gantt.png").rename(folder / "config.yaml")
    with pytest.raises(ConfigError, match=r"profile/config.yaml: not of an earlier"):  # alone it may be anybody's
        experiment_parts.clear_profile(folder)
    for name in FILES:
        (folder / name).touch()
    with pytest.raises(ConfigError, match="not of an earlier profile"):  # summary.json has another content
        experiment_parts.clear_profile(folder)
    (folder / "summary.json").write_text('{"findings": [], "seconds_per_step": 1}')
    experiment_parts.clear_profile(folder)
    assert not any(folder.iterdir()) and (tmp_path / "mine.txt").exists()
    experiment_parts.clear_profile(tmp_path / "none")


def test_the_experiments_own_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--out: .* holds the experiments"):
        experiment.run(experiments.load_experiment("fig09"), "cpu", experiments.EXPERIMENTS, None, CONSOLE)


def test_without_dot_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw.shutil, "which", lambda _: None)
    with pytest.raises(NNTileError, match=r"graphviz.*no picture was made, written are fig10.csv, fig10.md") as error:
        experiment.run(experiments.load_experiment("fig10"), "cpu", tmp_path / "out", None, CONSOLE)
    assert "ends in .dot" not in str(error.value) and not isinstance(error.value, ConfigError)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"fig10.csv", "fig10.md", "plot.dot"}
    assert "before fusion,3,12,303562752,301989888," in (tmp_path / "out/fig10.csv").read_text()
    assert "12 tasks, 304 Mflop" in (tmp_path / "out/plot.dot").read_text()
    assert "No picture: graphviz" in (tmp_path / "out/fig10.md").read_text()


@pytest.mark.long
def test_the_picture_of_some_points_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, titles, left = experiments.load_experiment("fig18"), [], 2
    count = len(sweep.points(made.part("cpu")))

    def measured(point: sweep.Point, *_: Any) -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        row = {"id": point.id, "sets": point.sets, "measure": {}, "status": "ok", "load": 0.0, "times": [1.0]}
        return row | dict.fromkeys(("seconds", "seconds_min", "seconds_max"), 1.0)

    drawn = experiment.figure_of
    monkeypatch.setattr(
        experiment, "figure_of", lambda plots, *more: (titles.append(plots[0].title), drawn(plots, *more))[1]
    )
    monkeypatch.setattr(sweep_run, "measure_point", measured)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(made, "cpu", tmp_path, None, CONSOLE)
    left = count * made.part("cpu").rounds
    experiment.run(made, "cpu", tmp_path, None, CONSOLE)
    assert titles == [f"GPT-2 inference (2 of {count} points)", "GPT-2 inference"]


@pytest.mark.parametrize("name", experiments.names())
def test_experiments_are_valid(name: str) -> None:
    """Every YAML, at both scales: each point is a config that loads."""
    made = experiments.load_experiment(name)
    for scale in ("cpu", "gpu"):
        assert list(experiment._planned(made.part(scale), made.kind))
    readme = (experiments.EXPERIMENTS / "README.md").read_text()
    assert f"`{name}`" in readme


def test_experiment_needs_gpus(tmp_path: Path) -> None:
    done = nntile(tmp_path, "experiment", "table2", "--scale", "gpu")
    if done.returncode:
        assert done.returncode == 1 and "GPU" in done.stderr and not (tmp_path / "runs").exists()
        done = nntile(tmp_path, "experiment", "table3", "--scale", "gpu")
        assert done.returncode == 1 and done.stderr.startswith("error: table3: needs 1 GPU, this machine has 0;")


def test_experiments_take_the_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiments.load_experiment("fig15").part("gpu")
    for there, kept in ((2, [1, 2]), (8, [1, 2, 4, 8]), (0, [1, 2, 4, 8])):  # none: refused later
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: there)
        part, told = experiment._on_present_gpus(made)
        assert part.grid["runtime.cuda"] == kept
        assert told == ("left out: runtime.cuda 4, 8; this machine has 2 GPUs" if there == 2 else "")
    made = experiments.load_experiment("fig09").part("gpu", "inference")
    for there, taken in ((1, 1), (4, 2), (0, 2)):
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: there)
        part, told = experiment._on_present_gpus(made)
        assert part.resolved().runtime.cuda == taken and part.work == "inference"
        assert told == ("runtime.cuda 1 instead of 2; this machine has 1 GPU" if there == 1 else "")
    text = report(experiments.load_experiment("fig09"), "gpu", ExperimentResult("a\n1\n"), 0.0, note="left out: 8")
    assert "\nLeft out: 8.\n" in text


def test_an_interrupted_experiment_tells_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, left = experiments.load_experiment("fig17"), 3

    def measured(point: sweep.Point, *_: Any) -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        row = {"id": point.id, "sets": point.sets, "measure": {}, "status": "ok", "load": 0.0}
        return row | {
            "seconds": 2.0,
            "seconds_min": 1.0,
            "seconds_max": 3.0,
            "tokens_per_s": 5.0,
            "times": [1.0, 2.0, 3.0],
        }

    monkeypatch.setattr(sweep_run, "measure_point", measured)
    every = len(sweep.points(made.part("cpu"))) * made.part("cpu").rounds
    assert every > 3
    with pytest.raises(KeyboardInterrupt):
        experiment.run(made, "cpu", tmp_path, None, Console(stderr=True))
    told = (tmp_path / "fig17.md").read_text()
    rounds = made.part("cpu").rounds
    assert f"\nInterrupted with 3 of {every // rounds} points measured, some in 1 of {rounds} rounds; " in told
    assert "\nInterrupted with " in told and "the same command goes on.\n" in told and "| 2 | 1 |" in told
    assert (tmp_path / "fig17.png").stat().st_size > 1000 and (tmp_path / "fig17.csv").read_text().count("\n") > 1
    left = every - 3  # no point is measured twice
    experiment.run(made, "cpu", tmp_path, None, Console(stderr=True))
    assert left == 0 and "Interrupted" not in (tmp_path / "fig17.md").read_text()


def test_experiments_in_both_modes() -> None:
    for name in ("fig09", "fig11", "fig12", "fig14", "fig15", "fig16", "fig17", "fig18"):
        made = experiments.load_experiment(name)
        plans = {m: list(experiment._planned(made.part("gpu", m), made.kind)) for m in ("inference", "training")}
        kinds = {m: {(work, phase) for _, _, work, phase, _ in planned} for m, planned in plans.items()}
        work = "linear_relu" if name == "fig15" else "linear_reshape"
        small = {"inference": {(work, "forward")}, "training": {(work, "all")}}
        assert kinds in ({"inference": {("inference", "all")}, "training": {("train", "all")}}, small)
    assert experiments.load_experiment("fig17").part("cpu", "training").plots[0].title == "GPT-2 training"
    for name in ("table2", "bt-fig11"):
        with pytest.raises(ConfigError, match="--mode"):
            experiments.load_experiment(name).part("cpu", "training")
    training = [config for _, config, work, *_ in experiment._planned(
        experiments.load_experiment("bt-fig14").part("cpu", "training"), "sweep") if work == "train"]  # fmt: skip
    assert len(training) == 10 and {config.model.head for config in training} == {"masked_lm"}


def test_experiment_graph(tmp_path: Path) -> None:
    done = nntile(tmp_path, "experiment", "fig10", "--out", "out")
    with_dot = any((Path(p) / "dot").exists() for p in os.environ["PATH"].split(os.pathsep))
    assert done.returncode == (0 if with_dot else 1), done.stderr
    assert "naive (before fusion): 12 tasks" in (tmp_path / "out" / "plot.dot").read_text()
    if with_dot:
        assert (tmp_path / "out" / "fig10.png").exists()
        assert "## The paper" in (tmp_path / "out" / "fig10.md").read_text()
    else:
        assert "apt-get install graphviz" in done.stderr


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    """What goes on from nothing leaves it alone, as `nntile profile` does."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/table3.md").write_text("mine")
    done = nntile(tmp_path, "experiment", "table3", "--out", "out")
    assert done.returncode == 2 and "--out: out is not an empty folder; allowed: a new or empty one" in done.stderr
    assert (tmp_path / "out/table3.md").read_text() == "mine"
    done = nntile(tmp_path, "experiment", "fig18", "--overwrite")
    assert done.returncode == 2 and "--overwrite: got fig18, which continues earlier results" in done.stderr
    done = nntile(tmp_path, "experiment", "fig10", "--out", "out", "--overwrite")
    assert (tmp_path / "out/fig10.md").exists() and (tmp_path / "out/table3.md").read_text() == "mine", done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["table3", "--mode", "inference"], "--mode: got inference with table3, which measures forward and backward"),
        (["bt-fig12", "--mode", "inference"], "--mode: got inference with bt-fig12, which measures forward passes"),
        (["bt-fig14", "--set", "fusion.bias=true"], "`variants` of the sweep's file sets fusion.bias; allowed: oth"),
    ],
)
def test_what_an_experiment_refuses(tmp_path: Path, args: list[str], message: str) -> None:
    done = nntile(tmp_path, "experiment", *args)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [("fig18", "the same command continues from out"), ("table3", "the same command begins anew"),
     ("fig09", "the same command begins anew with --overwrite, as out is not empty")],
)  # fmt: skip
def test_interrupted(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        if name == "fig09":
            Path("out").mkdir()
            Path("out/fig09.yaml").touch()
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "run", interrupted)
    with pytest.raises(typer.Exit):
        cli.experiment(name, out=Path("out"))
    assert capsys.readouterr().err == f"interrupted; {told}\n"


def test_ratios_of_variants() -> None:
    made = experiments.load_experiment("bt-fig14")
    times = {"baseline": 4.0, "+ bias and norm": 2.0, "+ no padding": 1.0}
    rows = [{"sets": {"train.seq": 128, "variant": name}, "status": "ok", "seconds": of, "seconds_min": of / 2}
            for name, of in times.items()]  # fmt: skip
    told = report(made, "cpu", ExperimentResult("", rows=rows), 0.0)
    assert "Times divided by the time of baseline, median (best repeat):" in told
    assert "* train.seq 128: + bias and norm 0.50 (0.50), + no padding 0.25 (0.25)" in told


def test_experiments_take_turns() -> None:
    for name in experiments.names():
        made = experiments.load_experiment(name)
        for scale in ("cpu", "gpu") if made.kind == "sweep" else ():
            assert made.part(scale).rounds >= 3, name
