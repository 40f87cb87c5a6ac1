"""Steps that are skipped, and where a value that is no finite number came from."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from pairwise import pairwise
from test_loop import HOW, command, metrics, nntile

import nntile_py as nt
from nntile_py import _core
from nntile_py.training import loss_scale

TILES: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "seq": 4, "embed": 8, "heads": 1, "ffn": 16, "vocab": 10},
    "ragged": {"batch": 3, "seq": 5, "embed": 7, "heads": 1, "ffn": 23, "vocab": 11},
}
CUDA = torch.cuda.is_available() and _core.has_cuda
WHERE = {"cpus": 0, "cuda": 1} if CUDA else {"cpus": 2}
SIZES: dict[str, Any] = {"layers": 2, "embed": 16, "heads": 2, "vocab": 30, "positions": 8}


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Any:
    with nt.Runtime(**WHERE) as running:
        yield running


def made(**config: Any) -> nt.models.GPT2:
    return nt.models.GPT2(nt.models.GPT2Config(**SIZES, **config), seed=3)


def batches(steps: int, rows: int = 4) -> list[dict[str, np.ndarray[Any, Any]]]:
    ids = np.random.default_rng(0).integers(0, 30, (steps, rows, 8))
    return [{"input_ids": one, "labels": one} for one in ids]


def state(trainer: nt.Trainer) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and averages."""
    snapshot = trainer.snapshot()
    snapshot.wait()
    whole = snapshot.state()
    stored = {**whole.weights, **{f"{w}.{n}": v for n, of in whole.averages.items() for w, v in of.items()}}
    return {name: one.read() for name, one in stored.items()}


def same(one: dict[str, np.ndarray[Any, Any]], other: dict[str, np.ndarray[Any, Any]]) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


OPTIMIZERS = nt.AdamW(lr=0.1), nt.SGD(lr=0.1, momentum=0.9), nt.Lion(lr=0.1), nt.Muon(lr=0.1)


@pytest.mark.few(3)
@pairwise(passes=[1, 2], tiling=list(TILES), optimizer=OPTIMIZERS)
def test_a_skipped_step_changes_nothing(optimizer: Any, tiling: str, passes: int) -> None:
    data = batches(4, 4 * passes)
    free = nt.Trainer(made(), 4, 8, TILES[tiling], optimizer=optimizer, grad_accumulation=passes)
    norms = [free.submit(one).result().grad_norm for one in data[:2]]
    free.close()
    limit = (norms[0] + norms[1]) / 2
    trainer = nt.Trainer(
        made(), 4, 8, TILES[tiling], optimizer=optimizer, grad_accumulation=passes, skip_above_norm=limit
    )
    before, skips = state(trainer), 0
    for one in data:
        result = trainer.submit(one).result()
        after = state(trainer)
        assert result.skipped == (result.grad_norm > limit) == same(before, after)
        before, skips = after, skips + result.skipped
    assert skips > 0 and trainer.steps == len(data)


def overflowing() -> nt.models.GPT2:
    """The weight of the second layer's MLP overflows in its product."""
    model, name = made(), "transformer.h.1.mlp.c_fc.weight"
    model.weights[name] = np.full_like(model.weights[name], 3e38)
    return model


def test_gradients_that_are_no_numbers_are_skipped() -> None:
    trainer = nt.Trainer(overflowing(), 4, 8, TILES["ragged"], skip_above_norm=1e9, clip_grad_norm=1.0)
    before = state(trainer)
    for one in batches(3):
        result = trainer.submit(one).result()
        assert result.skipped and not math.isfinite(result.grad_norm)
    assert same(before, state(trainer))


@pytest.mark.few(4)
@pairwise(fusion=[True, {"found": False}, False], tiling=list(TILES), policy=["chain", "commute", "redux", "tree"])
def test_the_operator_that_made_it(fusion: Any, tiling: str, policy: str) -> None:
    trainer = nt.Trainer(overflowing(), 4, 8, TILES[tiling], accumulate=policy, fusion=fusion, check_finite=True)
    with pytest.raises(nt.NNTileError, match=r"step 1: the loss is nan.*written by .*h1\.mlp.*pass 1 of step 1"):
        trainer.step(batches(1)[0])
    trainer = nt.Trainer(overflowing(), 4, 8, TILES[tiling], accumulate=policy, fusion=fusion, check_finite=True)
    with pytest.raises(nt.NNTileError, match=r"written by .*h1\.mlp.*in an evaluation"):
        trainer.evaluate(batches(1)[0])


def test_the_update_that_made_it() -> None:
    fine, *more = batches(4)
    trainer = nt.Trainer(made(), 4, 8, TILES["even"], optimizer=nt.SGD(lr=0.1), check_finite=True)
    trainer.step(fine)
    trainer.step(more[0], lr=1e39)
    with pytest.raises(nt.NNTileError, match=r"step 3: the loss is nan.*in the update of step 2"):
        for one in more[1:]:
            trainer.step(one)


@pytest.mark.few(3)
@pairwise(
    dtype=["fp32", "bf16", "fp16"] if CUDA else ["fp32", "fp64"],
    attention=["vendor", "merge", "flash", "naive"],
    tiling=list(TILES),
)
def test_nothing_is_found_in_what_is_right(dtype: str, attention: str, tiling: str) -> None:
    """Masked scores are minus infinity only within a task."""
    data = batches(3)
    mask = np.ones((4, 8), int)
    mask[0, 3:], mask[1, :4], mask[2] = 0, 0, 0
    trainers = [
        nt.Trainer(made(attention=attention), 4, 8, TILES[tiling], dtype, check_finite=check) for check in (True, False)
    ]
    losses = [[trainer.step({**one, "attention_mask": mask}) for one in data] for trainer in trainers]
    assert losses[0] == losses[1] and all(map(math.isfinite, losses[0]))
    assert _core.take_not_finite() is None


# -- a loss that is scaled


@pytest.mark.parametrize(
    ("tiling", "optimizer"),
    [("uncut", nt.AdamW(lr=0.01)), ("even", nt.Lion()), ("ragged", nt.AdamW()), ("even", nt.Muon())],
)
def test_a_scale_is_taken_out_again(tiling: str, optimizer: Any) -> None:
    """A power of two changes no bit of fp32."""
    found = []
    for scale in (None, 2.0**16):
        how: dict[str, Any] = {"clip_grad_norm": 0.5, "grad_accumulation": 2, "loss_scale": scale}
        trainer = nt.Trainer(made(), 2, 8, TILES[tiling], optimizer=optimizer, **how)
        results = [trainer.submit(one).result() for one in batches(3)]
        told = [(result.loss, result.grad_norm, result.skipped) for result in results]
        assert trainer.loss_scale == scale and all(result.loss_scale == scale for result in results)
        found.append((told, trainer.gradients(), state(trainer), trainer.evaluate(batches(1, 2)[0])))
        trainer.close()
    one, other = found
    assert one[0] == other[0] and same(one[1], other[1]) and same(one[2], other[2]) and one[3] == other[3]


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [nt.AdamW(lr=0.01), nt.Muon(lr=0.01)])
def test_a_scale_follows_overflow(optimizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loss scale is halved until gradients are finite, then doubled periodically; a checkpoint keeps it."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    data, scale, good = batches(12), 2.0**70, 0
    trainer = nt.Trainer(made(), 4, 8, TILES["ragged"], optimizer=optimizer, loss_scale=scale)
    before, grew = state(trainer), 0
    for step, one in enumerate(data):
        if step == 7:
            trainer.save(tmp_path / "saved")
        result = trainer.submit(one).result()
        after = state(trainer)
        assert result.loss_scale == scale and result.overflow == result.skipped == same(before, after)
        assert math.isfinite(result.loss) and math.isfinite(result.grad_norm) == (not result.overflow)
        before, good = after, 0 if result.overflow else good + 1
        scale, good, grew = (2 * scale, 0, grew + 1) if good == 3 else (scale / (1 + result.overflow), good, grew)
        assert trainer.loss_scale == scale
    assert result.loss_scale and result.loss_scale < 2.0**70 and grew
    trainer.close()
    again = nt.Trainer.load(tmp_path / "saved")
    for one in data[7:]:
        again.submit(one)
    assert again.loss_scale == scale and same(state(again), before)


def test_another_scale_begins_anew(tmp_path: Path) -> None:
    trainer = nt.Trainer(made(), 4, 8, loss_scale=2.0**70)
    trainer.submit(batches(1)[0])
    trainer.save(tmp_path / "saved")
    for scale, expected in ((2.0**70, 2.0**69), (8.0, 8.0), (None, None)):
        assert nt.Trainer.load(tmp_path / "saved", loss_scale=scale).loss_scale == expected


def test_a_scale_that_no_run_has(tmp_path: Path) -> None:
    nt.Trainer(made(), 4, 8, loss_scale=8.0).save(tmp_path / "saved")
    file = tmp_path / "saved" / "state.json"
    file.write_text(file.read_text().replace('"value": 8.0', '"value": 1e308'))
    told = r"saved/state.json: loss_scale.value: .*got 1e\+308; allowed: .* at most 3e\+38"
    with pytest.raises(nt.NNTileError, match=told):
        nt.Trainer.load(tmp_path / "saved")


def test_a_scale_that_can_fall_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself reports the failure; without a request for its result, a later step does."""
    monkeypatch.setattr(loss_scale, "LEAST", 2.0**99)
    told = "step 2: the gradients overflow with a loss scale of 6.3.*; use precision"
    for look in (False, True):
        trainer, data = nt.Trainer(made(), 4, 8, loss_scale=2.0**100, check_finite=look), batches(4)
        assert trainer.submit(data[0]).result().overflow
        pending = trainer.submit(data[1])
        assert trainer.loss_scale == 2.0**99
        with pytest.raises(nt.NotFinite, match=told + (".*the first such value was written by" if look else "")):
            pending.result()
        trainer.submit(data[2])
        trainer.submit(data[3])  # step 2 was asked for
        with pytest.raises(nt.NotFinite, match=told.replace("2", "3", 1)):
            trainer.submit(data[0])
        trainer.close()


@pytest.mark.parametrize("steps", [2, 12])
def test_a_run_whose_scale_can_fall_no_more(tmp_path: Path, steps: int) -> None:
    """A step with NaN ends as other failed steps, also as the last step."""
    least = "import sys; from nntile_py.training import loss_scale; loss_scale.LEAST = 2.0**99; "
    run = least + "from nntile_py.cli import main; sys.argv[0] = 'nntile'; main()"
    python, _, _, *arguments = command(tmp_path, f"train.loss_scale={2.0**100}", f"train.steps={steps}")
    done = forks.run([python, "-c", run, *arguments], **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: step 2: the gradients overflow with a loss scale of .*; stopped, the weights are", line)
    lines = metrics(tmp_path / "runs" / "tiny")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["grad_norm"] is None


def test_a_loss_that_is_no_number_says_nothing_of_its_scale() -> None:
    model = made()
    for weight in model.weights.values():
        weight[:] = math.nan
    trainer = nt.Trainer(model, 4, 8, loss_scale=8.0, skip_above_norm=5.0)
    result = trainer.submit(batches(1)[0]).result()
    assert result.skipped and not result.overflow and trainer.snapshot().state().loss_scale == {"value": 8.0, "good": 0}
    trainer.close()


def test_a_step_that_overflows_forgets_none_before_it() -> None:
    """Only the first batch reads the NaN; the second batch's loss scale is too large."""
    model, name, (one,) = made(), "transformer.wpe.weight", batches(1)
    model.weights[name] = np.where(np.arange(8)[:, None] == 7, np.float32(math.inf), model.weights[name])
    trainer = nt.Trainer(model, 4, 8, pack=True, loss_scale=2.0**127, check_finite=True)
    masks = [np.arange(8) < [[end]] * 4 for end in (8, 5)]
    pending = [trainer.submit({**one, "labels": np.where(m, one["labels"], -100), "attention_mask": m}) for m in masks]
    with pytest.raises(nt.NotFinite, match=r"step 1: the loss is nan.*written by .*pass 1 of step 1"):
        trainer.submit(one)
    assert pending[1].result().overflow
    trainer.close()


def test_a_result_read_twice_forgets_no_later_step() -> None:
    trainer, (one, other) = nt.Trainer(made(), 4, 8, check_finite=True, loss_scale=2.0**127), batches(2)
    first = trainer.submit(one)
    assert first.result().overflow
    trainer.submit(other)
    trainer.state_dict()  # waits
    assert first.result().overflow and _core.take_not_finite()
    trainer.close()


def test_a_loss_without_a_scale() -> None:
    class Plain(nt.models.GPT2):
        def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
            traced = super().trace(g, batch)
            g.inputs["labels"] = dataclasses.replace(g.inputs["labels"], scale=None)
            return traced

    with pytest.raises(nt.ConfigError, match="precision: the loss of CrossEntropy has no scale= of an input; allowed"):
        nt.Trainer(Plain(nt.models.GPT2Config(**SIZES)), 4, 8, loss_scale=8.0)


def test_weights_that_fp16_lacks() -> None:
    graph = nt.Graph("fp16")
    graph.param("w", {"embed": 2}, nt.ZEROS)
    (param,) = graph.params.values()
    assert (param.weight({"w": np.float32([65504, -1e-9])}) == np.float32([65504, -1e-9])).all()
    with pytest.raises(nt.ConfigError, match="precision: w holds 70000, and fp16 ends at 65504; allowed here: bf16, f"):
        param.weight({"w": np.float32([1, -70000])})


def test_a_run_with_a_scale(tmp_path: Path) -> None:
    """Metrics contain the loss scale, and a resumed run continues with it."""
    for steps, more in ((3, ()), (12, ("--resume",))):
        how = f"train.loss_scale={2.0**70}", f"train.steps={steps}"
        done = nntile(tmp_path, *how, arguments=("--out", "run", *more))
        assert done.returncode == 0, done.stderr
        told = "skipped, gradients overflow, the loss' scale is halved: "
        assert told in done.stdout
        assert re.search(r"\n\d+ steps? (was|were) skipped \(gradients that overflowed\)\n", done.stdout), done.stdout
    lines, scale = metrics(tmp_path / "run"), 2.0**70
    for line in lines:
        assert line["loss_scale"] == scale
        scale /= 1 + line.get("skipped", False)
    assert len(lines) == 12 and scale < 2.0**70 and "skipped" not in lines[-1]
    done = nntile(tmp_path, "train.loss_scale=8", "train.steps=13", arguments=("--out", "run", "--resume"))
    assert "train.loss_scale was" in done.stdout and metrics(tmp_path / "run")[-1]["loss_scale"] == 8
    done = nntile(tmp_path, f"train.loss_scale={2.0**70}", "train.skip_above_norm=1e-9", arguments=("--out", "both"))
    told = r"\n12 steps were skipped \(gradients that overflowed: (\d+), train.skip_above_norm: (\d+)\)\n"
    found = re.search(told, done.stdout)
    assert found and int(found[1]) + int(found[2]) == 12, done.stdout + done.stderr


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "a"])
def test_limits_that_are_none(value: Any) -> None:
    with pytest.raises(nt.ConfigError, match="skip_above_norm"):
        nt.Trainer(made(), 4, 8, skip_above_norm=value)


def test_a_run_that_skips(tmp_path: Path) -> None:
    """Checkpoints after each step: a checkpoint is left out unless a later step has confirmed its values.

    With so small a rate the norms are those of the batches, whichever steps are skipped."""
    each = "checkpoint.every=1", "checkpoint.keep=20", "optimizer.lr=1e-7"
    assert nntile(tmp_path, *each, arguments=("--out", "free")).returncode == 0
    norms = [line["grad_norm"] for line in metrics(tmp_path / "free")]
    limit = max(norms[2:]) * 0.999
    done = nntile(tmp_path, f"train.skip_above_norm={limit}", *each)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "runs" / "tiny")
    skipped = [line["step"] for line in lines if line["grad_norm"] > limit]
    assert skipped and [line["step"] for line in lines if line.get("skipped")] == skipped and len(lines) == 12
    told = "skipped, its gradient norm is not below"  # after the held-out loss, where it was measured
    assert all(re.search(rf"^step {step}/12  (held-out .*)?{told}", done.stdout, re.MULTILINE) for step in skipped)
    were = "steps were" if len(skipped) > 1 else "step was"
    assert f"{len(skipped)} {were} skipped (train.skip_above_norm)" in done.stdout
    kept = {int(folder.name[5:]) for folder in (tmp_path / "runs" / "tiny" / "checkpoints").iterdir()}
    left_out = {step - 1 for step in skipped if step > 1}
    assert kept == {*range(1, 13)} - left_out
    assert all(f"checkpoint of step {step} left out" in done.stdout for step in left_out)


@pytest.mark.long
def test_weights_that_are_ruined_replace_no_checkpoint(tmp_path: Path) -> None:
    """A step with too large a rate ruins them, though they are finite; all later steps are skipped, ten end the run."""
    assert nntile(tmp_path, "checkpoint.every=4", "train.eval_every=100").returncode == 0
    run = tmp_path / "runs" / "tiny"
    before = {path.name for path in (run / "checkpoints").iterdir()}
    worse = "optimizer.lr=1e30", "optimizer.warmup_steps=0", "train.steps=60", "train.skip_above_norm=10"
    done = nntile(tmp_path, *worse, "checkpoint.every=1", "train.eval_every=100", arguments=("--resume",))
    assert done.returncode == 1 and "gradient norms not below train.skip_above_norm = 10" in done.stderr, done.stderr
    assert {path.name for path in (run / "checkpoints").iterdir()} == before
    done = nntile(tmp_path, "train.steps=14", arguments=("--resume",))
    assert done.returncode == 0 and "going on after step 12" in done.stdout, done.stderr


def test_a_run_that_names_the_operator(tmp_path: Path) -> None:
    done = nntile(tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0", "debug.nonfinite=true")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the first such value was written by" in done.stderr and "of step" in done.stderr
    assert metrics(tmp_path / "runs" / "tiny")[-1]["loss"] is None
    assert not (tmp_path / "runs" / "tiny" / "model.safetensors").exists()
