"""`nntile experiment`: what it leaves, what it leaves alone."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nntile_py.analysis import draw
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.profiling import FILES
from nntile_py.sweep import experiment
from nntile_py.sweep import run as sweep_run
from nntile_py.sweep import spec as sweep

CONSOLE = Console(stderr=True)


def test_only_a_profile_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    (folder / "gantt.png").touch()
    with pytest.raises(ConfigError, match=r"profile/mine.txt: not of an earlier profile"):
        experiment.run(experiment.load_experiment("fig09"), "cpu", tmp_path, None, CONSOLE)
    assert (folder / "mine.txt").read_text() == "precious" and (folder / "gantt.png").exists()
    (folder / "mine.txt").rename(tmp_path / "mine.txt")
    (folder / "gantt.png").rename(folder / "config.yaml")
    with pytest.raises(ConfigError, match=r"profile/config.yaml: not of an earlier"):  # alone it may be anybody's
        experiment._clear(folder)
    for name in FILES:
        (folder / name).touch()
    experiment._clear(folder)
    assert not any(folder.iterdir()) and (tmp_path / "mine.txt").exists()
    experiment._clear(tmp_path / "none")


def test_the_experiments_own_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--out: .* holds the experiments"):
        experiment.run(experiment.load_experiment("fig09"), "cpu", experiment.EXPERIMENTS, None, CONSOLE)


def test_without_dot_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw.shutil, "which", lambda _: None)
    with pytest.raises(NNTileError, match=r"graphviz.*no picture was made, written are fig10.csv, fig10.md") as error:
        experiment.run(experiment.load_experiment("fig10"), "cpu", tmp_path / "out", None, CONSOLE)
    assert "ends in .dot" not in str(error.value) and not isinstance(error.value, ConfigError)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"fig10.csv", "fig10.md", "plot.dot"}
    assert "before fusion,3,12," in (tmp_path / "out/fig10.csv").read_text()
    assert "No picture: graphviz" in (tmp_path / "out/fig10.md").read_text()


def test_the_picture_of_some_points_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, titles, left = experiment.load_experiment("fig18"), [], 2
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
