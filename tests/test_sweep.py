"""`nntile sweep`: killed and resumed, failures as rows, refusals, the automatic search; and `nntile experiment`."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forks
import pytest
import yaml
from rich.console import Console

from nntile_py.config.run_config import load
from nntile_py.errors import ConfigError
from nntile_py.graph.estimate import estimate
from nntile_py.measure import autotune
from nntile_py.measure import runner as sweep_run
from nntile_py.measure import sweep_points as sweep
from nntile_py.measure.plots import figure_of
from nntile_py.measure.results import best_options, pooled
from nntile_py.measure.sweep_spec import METRICS
from nntile_py.tiles import RW, R, TaskList, Tile, W

BASE: dict[str, Any] = {
    "model": {"layers": 1, "embed": 16, "heads": 2},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 1, "batch": 4, "seq": 8},
    "runtime": {"cpus": 1},
}
NNTILE = [sys.executable, "-m", "nntile_py.cli"]


def write(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "s.yaml").write_text(yaml.safe_dump({"config": "base.yaml"} | tree))
    return folder / "s.yaml"


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "rows.jsonl"
    whole = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in whole[: whole.rfind("\n") + 1].splitlines()]


def nntile(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run([*NNTILE, *arguments], cwd=path, capture_output=True, text=True, timeout=200, check=False)


def children(pid: int) -> list[int]:
    """Points that run for the process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def alive(pid: int) -> bool:
    """Return whether a process runs; an ended process may keep its entry until its parent asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.long
def test_killed_twice(tmp_path: Path) -> None:
    """6 points, SIGKILL after some rows and again after some more: 6 rows in the end, none of them twice."""
    grid = {"tiles.embed": [4, 8, None], "tiles.batch": [1, 2]}
    measure = {"warmup": 0, "repeats": 1}  # a training step of a GPT-2
    write(tmp_path, {"grid": grid, "measure": measure})
    out, before = tmp_path / "out", 0
    for more in (1, 2):
        running = subprocess.Popen([*NNTILE, "sweep", "s.yaml", "--out", "out"], cwd=tmp_path, stderr=subprocess.PIPE)
        until = time.monotonic() + 60
        while len(lines(out)) < before + more or not children(running.pid):
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        points_running = children(running.pid)
        running.kill()
        running.communicate()
        until = time.monotonic() + 60  # one that was just being started ends when it can
        while any(map(alive, points_running)):
            assert time.monotonic() < until, "a point outlived its sweep"
            time.sleep(0.01)
        before = len(lines(out))
        assert before < 6
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"id": "cut sh')  # what a power cut may leave
    done = nntile(tmp_path, "sweep", "s.yaml", "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = lines(out)
    assert len(rows) == 6 == len({row["id"] for row in rows})
    assert {row["status"] for row in rows} == {"ok"}
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    assert len(json.loads((out / "results.json").read_text())["rows"]) == 6
    again = nntile(tmp_path, "sweep", "s.yaml", "--out", "out")
    assert again.returncode == 0 and lines(out) == rows  # nothing is left to do


@pytest.mark.long
def test_rounds_take_turns(tmp_path: Path) -> None:
    write(tmp_path, {"grid": {"tiles.batch": [1, 2]}, "rounds": 2, "measure": {"warmup": 0, "repeats": 3}})
    done = nntile(tmp_path, "sweep", "s.yaml", "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "out")
    assert [row["sets"]["tiles.batch"] for row in rows] == [1, 2, 1, 2] and len({row["id"] for row in rows}) == 4
    one, two = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert one["id"] == rows[0]["id"] and one["times"] == rows[0]["times"] + rows[2]["times"] and len(one["times"]) == 6
    assert two["seconds_min"] == min(two["times"]) and two["seconds_max"] == max(two["times"])
    assert two["seconds"] == pytest.approx((rows[1]["seconds"] + rows[3]["seconds"]) / 2)


@pytest.mark.long
def test_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of one runtime share a process, in whatever order they come; one that fails does not take others along."""
    started: list[Any] = []
    real = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        started.extend([made] if "-c" in arguments[0] else [])  # others ask git
        return made

    monkeypatch.setattr(subprocess, "Popen", counted)
    grid = {"tiles.batch": [1, 2], "runtime.window": [500, 600], "train.batch": [4, 10**8]}  # too many tiles
    for work in ("train", "inference"):
        measure = {"work": work, "warmup": 0, "repeats": 1}
        made = sweep.load_sweep(write(tmp_path, {"grid": grid, "measure": measure, "together": True}))
        rows, before = sweep_run.run(made, tmp_path / work, Console(file=io.StringIO())), len(started)
        assert [r["sets"] for r in rows] == list(made.settings())
        assert {(r["sets"]["train.batch"], r["status"]) for r in rows} == {(4, "ok"), (10**8, "failed")}
        assert [r["sets"]["runtime.window"] for r in lines(tmp_path / work)] == 4 * [500] + 4 * [600]
    assert before == 2 * 4, "a new one after each failure, but for the last"
    assert all(p.poll() is not None for p in started)
    grid.pop("train.batch")
    made = sweep.load_sweep(write(tmp_path, {"grid": grid, "measure": measure, "together": True}))
    assert len(sweep_run.run(made, tmp_path / "good", Console(file=io.StringIO()))) == 4 and len(started) == before + 2


def test_a_point_of_several_rounds() -> None:
    row = {"status": "ok", "sets": {}, "tasks": 7, "seconds": 2.0, "seconds_min": 1.0, "peak_mib": 5.0, "best ms": 9.0}
    other = row | {"seconds": 4.0, "seconds_min": 0.5, "peak_mib": 6.0, "best ms": 8.0, "times": [4.0]}
    bad = {"status": "error", "sets": {}, "error": "no"}
    assert pooled([row]) is row and pooled([row, bad]) is bad
    assert pooled([row, other, other | {"seconds": 9.0}]) == {
        "status": "ok", "sets": {}, "tasks": 7, "seconds": 4.0, "seconds_min": 0.5, "peak_mib": 6.0, "best ms": 8.0,
        "rounds": 3, "times": [4.0, 4.0], "by_round": [2.0, 4.0, 9.0],
    }  # fmt: skip


def test_training_points_failures_and_plots(tmp_path: Path) -> None:
    path = write(tmp_path, {
        "grid": {"model.heads": [2, 3], "tiles.batch": [1, 2]},  # three heads do not divide 16, with any tile
        "measure": {"repeats": 2},
        "plots": [{"x": "tiles.batch"}, {"x": "tiles.batch", "series": "model.heads", "kind": "heat"}],
    })  # fmt: skip
    with pytest.raises(ConfigError, match=r"model\.heads = 3.*allowed: a divisor"):
        sweep.points(sweep.load_sweep(path))
    tree = yaml.safe_load(path.read_text())
    tree["grid"]["model.embed"] = [16, 18]  # now each value fits somewhere
    tree["grid"]["tiles.batch"] = [2]
    path.write_text(yaml.safe_dump(tree))
    done = nntile(tmp_path, "sweep", "s.yaml", "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "out")
    assert sorted(row["status"] for row in rows) == ["ok", "ok", "ok", "refused"]
    assert next("model.heads: got 3" in row["error"] for row in rows if row["status"] == "refused")
    assert all(len(row["times"]) == 2 and row["tokens_per_s"] > 0 for row in rows if row["status"] == "ok")
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "plot2.svg").exists() and (tmp_path / "out" / "plot2.pdf").exists()
    best = json.loads((tmp_path / "out" / "results.json").read_text())["best"]
    assert best["seconds"] == min(row["seconds"] for row in rows if row["status"] == "ok")


def test_time_limit_and_lost_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = sweep.points(sweep.load_sweep(write(tmp_path, {"grid": {"tiles.batch": [1]}})))[0]
    row = sweep_run.measure_point(point, 0.05)
    assert row["status"] == "timeout" and "time_limit" in row["error"]
    real = subprocess.Popen

    def killed(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **options)

    monkeypatch.setattr(subprocess, "Popen", killed)
    row = sweep_run.measure_point(point, 60)
    assert row["status"] == "failed" and f"signal {int(signal.SIGKILL)}" in row["error"]


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    first, second = sweep_run.Rows(tmp_path), sweep_run.Rows(tmp_path)
    with first.open(), pytest.raises(ConfigError, match="another sweep"), second.open():
        pass


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "grid, list, random"),
        ({"grid": {}}, "grid"),
        ({"grid": {"tiles.batch": []}}, "grid: got"),
        ({"grid": {"tiles.bach": [1]}}, r"tiles\.bach.*did you mean batch"),
        ({"grid": {"tiles.batch": ["two"]}}, r"tiles\.batch.*integer"),
        ({"grid": {"tiles.batch": [1]}, "measure": {"work": "everything"}}, r"measure\.work: got 'everything'"),
        (
            {"grid": {"tiles.batch": [1]}, "plots": [{"x": "a", "colour": "red"}]},
            r"plots\.0\.colour: unknown key.*series",
        ),
        ({"grid": {"tiles.batch": [1]}, "time_limit": -1}, "time_limit: got -1"),
        ({"random": {"count": 2}}, r"random\.over: not given"),
        # Values as YAML, not as Python writes them.
        ({"grid": {"model.attention": [True]}}, r"^model\.attention = true: .*got true; allowed: 'vendor'"),
        ({"grid": {"train.batch": [None]}}, r"^train\.batch = null: .*got null; allowed: an integer"),
        ({"grid": {"tiles": [{"batch": "none"}]}}, r"^tiles = {batch: none}: .*batch: got 'none'; allowed: an integer"),
        ({"grid": {"train.batch": {"a": True}}}, r"grid\.train\.batch: got {a: true}; allowed: a list$"),
        ({"grid": {"tiles.batch": [1], "train.batch": [0]}}, r"^train\.batch = 0: .*train\.batch: got 0"),
    ],
)
def test_refused(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    path = write(tmp_path, tree)
    with pytest.raises(ConfigError, match=message):
        sweep.points(sweep.load_sweep(path))


def test_exit_status(tmp_path: Path) -> None:
    write(tmp_path, {"grid": {"tiles.bach": [1]}})
    done = nntile(tmp_path, "sweep", "s.yaml")
    assert done.returncode == 2 and "tiles.bach" in done.stderr and "Traceback" not in done.stderr
    assert nntile(tmp_path, "sweep", "missing.yaml").returncode == 2
    assert nntile(tmp_path, "experiment", "fig99").returncode == 2


def test_points(tmp_path: Path) -> None:
    values = {"tiles.batch": [1, 2, 4], "tiles.embed": [4, 8], "fusion": [True, False]}
    drawn = sweep.load_sweep(write(tmp_path, {"random": {"count": 5, "seed": 3, "over": values}}))
    assert len(sweep.points(drawn)) == 5 and list(drawn.settings()) == list(drawn.settings())
    both = {"list": [{"train.seq": 4}, {"train.seq": 8}], "grid": {"tiles.batch": [1, 2]}}
    assert [p.sets for p in sweep.points(sweep.load_sweep(write(tmp_path, both)))] == [
        {"train.seq": s, "tiles.batch": b} for s in (4, 8) for b in (1, 2)
    ]
    same = {"list": [{"tiles.batch": 1}, {"tiles.batch": 1}]}
    assert len(sweep.points(sweep.load_sweep(write(tmp_path, same)))) == 1


@pytest.mark.long
def test_variants(tmp_path: Path) -> None:
    """Each point with each variant; one that PyTorch runs is in a process of its own, all are tokens of one batch."""
    tree = {
        "set": {"model": {"type": "bert", "layers": 1, "embed": 16, "heads": 2, "head": "none"}},
        "grid": {"measure.alpha": [0.5, 1.0]},
        "variants": {
            "packed": {"train.pack": True, "tiles": {"batch": 2}},
            "padded": {},
            "PyTorch": {"measure.contestant": "torch_eager"},
        },
        "measure": {"work": "inference", "warmup": 1, "repeats": 2},
        "together": True,
        "plots": [{"x": "measure.alpha", "y": "ms", "series": "variant"}],
    }
    made = sweep.load_sweep(write(tmp_path, tree))
    points = sweep.points(made)
    assert [p.sets["variant"] for p in points] == 2 * ["PyTorch", "packed", "padded"]
    assert points[1].process == points[2].process != points[0].process
    assert points[1].config and points[1].config.train.pack and points[1].config.tiles.batch == 2
    rows = sweep_run.run(made, tmp_path / "out", Console(stderr=True))
    assert [row["status"] for row in rows] == 6 * ["ok"], rows
    assert all(row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"]) for row in rows)
    assert {(row["sets"]["measure.alpha"], row["tokens"]) for row in rows} == {(0.5, rows[0]["tokens"]), (1.0, 32)}
    legend = figure_of(made.plots, rows).subfigs[0].legends[0].get_texts()
    assert [one.get_text() for one in legend] == ["PyTorch", "packed", "padded"]
    assert best_options(rows[:1], made.best) == "measure.alpha=0.5 variant=PyTorch"
    for variants, told in (
        ({"a": {"measure.alpha": 0.5}}, "variants: measure.alpha is set by the grid or list, too; allowed: in one"),
        ({"a": {"measure.contestant": "jax"}}, "measure.contestant: got 'jax'; allowed: 'nntile', 'torch_eager', "),
        ({"a": {"measure.contestant": "torch_eager", "measure.how": "plan"}},
         "measure.contestant: got torch_eager; allowed: nntile, where measure.how is not run or"),
        ({"a": {"model.heds": 1}}, "model.heds: unknown key"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            sweep.points(sweep.load_sweep(write(tmp_path, tree | {"variants": variants, "plots": []})))


def test_estimate_of_a_known_graph() -> None:
    """Two chains of two tasks, joined by a fifth: three in a row; a reduction's contributions do not wait."""
    a, b, c = (Tile(name, (0,), (1000,), "fp32") for name in "abc")
    tasks = TaskList()
    for tile in (a, b):
        tasks.emit("k", [W(tile)], flop=1e6)
        tasks.emit("k", [RW(tile)], flop=1e6)
    tasks.emit("k", [W(c), R(a), R(b)], flop=1e6)
    made = estimate([tasks.resolve()], workers=2)
    assert made.tasks == 5 and made.parallelism == pytest.approx(5 / 3, rel=1e-6)


@pytest.mark.long
def test_auto(tmp_path: Path) -> None:
    write(tmp_path, {})
    done = nntile(tmp_path, "sweep", "--auto", "base.yaml", "--budget", "2", "--set", "train.batch=2", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "tilings planned; pruned:" in done.stderr
    assert "--set tiles.batch=" in done.stdout or "own tiles" in done.stdout  # the times decide
    assert "the config's own tiles" in done.stdout
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["status"] == "ok" for row in rows)
    assert set(rows[0]["sets"].values()) == {None}, "the config's own tiles, which are none"
    assert rows[1]["sets"]["tiles.batch"], "a tiling beside the config's own"
    assert "1 of 6: uncut: " in done.stderr and "null" not in done.stdout
    assert all((tmp_path / f"out/plot.{form}").stat().st_size > 1000 for form in ("png", "svg", "pdf"))
    with (tmp_path / "out/searched.csv").open() as file:
        searched = list(csv.DictReader(file))
    assert f"{len(searched)} tilings planned" in done.stderr and sum(bool(s["seconds"]) for s in searched) == len(rows)


def test_workers_of_a_config(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert load(tmp_path / "base.yaml").workers == 1
    assert load(tmp_path / "base.yaml", ["runtime.cuda=4"]).workers == 4


GRID = {"grid": {"tiles.batch": [1, 2]}}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"plots": [{"x": "tiles.bach"}]}, r"plots\.0\.x: 'tiles\.bach'.*did you mean tiles\.batch\?"),
        ({"plots": [{"x": "tiles.batch", "series": "fusion"}]}, r"plots\.0\.series: 'fusion'"),
        ({"plots": [{"x": "tiles.batch", "panel": "fusion"}]}, r"plots\.0\.panel: 'fusion'"),
        ({"plots": [{"x": "tiles.batch", "y": ["ms", "secnds"]}]}, r"plots\.0\.y: 'secnds'.*did you mean seconds\?"),
        ({"plots": [{"x": "tiles.batch", "y": "ms"}], "measure": {"how": "plan"}}, r"plots\.0\.y: 'ms'"),
        ({"best": {"metric": "foo"}}, r"best\.metric: 'foo'.*allowed: seconds"),
        ({"grid": None, "random": {"count": 1, "over": {"tiles.embed": []}}}, r"random\.over: got"),
        ({"config": "nope.yaml"}, r"^config: .*no such file: nope\.yaml"),
        ({"set": {"model.layrs": 1}}, r"^set: .*model\.layrs: unknown key"),
    ],
)
def test_refused_before_anything_is_measured(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    path = write(tmp_path, GRID | tree)
    with pytest.raises(ConfigError, match=message):
        sweep.points(sweep.load_sweep(path))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("tiles.embed", "--set tiles.embed: has no `=`; allowed: key=value"),
        ("tiles.batch=2", "--set tiles.batch=2: `grid` of the sweep's file sets tiles.batch; allowed: other keys"),
        ("train.seq=4", "`list` of the sweep's file sets train.seq"),
        ("measure.repeats=1", "measure is part of the sweep's file"),
        ("foo=1", "^set: .*foo: unknown key"),
    ],
)
def test_set_refused(tmp_path: Path, item: str, message: str) -> None:
    path = write(tmp_path, GRID | {"list": [{"train.seq": 4}]})
    with pytest.raises(ConfigError, match=message):
        sweep.points(sweep.load_sweep(path, [item]))


def test_set_replaces_the_config(tmp_path: Path) -> None:
    path = write(tmp_path, GRID)
    other = tmp_path / "elsewhere" / "other.yaml"
    other.parent.mkdir()
    other.write_text(yaml.safe_dump(BASE | {"train": {"steps": 7, "batch": 4, "seq": 8}}))
    made = sweep.points(sweep.load_sweep(path, [f"config={other}", "train.seq=4"]))
    assert {(point.config.train.steps, point.config.train.seq) for point in made if point.config} == {(7, 4)}
    with pytest.raises(ConfigError, match="no such file: 3"):
        sweep.points(sweep.load_sweep(path, ["config=3"]))


def test_a_config_is_no_sweep(tmp_path: Path) -> None:
    path = write(tmp_path, GRID)
    with pytest.raises(ConfigError, match=r"a run's config.*did you mean --auto"):
        sweep.load_sweep(tmp_path / "base.yaml")
    with pytest.raises(ConfigError, match=r"the config of a run, such as base\.yaml"):
        autotune.search(path, [], 1, Console(file=io.StringIO()))


@pytest.mark.parametrize("line", ["no JSON", "3", '{"status": "ok", "sets": {}}', '{"id": "a"}'])
def test_rows_that_are_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "status": "ok", "sets": {}, "seconds": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: allowed"), sweep_run.Rows(tmp_path).open():
        pass


def measured(point: sweep.Point, *_: Any) -> dict[str, Any]:
    at = point.sets["tiles.batch"] + 10 * point.sets.get("train.seq", 0)
    result = {"seconds": float(at), "seconds_min": float(at), "seconds_max": float(at), "tokens_per_s": float(at)}
    return {"id": point.id, "sets": point.sets, "measure": {}, "status": "ok"} | result


def test_rows_of_another_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "measure_point", measured)
    out, console = tmp_path / "out", Console(file=io.StringIO())
    sweep_run.run(sweep.load_sweep(write(tmp_path, GRID)), out, console)
    before = (out / "results.csv").read_bytes()
    more = sweep.load_sweep(write(tmp_path, {"grid": {"tiles.batch": [2, 4]}}))
    assert len(sweep_run.run(more, out, console)) == 2 and len(lines(out)) == 3, "one that shares points goes on"
    with pytest.raises(ConfigError, match="of another sweep; allowed: another folder"):
        sweep_run.run(sweep.load_sweep(path=tmp_path / "s.yaml", overrides=["train.seq=4"]), out, console)
    assert (out / "results.csv").read_bytes() != before and len(lines(out)) == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["plan", "run", "operators"])
def test_metrics_are_those_measured(tmp_path: Path, how: Any) -> None:
    path = write(tmp_path, {"grid": {"tiles.batch": [2]}, "measure": {"how": how, "work": "encoder", "repeats": 1}})
    row = sweep_run.measure_point(sweep.points(sweep.load_sweep(path))[0], 120)
    assert row["status"] == "ok", row
    assert set(METRICS[how]) == row.keys() - {"id", "sets", "measure", "status", "started", "times"}
