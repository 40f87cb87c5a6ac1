"""`checkpoint.best`: the checkpoint with the smallest held-out loss stays, and the link `best` names it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import rates
from test_checkpoint import FACTS, state
from test_loop import metrics, nntile

import nntile_py as nt
from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint import reader
from nntile_py.checkpoint.best import BEST, BestCheckpoint, best_step, link_best, remove_unfinished_links
from nntile_py.checkpoint.run_folder import METRICS, RunFolder
from nntile_py.inference.open_model import open_model

CONFIG = {"seed": 0, "train": {"batch": 2, "seq": 8, "eval_batches": 4, "steps": 9}}
OF_RUN = {"config": CONFIG, "data": {"held-out text": "1"}}


def write(run: Path, step: int, **facts: Any) -> None:
    folder = checkpoint.checkpoint_folder(run, step)
    checkpoint.write_checkpoint(folder, state(step), {"config.json": "{}"}, FACTS | OF_RUN | facts)


def test_the_smallest_loss_of_the_same_measurement_counts(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path, 1)
    write(tmp_path, 2, held_out_loss=3.0)
    write(tmp_path, 3, held_out_loss=4.0)
    write(tmp_path, 4, held_out_loss=3.0)
    write(tmp_path, 5, held_out_loss=1.0, data={"held-out text": "2"})
    write(tmp_path, 6, held_out_loss=1.0, config=CONFIG | {"train": {**CONFIG["train"], "eval_batches": 5}})  # type: ignore[dict-item]
    write(tmp_path, 7, held_out_loss=1.0, config=CONFIG | {"train": {**CONFIG["train"], "steps": 10}})  # type: ignore[dict-item]
    (tmp_path / "checkpoints" / "step-000008").mkdir()  # no checkpoint
    assert BestCheckpoint(tmp_path, "held_out_loss", OF_RUN, said.append).best == (1.0, 7)
    assert os.readlink(tmp_path / BEST) == "checkpoints/step-000007" and best_step(tmp_path) == 7
    checkpoint.set_aside(tmp_path, 4)  # as a run does that resumes from step 4
    best = BestCheckpoint(tmp_path, "held_out_loss", OF_RUN, said.append)
    assert best.best == (3.0, 2) and best_step(tmp_path) == 2
    assert not best.improves(5, 3.0) and best.improves(6, 2.5) and best.facts(6) == {"held_out_loss": 2.5}
    assert best.facts(4) == {} and best_step(tmp_path) == 2  # until the checkpoint is complete
    best.written(tmp_path, 6)
    assert best.best == (2.5, 6) and best_step(tmp_path) == 6
    best.written(tmp_path, 8)  # whose loss was not measured
    assert best_step(tmp_path) == 6 and said == []


def test_without_the_key_a_link_stays_unless_its_checkpoint_is_gone(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path, 2, held_out_loss=3.0)
    link_best(tmp_path, 2)
    best = BestCheckpoint(tmp_path, None, OF_RUN, said.append)
    assert not best.improves(3, 1.0) and best.best is None and best_step(tmp_path) == 2
    checkpoint.set_aside(tmp_path, 1)
    BestCheckpoint(tmp_path, None, OF_RUN, said.append)
    assert not os.path.lexists(tmp_path / BEST)
    assert said == ["the link best is removed: there is no checkpoint of step 2 any more"]


def test_the_best_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    assert [step for step, _ in checkpoint.removable(tmp_path, 8, None, best=4)] == [2, 6]
    checkpoint.prune(tmp_path, 1, None, best=4)
    assert [step for step, _ in checkpoint.checkpoints_in(tmp_path)] == [8, 4]


def test_what_a_user_has_in_the_place_of_the_link_stays(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for number, make in enumerate((Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")), 1):
        make(tmp_path / BEST)
        link_best(tmp_path, None)
        assert os.path.lexists(tmp_path / BEST) and best_step(tmp_path) is None
        link_best(tmp_path, 2)
        assert os.path.lexists(tmp_path / f"best.old{number}") and best_step(tmp_path) == 2
        link_best(tmp_path, None)


@pytest.mark.parametrize("users", [True, False])
def test_a_run_that_is_replaced_loses_its_link_only(users: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 8)
    (out / METRICS).touch()
    if users:
        (out / BEST).write_text("notes")
    else:
        link_best(out, 8)
    run = RunFolder(out, replaces=True)
    write(run.path, 2)
    link_best(run.path, 2)
    run.settle()
    run.close()
    assert best_step(out) == 2 and (out / BEST).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.read_text() for path in out.glob("best.old*")] == ["notes"] * users


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from nntile_py.checkpoint.best import link_best
at, count = int(sys.argv[2]), 0

def watch(event, arguments):
    global count
    if event in ("os.rename", "os.symlink", "os.remove"):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
link_best(Path(sys.argv[1]), 4)
print(count)
"""


def test_a_kill_leaves_the_old_or_the_new_link(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent))
    statuses = []
    for at in range(6):
        run = tmp_path / str(at)
        for step in (2, 4):
            write(run, step)
        link_best(run, 2)
        done = forks.run([sys.executable, "-c", code, str(run), str(at)], check=False)
        statuses.append(done.returncode)
        assert best_step(run) == (2 if done.returncode and at <= 2 else 4) and (run / BEST).is_dir()
        remove_unfinished_links(run)
        assert {path.name for path in run.iterdir()} == {"checkpoints", BEST}
    assert statuses[0] == 0 and statuses[1:3] == [-9, -9]


# -- runs

SCHEDULE = f"optimizer.schedule={Path(rates.__file__)}:too_high"
HOW = (
    "train.steps=24", "train.eval_every=4", "checkpoint.keep=1", "checkpoint.every=null", "sample.tokens=0",
    "checkpoint.best=held_out_loss", "optimizer.lr=1e-3", SCHEDULE,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose held-out loss rises at its end."""
    path = tmp_path_factory.mktemp("whole")
    done = nntile(path, *HOW)
    assert done.returncode == 0, done.stderr
    run = path / "runs" / "tiny"
    step, loss = smallest(run)
    assert f"best held-out loss {loss:.4f} after step {step}: {run / BEST}" in done.stdout
    return run


def smallest(run: Path) -> tuple[int, float]:
    """Step and value of the smallest held-out loss in metrics.jsonl."""
    step, loss = min(
        ((m["step"], m["held_out_loss"]) for m in metrics(run) if "held_out_loss" in m), key=lambda p: p[1]
    )
    return int(step), float(loss)


def test_a_run_keeps_its_best_checkpoint(whole: Path) -> None:
    step, loss = smallest(whole)
    assert step < 24 and best_step(whole) == step
    assert [number for number, _ in checkpoint.checkpoints_in(whole)] == [24, step]
    assert reader.read_facts(whole / BEST)["held_out_loss"] == loss
    opened = open_model(whole / BEST)
    assert opened.step == step and opened.tokenizer and opened.config["train"]["steps"] == 24
    assert (whole / BEST / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes()
    encoder = nt.Encoder.from_hf(whole / BEST)
    assert encoder.model.config.layers == opened.model.config.layers


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["best", pytest.param("before it", marks=pytest.mark.long), "behind it"])
def test_the_best_is_right_after_a_resume(where: str, whole: Path, tmp_path: Path) -> None:
    """A resumed run finds the same best checkpoint, whether it is before or after the step of the resume."""
    run = tmp_path / "runs" / "tiny"
    shutil.copytree(whole, run, symlinks=True)
    step, loss = smallest(whole)
    if where == "best":
        start = run / BEST
    else:
        shutil.rmtree(run)
        again = nntile(tmp_path, *HOW, "checkpoint.every=4", "checkpoint.keep=9")
        assert again.returncode == 0, again.stderr
        start = checkpoint.checkpoint_folder(run, 4 if where == "before it" else 20)
    command = [sys.executable, "-m", "nntile_py.cli", "train", "--resume", str(start), "--set", SCHEDULE]
    done = forks.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert best_step(run) == step == smallest(run)[0]
    assert json.loads((run / BEST / "state.json").read_text())["held_out_loss"] == loss
