"""What planned lists would take on several GPUs: by hand, and that a plan is worth its name."""

from dataclasses import replace
from pathlib import Path

import pytest

import nntile_py as nt
from nntile_py.analysis.plan import plan
from nntile_py.analysis.simulate import planned_seconds, simulate_list
from nntile_py.config.run_config import load
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import R, TaskList, Tile, Tiling, W, device_model
from nntile_py.tiles.placement import Speed

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
HAND = Speed(flop_s=1e12, bytes_s=1e15, link_s=1e9, latency=1e-3, overhead=0.5e-3)


def test_by_hand() -> None:
    """Worker 0 makes a, worker 1 b, in 4 and 2 ms; worker 1 reads both, but a, of 1 MB, has to travel."""
    a, b, c = (Tile(name, (0,), (250_000,), "fp32") for name in "abc")
    tasks = TaskList()
    tasks.emit("x", [W(a)], flop=4e9)
    tasks.emit("x", [W(b)], flop=2e9)
    tasks.emit("y", [W(c), R(a), R(b)], flop=3e9)
    tasks.resolve()
    for task, worker in zip(tasks.tasks, (0, 1, 1), strict=True):
        task.worker = worker
    a_there = 4e-3 + 0.5e-3 + 1e6 / 1e9 + 1e-3
    assert simulate_list(tasks.tasks, 2, HAND, {}) == pytest.approx(a_there + 3e-3 + 0.5e-3)
    launched = replace(HAND, launch=1e-4)
    assert simulate_list(tasks.tasks, 2, launched, {}) == pytest.approx(a_there + 3e-3 + 0.5e-3 + 2e-4)
    for task in tasks.tasks:
        task.worker = 0
    assert simulate_list(tasks.tasks, 2, HAND, {}) == pytest.approx(9e-3 + 3 * 0.5e-3)


def seconds(batch: int, tile: int, workers: int, layers: int = 6) -> float:
    config = nt.models.GPT2Config(layers=layers, embed=768, heads=12, vocab=50304, positions=1024)
    step = StepSpec(
        nt.models.GPT2(config, {}), batch, 1024, Tiling({"batch": tile}), precision="bf16", optimizer=nt.AdamW(),
        clip_grad_norm=1.0, accumulate="chain", fusion=Fusion(),
    ).step()  # fmt: skip
    return planned_seconds([low.tasks for low in step.lists], workers, device_model.GPU["bf16"])


def test_gpus_do_not_take_turns() -> None:
    """Four do four times as much in hardly more time, with one tile of the batch each as with four."""
    one, four = seconds(32, 32, 1), seconds(128, 32, 4)
    assert one < four < 1.35 * one  # what has 6 layers has much to add up beside its work
    assert seconds(128, 16, 4) < 1.05 * four and seconds(128, 8, 4) < 1.1 * four


def test_micro_batches_run_the_same_program() -> None:
    config = load(EXPERIMENTS / "gpt2_124m.yaml", ["scheduler=multi_gpu", "runtime.cuda=2", "tiles.batch=8"])
    times = []
    for count in (1, 2, 9):
        train = config.train.model_copy(update={"grad_accumulation": count})
        times.append(plan(config.model_copy(update={"train": train})).step_seconds)
    one, two, nine = times
    assert one < two < nine < 9 * one
    assert (nine - two) / 7 == pytest.approx(two - one, rel=0.1)


def test_plan_tells_the_time_of_what_is_planned() -> None:
    config = load(EXPERIMENTS / "gpt2_124m.yaml", ["scheduler=multi_gpu", "runtime.cuda=2", "tiles.batch=8"])
    assert config.planned
    by_plan = plan(config).step_seconds
    loose = config.model_copy(update={"runtime": config.runtime.model_copy(update={"placement": "scheduler"})})
    assert not loose.planned and plan(loose).step_seconds != by_plan
    every = config.model_copy(update={"runtime": config.runtime.model_copy(update={"cpus": "all", "placement": None})})
    assert every.planned  # beside GPUs, all cores are none
    one = config.model_copy(update={"runtime": config.runtime.model_copy(update={"cuda": 1})})
    assert not one.planned and by_plan < plan(one).step_seconds
    # Measured on an H200: 54 to 57 ms.
    uncut = load(EXPERIMENTS / "gpt2_124m.yaml", ["runtime.cuda=1", "tokenizer.vocab_size=50304", "tiles={}"])
    assert uncut.train.batch == 32 and plan(uncut).step_seconds == pytest.approx(55e-3, rel=0.1)
