"""Task groups with scratch tiles and residents, as on GPUs, on CPU workers: same bits as single tasks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.execution import memory, program
from nntile_py.tiles import TaskList
from nntile_py.tiles.placement import place
from nntile_py.tiles.task_groups import GROUP_SECONDS, grouped

SIZES = {"layers": 2, "embed": 64, "heads": 4, "vocab": 512, "positions": 64, "dropout": 0.1}
RAGGED = {"batch": 3, "seq": 40, "embed": 48, "heads": 3, "ffn": 100, "vocab": 300}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[TaskList]:
    """The lists of all programs, which are grouped as for GPUs."""
    made: list[TaskList] = []

    def placed(tasks: TaskList, workers: int, *others: Any) -> TaskList:
        made.append(grouped(place(tasks, workers, *others), 600e12, 3.5e12, GROUP_SECONDS, one_worker=workers == 1))
        return made[-1]

    monkeypatch.setattr(program, "place", placed)
    return made


def trained(
    workers: int, placement: str, saved: Path | None = None, **options: Any
) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """Return the losses of some steps, and of an evaluation, and the weights.

    saved: a folder to which the trainer saves a checkpoint after four steps; another trainer goes on from there.
    """
    draw = np.random.default_rng(0)
    with nt.Runtime(cpus=workers, placement=placement):
        trainer = nt.Trainer(nt.models.GPT2(nt.models.GPT2Config(**SIZES)), 4, 64, seed=1, **options)
        losses = []
        for step in range(12):
            ids = draw.integers(0, 8, (4 * options.get("grad_accumulation", 1), 65)).cumsum(1) % 512
            losses.append(trainer.step(ids[:, :64], ids[:, 1:], lr=1e-3))
            if step == 1:
                trainer.state_dict()
            if step == 3 and saved:
                trainer.save(saved)
                trainer.close()
                trainer = nt.Trainer.load(saved)
        losses.append(trainer.evaluate(ids[:4, :64], ids[:4, 1:]))
        return losses, [np.asarray(weight) for weight in trainer.state_dict().values()]


@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.few(8)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("tiles", [{}, {"batch": 2}, RAGGED], ids=["uncut", "batch", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 1.0, "grad_accumulation": 2},
        {"accumulate": "tree", "recompute": "layer"},
        {"optimizer": nt.Lion(lr=1e-3)},
        {"precision": "fp8"},
        {"precision": "fp8", "fp8": {"scales": "row"}, "recompute": "layer"},
        {"precision": "fp8", "fp8": {"scales": "row"}, "clip_grad_norm": 1.0},
    ],
    ids=str,
)
def test_same_bits(
    options: dict[str, Any], tiles: dict[str, int], workers: int, groups: list[TaskList], tmp_path: Path
) -> None:
    expected, exact = trained(2, "scheduler", tiles=tiles, **options)
    assert not groups
    losses, weights = trained(workers, "planned", tmp_path / "saved", tiles=tiles, **options)
    assert sum(len(task.scratch) for tasks in groups for task in tasks.tasks) > 4
    assert any(memory.residents([tasks], 1e12) for tasks in groups)
    assert losses == expected
    for one, two in zip(weights, exact, strict=True):
        np.testing.assert_array_equal(one, two)


def test_several_programs_and_trainers(groups: list[TaskList]) -> None:
    """Steps with an optional input, whose programs are built later, and steps of another trainer, without waits."""
    draw = np.random.default_rng(0)
    batches = [draw.integers(0, SIZES["vocab"], (4, 64)) for _ in range(8)]
    mask = np.tri(4, 64, 60, dtype=int)

    def run(placement: str) -> list[Any]:
        with nt.Runtime(cpus=2, placement=placement):
            model = nt.models.GPT2Config(**SIZES)
            one, other = (nt.Trainer(nt.models.GPT2(model, seed=k), 4, 64, {"batch": 2}, seed=k) for k in (1, 2))
            pending = []
            for number, ids in enumerate(batches):
                inputs = {"input_ids": ids, "labels": np.where(mask, ids, -100)}
                masked = inputs | ({"attention_mask": mask} if number % 3 == 1 else {})
                pending += [one.submit(masked), other.submit(inputs)]
                if number == 4:
                    copy = one.snapshot()
            weights = [*one.state_dict().values(), *other.state_dict().values()]
            copy.wait()
            losses = [step.result().loss for step in pending]
            return [*losses, *map(np.asarray, weights)]

    expected = run("scheduler")
    assert not groups
    for value, exact in zip(run("planned"), expected, strict=True):
        np.testing.assert_array_equal(value, exact)
    assert groups
