"""Tasks counted before they are made, what is said of far too many, and the tiles that are named instead."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from nntile_py.analysis.draw import draw
from nntile_py.analysis.operators import analyse
from nntile_py.analysis.tile_advice import coarse, note, own_cost
from nntile_py.config.builders import step_spec, timings
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.graph.count import most_tasks
from nntile_py.graph.estimate import Estimate
from nntile_py.graph.params import trace
from nntile_py.measure import autotune
from nntile_py.profiling.layout_timer import tune
from nntile_py.tiles import AXES, device_model
from nntile_py.training.datasets import check_objective

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FINE = ("tiles={batch: 1, embed: 8, heads: 1, ffn: 8, vocab: 64}",)  # 587,218 tasks a step
LARGE = ("model.layers=12", "model.embed=768", "model.heads=12", "train.batch=512", "tiles={batch: 1}")
SMALL = ("model.layers=2", "train.seq=40", "train.batch=5", "tokenizer.vocab_size=300", "runtime.cpus=2")
RAGGED = "tiles={batch: 1, seq: 9, embed: 50, heads: 1, ffn: 90, vocab: 70}"


def of(name: str, *sets: str) -> RunConfig:
    return load(EXPERIMENTS / f"{name}.yaml", sets)


def listed(config: RunConfig) -> int:
    step = step_spec(config).step()
    lists = [step.first, *[step.more] * (config.train.grad_accumulation - 1), step.update]
    for graph, low in (step.graph, step.first), (step.update_graph, step.update):
        assert most_tasks(graph, step_spec(config).cuts) > len(low.tasks.tasks)
    return sum(len(low.tasks.tasks) for low in lists if low)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", sorted(path.stem for path in EXPERIMENTS.glob("*_tiny.yaml")))
@pytest.mark.parametrize("tiles", ["tiles={}", "tiles={batch: 3, embed: 100}", RAGGED])
def test_the_count_is_that_of_the_list(name: str, tiles: str) -> None:
    config = of(name, *SMALL, tiles)
    assert own_cost(config).tasks == pytest.approx(listed(config), rel=0.03)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sets",
    [
        ("accumulate=tree",),
        ("accumulate=redux",),
        ("fusion=false", "model.attention=naive"),
        ("model.attention=flash",),
        ("model.attention=merge", "train.grad_accumulation=3"),
        ("optimizer.name=sgd",),
    ],
    ids=lambda sets: sets[0],
)
def test_the_count_in_other_ways_to_compute(sets: tuple[str, ...]) -> None:
    config = of("gpt2_tiny", *SMALL, RAGGED, *sets)
    assert own_cost(config).tasks == pytest.approx(listed(config), rel=0.2)


def test_far_too_many_are_told_at_once() -> None:
    config, start = of("gpt2_tiny", *FINE, "runtime.cpus=2"), time.process_time()
    told = note(config)
    assert time.process_time() - start < 10  # to list them takes a minute
    assert told.startswith("note: 587,218 tasks a step; each has 0.6 us of arithmetic") and "far too small" in told
    sets = re.findall(r"--set (\S+)", told)
    better = of("gpt2_tiny", *FINE, "runtime.cpus=2", *sets)
    assert [one.split("=")[0] for one in sets] == [f"tiles.{axis}" for axis in AXES if axis != "seq"]
    assert own_cost(better).work >= device_model.CPU.good and note(better) == ""
    assert f"({own_cost(better).tasks:,} tasks)" in told
    assert better.tiles.batch == 4, "a tile for each worker"


def test_what_takes_long_to_list_is_told() -> None:
    """Also of tiles that are as they should be; where they are so few that it takes no time, nothing is said."""
    large = of("gpt2_tiny", *LARGE)
    assert not own_cost(large).far_too_fine and own_cost(large).tasks > 50_000
    assert re.fullmatch(r"note: [\d,]+ tasks a step; listing them takes about \d+ s", note(large))


def test_a_good_tiling_is_left_alone() -> None:
    config = of("gpt2_tiny", "runtime.cpus=2")
    assert note(config) == "" and coarse(config).tiles == step_spec(config).tiling.tiles


def test_heads_that_share_keys_stay_together() -> None:
    config = of("llama_tiny", "tiles={batch: 1, heads: 1, embed: 8, ffn: 8}")
    found = coarse(config)
    assert own_cost(of("llama_tiny", f"tiles={found.tiles}")).tasks == found.tasks


@pytest.mark.long
def test_more_than_can_be_listed_is_told_with_what_to_try(tmp_path: Path) -> None:
    config = of("gpt2_tiny", "tiles={batch: 1, embed: 4, ffn: 4, vocab: 16}")
    assert "try --set tiles." in note(config) and "going on" not in note(config)
    with pytest.raises(ConfigError, match=r"about 2,\d+,\d+ tasks are too many for a list; allowed: 2,000,000"):
        step_spec(config).step()
    with pytest.raises(ConfigError, match="tasks are too many for a list"):
        analyse(config)
    with pytest.raises(ConfigError, match="tasks are too many for a list"):
        draw(config)
    with pytest.raises(ConfigError, match="tasks are too many for a list"):
        tune(config, "train", timings(config, tmp_path / "times.json", new=True), 1, print)


@pytest.mark.long
def test_a_search_lists_no_tiling_of_far_too_many_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the config's own nor one on the way; and measures none."""
    import io

    from rich.console import Console

    planned: list[int] = []

    def estimate(lists: list[object], *rest: object) -> Estimate:
        made: Estimate = real(lists, *rest)  # type: ignore[arg-type]
        planned.append(made.tasks)
        return made

    real = autotune.estimate
    monkeypatch.setattr(autotune, "estimate", estimate)
    monkeypatch.setattr(autotune, "MOST_PLANS", 12)
    out = io.StringIO()
    sets = [*FINE, "model.layers=1", "runtime.cpus=2"]
    found = autotune.search(EXPERIMENTS / "gpt2_tiny.yaml", sets, 4, Console(file=out, width=200))
    assert planned and max(planned) < 40_000
    assert "too many to measure" in out.getvalue()
    assert all(point["tiles.embed"] != 8 for point in found.sweep.list_ or [])
    figure = autotune.draw_search(found, [], "")
    figure.canvas.draw()
    ticks = [text.get_text() for text in figure.axes[0].get_xticklabels(which="both") if text.get_text()]
    assert len(ticks) > 1 and all(tick.replace(",", "").isdigit() for tick in ticks)  # no 4 x 10^2 over the next one


def test_one_trace_serves_the_note_the_check_and_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, config = list[bool](), of("gpt2_tiny", "tiles={batch: 4}")

    def counted(model: Any, graph: Any, batch: Any) -> Any:
        traces.append(graph.training)
        return trace(model, graph, batch)

    monkeypatch.setattr("nntile_py.graph.step.trace", counted)
    spec = step_spec(config)
    note(config, spec)
    check_objective(config, spec)
    spec.step()
    assert traces == [True]
    spec.with_inputs(["attention_mask"]).step()
    assert len(traces) == 2
