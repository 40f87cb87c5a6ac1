"""Too little memory: an exception names keys and tensors. See test_disk.py for tiles on a disk."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CPUS
from faults import ends_well

import nntile_py as nt
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.errors import say_once
from nntile_py.execution import memory, memory_checks, starpu_settings
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.step import StepSpec
from nntile_py.system.cgroup import machine_memory, within_machine
from nntile_py.tiles import Tiling, eviction
from nntile_py.tiles.eviction import SHARE, mark_evictions, outside_peak
from nntile_py.tiles.task_groups import grouped
from nntile_py.training.run_start import first_trainer

MIB = 2**20
CONFIG = nt.models.GPT2Config(layers=2, embed=64, heads=2, vocab=1000, positions=64)


def test_an_array_larger_than_the_memory(python: Any) -> None:
    code = """
with nt.Runtime(cpus=1, memory=1 << 20):
    refused(lambda: nt.array(np.zeros(1 << 20)).numpy(), "memory")
    y = nt.array(np.ones(3)); inc(y)
    assert y.numpy().tolist() == [2, 2, 2]
print("end")
"""
    ends_well(python, code, refused=1)


@pytest.mark.long
def test_arrays_that_found_no_place_when_the_block_ends(python: Any) -> None:
    code = """
def leave():
    with nt.Runtime(cpus=1, memory=2 << 20):
        arrays = [nt.array(np.ones(1 << 17)) for _ in range(3)]
refused(leave, "tiles on their way to main memory")
print("end")
"""
    ends_well(python, code, refused=1)


def test_a_model_larger_than_the_memory(python: Any) -> None:
    code = """
big = nt.models.GPT2(nt.models.GPT2Config(layers=2, embed=64, heads=2, vocab=1000, positions=64))
many = np.zeros((4, 64), int)
def train():
    trainer = nt.Trainer(big, 4, 64)
    for _ in range(3): trainer.step(many, many)
with nt.Runtime(cpus=2, memory=1 << 20):
    refused(train, "memory")
print("end")
"""
    ends_well(python, code, refused=1)


def test_a_tile_larger_than_the_machine(python: Any) -> None:
    code = """
from nntile_py.execution.task_payload import body
with nt.Runtime(cpus=1):
    def run():
        source, huge = _core.Tile([4], "fp32"), _core.Tile([1 << 45], "fp32")
        source.write(np.ones(4))
        program = _core.Program()
        bodies = [body("transpose", "h0.Transpose", [0, 1], [0])]
        program.add(bodies=bodies, codelet="transpose", name="h0.Transpose", tiles=[huge, source], modes=["W", "R"])
        program.run([])
        nt.Runtime.wait()
    refused(run, "memory")
print("end")
"""
    ends_well(python, code, refused=1)


# -- the watchdog


def test_tasks_that_wait_for_memory_for_ever(python: Any) -> None:
    """Arrays that are all in use, more than memory holds."""
    code = """
def fill():
    with nt.Runtime(cpus=1, memory=4 << 20):
        nt.Trainer(model, 2, 8)
        arrays = [nt.array(np.zeros(1 << 17)) for _ in range(8)]
        for array in arrays: inc(array)
        nt.Runtime.wait()
refused(fill, "a tile of 1 MiB waits for room: NUMA 0 has ")
refused(lambda: nt.Runtime(cpus=1).__enter__(), "start a new process")
print("end")
"""
    ends_well(python, code, refused=2)


# -- checks before the first step, on the task lists of GPUs


class Gpu:
    """What the checks look at of a Runtime."""

    ranks = None

    def __init__(self, cuda_memory: int, memory: int | None = None, cuda: int = 1, disk: Any = None) -> None:
        self.cuda, self.cpus, self.cuda_memory, self.memory, self.disk = cuda, 0, cuda_memory, memory, disk


def spec(tiles: dict[str, int]) -> StepSpec:
    return StepSpec(
        nt.models.GPT2(CONFIG, {}), 8, 64, Tiling(tiles), precision="bf16", optimizer=nt.AdamW(), clip_grad_norm=1.0,
        accumulate="chain", fusion=Fusion(),
    )  # fmt: skip


def step(tiles: dict[str, int]) -> Any:
    return spec(tiles).step()


def test_a_task_larger_than_the_gpu() -> None:
    uncut, cut = step({}).first.tasks, step({"batch": 1, "vocab": 100}).first.tasks
    for tasks in (uncut, cut):
        memory_checks.check_tasks(tasks, Gpu(2**30))  # type: ignore[arg-type]
    memory_checks.check_tasks(cut, Gpu(MIB))  # type: ignore[arg-type]
    text = (
        r"out of memory: head\.\S* works on 1\.3 MiB of tiles at once, and runtime\.cuda_memory = 1\.0 MiB has room "
        r"for 0\.5; the largest tiles are .*\(1\.0 MiB: batch 8 x seq 64 x vocab 1000\).* Lower tiles\.batch, "
        r"tiles\.seq, tiles\.vocab, tiles\.embed$"
    )
    with pytest.raises(nt.TaskError, match=text):
        memory_checks.check_tasks(uncut, Gpu(MIB))  # type: ignore[arg-type]
    more = r"tiles\.embed, or use more micro-batches \(train\.grad_accumulation\) of a smaller train\.batch$"
    with pytest.raises(nt.TaskError, match=more):
        memory_checks.check_tasks(uncut, Gpu(MIB), in_step=True)  # type: ignore[arg-type]
    one = replace(spec({}), batch=1).step().first.tasks
    with pytest.raises(nt.TaskError, match=r"Lower tiles\.vocab, tiles\.embed, tiles\.seq$"):
        memory_checks.check_tasks(one, Gpu(MIB // 8), in_step=True)  # type: ignore[arg-type]


def test_a_task_larger_than_what_the_disk_fills() -> None:
    """Tiles from the disk pass through main memory, which must hold one tile per worker and one more."""
    uncut = step({}).first.tasks
    memory_checks.check_tasks(uncut, Gpu(2**30, 3 * MIB, disk=True))  # type: ignore[arg-type]
    with pytest.raises(nt.TaskError, match=r"runtime\.memory = 3\.0 MiB has room for 0\.6; the largest"):
        memory_checks.check_tasks(uncut, Gpu(2**30, 3 * MIB, cuda=4, disk=True))  # type: ignore[arg-type]


def test_groups_are_bounded_in_bytes() -> None:
    tasks = step({"batch": 1, "vocab": 100}).first.tasks
    most = max(sum(a.tile.bytes for a in task.accesses) for task in tasks.tasks)
    counts = []
    for limit in (most, 4 * most, 2**30):
        groups = grouped(tasks, 600e12, 3.5e12, 1e-3, limit).tasks
        assert all(sum(a.tile.bytes for a in task.accesses) <= limit for task in groups)
        counts.append(len(groups))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_memory_that_may_go_under_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    told = "^PYTORCH_ALLOC_CONF: got expandable_segments:True; allowed with CUDA workers: expandable_segments:False"
    with pytest.raises(nt.ConfigError, match=told):
        starpu_settings.prepare_cuda(1, None)


def test_main_memory_beside_gpus() -> None:
    built = step({"batch": 1})
    peak = built.peak_bytes()
    memory_checks.check_step(built, Gpu(peak, 2 * MIB))  # type: ignore[arg-type]
    memory_checks.check_step(built, Gpu(peak // 2, peak, cuda=2))  # type: ignore[arg-type]
    for gpu in (Gpu(peak // 2, peak // 4), Gpu(peak, MIB // 4)):
        told = r"of it outside of \d+ MiB for tiles in runtime\.cuda_memory, and runtime\.memory has room for"
        with pytest.raises(nt.TaskError, match=told):
            memory_checks.check_step(built, gpu)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_the_least_that_is_named_is_taken(batch: int) -> None:
    """Whole MiB, rounded up: no message says that so much is needed, and so much is there."""
    built = step({"batch": batch})
    with pytest.raises(nt.TaskError) as refused:
        memory_checks.check_step(built, Gpu(0, MIB, cuda=0))  # type: ignore[arg-type]
    found = re.search(r"at least (\d+) MiB, and more where .* runtime\.memory has room for 1;", str(refused.value))
    assert found
    memory_checks.check_step(built, Gpu(0, int(found[1]) * MIB, cuda=0))  # type: ignore[arg-type]
    with pytest.raises(nt.TaskError, match=rf"has room for {int(found[1]) - 1};"):
        memory_checks.check_step(built, Gpu(0, (int(found[1]) - 1) * MIB, cuda=0))  # type: ignore[arg-type]


BOTH = "Use train.grad_accumulation: auto, recompute: auto, a smaller batch or seq, or smaller tiles.batch"


@pytest.mark.parametrize("cuda", [0, 1])
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, BOTH),
        ({"batch": 1}, "Use recompute: auto, a smaller batch"),
        ({"recompute": "attention"}, "Use train.grad_accumulation: auto, recompute: layer, a smaller batch"),
        ({"recompute": "layer", "grad_accumulation": 2}, "Use train.grad_accumulation: auto, a smaller batch"),
        ({"recompute": "layer", "batch": 1}, "Use a smaller batch"),
    ],
)
def test_a_step_without_room_names_micro_batches_and_recompute(changes: Any, advice: str, cuda: int) -> None:
    """The settings that lower the peak of activations, unless the step has them already."""
    built = replace(spec({}), **changes).step()
    kept, peak = sum(built.kept_tiles().values()), built.peak_bytes()
    between = (kept + peak) // 2
    gpu = Gpu(int(between / 2 / SHARE), between // 2) if cuda else Gpu(0, between, cuda=0)
    with pytest.raises(nt.TaskError, match=re.escape(f". {advice}")):
        memory_checks.check_step(built, gpu)  # type: ignore[arg-type]
    small = Gpu(kept // 3, kept // 2, cuda=cuda)
    with pytest.raises(nt.TaskError, match=r"inputs alone take \d+ MiB: use a smaller model") as refused:
        memory_checks.check_step(built, small)  # type: ignore[arg-type]
    assert "micro-batches" not in str(refused.value) and "recompute" not in str(refused.value)


def test_main_memory_for_weights_at_the_start() -> None:
    """Weights are written in main memory first, in bf16 with the low bits of their master weights."""
    built = StepSpec(
        nt.models.GPT2(CONFIG, {}), 2, 64, Tiling({}), precision="bf16", optimizer=nt.AdamW(), clip_grad_norm=1.0,
        accumulate="chain", fusion=Fusion(), grad_accumulation=1,
    ).step()  # fmt: skip
    words = sum(t.numel for t in built.graph.tensors.values() if t.kind == "param")
    with pytest.raises(nt.TaskError, match=r"runtime\.memory has room for .* first written to main memory: use a "):
        memory_checks.check_step(built, Gpu(2**30, 4 * words - 1))  # type: ignore[arg-type]
    memory_checks.check_step(built, Gpu(2**30, 4 * words + MIB))  # type: ignore[arg-type]


def test_main_memory_for_what_leaves_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is marked if the tiles that leave would fill main memory; StarPU then evicts by itself."""
    built = step({})
    lists = [low.tasks for low in built.lists]
    kept, peak = sum(built.kept_tiles().values()), built.peak_bytes()
    assert memory.room_to_plan(Gpu(peak * 2), lists) == 0  # type: ignore[arg-type]
    for gpu in (Gpu(peak // 2, cuda=2), Gpu(peak // 2, kept, disk=True)):
        assert memory.room_to_plan(gpu, lists) == 0  # type: ignore[arg-type]
    room = memory.room_to_plan(Gpu(peak // 2), lists)  # type: ignore[arg-type]
    assert 0.4 * peak < room < 0.5 * peak and mark_evictions(lists, room)
    left = outside_peak(lists)
    assert peak - room <= left < peak
    assert memory.has_room_for_evictions(lists, Gpu(peak // 2, 32 * left // 31 + 1))  # type: ignore[arg-type]
    assert not memory.has_room_for_evictions(lists, Gpu(peak // 2, left))  # type: ignore[arg-type]
    assert memory.has_room_for_evictions(lists, Gpu(peak // 2))  # type: ignore[arg-type]
    small: Any = Gpu(peak // 2, left)
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="no room for the tiles of an eviction plan, so StarPU chooses"):
        memory.limit_evictions(lists, small, ())
    assert not any(task.evicts for tasks in lists for task in tasks.tasks)
    monkeypatch.setattr(eviction, "SOON", 2)  # the step has few tasks
    assert mark_evictions(lists, room, ["optimizer"])
    memory.limit_evictions(lists, small, ["optimizer"])  # fits: only the marks for lack of room are removed
    assert {tile.kind for tasks in lists for task in tasks.tasks for tile in task.evicts} == {"state"}
    assert mark_evictions(lists, room)
    smallest: Any = Gpu(peak // 2, kept // 2)
    with pytest.raises(nt.TaskError, match="offload: main memory has no room for the tiles of optimizer, weights;"):
        memory.limit_evictions(lists, smallest, ["optimizer", "weights"])
    assert mark_evictions(lists, room)
    monkeypatch.setattr(memory_checks, "main_memory", lambda *_: 1.1 * left)  # some is left to the program itself
    assert not memory.has_room_for_evictions(lists, Gpu(peak // 2))  # type: ignore[arg-type]


def test_few_tasks_in_flight_where_memory_is_full() -> None:
    """Any number of tasks is in flight only if memory has room for tiles that are recomputed early."""
    built = replace(spec({}), grad_accumulation=2, recompute="layer").step()
    lists, peak = [low.tasks for low in built.lists], built.peak_bytes()
    tiles = {access.tile for task in lists[0].tasks for access in task.accesses}
    temporary = sum(tile.bytes for tile in tiles if not tile.persistent)
    assert temporary > 2 * lists[0].temporary_bytes()
    for more, tasks in ((0, 32), (temporary // 4, 32), (temporary, 0)):
        assert memory_checks.window(lists, Gpu(peak // 2, peak - peak // 2 + more)) == tasks  # type: ignore[arg-type]


def test_pinned_memory_leaves_room_for_the_process() -> None:
    whole = machine_memory()
    assert nt.Runtime(memory=1 << 30)._pinned() == 33 << 25
    assert nt.Runtime(memory=2 * whole)._pinned() == whole
    assert 0.7 * whole < nt.Runtime()._pinned() < 0.9 * whole  # the process has other arrays too


def test_a_run_holds_its_weights_in_tiles_only() -> None:
    """Arrays of a checkpoint's weights are freed when the tiles have them, and the end of a run makes no new ones."""
    config = load(Path(__file__).parents[1] / "experiments/gpt2_tiny.yaml", ["train.batch=2", "train.seq=16"])
    planned = step_spec(config)
    assert planned.model.weights  # arrays, as those of a checkpoint in bf16
    with nt.Runtime(cpus=1) as runtime:
        trainer = first_trainer(config, planned, runtime, None)
        assert not trainer.model.weights
        trainer.step(np.ones((2, 16), int), np.ones((2, 16), int))
    assert not trainer.model.weights


def test_more_than_the_machine_has() -> None:
    with nt.Runtime(cpus=CPUS), pytest.raises(nt.TaskError, match="out of memory: a step needs at least"):
        nt.Trainer(nt.models.GPT2(CONFIG), 10**7, 64)


def test_memory_of_a_job(tmp_path: Path) -> None:
    """The least limit of the cgroups above; of either version, or none that can be read."""
    whole, mine, root = machine_memory(tmp_path / "none"), tmp_path / "cgroup", tmp_path / "fs"
    (root / "job" / "step").mkdir(parents=True)
    (root / "memory" / "job").mkdir(parents=True)
    mine.write_text("0::/job/step\n")
    assert machine_memory(mine, root) == whole > 3 << 20
    (root / "job" / "step" / "memory.max").write_text("max\n")
    (root / "job" / "memory.max").write_text(f"{3 << 20}\n")
    assert machine_memory(mine, root) == 3 << 20
    (root / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{2 << 20}\n")
    mine.write_text("5:cpu,cpuacct:/job\n4:memory:/job/step\n0::/\n")
    assert machine_memory(mine, root) == 2 << 20
    mine.write_text("4:memory:/the/host's\n")
    assert machine_memory(mine, root) == whole
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{1 << 20}\n")
    assert machine_memory(mine, root) == 1 << 20


def test_memory_of_another_machine() -> None:
    """The smaller of runtime.memory and the machine's memory counts, also in the check of a plan."""
    assert [within_machine(limit, 3 * MIB) for limit in (None, 2 * MIB, 4 * MIB)] == [3 * MIB, 2 * MIB, 3 * MIB]
    assert within_machine(None) == within_machine(2**60) == machine_memory() and within_machine(MIB) == MIB
    built = step({"batch": 2})
    need = -(-built.peak_bytes() // MIB) * MIB
    for limit in (0, 2 * need):
        memory_checks.check_step(built, Gpu(0, limit, cuda=0), need)  # type: ignore[arg-type]
        with pytest.raises(nt.TaskError, match=rf"has room for {need // MIB - 1};"):
            memory_checks.check_step(built, Gpu(0, limit, cuda=0), need - MIB)  # type: ignore[arg-type]


def test_a_peak_is_forgotten_before_anything_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses to reset counters of a process that has not used its GPU yet, as a contestant's."""
    begun: list[str] = []

    def reset(device: int) -> None:
        assert begun, "Invalid device argument"
        begun.append(f"reset {device}")

    monkeypatch.setattr("torch.cuda.init", lambda: begun.append("init"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    memory.forget_gpu_peak()
    assert begun == ["init", "reset 0", "reset 1"]
