"""Weights in the order that a search of layouts chose: what is read from them, and written to files, stays the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_layouts import KEYS, MODELS, OF, TILINGS, Drawn

import nntile_py as nt
from nntile_py.checkpoint import reader
from nntile_py.graph.step import StepSpec
from nntile_py.testing import error
from nntile_py.tiles import Tiling

SEED = 1  # of the times that are drawn: some of the weights are turned


def started(spec: StepSpec, weights: dict[str, Any], folder: Path | None = None) -> nt.Trainer:
    """A trainer of these weights, or of a checkpoint."""
    model = spec.model.changed()
    model.weights = {name: value.copy() for name, value in weights.items()}
    trainer = nt.Trainer.of_spec(replace(spec, model=model), seed=3)
    if folder:
        trainer.restore(int(reader.read_facts(folder)["step"]), reader.read_averages(folder))
    return trainer


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "tiling", "optimizer"), [
    ("gpt2", "uncut", nt.AdamW()), ("gpt2", "ragged", nt.SGD(momentum=0.9)), ("encoder", "even", nt.AdamW()),
    pytest.param("albert", "ragged", nt.SGD(momentum=0.9), marks=pytest.mark.long), ("gpt2", "even", nt.Muon(lr=1e-3)),
])  # fmt: skip
def test_files_do_not_know(runtime: nt.Runtime, tmp_path: Path, model: str, tiling: str, optimizer: Any) -> None:
    """Weights and averages go from one order into another and back without a bit changed; what is computed agrees, with
    two passes a step, clipping, and inputs that the first step did not have."""
    spec = StepSpec(MODELS[model](), 4, 16, Tiling(TILINGS[tiling]), precision="fp64", optimizer=optimizer,
                    clip_grad_norm=0.5, grad_accumulation=2)  # fmt: skip
    weights = dict(spec.model.weights)
    other = replace(spec, timings=Drawn(OF, seed=SEED))
    inputs = [spec.random_inputs(8, step) for step in range(3)]
    plain, turned = started(spec, weights), started(other, weights)
    built = turned.built
    assert built.kept and all(built.grads[p.tensor].axes == p.tensor.axes for p in built.params)
    assert not plain.built.kept and same(turned.state_dict(), weights)
    both = [plain, turned]
    for one in inputs[:2]:
        losses = [float(trainer.step(one)) for trainer in both]
        assert error(*losses) < 1e-12
    half = {name: value[:4] for name, value in inputs[2].items()}
    evaluated = [trainer.evaluate(half, return_outputs=True) for trainer in both]
    assert error(evaluated[1][0], evaluated[0][0]) < 1e-12
    assert all(error(evaluated[1][1][name], value) < 1e-9 for name, value in evaluated[0][1].items())
    turned.save(tmp_path / "turned")
    for way, where in (spec, "default"), (replace(other, timings=Drawn(OF, seed=SEED + 1)), "turned otherwise"):
        both.append(started(way, turned.state_dict(), tmp_path / "turned"))
        both[-1].save(tmp_path / where)
        files = [reader.read_facts(tmp_path / folder)["sha256"] for folder in ("turned", where)]
        assert files[0] == files[1] and "optimizer.safetensors" in files[0]
    assert both[-1].built.kept != turned.built.kept
    more = {"attention_mask": np.tile(np.arange(16) < 11, (8, 1)).astype(np.int64)} if model == "gpt2" else {}
    losses = [float(trainer.step(inputs[2] | more)) for trainer in both]
    assert error(losses, losses[:1] * len(both)) < 1e-12
    gradients = [trainer.gradients() for trainer in both]
    for got in gradients[1:]:
        assert max(error(got[name], of) for name, of in gradients[0].items() if not name.endswith(KEYS)) < 1e-9
    for trainer in both:
        trainer.close()
