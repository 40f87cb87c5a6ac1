"""`nntile plan` against what a run then does, and against arithmetic by hand."""

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import nntile_py as nt
from nntile_py.analysis import plan_room
from nntile_py.analysis.plan import Plan, plan
from nntile_py.analysis.workloads import build
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError, say_once
from nntile_py.execution import program
from nntile_py.execution.memory import DROPPED
from nntile_py.graph.estimate import estimate
from nntile_py.profiling import recorder
from nntile_py.system import cgroup
from nntile_py.tiles import R, TaskList, Tile, W, device_model

TINY = Path(__file__).parents[1] / "experiments/gpt2_tiny.yaml"


def of(*overrides: str) -> tuple[RunConfig, Plan]:
    config = load(TINY, ["model.layers=2", "train.seq=32", "train.batch=4", "tokenizer.vocab_size=300", *overrides])
    return config, plan(config)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tiles", ["{}", "{batch: 3, embed: 40, vocab: 130}"])
def test_the_plan_is_what_runs(tiles: str, accumulation: int) -> None:
    config, made = of(f"tiles={tiles}", f"train.grad_accumulation={accumulation}")
    from nntile_py.models.gpt2 import GPT2

    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(
            GPT2(config.model), 4, 32, config.tiles.model_dump(exclude_none=True),
            clip_grad_norm=config.optimizer.clip_grad_norm, grad_accumulation=accumulation,
        )  # fmt: skip
        assert made.tasks == trainer.tasks_per_step
        assert made.flop == pytest.approx(trainer.flop_per_step, rel=1e-9)
        words = sum(w.size for w in trainer.state_dict().values())
    assert made.parameters == words and made.tokens == accumulation * 4 * 32


def test_operators_without_tasks_are_not_listed() -> None:
    """CrossEntropy's tasks make the gradient too where the classes are uncut."""
    for tiles, kinds in (("{vocab: 130}", ["CrossEntropy", "CrossEntropyGrad"]), ("{}", ["CrossEntropy"])):
        _, made = of(f"tiles={tiles}")
        assert [kind for _, kind in made.rows if kind.startswith("CrossEntropy")] == kinds
        assert all(row.tasks and row.operators for row in made.rows.values())


def test_plan_profile_and_exclude_name_operators_alike() -> None:
    dropout = "model.dropout=0.1"
    config, planned = of(dropout)
    step = build(config, "train").lists
    profiled = {recorder._info(task, False, {}).operator for tasks in step for task in tasks.tasks}
    assert {kind for _, kind in planned.rows} == profiled
    assert {"dropout_add_layer_norm", "Contract", "AdamW"} <= profiled
    _, without = of(dropout, "fusion={exclude: [dropout_add_layer_norm]}")
    assert "dropout_add_layer_norm" not in {kind for _, kind in without.rows}


@pytest.mark.parametrize("batch", [10**5, 10**9])
def test_too_many_tiles_are_refused_at_once(batch: int) -> None:
    need = "more than any other axis: raise tiles.batch"
    with pytest.raises(ConfigError, match=f"cut into {batch // 2:,} tiles, {need}"):
        of(f"train.batch={batch}", "tiles={batch: 2}")


def test_time_is_of_the_workers_that_the_config_names() -> None:
    _, one = of("runtime.cpus=1")
    _, two = of("runtime.cpus=2", "tiles={batch: 1}")
    assert "1 CPU worker of 50 Gflop/s" in one.workers and "2 CPU workers" in two.workers
    assert one.step_seconds == pytest.approx(one.tasks * (one.task_seconds + device_model.CPU.beside))
    assert two.step_seconds < 0.8 * one.step_seconds
    config, _ = of()
    gpu = config.model_copy(update={"precision": "bf16", "runtime": config.runtime.model_copy(update={"cuda": 1})})
    made = plan(gpu)
    assert "1 GPU of 600,000 Gflop/s" in made.workers and made.step_seconds < 0.1 * one.step_seconds


def test_tf32_is_fp32_tiles_in_every_work() -> None:
    for work in ("train", "inference", "encoder", "linear_relu", "qkv_all"):
        bytes_moved = [
            estimate(build(load(TINY, sets), cast(Any, work)).lists, 1).bytes_moved
            for sets in (["precision=tf32", "runtime.cuda=1", "tiles={}"], ["precision=fp32", "tiles={}"])
        ]
        assert bytes_moved[0] == bytes_moved[1] > 0


def test_what_leaves_a_gpu_that_is_too_small() -> None:
    config, _ = of()

    def made(memory: int | None, cpus: int = 0) -> Plan:
        update = {"cuda": 1, "cpus": cpus, "cuda_memory": memory, "memory": None}
        runtime = config.runtime.model_copy(update=update)
        return plan(config.model_copy(update={"precision": "bf16", "runtime": runtime}))

    free = made(None)
    assert free.evicted_bytes == made(2 * free.peak_bytes).evicted_bytes == 0
    tight = made(int(0.7 * free.peak_bytes))
    assert 0.3 * free.peak_bytes < tight.evicted_bytes < 0.8 * free.peak_bytes
    seconds = free.step_seconds + tight.evicted_bytes / device_model.GPU["bf16"].host_s
    assert tight.step_seconds == pytest.approx(seconds)
    assert made(int(0.5 * free.peak_bytes)).evicted_bytes > tight.evicted_bytes
    assert made(int(0.5 * free.peak_bytes), cpus=2).evicted_bytes == 0  # who runs what is not known


@pytest.mark.long
def test_what_a_task_costs_beside_its_work() -> None:
    """Tiny tasks take the runtime's time for each, not that of their flop; and no less than to submit them."""
    config, made = of("tiles={batch: 1, embed: 16, ffn: 32, vocab: 32, heads: 1}")
    measured = 18.8e-6  # seconds of a step for each of 86,758 tasks of 9 us on two cores, tests of 2026-11-22
    assert made.task_seconds < 5e-6
    assert made.step_seconds / made.tasks == pytest.approx(measured, rel=0.4)
    lists = build(config).lists
    assert estimate(lists, 1000).seconds >= made.tasks * device_model.CPU.submit


def test_estimate_by_hand() -> None:
    """Two tasks that one may run beside the other, then one that waits for both."""
    a, b, c = (Tile(name, (0,), (1000,), "fp32") for name in "abc")
    tasks = TaskList()
    tasks.emit("x", [W(a)], flop=50e9 * 1e-3)
    tasks.emit("x", [W(b)], flop=50e9 * 3e-3)
    tasks.emit("y", [W(c), R(a), R(b)], flop=50e9 * 2e-3)
    made = estimate([tasks.resolve()], workers=2)
    each = device_model.CPU.beside
    assert made.tasks == 3 and made.mean_task == pytest.approx(2e-3)
    assert made.seconds == pytest.approx(5e-3 + 2 * each)  # the longest chain
    assert made.parallelism == pytest.approx((6e-3 + 3 * each) / (5e-3 + 2 * each))
    assert made.bytes_moved == 5 * 4000 and dataclasses.asdict(made)["speed"]["flop_s"] == 50e9


def test_a_plan_for_a_machine_with_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without runtime.memory the plan is for this machine; a larger runtime.memory is that of another machine."""
    _, made = of("runtime.memory=null")
    assert not made.refused
    small = made.peak_bytes - 1
    monkeypatch.setattr(plan_room, "machine_memory", lambda: small)
    monkeypatch.setattr(cgroup, "machine_memory", lambda: small)
    _, made = of("runtime.memory=null")
    assert made.refused.startswith("out of memory: a step needs at least ")
    assert made.refused.endswith("; to plan for another machine, set runtime.memory to its main memory")
    assert not of(f"runtime.memory={2 * small}")[1].refused
    with_limit = of(f"runtime.memory={small - 1}")[1].refused
    assert with_limit.startswith("out of memory: ") and "another machine" not in with_limit


def test_plan_and_run_drop_the_eviction_plan_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main memory below 32/31 of the evicted bytes: StarPU chooses the tiles. A plan and a run both say so."""
    gpu = "runtime.cuda=1", "runtime.cpus=0", "precision=bf16", "train.grad_accumulation=3"
    half = f"runtime.cuda_memory={of(*gpu)[1].peak_bytes // 2}"
    planned = of(*gpu, half, "runtime.memory=64GiB")[1]
    assert planned.evicted_bytes and not planned.eviction_needs
    above = planned.peak_bytes - planned.peak_bytes // 2
    needs = of(*gpu, half, f"runtime.memory={above}")[1].eviction_needs
    assert 1 < needs / above < 1.2
    monkeypatch.setattr(program, "_core", SimpleNamespace(cuda_workers=lambda: 1, cpu_workers=lambda: 0))
    monkeypatch.setattr(program._core, "reserve_for_tiles", lambda: None, raising=False)
    monkeypatch.setattr(program, "lives_on_cuda", lambda tasks: True)
    monkeypatch.setattr(program, "Program", lambda tasks, *others: tasks)
    for memory, dropped in ((needs, False), (needs - 2, True)):
        config, made = of(*gpu, half, f"runtime.memory={memory}")
        assert bool(made.eviction_needs) == dropped and not made.refused
        assert (made.evicted_bytes == planned.evicted_bytes) != dropped
        text = "\n".join(str(line) for line in made.render().renderables)
        assert ("StarPU chooses the tiles that leave: a plan needs runtime.memory of" in text) == dropped
        runtime = SimpleNamespace(
            cuda=1, cpus=0, memory=memory, cuda_memory=config.runtime.cuda_memory, disk=None, ranks=None,
            placement="planned", on_cpu=None,
        )  # fmt: skip
        monkeypatch.setattr(program.Runtime, "current", runtime)
        say_once.cache_clear()
        step = step_spec(config).step()
        order = step.order(3)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lists: Any = program.programs(
                [one.tasks for one in step.lists], cast(Any, SimpleNamespace(ranks=None, residency={})), order=order
            )
        assert [str(one.message) for one in told] == [DROPPED] * dropped
        assert any(task.evicts for tasks in lists for task in tasks.tasks) != dropped


def test_a_plan_refuses_offload_without_room() -> None:
    """A run refuses it before its first step, with the same message."""
    gpu = "runtime.cuda=1", "runtime.cpus=0", "runtime.cuda_memory=64GiB", "offload=[optimizer,activations]"
    made = of(*gpu, "runtime.memory=4GiB")[1]
    assert made.evicted_bytes and not made.refused
    small = of(*gpu, f"runtime.memory={made.state_bytes // 2}")[1].refused
    assert small.startswith("offload: main memory has no room for the tiles of optimizer, activations; allowed: fewer")
    assert not of(*gpu[:3], f"runtime.memory={made.state_bytes // 2}")[1].refused
