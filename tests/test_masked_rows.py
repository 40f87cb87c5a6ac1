"""Logits only of masked tokens: the same loss and gradients, and the bound on their number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.data.collators import MaskedCollator
from nntile_py.graph.random_inputs import random_inputs
from nntile_py.graph.step import StepSpec
from nntile_py.models.heads import labels_at, masked_places
from nntile_py.testing import error

TINY = Path(__file__).parents[1] / "experiments" / "bert_tiny.yaml"
ROWS, SEQ, VOCAB, MOST = 4, 12, 60, 5
CONFIG: dict[str, Any] = {"layers": 2, "embed": 24, "heads": 3, "vocab": VOCAB, "positions": SEQ, "dropout": 0.2}
RAGGED = {"batch": 3, "seq": 5, "embed": 7, "heads": 2, "ffn": 40, "vocab": 17}


def inputs(counts: list[int], seed: int = 0) -> dict[str, Any]:
    """So many tokens to predict in each row."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (len(counts), SEQ))
    hidden = rng.random(ids.shape).argsort(axis=1) >= np.array(counts)[:, None]
    return {"input_ids": ids, "labels": np.where(hidden, -100, ids)}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["BERT", "DistilBERT", "ALBERT", "RoBERTa"])
@pytest.mark.parametrize(("tiles", "micro"), [({}, 1), (RAGGED, 1), ({"seq": 4, "batch": 1}, 2)])
def test_the_same_step(runtime: nt.Runtime, kind: str, tiles: dict[str, int], micro: int) -> None:
    """Dropout on; rows without any, and with as many as there may be. In fp64: some gradients nearly cancel."""
    cls = getattr(nt.models, kind)
    given, got = inputs([MOST, 0, 2, MOST]), []
    for masked in (0, MOST):
        model = cls(cls.Config(**CONFIG, masked=masked), seed=1)
        options: dict[str, Any] = {"precision": "fp64", "grad_accumulation": micro, "clip_grad_norm": 1.0}
        trainer = nt.Trainer(model, ROWS // micro, SEQ, tiles, **options)
        losses = [trainer.step(given), trainer.step(inputs([1, 2, 3, 4], 1))]
        got.append((losses, trainer.gradients(), trainer.evaluate(inputs([3] * (ROWS // micro)), return_logits=True)))
        trainer.close()
    (losses, grads, (loss, logits)), (losses_, grads_, (loss_, logits_)) = got
    assert error(losses_, losses) < 1e-9 and grads_.keys() == grads.keys()
    counted = [name for name in grads if not re.search(r"(key|k_lin)\.bias", name)]  # theirs is rounding alone
    assert {name: e for name in counted if (e := error(grads_[name], grads[name])) > 1e-9} == {}
    assert logits_.shape == (ROWS // micro, SEQ, VOCAB) and error(logits_, logits) < 1e-9
    assert loss_ == pytest.approx(loss, rel=1e-9)


def test_too_many_in_a_row(runtime: nt.Runtime) -> None:
    """One clear error, and the next step is right."""
    model = nt.models.BERT(nt.models.BERTConfig(**CONFIG, masked=MOST), seed=1)
    trainer = nt.Trainer(model, ROWS, SEQ, RAGGED)
    loss = trainer.step(inputs([1, 2, 3, 4]), lr=0.0)
    with pytest.raises(ValueError, match=r"labels\[2\]: 7 tokens are to be .*; allowed: at most 5, .*model\.masked"):
        trainer.step(inputs([1, 2, 7, MOST]))
    assert abs(trainer.step(inputs([1, 2, 3, 4]), lr=0.0) / loss - 1) < 0.1  # dropout draws anew
    assert len(trainer.evaluate({"input_ids": inputs([1] * ROWS)["input_ids"]}, return_logits=True)[1]) == ROWS
    trainer.close()


def test_places() -> None:
    labels = np.array([[-100, 7, -100, 3], [-100, -100, -100, -100]])
    places = masked_places(labels, 3)
    assert places.tolist() == [[1, 3, -1], [-1, -1, -1]]
    assert labels_at(labels, places).tolist() == [[7, 3, -100], [-100, -100, -100]]


def test_random_inputs_fit() -> None:
    model = nt.models.BERT(nt.models.BERTConfig(**CONFIG, masked=MOST))
    graph = StepSpec(model, ROWS, SEQ).trace()[0]
    drawn = random_inputs(graph, ROWS, 0)
    assert ((drawn["labels"] != -100).sum(axis=1) == MOST).all() and drawn["masked_places"].min() >= 0
    assert np.array_equal(drawn["masked_labels"], labels_at(drawn["labels"], drawn["masked_places"]))


@pytest.mark.parametrize("alpha", [1e-9, 0.5 / SEQ, 1.5 / SEQ])
def test_random_inputs_of_hardly_a_token(alpha: float) -> None:
    graph = StepSpec(nt.models.BERT(nt.models.BERTConfig(**CONFIG)), ROWS, SEQ).trace()[0]
    lengths = random_inputs(graph, ROWS, 0, alpha)["attention_mask"].sum(1)
    assert lengths.min() >= 1 and lengths.sum() == max(ROWS, round(alpha * SEQ * ROWS))


def test_a_collator_never_masks_more() -> None:
    """The bound is exceeded by chance in one of 700 rows; rows within the bound keep their masks."""
    samples = np.random.default_rng(0).integers(5, 100, (3000, 64))
    free, usual, few = (MaskedCollator(64, 100, 4, probability=0.2, most=most) for most in (64, None, 10))
    assert usual.most == 24 and few.most == 10
    made = {"free": free, "usual": usual, "few": few}
    counts = {name: (collate(samples)["labels"] != -100).sum(axis=1) for name, collate in made.items()}
    assert counts["free"].max() > 24 == counts["usual"].max() and 0 < (counts["free"] > 24).sum() < 20
    assert np.array_equal(np.minimum(counts["free"], 24), counts["usual"])
    assert np.array_equal(np.minimum(counts["free"], 10), counts["few"])
    chosen = few(samples)["labels"] != -100
    assert 0.9 < chosen[:, :32].sum() / chosen[:, 32:].sum() < 1.1  # those that are left are anywhere
    with pytest.raises(nt.ConfigError, match="most: got 0; allowed: at least 1"):
        MaskedCollator(64, 100, 4, most=0)


def test_a_run_masks_as_many_as_its_model_is_made_for() -> None:
    config = load(TINY)
    assert config.model.masked == 24
    inputs_ = step_spec(config).trace()[0].inputs
    assert inputs_["masked_places"].tensor.shape == (16, 24) and inputs_["labels"].max_count == 24
    assert load(TINY, ["train.seq=9"]).model.masked == 8 and load(TINY, ["train.seq=5"]).model.masked == 5
    assert load(TINY, ["model.masked=10"]).model.masked == 10
    assert "masked_places" not in step_spec(load(TINY, ["model.masked=0"])).trace()[0].inputs
    with pytest.raises(nt.ConfigError, match=r"model\.masked: got 9; allowed: 0, or at least the 10 tokens"):
        load(TINY, ["model.masked=9"])
    with pytest.raises(nt.ConfigError, match=r"model\.masked: got -1; allowed: an integer of at least 0"):
        load(TINY, ["model.masked=-1"])
