"""Forward passes that are timed: the losses of a Trainer's evaluation, padded and packed; attention alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.analysis.workloads import AttentionOnly
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig, resolve
from nntile_py.execution.program import Store, programs
from nntile_py.graph.step import StepSpec
from nntile_py.measure.config_peer import inputs_of, torch_side
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
    """Against float64, in what is no padding; the pass that is timed has no loss."""
    spec = StepSpec(AttentionOnly(config(attention=form).model), 4, 10, Tiling({"batch": 2, "heads": 1}), pack=pack)
    inputs = spec.random_inputs(4, 0, 0.6, training=False)
    assert forward_passes(spec, inputs)[1](1) == [0.0]
    q, k, v = (np.moveaxis(inputs[name].astype(np.float64), 2, 1) for name in "qkv")
    scores = np.where(inputs["attention_mask"][:, None, None], q @ np.swapaxes(k, 2, 3) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.moveaxis(weights / weights.sum(-1, keepdims=True) @ v, 1, 2)
    if not pack:  # what the timed program computes, read back
        trainer = _Kept(spec.with_inputs(inputs))
        real = inputs["attention_mask"] > 0
        np.testing.assert_allclose(trainer(inputs)[real], want[real], rtol=1e-5, atol=1e-6)


class _Kept:
    """The pass with its output kept."""

    def __init__(self, spec: StepSpec) -> None:
        self._made, self._store = spec.evaluation(keep=True), Store()
        (self._program,) = programs([self._made.forward.tasks], self._store)

    def __call__(self, inputs: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        for name, one in self._made.graph.inputs.items():
            self._store.write(self._made.forward, one.tensor, inputs[name])
        self._program.run({})
        return self._store.read(self._made.forward, self._made.outputs["attention"])


@pytest.mark.parametrize("work", ["inference", "train", "attention"])
def test_pytorch_runs_the_same(work: Any) -> None:
    """Losses as transformers' model has them of the same inputs; of attention there is none."""
    made = config()
    run = torch_side(made, inputs_of(made, work, 0.6), "torch_eager", work)
    losses = run(2)
    assert len(losses) == 2 and (losses == [0.0, 0.0] if work == "attention" else losses[0] > 5)
    if work == "train":
        assert losses[1] != losses[0]
