"""BERT and its family, Llama, encoder and decoder in tiles against transformers and torch.nn: see model_cases.py."""

from __future__ import annotations

import importlib
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from model_cases import ADAMW, BATCH, CASES, SEQ, VOCAB, by_part, made, reference, same
from pairwise import covering

import nntile_py as nt
from nntile_py.graph.random_inputs import random_inputs
from nntile_py.models.deberta_parts import distance_rows, log_buckets
from nntile_py.models.hf_config import StoredWeights
from nntile_py.testing import error

EVEN = {"batch": 2, "seq": 6, "embed": 12, "heads": 2, "ffn": 20, "vocab": 30}
RAGGED = {"batch": 3, "seq": 5, "embed": 15, "heads": 4, "ffn": 25, "vocab": 37}  # seq in three parts, others in two
TILINGS: dict[str, dict[str, int]] = {"uncut": {}, "even": EVEN, "ragged": RAGGED, "seq alone": {"seq": 5}}
POLICIES = ("chain", "commute", "redux", "tree")
ATTENTION = ("vendor", "merge", "flash", "naive")


FUSIONS = (True, nt.Fusion(found=False), False)
# Each two values of different parameters meet in a row; each case has two rows, of different tilings.
ROWS = [
    (tiling, POLICIES[policy], ATTENTION[attention], FUSIONS[fusion])
    for number, policy, attention, fusion in covering([len(TILINGS), len(POLICIES), len(ATTENTION), len(FUSIONS)])
    for tiling in [[*TILINGS][number]]
]


@pytest.mark.few(16)
@pytest.mark.parametrize(
    ("name", "tiling", "policy", "attention", "fusion"),
    [(name, *ROWS[(k + half) % len(ROWS)]) for k, name in enumerate(CASES) for half in (0, len(ROWS) // 2)],
)
def test_training(runtime: nt.Runtime, name: str, tiling: str, policy: str, attention: str, fusion: Any) -> None:
    """Outputs, gradients, ten steps of AdamW, the weights at the end."""
    want, case = reference(name), CASES[name]
    trainer = nt.Trainer(
        case.ours(want.model), BATCH, SEQ, TILINGS[tiling], optimizer=nt.AdamW(**ADAMW), accumulate=policy,
        fusion=fusion, attention=case.attention or attention,
    )  # fmt: skip
    loss, outputs = trainer.evaluate(want.inputs[0], return_outputs=True)
    assert abs(loss / want.losses[0] - 1) < 1e-5
    assert outputs.keys() == want.outputs.keys()
    assert {key for key, value in outputs.items() if error(value, want.outputs[key]) > 1e-5} == set()
    first = trainer.step(want.inputs[0])
    assert abs(first / want.losses[0] - 1) < 1e-5
    compare(trainer.gradients(), want.gradients, want, 1e-5)
    losses = [first] + [p.result().loss for p in [trainer.submit(one) for one in want.inputs[1:]]]
    assert error(losses, want.losses) < 1e-5
    compare(trainer.state_dict(), want.weights, want, 1e-4)
    trainer.close()


def compare(got: Any, want: Any, of: Any, limit: float) -> None:
    assert got.keys() == want.keys()
    got, want = of.counted(got), of.counted(want)
    wrong = {name: error(got[name], want[name]) for name in want}
    assert max(wrong.values()) < limit, sorted(wrong.items(), key=lambda item: -item[1])[:5]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_what_has_no_gradient(name: str) -> None:
    """Only the biases of keys are left out of the comparison, and what is off by little is seen."""
    want, zero = reference(name), CASES[name].zero
    parts = by_part(want.gradients)
    left_out = parts.keys() - want.counted(want.gradients).keys()
    assert left_out == {key for key in parts if zero and zero in key}
    assert bool(left_out) == bool(zero)
    smallest = min(want.counted(want.gradients), key=lambda key: np.linalg.norm(parts[key]))
    off = {key: value.copy() for key, value in want.gradients.items()}
    by_part(off)[smallest][...] *= 1 + 2e-5  # a view of it
    with pytest.raises(AssertionError, match=re.escape(smallest)):
        compare(off, want.gradients, want, 1e-5)


def test_what_a_step_is_given_may_change(runtime: nt.Runtime) -> None:
    """Inputs with a default go back to it; a mask of ones is as good as none."""
    plain, masked = reference("masked_lm plain").inputs[0], reference("masked_lm").inputs[0]
    torch_model = made("masked_lm").eval()
    trainer = nt.Trainer(nt.models.from_hf(torch_model), BATCH, SEQ, RAGGED)
    ones = plain | {"attention_mask": np.ones((BATCH, SEQ), int), "token_type_ids": np.zeros((BATCH, SEQ), int)}
    got = {}
    for key, inputs in {"plain": plain, "masked": masked, "ones": ones, "plain again": plain}.items():
        got[key] = trainer.evaluate(inputs)
        assert abs(got[key] / CASES["masked_lm"].run(torch_model, inputs)[0].item() - 1) < 1e-5
    assert got["plain"] == got["ones"] == got["plain again"] != got["masked"]


def test_a_loss_with_one_part_in_a_step_and_several_in_an_evaluation(runtime: nt.Runtime) -> None:
    """A step gathers the masked tokens into one tile, an evaluation takes the logits of all."""
    want = reference("masked_lm gathered")
    model = CASES["masked_lm gathered"].ours(want.model)
    trainer = nt.Trainer(model, BATCH, SEQ, {"seq": 5}, accumulate="redux")
    assert [trainer.evaluate(want.inputs[0]), trainer.step(want.inputs[0])] == pytest.approx(2 * want.losses[:1], 1e-5)
    trainer.close()


@pytest.mark.parametrize("name", ["pretraining", "roberta"])
def test_micro_batches(runtime: nt.Runtime, name: str) -> None:
    """Two micro-batches with masks of their own, and counts of labels of their own, are one batch."""
    want = reference(name)
    model = CASES[name].ours(want.model)
    trainer = nt.Trainer(model, BATCH // 2, SEQ, RAGGED, grad_accumulation=2)
    assert abs(trainer.step(want.inputs[0]) / want.losses[0] - 1) < 1e-5
    compare(trainer.gradients(), want.gradients, want, 1e-5)
    trainer.close()


def test_positions_that_padding_does_not_count_in(runtime: nt.Runtime) -> None:
    """Made of each step's tokens, unless the step gives them; random inputs have them too."""
    trainer = nt.Trainer(nt.models.from_hf(made("roberta")), BATCH, SEQ, RAGGED)
    inputs = reference("roberta").inputs[0]
    real = inputs["input_ids"] != 1
    positions = np.array([[1 + sum(row[: s + 1]) if row[s] else 1 for s in range(SEQ)] for row in real])
    assert real.sum() < real.size and positions.max() == SEQ + 1
    own = trainer.evaluate(inputs)
    assert trainer.evaluate(inputs | {"positions": positions}) == own
    assert trainer.evaluate(inputs | {"positions": np.where(real, 2, 1)}) != own
    assert trainer.evaluate(inputs) == own
    drawn = random_inputs(trainer.built.graph, BATCH, 0)
    assert np.array_equal(drawn["positions"], np.cumsum(drawn["input_ids"] != 1, 1) * (drawn["input_ids"] != 1) + 1)
    for sizes in ({"positions": 11}, {"padding_token": VOCAB}):
        message = "12 is longer than the model's 11 positions|padding_token: got 60; .* less than model.vocab = 60"
        config = {"layers": 1, "embed": 8, "heads": 2, "vocab": VOCAB, "positions": SEQ} | sizes
        with pytest.raises(nt.ConfigError, match=message):
            nt.Trainer(nt.models.RoBERTa(nt.models.RoBERTaConfig(**config)), BATCH, SEQ)


# -- relative positions


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (256, 131), (32, 64), (8, 15), (7, 9), (4, 5), (2, 3)])
def test_buckets_of_distances(buckets: int, longest: int) -> None:
    """Those of transformers, of sequences longer than the longest distance too; the rows that distances have."""
    theirs = importlib.import_module("transformers.models.deberta_v2.modeling_deberta_v2")
    distance = np.arange(-600, 601)
    want = theirs.make_log_bucket_position(torch.from_numpy(distance), buckets, longest).long().numpy()
    assert np.array_equal(log_buckets(distance, buckets, longest), want)
    for seq in (1, 2, longest, 600):
        rows, index = distance_rows(seq, seq, buckets, longest)
        of_key_less_query = want[600 - (seq - 1) : 600 + seq][::-1]
        assert np.array_equal(rows[index], np.clip(of_key_less_query + buckets, 0, 2 * buckets - 1))
        assert (np.diff(index) >= 0).all() and (np.diff(rows) < 0).all()
    rows, index = distance_rows(4, 4, 0, 3)
    assert rows[index].tolist() == [5, 5, 4, 3, 2, 1, 0]
    rows, index = distance_rows(4, 2, 0, 3)
    assert rows[index].tolist() == [4, 4, 4, 3, 2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_buckets": 22}, "position_buckets: got 22; allowed: 0, or from 2 to 21, as the longest distance is"),
        ({"position_buckets": 1}, "position_buckets: got 1; allowed: 0, or from 2"),
        ({"attention": "vendor"}, "model.attention: got 'vendor'; allowed: 'auto'"),
        ({"positions": 11}, "seq: 12 is longer than the model's 11 positions"),
    ],
)
def test_what_deberta_refuses(runtime: nt.Runtime, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(nt.ConfigError, match=message):
        config = {"layers": 1, "embed": 8, "heads": 2, "vocab": VOCAB, "positions": SEQ} | fields
        nt.Trainer(nt.models.DeBERTaV2(nt.models.DeBERTaV2Config(**config)), BATCH, SEQ)


def test_a_published_deberta(tmp_path: Path) -> None:
    """Its config has pos_att_type as a text and no `legacy`, its head is the newer one."""
    hf = made("deberta v3")
    hf.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"pos_att_type": "p2c|c2p", "max_relative_positions": -1}
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "legacy"}))
    theirs, names = nt.models.from_hf(tmp_path).weights, nt.models.DeBERTaV2.old_names
    for old, name in names.items():
        ours = {key.replace(name, old): value for key, value in theirs.items() if key.startswith(name)}
        assert ours and all(np.array_equal(value, hf.state_dict()[key].detach()) for key, value in ours.items())
    model = nt.models.from_hf(tmp_path, legacy=False)
    assert model.config == nt.models.from_hf(hf).config
    assert same(model.to_hf().state_dict(), hf.state_dict())


# -- dropout


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "attention_dropout"), [("pretraining", 0.2), ("pretraining", 0.0), ("deberta v3", 0.2)]
)
def test_dropout_does_not_depend_on_the_tiling(runtime: nt.Runtime, name: str, attention_dropout: float) -> None:
    hf, inputs = made(name), reference(name).inputs[0]
    options = {"dropout": 0.2, "attention_dropout": attention_dropout, "attention": "naive"}

    def losses(tiles: dict[str, int], seed: int = 0, **more: Any) -> list[float]:
        trainer = nt.Trainer(nt.models.from_hf(hf, **options), BATCH, SEQ, tiles, seed=seed, **more)
        made = [trainer.step(inputs) for _ in range(3)]
        trainer.close()
        return made

    uncut = losses({})
    for tiles, more in ((EVEN, {"accumulate": "tree"}), (RAGGED, {}), (RAGGED, {"fusion": False})):
        assert error(losses(tiles, **more), uncut) < 1e-5
    plain = nt.Trainer(nt.models.from_hf(hf), BATCH, SEQ)
    assert error(uncut, [plain.step(inputs) for _ in range(3)]) > 1e-3
    plain.close()
    assert abs(losses({}, seed=1)[0] / uncut[0] - 1) > 1e-4


# -- wrong inputs of a step

GOOD = {"input_ids": np.ones((BATCH, SEQ), int), "labels": np.ones((BATCH, SEQ), int)}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"labels": None}, "labels: missing; the model needs input_ids, labels"),
    ({"mask": np.ones((BATCH, SEQ))}, "mask: unknown input; allowed: .*input_ids.*token_type_ids.*attention_mask"),
    ({"input_ids": np.ones((BATCH, SEQ + 1), int)}, r"input_ids: got int64 \(4, 13\); allowed: ints \(4, 12\)"),
    ({"input_ids": np.ones((BATCH, SEQ))}, "input_ids: got float64 .*allowed: ints"),
    ({"input_ids": np.full((BATCH, SEQ), VOCAB)}, "input_ids: values go from 60 to 60; allowed: 0 to 59"),
    ({"input_ids": np.full((BATCH, SEQ), -100)}, "input_ids: values go from -100 to -100; allowed: 0 to 59"),
    ({"input_ids": [[1, 2], [3]]}, "input_ids: .*allowed: ints"),
    ({"input_ids": "text"}, "input_ids: .*allowed: ints"),
    ({"labels": np.full((BATCH, SEQ), -1)}, "labels: values go from -1 to -1; allowed: 0 to 59 and -100"),
    ({"labels": np.ones(BATCH, int)}, r"labels: got int64 \(4,\); allowed: "),
    ({"token_type_ids": np.full((BATCH, SEQ), 2)}, "token_type_ids: values go from 2 to 2; allowed: 0 to 1"),
    ({"attention_mask": np.full((BATCH, SEQ), 2)}, "attention_mask: values go from 2"),
    ({"attention_mask": np.zeros((BATCH, 1), int)}, r"attention_mask: got int64 \(4, 1\); allowed: "),
    ({"attention_mask": np.ones((BATCH, 1), int)}, r"attention_mask: got int64 \(4, 1\); allowed: "),
    ({"attention_mask": np.zeros((BATCH, SEQ))}, "attention_mask: got float64 .*; allowed: ints"),
    ({"attention_mask": [[1, 1], [1]]}, r"attention_mask: is not an array \(ValueError: .*\); allowed: ints \(4, 12\)"),
    ({"attention_mask": torch.ones(BATCH, SEQ, dtype=torch.bfloat16)}, "attention_mask: is not an array .*BFloat16"),
    ({"attention_mask": object()}, r"attention_mask: got object \(\); allowed: "),
    ({"input_ids": torch.ones(BATCH, SEQ).bfloat16()}, "input_ids: is not an array .*BFloat16"),
    ({"input_ids": torch.ones(BATCH, SEQ, requires_grad=True)}, "input_ids: is not an array .*detach"),
    ({"labels": torch.ones(BATCH, SEQ, dtype=torch.int64).to_sparse()}, "labels: is not an array .*allowed: ints"),
    ({"labels": torch.ones(BATCH, SEQ, dtype=torch.int64).to("meta")}, "labels: is not an array .*allowed: ints"),
    ({"positions": np.full(SEQ, 99)}, "positions: values go from 99"),
]  # fmt: skip


def test_wrong_inputs(runtime: nt.Runtime) -> None:
    trainer = nt.Trainer(nt.models.from_hf(made("masked_lm")), BATCH, SEQ)
    before = trainer.evaluate(GOOD)
    for changed, message in WRONG:
        inputs = {name: value for name, value in (GOOD | changed).items() if value is not None}
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises(ValueError, match=message):
                call(inputs)
    assert trainer.steps == 0 and trainer.evaluate(GOOD) == before
    with pytest.raises(ValueError, match="labels: given beside a dict"):
        trainer.step(GOOD, GOOD["labels"])


def test_wrong_numbers(runtime: nt.Runtime) -> None:
    trainer = nt.Trainer(nt.models.TransformerEncoder(nt.models.TransformerEncoderConfig(embed=8, heads=2)), 1, 3)
    with pytest.raises(ValueError, match=r"x: got <U1 \(\); allowed: numbers \(1, 3, 8\)"):
        trainer.step({"x": "x", "labels": np.zeros((1, 3, 8))})
    with pytest.raises(ValueError, match="x: missing; the model needs x, labels"):
        trainer.step({"labels": np.zeros((1, 3, 8))})
    for value in (torch.ones(1, 3, 8).bfloat16(), torch.ones(1, 3, 8, requires_grad=True)):
        with pytest.raises(ValueError, match=r"x: is not an array .*; allowed: numbers \(1, 3, 8\)"):
            trainer.step({"x": value, "labels": np.zeros((1, 3, 8))})


def test_outputs_without_labels(runtime: nt.Runtime) -> None:
    """The loss of none is nan, for tokens and for numbers; without outputs to return, labels are needed."""
    encoder = nt.models.TransformerEncoder(nt.models.TransformerEncoderConfig(embed=8, heads=2))
    for model, inputs, labels in (
        (encoder, {"x": np.ones((2, 3, 8))}, np.ones((2, 3, 8))),
        (nt.models.from_hf(made("pretraining")), {"input_ids": np.ones((2, 3), int)}, np.ones((2, 3), int)),
    ):
        trainer = nt.Trainer(model, 2, 3)
        with pytest.raises(ValueError, match="labels: missing"):
            trainer.evaluate(inputs)
        loss, outputs = trainer.evaluate(inputs, return_outputs=True)
        assert np.isnan(loss)
        known, same_outputs = trainer.evaluate(inputs | {"labels": labels}, return_outputs=True)
        assert np.isfinite(known) and same(outputs, same_outputs)


def test_learning_rates(runtime: nt.Runtime) -> None:
    inputs = {"x": np.ones((1, 3, 8)), "labels": np.zeros((1, 3, 8))}

    def after(lr: Any) -> Any:
        config = nt.models.TransformerEncoderConfig(embed=8, heads=2)
        trainer = nt.Trainer(nt.models.TransformerEncoder(config), 1, 3, optimizer=nt.SGD(lr=np.float32(0.25)))
        trainer.step(inputs, lr=lr)
        return trainer.state_dict()

    want = after(0.5)
    assert same(after(np.float32(0.5)), want) and same(after(Fraction(1, 2)), want) and not same(after(None), want)
    assert same(after(1), after(np.int64(1)))
    for wrong in (True, np.True_, "1", -1, np.float32("nan"), float("inf"), torch.tensor(0.5), np.ones(2), 1j):
        for call in (after, lambda lr: nt.AdamW(lr=lr)):
            with pytest.raises(nt.ConfigError, match=r"optimizer\.lr: got .*; allowed: a number of at least 0"):
                call(wrong)


def small_llama() -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=20, max_position_embeddings=SEQ))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_converted_one_by_one(runtime: nt.Runtime, tmp_path: Path, dtype: torch.dtype) -> None:
    """While a trainer fills its tiles, no fp32 copy of the whole model exists."""
    hf = small_llama().to(dtype)
    hf.save_pretrained(tmp_path)
    want = {name: value.float().numpy() for name, value in hf.state_dict().items()}
    for source in hf, tmp_path:
        model = nt.models.from_hf(source, lora={"rank": 2, "targets": ["q_proj"]})
        other = model.changed(attention="naive")
        trainer = nt.Trainer(model, BATCH, SEQ)
        stored = model._weights
        assert isinstance(stored, StoredWeights) and "arrays" not in vars(stored)
        assert trainer.parameters[0] < trainer.parameters[1]
        converted = [name for name in stored if stored[name] is not stored._stored[name]]
        assert {*converted} == {*want} & {*stored} and len(stored) > len(converted)  # adapters are fp32 arrays
        weights = model.weights
        assert weights is other.weights and other.first_weights() is weights is model.weights
        assert all(np.array_equal(weights[name], want[name]) for name in converted)
        saved = trainer.state_dict()
        assert all(np.array_equal(saved[name], want[name]) for name in converted)
        trainer.close()


def test_a_model_with_its_own_weights_gets_arrays() -> None:
    class Own(nt.models.Llama):
        @property
        def weights(self) -> Any:
            return self.kept

        @weights.setter
        def weights(self, weights: Any) -> None:
            self.kept = weights

    model = Own.from_hf(small_llama().to(torch.bfloat16))
    assert type(model.weights) is dict and {one.dtype for one in model.weights.values()} == {np.dtype("float32")}
