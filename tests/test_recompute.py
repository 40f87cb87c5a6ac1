"""Recompute: tasks of the forward pass run again in the backward pass, with the same bits and less memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_freeze import nntile

import nntile_py as nt
from nntile_py.analysis.drawings import TaskDrawing
from nntile_py.analysis.plan import plan
from nntile_py.analysis.workloads import build
from nntile_py.config.run_config import load
from nntile_py.graph.recompute_rule import segment_of
from nntile_py.tiles import ACC, RW, R, TaskList, Tile, W
from nntile_py.tiles.recompute import SUFFIX, recompute

SEQ, VOCAB = 24, 97
RAGGED = {"batch": 3, "seq": 10, "embed": 24, "heads": 2, "ffn": 50, "vocab": 40}


def gpt2() -> Any:
    sizes: Any = {"layers": 3, "embed": 64, "heads": 4, "vocab": VOCAB, "positions": SEQ, "dropout": 0.1}
    return nt.models.GPT2(nt.models.GPT2Config(**sizes), seed=0)


def llama() -> Any:
    sizes: Any = {"layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "positions": SEQ, "ffn": 96}
    return nt.models.Llama(nt.models.LlamaConfig(**sizes), seed=0)


def bert() -> Any:
    sizes: Any = {"layers": 2, "embed": 64, "heads": 4, "vocab": VOCAB, "positions": SEQ, "dropout": 0.1}
    return nt.models.BERT(nt.models.BERTConfig(**sizes), seed=0)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama, "bert": bert}


def bits(model: Any, rows: int = 4, steps: int = 3, **options: Any) -> tuple[list[str], str, TaskList]:
    """Return the losses, a digest of the weights, and the task list of the first pass."""
    trainer = nt.Trainer(model, rows, SEQ, optimizer=nt.AdamW(lr=1e-3), **options)
    ids = np.random.default_rng(0).integers(5, VOCAB, (rows * options.get("grad_accumulation", 1), SEQ))
    losses = [trainer.step({"input_ids": ids, "labels": ids}).hex() for _ in range(steps)]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in trainer.state_dict().values())).hexdigest()
    tasks = trainer.built.first.tasks
    trainer.close()
    return losses, digest, tasks


def repeated(tasks: TaskList) -> int:
    return sum(task.op.endswith(SUFFIX) for task in tasks.tasks)


@pytest.mark.parametrize("again", ["attention", "layer", ["*.mlp.*"], ["*"]], ids=str)
@pytest.mark.parametrize("tiles", [{}, {"batch": 1}, RAGGED], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_the_same(name: str, tiles: dict[str, int], again: str | list[str]) -> None:
    if name == "gpt2":
        tiles = tiles | {"heads": 3} if tiles else tiles
    with nt.Runtime(cpus=2):
        want = bits(MODELS[name](), tiles=tiles)
        got = bits(MODELS[name](), tiles=tiles, recompute=again)
    assert got[:2] == want[:2]
    assert repeated(want[2]) == 0 < repeated(got[2])


@pytest.mark.parametrize("options", [
    {"grad_accumulation": 3, "tiles": {"batch": 1}},
    {"fusion": False, "tiles": RAGGED},
    {"accumulate": "redux", "tiles": {"batch": 2}},
    {"accumulate": "tree", "tiles": {"batch": 1, "embed": 32}},
    {"attention": "naive", "tiles": {"seq": 10}},
    {"pack": True, "tiles": {"batch": 2}},
    {"precision": "fp64"},
], ids=str)  # fmt: skip
def test_options(options: dict[str, Any]) -> None:
    """One worker: redux then adds in the order of the list."""
    with nt.Runtime(cpus=1):
        want = bits(gpt2(), **options)
        got = bits(gpt2(), recompute="layer", **options)
    assert got[:2] == want[:2] and repeated(got[2])
    assert got[2].peak_bytes() < want[2].peak_bytes()


def test_frozen_layers() -> None:
    """No backward task needs a result of a frozen layer: nothing is repeated, and only patterns are refused."""
    config, options = gpt2().config.changed(tie_embeddings=False), {"freeze": ["transformer.*"]}

    def trained(again: str | list[str]) -> tuple[list[str], str, TaskList]:
        return bits(nt.models.GPT2(config), recompute=again, **options)

    with nt.Runtime(cpus=1):
        want = trained("none")
        for again in ("attention", "layer"):
            got = trained(again)
            assert got[:2] == want[:2] and not repeated(got[2])
        with pytest.raises(nt.ConfigError, match=r"repeats no operator of this model, as the backward pass needs no"):
            trained(["*.attn.*"])


def test_with_little_memory(tmp_path: Path) -> None:
    """Tiles that do not fit go to the disk, as without recompute."""
    with nt.Runtime(cpus=2):
        want = bits(gpt2(), tiles={"batch": 1})
    with nt.Runtime(cpus=2, memory="3MiB", disk={"path": str(tmp_path), "size": "1GiB"}):
        got = bits(gpt2(), tiles={"batch": 1}, recompute="layer")
    assert got[:2] == want[:2]


def test_layers_are_computed_again_one_after_the_other() -> None:
    """The layer's results are freed in the forward pass; a repeated task starts when the layer's gradient has come."""
    with nt.Runtime(cpus=1):
        tasks = bits(gpt2(), steps=1, tiles={"batch": 2}, recompute="layer")[2].tasks
    order = list(dict.fromkeys(task.op.split(".")[0] for task in tasks if task.op.endswith(SUFFIX)))
    assert order == ["h2", "h1", "h0"]
    numbers = {id(tile): number for number, task in enumerate(tasks) for tile in task.frees}
    first = next(number for number, task in enumerate(tasks) if task.op.endswith(SUFFIX))
    freed = [tile for task in tasks[:first] for tile in task.frees if tile.tensor.startswith("h0.mlp")]
    assert freed and all(numbers[id(tile)] < first for tile in freed)
    waiting = [number for number, task in enumerate(tasks) if any(access.waits for access in task.accesses)]
    assert {tasks[number].op.split(".")[0] for number in waiting} == {"h0", "h1", "h2"}
    for number in waiting:
        (gradient,) = (access.tile for access in tasks[number].accesses if access.waits)
        made = [k for k, task in enumerate(tasks) if any(a.tile is gradient and a.mode != "R" for a in task.accesses)]
        assert made and max(made) < number <= numbers[id(gradient)]
        assert tasks[number].priority <= min(task.priority for task in tasks[:number])


def tile(name: str, persistent: bool = False) -> Tile:
    return Tile(name, (0,), (4,), "fp32", persistent=persistent)


def test_results_that_cannot_be_computed_again_are_kept() -> None:
    """Operands that are overwritten later, results in persistent tiles, results that the backward pass changes."""
    x, changed, kept, made, late = tile("x", True), tile("changed"), tile("kept"), tile("made"), tile("late")
    loss, end = tile("loss", True), tile("end")
    tasks = TaskList()
    tasks.emit("a", [W(changed), R(x)], op="h0.a")
    tasks.emit("b", [W(kept), R(changed)], op="h0.b")
    tasks.emit("c", [RW(changed)], op="h1.c")  # b cannot be repeated
    tasks.emit("d", [W(made), ACC(loss), R(x)], op="h0.d")  # writes a persistent tile
    tasks.emit("e", [W(late), R(x)], op="h0.e")
    tasks.emit("f", [RW(late), R(kept), R(made)], op="h0.f.backward")
    tasks.emit("g", [W(end), R(late)], op="h0.g.backward")
    assert recompute(tasks, 5, segment_of("layer")) == 0
    assert [task.kernel for task in tasks.tasks] == [*"abcdefg"]


def test_a_segment_of_many_tasks_in_a_chain() -> None:
    """The backward pass reads each result. All but the first task depend on an earlier one."""
    count, tasks = 3000, TaskList()
    made = [tile("x", True), *(tile(f"y{k}") for k in range(count))]
    for k in range(count):
        tasks.emit("f", [W(made[k + 1]), R(made[k])], op="h0.f")
    for k in reversed(range(count)):
        tasks.emit("g", [W(tile(f"dy{k}")), R(made[k + 1])], op="h0.g.backward")
    assert recompute(tasks, count, segment_of("layer")) == count
    again = [task.accesses[0].tile for task in tasks.tasks if task.op.endswith(SUFFIX)]
    assert [task.accesses[1].tile for task in tasks.tasks[-count:]] == again[::-1]
    assert not {*again} & {*made}


@pytest.mark.parametrize("value, message", [
    ("all", "recompute: got 'all'; allowed: none, attention, layer, auto, or a list of patterns"),
    ([3], r"recompute: got \[3\]; allowed: "),
    ([], r"recompute: got \[\]; allowed: "),
    (["*.nothing.*"], r"recompute: \['\*.nothing.\*'\] repeats no operator of this model; .* embed"),
])  # fmt: skip
def test_values_that_are_not_allowed(value: Any, message: str) -> None:
    with nt.Runtime(cpus=1), pytest.raises(nt.ConfigError, match=message):
        nt.Trainer(gpt2(), 4, SEQ, recompute=value)


def test_command(tmp_path: Path) -> None:
    """A run, a resumed run with another value, and the plan."""
    sets = f"out={tmp_path}/run", "train.batch=4", "train.seq=16"
    done = nntile(tmp_path, *sets, "train.steps=4", "checkpoint.every=4", "recompute=layer")
    assert done.returncode == 0, done.stderr
    done = nntile(tmp_path, *sets, "recompute=auto", "train.steps=8", arguments=("--resume", f"{tmp_path}/run"))
    assert done.returncode == 0, done.stderr
    assert "recompute: none, the fastest that fits into the memory" in done.stdout
    done = nntile(tmp_path, *sets, "recompute=some", arguments=("--overwrite",))
    assert done.returncode == 2 and "recompute: got 'some'; allowed: none, attention, layer, auto, or" in done.stderr


def test_plan_and_pictures_show_repeated_operators() -> None:
    path = Path(__file__).parents[1] / "experiments/gpt2_tiny.yaml"
    configs = [load(path, [f"recompute={value}"]) for value in ("none", "layer")]
    without, done = map(plan, configs)
    rows = {kind: row for (phase, kind), row in done.rows.items() if phase == "recompute"}
    assert {"Contract", "Attention"} <= rows.keys() and all(row.operators and row.tiles for row in rows.values())
    assert done.peak_bytes < without.peak_bytes and done.flop == without.flop
    tasks = [done.tasks, without.tasks]
    assert tasks[0] - tasks[1] == sum(row.tasks for row in rows.values())
    before, after = (TaskDrawing(build(config), "after", 1, "all", True).count for config in configs)
    assert before < after
