"""Timed forward passes: the losses of a Trainer's evaluation, padded and packed; attention only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.analysis.workloads import AttentionOnly
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig, resolve
from nntile_py.execution.forward_program import ForwardProgram, MissingInput
from nntile_py.execution.program import Store
from nntile_py.graph.step import StepSpec
from nntile_py.measure.torch_peers import transformers_model
from nntile_py.measure.workload_inputs import inputs_of
from nntile_py.tiles import Tiling
from nntile_py.training.repeated_steps import forward_passes


def config(**model: Any) -> RunConfig:
    tree = {
        "model": {"type": "bert", "layers": 1, "embed": 16, "heads": 2, **model}, "tokenizer": {"vocab_size": 300},
        "train": {"steps": 1, "batch": 4, "seq": 10}, "tiles": {"batch": 2},
    }  # fmt: skip
    return resolve(tree, [], "tests")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("pack", [False, True])
def test_losses_are_those_of_an_evaluation(runtime: nt.Runtime, kind: str, pack: bool) -> None:
    made = config(type=kind)
    spec = replace(step_spec(made, build_model(made)), pack=pack)
    inputs = inputs_of(made, "inference", 0.6, spec)
    assert inputs["attention_mask"].sum() == 24
    _, run = forward_passes(spec, inputs)
    trainer = nt.Trainer.of_spec(spec)
    assert run(2) == [pytest.approx(trainer.evaluate(inputs), rel=1e-6)] * 2
    trainer.close()


@pytest.mark.parametrize("form", ["vendor", "naive"])
@pytest.mark.parametrize("pack", [False, True])
def test_attention_alone(runtime: nt.Runtime, form: str, pack: bool) -> None:
    """Against float64, except in padding; the timed pass has no loss."""
    spec = StepSpec(AttentionOnly(config(attention=form).model), 4, 10, Tiling({"batch": 2, "heads": 1}), pack=pack)
    inputs = spec.random_inputs(4, 0, 0.6, training=False)
    assert forward_passes(spec, inputs)[1](1) == [0.0]
    q, k, v = (np.moveaxis(inputs[name].astype(np.float64), 2, 1) for name in "qkv")
    scores = np.where(inputs["attention_mask"][:, None, None], q @ np.swapaxes(k, 2, 3) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.moveaxis(weights / weights.sum(-1, keepdims=True) @ v, 1, 2)
    if not pack:  # what the timed program computes, read back
        program = ForwardProgram(spec.with_inputs(inputs).evaluation(keep=True), Store())
        program.write(program.check(inputs))
        program.run({})
        real = inputs["attention_mask"] > 0
        np.testing.assert_allclose(program.read("attention")[real], want[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("work", ["inference", "train", "attention"])
def test_pytorch_runs_the_same(work: Any) -> None:
    """Losses as transformers' model has them of the same inputs; of attention there is none."""
    made = config()
    run = transformers_model(made, inputs_of(made, work, 0.6), "torch_eager", work)
    losses = run(2)
    assert len(losses) == 2 and (losses == [0.0, 0.0] if work == "attention" else losses[0] > 5)
    if work == "train":
        assert losses[1] != losses[0]


def test_a_forward_program_keeps_inputs_and_names_outputs(runtime: nt.Runtime) -> None:
    """Outputs equal a Trainer's; an input keeps its value until the next write; each run has its own slots."""
    made = config(type="gpt2", dropout=0.0)
    spec = step_spec(made, build_model(made))
    ids = np.random.default_rng(0).integers(0, 300, (2, 4, 10))
    trainer = nt.Trainer.of_spec(spec)
    expected = [trainer.evaluate({"input_ids": one, "labels": one}, return_logits=True) for one in ids]
    trainer.close()
    program = ForwardProgram(spec.with_inputs(frozenset()).evaluation(keep=True), Store())
    program.write_weights(spec.model.weights)
    for one, (loss, logits) in zip(ids, expected, strict=True):
        given = {"input_ids": one, "labels": one}
        arrays = program.check(given, shift=True)
        program.write(arrays)
        slots = program.slots(arrays, given)
        assert set(slots) == set(program.slot_names)
        program.run(slots)
        assert program.loss() == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(program.read("logits"), logits, rtol=1e-5, atol=1e-6)
    program.run({name: 2 * value for name, value in slots.items()})
    assert program.loss() == pytest.approx(2 * loss, rel=1e-6)  # of the same inputs
    copied = program.start_copy("logits")
    program.write({"input_ids": ids[0]})
    program.run(slots)
    np.testing.assert_allclose(program.finish_copy("logits", copied), logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(program.read("logits"), expected[0][1], rtol=1e-5, atol=1e-6)
    with pytest.raises(MissingInput, match="input_ids: missing; the model needs input_ids, labels"):
        program.check({"labels": ids[0]})
    with pytest.raises(ValueError, match="input_ids: got int64 \\(3, 10\\); allowed: ints \\(4, 10\\)"):
        program.check({"input_ids": ids[0][:3]}, unlabelled=True)
