"""`tiles: auto`: the search by estimates, the file that keeps tilings, and runs that resume with the same tiles."""

import fcntl
import io
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from test_loop import TREE, metrics, nntile

from nntile_py import cli
from nntile_py.analysis.analysis_report import movement
from nntile_py.analysis.operators import analyse
from nntile_py.analysis.plan import plan
from nntile_py.config import builders, kept_tiles
from nntile_py.config.builders import auto_tiles, keep_measured, search_for, step_spec, uncut, with_tiles
from nntile_py.config.kept_tiles import ESTIMATED, MEASURED, KeptTiles
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.graph.recompute_choice import IN_ORDER, Room
from nntile_py.graph.tile_choice import GAIN, search_tiles
from nntile_py.measure import autotune
from nntile_py.system import launcher, worker_rates
from nntile_py.system.worker_rates import WorkerRates
from nntile_py.tiles import device_model

TINY = Path(__file__).parents[1] / "experiments" / "gpt2_tiny.yaml"
SMALL = ("model.layers=1", "train.batch=6", "train.seq=16", "tokenizer.vocab_size=300", "tiles=auto")
ROOM = Room(2, False, 1 << 40)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and rates without a measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(builders, "measured_rates", lambda *_, **__: WorkerRates(100e9, 10e9, 1.0))
    builders._tilings.clear()
    yield tmp_path / "cache" / "nntile_py" / "tilings"
    builders._tilings.clear()


def of(*sets: str, workers: int = 2) -> RunConfig:
    return load(TINY, [*SMALL, f"runtime.cpus={workers}", *sets])


def kept_file(cache: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = cache.glob("*.json")
    return path, json.loads(path.read_text())


# -- the search


@pytest.mark.parametrize(("workers", "batch"), [(2, 3), (3, 2), (4, 2), (6, 1)])
def test_each_worker_gets_a_tile_of_the_batch(workers: int, batch: int) -> None:
    assert auto_tiles(of("train.seq=128", workers=workers)).tiles["batch"] == batch


def test_one_worker_needs_no_tiles(cache: Path) -> None:
    assert auto_tiles(of(workers=1)).tiles == {} and not cache.exists()


def test_a_small_batch_is_cut_along_other_axes() -> None:
    searched = search_for(of("train.batch=1", "train.seq=128", "model.embed=192", workers=4))
    assert searched.best.tiles and "batch" not in searched.best.tiles
    first, *finer = searched.estimates
    assert first.tiles == {} and searched.best.seconds < GAIN * first.seconds
    assert len({one.text for one in searched.estimates}) == len(searched.estimates)
    assert len(finer) > 5


def test_a_tiling_that_gains_nothing_is_not_chosen() -> None:
    """If a task costs as much as all work, more tasks are slower."""
    slow = device_model.CPU.__class__(flop_s=1e15, bytes_s=1e15, link_s=1e15, overhead=1e-3)
    assert search_tiles(step_spec(uncut(of())), 2, ROOM, slow).best.tiles == {}
    assert search_tiles(step_spec(uncut(of())), 2, ROOM, device_model.CPU).best.tiles == {"batch": 3}


def test_a_tiling_that_fits_is_chosen_if_there_is_one() -> None:
    """Without any room the estimated times decide; with room for the smallest peak only this tiling is left."""
    spec = step_spec(uncut(of("train.batch=1", "train.seq=128")))
    searched = search_tiles(spec, 4, Room(4, False, 1), device_model.CPU)
    assert not any(one.fits for one in searched.estimates)
    assert searched.best.tiles == search_tiles(spec, 4, ROOM, device_model.CPU).best.tiles != {}
    least = min(searched.estimates, key=lambda one: one.peak_bytes)
    room = Room(4, False, int(least.peak_bytes / IN_ORDER) + 2)
    best = search_tiles(spec, 4, room, device_model.CPU).best
    assert best.fits and best.peak_bytes == least.peak_bytes


def test_the_search_lists_a_bounded_number_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of("train.batch=1", workers=4)
    every = len(search_for(config).estimates)
    monkeypatch.setattr("nntile_py.graph.tile_choice.LISTED", 300)
    assert 1 < len(search_for(config).estimates) < every


def test_packed_sequences_get_a_bin_for_each_worker() -> None:
    assert auto_tiles(of("train.pack=true")).tiles == {"batch": 3}


# -- the file


def test_the_first_choice_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = auto_tiles(of())
    path, content = kept_file(cache)
    assert content["rates"] == {"fp32": [100e9, 10e9]}
    assert [*content["tilings"].values()] == [{"tiles": first.tiles, "how": ESTIMATED}]
    builders._tilings.clear()
    monkeypatch.setattr(builders, "search_for", None)  # a second search would fail
    assert auto_tiles(of()) == first == auto_tiles(of("train.steps=7", "optimizer.lr=1"))
    (program,) = content["tilings"]
    path.write_text(json.dumps({"tilings": {program: {"tiles": {"batch": 1}, "how": ESTIMATED}}}))
    builders._tilings.clear()
    assert auto_tiles(of()).tiles == {"batch": 1}


def test_another_program_is_another_entry(cache: Path) -> None:
    auto_tiles(of())
    for other in ("train.seq=8", "runtime.memory=1GiB", "train.grad_accumulation=2"):
        auto_tiles(of(other))
    assert len(kept_file(cache)[1]["tilings"]) == 4


def test_a_measured_tiling_replaces_an_estimated_one() -> None:
    assert auto_tiles(of()).how == ESTIMATED
    keep_measured(of("tiles={embed: 96}"), {"batch": 2, "heads": 3})  # the config's own tiles have no effect
    kept = auto_tiles(of())
    assert (kept.tiles, kept.how) == ({"batch": 2, "heads": 3}, MEASURED)
    assert KeptTiles("a").keep("p", {}, MEASURED) == KeptTiles("a").keep("p", {"batch": 1}, ESTIMATED)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"tilings": 3, "rates": []}', '{"rates": {"fp32": [0, 1]}}', '{"rates": {"fp32": [1, "2"]}}',
        f'{{"rates": {{"fp32": [{"9" * 400}, 1]}}}}', '{"rates": {"fp32": [5e-324, 1e10]}}',
        f'{{"tilings": {{"a": {"[" * 900}{"]" * 900}}}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty(text: str, cache: Path) -> None:
    first = auto_tiles(of())
    path, content = kept_file(cache)
    path.write_text(text)
    builders._tilings.clear()
    assert auto_tiles(of()) == first and kept_file(cache)[1] == content


def test_a_huge_file_counts_as_empty(cache: Path) -> None:
    first = auto_tiles(of())
    path, content = kept_file(cache)
    os.truncate(path, 1 << 40)
    builders._tilings.clear()
    assert auto_tiles(of()) == first and kept_file(cache)[1] == content


@pytest.mark.parametrize("tiles", [{"batch": 0}, {"batch": "3"}, {"batch": 2**63}, {"depth": 1}, [3], None])
def test_a_damaged_entry_is_replaced(tiles: Any, cache: Path) -> None:
    first = auto_tiles(of())
    path, content = kept_file(cache)
    (program,) = content["tilings"]
    path.write_text(json.dumps(content | {"tilings": {program: {"tiles": tiles, "how": ESTIMATED}}}))
    builders._tilings.clear()
    assert auto_tiles(of()) == first and kept_file(cache)[1] == content


def test_pipes_in_the_place_of_files(cache: Path) -> None:
    first = auto_tiles(of())
    path, _ = kept_file(cache)
    for one in (path, path.with_suffix(".lock")):
        one.unlink()
        os.mkfifo(one)
    builders._tilings.clear()
    assert auto_tiles(of()) == first


def test_a_link_in_the_place_of_the_lock(cache: Path, tmp_path: Path) -> None:
    first = auto_tiles(of())
    path, _ = kept_file(cache)
    lock = path.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    path.unlink()
    builders._tilings.clear()
    assert auto_tiles(of()) == first and not (tmp_path / "elsewhere").exists() and not path.exists()


def test_a_lock_that_is_never_released(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = auto_tiles(of())
    path, _ = kept_file(cache)
    path.unlink()
    monkeypatch.setattr(kept_tiles, "PATIENCE", 0.2)
    with open(path.with_suffix(".lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        builders._tilings.clear()
        assert auto_tiles(of()) == first and not path.exists()
    builders._tilings.clear()
    assert auto_tiles(of()) == first and path.exists()


def test_a_measurement_without_all_its_threads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started, real = [], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        worker_rates.measured_rates(2, False, size=8, seconds=0.01)
    assert not started[0].is_alive()


def test_a_measurement_that_fails_on_one_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def rand(*_: Any, **__: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise MemoryError("no memory")
        return torch.zeros(8, 8)

    monkeypatch.setattr(torch, "rand", rand)
    with pytest.raises(MemoryError, match="no memory"):
        worker_rates.measured_rates(2, False, size=8, seconds=0.01)


def test_the_batch_is_cut_for_all_workers_if_it_does_not_divide() -> None:
    sizes = {one.tiles.get("batch") for one in search_for(of("train.batch=9", "train.seq=128", workers=8)).estimates}
    assert {1, 2} <= sizes


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert auto_tiles(of()).tiles == {"batch": 3}


def test_ranks_choose_without_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several machines may differ; the tiles are for the workers of all ranks."""
    keep_measured(of(), {"batch": 1})
    monkeypatch.setattr(builders, "measured_rates", None)  # a measurement would fail
    path, before = kept_file(cache)
    found = []
    for rank in range(3):
        monkeypatch.setattr(launcher, "started", lambda rank=rank: (rank, 3))
        builders._tilings.clear()
        found.append(auto_tiles(of("train.batch=12", "train.seq=64")))
    assert found[0].tiles["batch"] == 2 and found == found[:1] * 3  # six workers
    assert kept_file(cache) == (path, before)


# -- the config


def test_auto_is_the_default_and_empty_is_uncut(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    tree = {key: value for key, value in yaml.safe_load(TINY.read_text()).items() if key != "tiles"}
    path.write_text(yaml.safe_dump(tree))
    assert load(path).tiles == load(path, ["tiles=null"]).tiles == load(path, ["tiles=auto"]).tiles == "auto"
    assert load(path).tile_sizes == {} and "\ntiles: auto\n" in load(path).to_yaml()
    assert step_spec(load(path, ["tiles={}"])).tiling.tiles == {}
    assert step_spec(load(path, ["runtime.cpus=2"])).tiling.tiles == {"batch": 4}
    assert load(path, ["tiles=auto", "tiles.embed=96"]).tile_sizes == {"embed": 96}
    config = load(path, ["runtime.cpus=2"])
    assert with_tiles(config).tile_sizes == {"batch": 4} and uncut(config).tile_sizes == {}
    (tmp_path / "made.yaml").write_text(with_tiles(config).to_yaml())
    assert load(tmp_path / "made.yaml") == with_tiles(config) == uncut(with_tiles(config))


def test_a_plan_shows_the_estimates() -> None:
    made = plan(of())
    assert made.tilings and made.tilings.kept.tiles == {"batch": 3}
    shown = made.to_dict()["tilings"]
    assert shown["chosen"] == {"batch": 3} and [one["tiles"] for one in shown["estimates"]] == [{}, {"batch": 3}]
    console = Console(file=io.StringIO(), width=200)
    console.print(made.render())
    assert isinstance(console.file, io.StringIO)
    assert "{batch: 3} (auto: estimated)" in console.file.getvalue()
    assert made.workers == "2 CPU workers of 100 Gflop/s and 10 GB/s each"
    given = plan(of("tiles={batch: 3}"))  # with default rates
    assert given.workers == "2 CPU workers of 50 Gflop/s and 5 GB/s each" and given.step_seconds > made.step_seconds
    assert "tilings" not in plan(of("tiles={batch: 3}")).to_dict()
    alone = plan(of(workers=1)).tilings
    assert alone and (alone.kept.tiles, alone.searched) == ({}, None)


@pytest.mark.parametrize(("sets", "rates"), [((), "200 Gflop/s and 20"), (("tiles={batch: 3}",), "100 Gflop/s and 10")])
def test_an_analysis_has_the_rates_of_the_plan(sets: tuple[str, ...], rates: str) -> None:
    config = of(*sets)
    made = analyse(config)
    *_, line = movement(made)
    source = "not measured: the device model of plans" if sets else "measured for `tiles: auto`, as in plans"
    assert line == f"Peak: {plan(config).workers}, {rates} GB/s in all ({source})."


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        ((), "Try: a larger `train.batch`: by the plan, a task takes "),
        (("tiles={embed: 64}",), "Try: larger tiles.embed, or a larger `train.batch`: by the plan, a task takes "),
        (("train.batch=1", "train.seq=2048", "model.heads=1", "model.embed=64"), "Try: a larger `train.batch`: by"),
        (("train.seq=2048", "tiles={}"), "Try: smaller tiles: by the plan, 1."),
        (("train.seq=2048", "tiles={batch: 1}"), "Try: more workers: products"),
        (("train.seq=2048", "runtime.cpus=1"), "Try: more workers: by the plan, 1."),
        (("train.seq=2048", "tiles={}", "precision=fp64", "runtime.cpus=1"), "Try: smaller tiles with more workers: "),
    ],
)
def test_advice_at_the_arithmetic_limit(sets: tuple[str, ...], wanted: str) -> None:
    """More workers are no use for short tasks, nor where few tasks can run at once."""
    config = of("profile.peak_flop=1e9", "profile.peak_bytes=1e12", "optimizer.name=sgd", *sets)
    *_, line = analyse(config).conclusion()
    assert line.startswith(wanted), line
    assert line.endswith("`precision: fp32`.") == ("precision=fp64" in sets)


def test_a_model_without_a_loss_stays_uncut(cache: Path) -> None:
    """It has no training step to estimate; forward passes run all the same."""
    bert = load(TINY.parent / "bert_tiny.yaml", ["model.head=none", "runtime.cpus=2", "model.layers=1"])
    assert step_spec(bert).tiling.tiles == {} and step_spec(bert).evaluation()
    with pytest.raises(ConfigError, match="has no loss"):
        plan(bert)
    assert not cache.exists()


# -- commands


def test_a_resumed_run_has_the_tiles_of_its_checkpoint(tmp_path: Path) -> None:
    """Whatever the file says meanwhile, and with another number of workers: its bits depend on the tiles."""
    assert "tiles" in TREE
    sets = ("tiles=auto", "model.embed=128", "train.seq=64", "sample.tokens=0", "checkpoint.every=3")
    sets += ("optimizer.schedule=constant",)
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, run):
        folder.mkdir()
    done = nntile(whole, *sets, "train.steps=6")
    assert done.returncode == 0, done.stderr
    assert "tiles: {batch: 2}, chosen by estimates; `nntile plan` shows the estimates" in done.stdout
    assert load(whole / "runs" / "tiny" / "config.yaml").tile_sizes == {"batch": 2}
    assert nntile(run, *sets, "train.steps=3").returncode == 0
    for path in (tmp_path / "cache" / "nntile_py" / "tilings").glob("*.json"):
        path.write_text(path.read_text().replace('"batch": 2', '"batch": 1'))
    done = nntile(run, "train.steps=6", "runtime.cpus=1", arguments=("--resume",))
    assert done.returncode == 0 and "tiles: " not in done.stdout, done.stdout
    both = [[(line["step"], line["loss"]) for line in metrics(one / "runs" / "tiny")] for one in (whole, run)]
    assert both[0] == both[1] and len(both[0]) == 6
    assert load(run / "runs" / "tiny" / "config.yaml").tile_sizes == {"batch": 2}


def test_a_clear_winner_of_a_sweep_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: Any) -> None:
        raise OSError("read-only")

    path = tmp_path / "c.yaml"
    path.write_text(of().to_yaml())
    searched = autotune.search(path, [], 3, Console(file=io.StringIO()))
    points = [dict(sets) for sets in searched.sweep.list_]
    assert points[0]["tiles.batch"] == 3  # the config's own: the estimated tiling

    def rows(*times: float) -> list[dict[str, Any]]:
        return [
            {"sets": sets, "status": "ok", "seconds": t, "seconds_min": 0.9 * t, "times": [0.99 * t, t,
             1.01 * t]} for sets, t in zip(points, times, strict=True)
        ]  # fmt: skip

    assert autotune.keep_winner(searched, rows(1.0, 1.01, 1.02)) == "" and auto_tiles(of()).how == ESTIMATED
    text = autotune.keep_winner(searched, rows(2.0, 1.0, 3.0))
    tiles = {key.removeprefix("tiles."): size for key, size in points[1].items() if size}
    assert text.startswith("`tiles: auto` now stands for {") and auto_tiles(of()).tiles == tiles
    assert auto_tiles(of()).how == MEASURED
    monkeypatch.setattr(kept_tiles, "replace_file", replace)
    assert "is not kept for `tiles: auto`, as the cache" in autotune.keep_winner(searched, rows(2.0, 3.0, 1.0))


def test_a_search_of_a_small_model_uses_its_budget(tmp_path: Path) -> None:
    """All tilings have short tasks: the best are measured, and count as measured, not as pruned."""
    (tmp_path / "c.yaml").write_text(of("tiles={}").to_yaml())
    out = io.StringIO()
    searched = autotune.search(tmp_path / "c.yaml", [], 3, Console(file=out, width=300))
    points = searched.sweep.list_ or []
    count, chosen = len(searched.tilings), [tuple(point.values()) for point in points]
    first, second = out.getvalue().splitlines()[-2:]
    assert len(chosen) == len({*chosen}) == 3 and not any(chosen[0])  # the config's own tiling is the uncut one
    assert first.startswith(f"{count} tilings planned; pruned: {count} for tasks shorter than 10 times")
    assert first.endswith(". As all are pruned, those with the shortest planned steps are measured")
    assert second == "3 tilings will be measured, in 3 rounds; --budget N sets their number"
    assert {tiling.key for tiling in searched.tilings if not tiling.pruned} == {*chosen}
    rows = [{"sets": point, "status": "ok", "seconds": 1.0 + k, "times": [1.0 + k] * 3, "seconds_min": 1.0 + k,
             "seconds_max": 1.0 + k, "measure": {}} for k, point in enumerate(points)]  # fmt: skip
    legend = autotune.draw_search(searched, rows, "").axes[0].get_legend()
    assert legend
    names = [text.get_text() for text in legend.get_texts()]
    assert names[0] == "kept (3)" and names[1].endswith(f" their overhead ({count - 3})") and names[2] == "measured (3)"
    out = io.StringIO()
    autotune.search(tmp_path / "c.yaml", [], 500, Console(file=out, width=300))
    assert "fewer than --budget 500, as no other tiling is worth a measurement" in out.getvalue()


def test_the_command_prints_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [part for item in (*SMALL, "runtime.cpus=2") for part in ("--set", item)]
    monkeypatch.setattr("sys.argv", ["nntile", "plan", str(TINY), *sets])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and "(auto: estimated)" in capsys.readouterr().out
