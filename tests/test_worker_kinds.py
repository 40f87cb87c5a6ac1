"""runtime.on_cpu: which kind of worker gets a task, and what is refused. test_cuda_cpus.py runs both kinds on a GPU."""

from pathlib import Path
from typing import Any

import pytest

import nntile_py as nt
from nntile_py.config.run_config import load
from nntile_py.tiles import Access, Task, TaskList, Tile
from nntile_py.tiles.task_groups import grouped
from nntile_py.tiles.worker_kinds import assign_kinds, check_patterns


def tasks(dtype: str = "fp32") -> TaskList:
    result = TaskList("chain", set())
    names = [("embedding", "wte"), ("contract", "h.0.attn.q"), ("adamw", "h.0.AdamW"), ("adamw", "h.1.AdamW")]
    for number, (kernel, op) in enumerate(names):
        tile = Tile("x", (number,), (4, 4), dtype, persistent=True)
        result.tasks.append(Task(kernel, [Access(tile, "RW")], op=op, flop=1.0))
    return result


def kinds(*patterns: str) -> list[str]:
    listed = tasks()
    assign_kinds([listed], patterns)
    return [task.kind[:2] for task in listed.tasks]


def test_kinds_by_pattern() -> None:
    assert kinds("adamw") == ["cu", "cu", "cp", "cp"]
    assert kinds("h.1.*", "emb*") == ["cp", "cu", "cu", "cp"]
    assert kinds("h.[01].AdamW") == ["cu", "cu", "cp", "cp"]
    assert kinds() == ["cu"] * 4
    listed = tasks()
    assign_kinds([listed], ["adamw"])
    assign_kinds([listed], None)  # the same list in the next runtime
    assert [task.kind for task in listed.tasks] == [""] * 4


def test_groups_have_one_kind() -> None:
    listed = tasks()
    assign_kinds([listed], ["*.AdamW"])
    groups = grouped(listed, 1e12, 1e12, 1.0, one_worker=True).tasks
    assert [(len(group.parts) or 1, group.kind) for group in groups] == [(2, "cuda"), (1, "cpu"), (1, "cpu")]


def test_low_precision_has_no_cpu_kernels() -> None:
    with pytest.raises(nt.ConfigError, match=r"'adamw' matches h.0.AdamW \(adamw\), which has bf16 tiles"):
        assign_kinds([tasks("bf16")], ["adamw"])
    assign_kinds([tasks("bf16")], [])


def test_a_pattern_without_a_task() -> None:
    check_patterns([tasks(), tasks()], ["adamw", "wte"])
    check_patterns([tasks()], None)
    with pytest.raises(nt.ConfigError, match=r"on_cpu: 'adam' matches no task.*adamw, contract, embedding"):
        check_patterns([tasks()], ["adam"])


@pytest.mark.parametrize("given", ["adamw", [3]])
def test_a_runtime_refuses_other_types(given: Any) -> None:
    with pytest.raises((nt.ConfigError, TypeError), match="on_cpu"):
        nt.Runtime(cpus=1, on_cpu=given)


def test_without_gpus_all_tasks_run_on_cpus() -> None:
    """A YAML with on_cpu also runs on a machine without GPUs."""
    assert nt.Runtime(cpus=1, on_cpu=["adamw"]).on_cpu is None


@pytest.mark.parametrize("cpus", ["0", "all"])
def test_a_config_needs_cpus_beside_gpus(tmp_path: Path, cpus: str) -> None:
    path = tmp_path / "c.yaml"
    sizes = "model: {layers: 1, embed: 12, heads: 2}, train: {steps: 1, batch: 2, seq: 8}"
    path.write_text(f"{{{sizes}, runtime: {{cuda: 1, cpus: {cpus}, on_cpu: [adamw]}}}}")
    with pytest.raises(nt.ConfigError, match=f"runtime.cpus: got {cpus} with runtime.on_cpu"):
        load(path)
    assert load(path, ["runtime.cpus=2"]).runtime.on_cpu == ["adamw"]
