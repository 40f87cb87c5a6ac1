"""The settings `offload` and `recompute: auto`: tiles that leave a GPU, and the fastest step that fits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from test_recompute import SEQ, VOCAB, gpt2

import nntile_py as nt
from nntile_py.errors import ConfigError
from nntile_py.graph.initial_weights import DrawnWeights, initial_weights
from nntile_py.graph.micro_batches import in_parts
from nntile_py.graph.recompute_choice import IN_ORDER, Room, StepEstimate, candidates, fastest
from nntile_py.graph.step import StepSpec
from nntile_py.system.folders import installed
from nntile_py.tiles import Tiling, eviction
from nntile_py.tiles.eviction import OFFLOADED, SOON, mark_evictions, room_in_turn
from nntile_py.tiles.task import RW, R, Task, Tile, W
from nntile_py.tiles.tasklist import TaskList


def spec(**fields: Any) -> StepSpec:
    sizes: Any = {"layers": 8, "embed": 64, "heads": 4, "vocab": VOCAB, "positions": 64}
    model = nt.models.GPT2(nt.models.GPT2Config(**sizes), {})
    return StepSpec(model, 16, 64, Tiling({"batch": 4}), **fields)


def lists(of: StepSpec) -> list[TaskList]:
    return [one.tasks for one in of.step().lists]


def evicted(of: list[TaskList], *kinds: Any) -> dict[str, int]:
    """Return {kind of tile: tiles that leave}."""
    mark_evictions(of, float("inf"), kinds)
    counts: dict[str, int] = {}
    for tile in (tile for tasks in of for task in tasks.tasks for tile in task.evicts):
        kind = tile.kind if tile.persistent else "temp"
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def test_only_the_kinds_leave() -> None:
    of = lists(spec())
    tiles = {access.tile.key: access.tile for task in of[-1].tasks for access in task.accesses}.values()
    states = sum(tile.kind == "state" for tile in tiles)
    assert evicted(of) == {}
    assert evicted(of, "optimizer") == {"state": states}  # the update uses each state once
    assert evicted(of, "weights").keys() == {"param"} and evicted(of, "activations").keys() == {"temp"}
    assert evicted(of, *OFFLOADED).keys() == {*OFFLOADED.values()}
    assert evicted(of) == {}  # old marks are gone


def test_tiles_that_are_used_soon_or_not_again_stay() -> None:
    weight, gradient, state = (
        Tile(kind, (0,), (256,), "fp32", persistent=True, kind=kind) for kind in ("param", "grad", "state")
    )
    activation, short = Tile("x", (0,), (256,), "fp32"), Tile("y", (0,), (256,), "fp32")
    other = Tile("z", (0,), (1,), "fp32", persistent=True)
    tasks = TaskList(initialised=[weight, gradient, state, other])
    tasks.tasks = [
        Task("k", [R(weight), W(activation), W(short)], clears=[gradient]),
        Task("k", [R(short), RW(weight)], frees=[short]),
        *(Task("k", [RW(other)]) for _ in range(SOON)),
        Task("k", [R(activation), W(gradient)], frees=[activation]),
        Task("k", [R(gradient), RW(weight), RW(state)]),
    ]
    mark_evictions([tasks], float("inf"), [*OFFLOADED])
    leave = {number: [tile.tensor for tile in task.evicts] for number, task in enumerate(tasks.tasks) if task.evicts}
    # The gradient is discarded before its next use; the weight is used soon after the first and the last task.
    assert leave == {0: ["x"], 1: ["param"], len(tasks.tasks) - 1: ["state"]}
    tasks.tasks[2] = Task("k", [RW(other)], parts=[Task("k", [RW(other)])] * 3)  # a group counts as its tasks
    del tasks.tasks[3]
    mark_evictions([tasks], float("inf"), ["activations"])
    assert tasks.tasks[0].evicts == [activation]


def test_evictions_for_room_count_what_is_offloaded() -> None:
    """A step that fits without its optimizer states evicts nothing else if they are offloaded."""
    of, every = lists(spec()), spec().step().peak_bytes()
    room = room_in_turn(of, 0.75 * every)
    alone = eviction.evicted(of, room).bytes
    assert alone > 0
    with_states = eviction.evicted(of, room, ["optimizer"]).bytes
    kinds = {tile.kind for tasks in of for task in tasks.tasks for tile in task.evicts}
    tiles = {access.tile.key: access.tile for task in of[-1].tasks for access in task.accesses}.values()
    states = sum(tile.bytes for tile in tiles if tile.kind == "state")
    assert with_states >= states and "state" in kinds


def test_auto_chooses_the_fastest_that_fits() -> None:
    of = spec()
    cpu = Room(2, False, 1 << 40)
    found = {one.recompute: one for one in candidates(of, cpu)}
    none, layer = found["none"], found["layer"]
    assert none.seconds < found["attention"].seconds < layer.seconds and layer.peak_bytes < 0.7 * none.peak_bytes
    assert fastest([*found.values()]) == none
    tight = replace(cpu, bytes=int(layer.peak_bytes / IN_ORDER) + 1)
    assert fastest(candidates(of, tight)) == replace(layer, fits=True)
    least = fastest(candidates(of, replace(cpu, bytes=int(layer.peak_bytes / IN_ORDER))))
    assert least.recompute == "layer" and not least.fits  # the check of the memory then raises the error
    slow = fastest(candidates(of, replace(tight, beyond=1 << 40)))  # a disk costs more than the repeated tasks
    assert slow.recompute == "layer"
    assert replace(of, recompute="auto", room=tight).chosen_recompute == "layer"
    assert replace(of, recompute="auto", room=cpu).chosen_recompute == "none"
    assert replace(of, recompute="auto").chosen_recompute == "none"  # this machine has room


def test_auto_counts_planned_evictions_on_a_gpu() -> None:
    of = spec(precision="bf16")
    free = candidates(of, Room(1, True, 1 << 40, planned=True))
    tight = candidates(of, Room(1, True, free[0].peak_bytes // 2, 1 << 40, planned=True))
    assert not free[0].evicted_bytes < 0 < tight[0].evicted_bytes and tight[0].seconds > free[0].seconds
    # Main memory has no room for the plan's tiles: the estimate is that of a GPU without an eviction plan.
    half = Room(1, True, free[0].peak_bytes // 2, 1 << 40, planned=True, at_rest=free[0].peak_bytes // 2)
    assert candidates(of, half)[0] == candidates(of, replace(half, planned=False))[0] != tight[0]


def test_smaller_micro_batches() -> None:
    found = dict(in_parts(spec(grad_accumulation=2, room=Room(2, False, 1 << 40)), (1, 2, 4, 8)))
    assert [*found] == [2, 4, 8, 16]
    peaks = [each[0].peak_bytes for each in found.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert isinstance(found[2][0], StepEstimate)


def test_trainer_chooses() -> None:
    ids = np.arange(16 * 64).reshape(16, 64) % VOCAB
    room = Room(1, False, 1 << 40)
    needs = {one.recompute: one.peak_bytes for one in candidates(spec(), room)}
    losses = []
    for value, memory in ("none", None), ("auto", None), ("auto", int(0.75 * needs["none"])):
        with nt.Runtime(cpus=1, memory=memory):
            model = nt.models.GPT2(spec().model.config, seed=0)
            trainer = nt.Trainer(model, 16, 64, {"batch": 4}, recompute=value, offload=[*OFFLOADED])
            assert trainer.spec.recompute == ("layer" if memory else "none") and trainer.spec.offload == (*OFFLOADED,)
            losses.append([trainer.step(ids, ids) for _ in range(3)])
            trainer.close()
    assert losses[0] == losses[1] == losses[2]


def test_saved_trainer_keeps_the_settings(tmp_path: Path) -> None:
    with nt.Runtime(cpus=1):
        nt.Trainer(gpt2(), 4, SEQ, recompute="auto", offload=["weights"]).save(tmp_path / "saved")
        assert nt.Trainer.load(tmp_path / "saved").spec.offload == ("weights",)


@pytest.mark.parametrize("value", ["optimizer", ["states"], [1], None])
def test_wrong_kinds(value: Any) -> None:
    with pytest.raises((ConfigError, TypeError), match="offload"), nt.Runtime(cpus=1):
        nt.Trainer(gpt2(), 4, SEQ, offload=value)
    result = planned("gpt2_tiny.yaml", f"offload={json.dumps(value)}")
    assert result.returncode == 2 and "offload" in result.stderr and "optimizer" in result.stderr


def planned(name: str, *sets: str, json: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nntile_py.cli", "plan", str(installed("experiments") / name), *["--json"] * json]
    command += [part for one in sets for part in ("--set", one)]
    return forks.run(command, capture_output=True, text=True, check=False)


def test_plan_shows_the_choice() -> None:
    sets = "recompute=auto", "runtime.cuda_memory=10GiB"
    shown = planned("gpt2_124m.yaml", *sets)
    assert shown.returncode == 0 and "recompute           layer (fastest estimate" in shown.stdout, shown.stderr
    made = json.loads(planned("gpt2_124m.yaml", *sets, json=True).stdout)
    rows = made["recompute"]["1"]
    assert [row["recompute"] for row in rows] == ["none", "attention", "layer"] and rows[0]["evicted_bytes"] > 0
    assert made["recompute"]["2"][0]["peak_bytes"] < rows[0]["peak_bytes"]
    offloaded = json.loads(planned("gpt2_124m.yaml", "offload=[optimizer]", json=True).stdout)
    assert offloaded["evicted_bytes"] == 10 * offloaded["parameters"]  # moments, and low bits of weights
    assert "recompute" not in offloaded


def test_weights_drawn_one_by_one_are_the_same() -> None:
    model = gpt2()
    drawn, want = DrawnWeights(model.params(), 0), initial_weights(model.params(), 0)
    assert [*drawn] == [*want] and all(np.array_equal(drawn[name], value) for name, value in want.items())
    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(model, 4, SEQ)
        assert model._weights is None  # not kept
        trainer.close()
    assert all(np.array_equal(model.first_weights()[name], value) for name, value in model.weights.items())
