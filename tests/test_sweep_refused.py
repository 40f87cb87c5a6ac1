"""`nntile sweep` refuses wrong files, wrong `--set` options and wrong rows before it measures."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from test_sweep import BASE, GRID, write

from nntile_py.errors import ConfigError
from nntile_py.measure import autotune
from nntile_py.measure import runner as sweep_run
from nntile_py.measure import sweep_points as sweep


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
