"""Steps on the same inputs, as measurements make them."""

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.graph.bin_packing import Bins
from nntile_py.training.repeated_steps import same_steps

CONFIG = nt.models.GPT2Config(layers=1, embed=16, heads=2, vocab=50, positions=16)
IDS = np.random.default_rng(0).integers(0, 50, (2, 16))
MASK = np.arange(16) < np.array([[16], [9]])
INPUTS = {"input_ids": IDS, "labels": np.where(MASK, IDS, -100), "attention_mask": MASK.astype(np.int64)}


def trainer(pack: bool) -> nt.Trainer:
    return nt.Trainer(nt.models.GPT2(CONFIG, seed=0), 2, 16, {"batch": 1}, pack=pack)


@pytest.mark.parametrize("pack", [False, True])
def test_they_train(runtime: nt.Runtime, pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one step after the other does; what is packed is packed once."""
    one, other, packed = trainer(pack), trainer(pack), []
    inputs = INPUTS if pack else {name: INPUTS[name] for name in ("input_ids", "labels")}
    expected = [one.step(inputs) for _ in range(3)]
    fill = Bins.fill
    monkeypatch.setattr(Bins, "fill", lambda *of, **how: packed.append(1) or fill(*of, **how))
    run = same_steps(other, inputs)
    assert [*run(2), *run(1)] == expected and other.steps == 3
    assert expected[2] < expected[0] and len(packed) == pack


def test_tf32(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only CUDA rounds products to tf32; CPU workers, if they did not refuse it, would train as in fp32."""
    monkeypatch.setattr("nntile_py.training.trainer.check_precision", lambda *_: None)
    rounded = nt.Trainer(nt.models.GPT2(CONFIG, seed=0), 2, 16, {"batch": 1}, "tf32")
    assert same_steps(rounded, IDS, IDS)(2) == same_steps(trainer(False), IDS, IDS)(2)


def test_labels_beside(runtime: nt.Runtime) -> None:
    one, other = trainer(False), trainer(False)
    assert same_steps(one, IDS, IDS)(2) == [other.step(IDS, IDS) for _ in range(2)]
