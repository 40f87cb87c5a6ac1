"""BERT and its family, Llama, encoder and decoder in tiles against transformers and torch.nn: see model_cases.py."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
import yaml
from model_cases import ADAMW, BATCH, CASES, SEQ, VOCAB, bert, by_part, distilbert, llama, made, reference
from safetensors.torch import load_file, save_file

import nntile_py as nt
from nntile_py.config.run import load
from nntile_py.config.spec import build_model
from nntile_py.graph.declared import random_inputs
from nntile_py.graph.step import StepSpec
from nntile_py.models.deberta import distance_rows, log_buckets
from nntile_py.testing import error

EVEN = {"batch": 2, "seq": 4, "embed": 12, "heads": 2, "ffn": 20, "vocab": 30}
RAGGED = {"batch": 3, "seq": 5, "embed": 7, "heads": 4, "ffn": 9, "vocab": 17}
TILINGS: dict[str, dict[str, int]] = {"uncut": {}, "even": EVEN, "ragged": RAGGED, "seq alone": {"seq": 5}}
POLICIES = ("chain", "commute", "redux", "tree")
ATTENTION = ("vendor", "merge", "flash", "naive")


def pairwise(*choices: list[Any]) -> list[tuple[Any, ...]]:
    """Few rows in which every two choices of different lists meet: each row takes the most pairs that are left."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    of = {row: pairs(row) for row in itertools.product(*choices)}
    left, rows = set.union(*of.values()), []
    while left:
        rows.append(max(of, key=lambda row: len(of[row] & left)))
        left -= of[rows[-1]]
    return sorted(rows, key=lambda row: choices[0].index(row[0]))


@pytest.mark.parametrize(
    ("name", "tiling", "policy", "attention", "fusion"),
    pairwise(list(CASES), list(TILINGS), list(POLICIES), list(ATTENTION), [True, False]),
)
def test_training(runtime: nt.Runtime, name: str, tiling: str, policy: str, attention: str, fusion: bool) -> None:
    """Outputs, gradients, ten steps of AdamW, the weights at the end."""
    want, case = reference(name), CASES[name]
    trainer = nt.Trainer(
        case.ours(want.model), BATCH, SEQ, TILINGS[tiling], optimizer=nt.AdamW(**ADAMW), accumulate=policy,
        fusion=fusion, attention=case.attention or attention,
    )  # fmt: skip
    loss, outputs = trainer.evaluate(want.inputs[0], return_outputs=True)
    assert abs(loss / want.losses[0] - 1) < 1e-5
    assert outputs.keys() == want.outputs.keys()
    real = {key: [case.real(want.inputs[0], one[key]) for one in (outputs, want.outputs)] for key in outputs}
    assert {key for key, (got, of_torch) in real.items() if error(got, of_torch) > 1e-5} == set()
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


def test_pairs_of_choices() -> None:
    rows = pairwise([1, 2, 3], ["a", "b"], [True, False])
    assert {row[:2] for row in rows} == set(itertools.product([1, 2, 3], "ab"))
    assert {row[1:] for row in rows} == set(itertools.product("ab", [True, False]))
    assert len(rows) < 12


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


def deberta(**config: Any) -> Any:
    return bert("DebertaV2ForMaskedLM", **config)


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
        ({"c2p": False, "p2c": False}, "model.c2p: got false, and model.p2c is false; allowed: true for one"),
        ({"position_buckets": 22}, "position_buckets: got 22; allowed: 0, or from 2 to 21, as the longest distance is"),
        ({"position_buckets": 1}, "position_buckets: got 1; allowed: 0, or from 2"),
        ({"attention": "vendor"}, "model.attention: got 'vendor'; allowed: 'naive'"),
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
    with pytest.raises(nt.ConfigError, match=r"weight cls\.predictions\.transform\.dense\.weight is missing"):
        nt.models.from_hf(tmp_path)
    model = nt.models.from_hf(tmp_path, legacy=False)
    assert model.config == nt.models.from_hf(hf).config
    assert same(model.to_hf().state_dict(), hf.state_dict())


# -- dropout


@pytest.mark.parametrize(
    ("name", "attention_dropout"), [("pretraining", 0.0), ("pretraining", 0.2), ("deberta v3", 0.2)]
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


# -- weights in and out

HF = [name for name in CASES if name not in ("masked_lm plain", "encoder", "decoder") and "gathered" not in name]


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", HF)
def test_to_hf_and_back(tmp_path: Path, name: str) -> None:
    """Through memory and through a folder: class, config, weights, logits."""
    hf = made(name).eval()
    hf.save_pretrained(tmp_path)
    model, read = nt.models.from_hf(hf), nt.models.from_hf(tmp_path)
    assert type(model) is type(read) is nt.models.find(hf.config.model_type)
    assert same(model.weights, read.weights) and model.config == read.config
    inputs = reference(name).inputs[0]
    for back in (model.to_hf(), read.to_hf()):
        assert type(back) is type(hf)
        assert same(back.state_dict(), hf.state_dict())
        with torch.no_grad():
            got, want = (CASES[name].run(one, inputs) for one in (back, hf))
        assert got[0] == want[0] and all(torch.equal(got[1][key], want[1][key]) for key in want[1])


def test_a_folder_without_a_head(tmp_path: Path) -> None:
    """The bare model has no head: what lacks is named."""
    made("llama").model.save_pretrained(tmp_path)
    with pytest.raises(nt.ConfigError, match=r"weight lm_head\.weight is missing"):
        nt.models.from_hf(tmp_path)


@pytest.mark.parametrize(("name", "part"), [("classification", "bert"), ("roberta", "roberta")])
def test_a_model_without_a_head(tmp_path: Path, name: str, part: str) -> None:
    """It is read and given back; what has no loss is not trained."""
    hf = getattr(made(name), part)
    hf.save_pretrained(tmp_path)
    model = nt.models.from_hf(tmp_path)
    assert model.config.head == "none"
    back = model.to_hf()
    assert type(back) is type(hf) and back.state_dict().keys() == {n for n in hf.state_dict() if "pooler" not in n}
    assert all(torch.equal(value, hf.state_dict()[key]) for key, value in back.state_dict().items())
    with pytest.raises(nt.ConfigError, match="with head: none has no loss; allowed in training: a model whose trace"):
        StepSpec(model, 2, SEQ).step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bert("BertForMaskedLM", hidden_act="silu"), "hidden_act is 'silu' in the .*; allowed: 'gelu'"),
        (lambda: bert("BertForQuestionAnswering"), r"BertForQuestionAnswering'\] in .* allowed: BertFor"),
        (lambda: bert("BertForMaskedLM", is_decoder=True), "is_decoder is True in the model's config; allowed: False"),
        (lambda: distilbert("DistilBertForMaskedLM", activation="silu"), "activation is 'silu' in .*; allowed: 'gelu'"),
        (lambda: distilbert("DistilBertForMaskedLM", sinusoidal_pos_embds=True), "sinusoidal_pos_embds is True.*False"),
        (lambda: distilbert("DistilBertForMultipleChoice"), r"MultipleChoice'\] in .* allowed: DistilBert"),
        (lambda: deberta(), "relative_attention is False in the model's config; allowed: True"),
        (lambda: deberta(relative_attention=True), "pos_att_type is None in .*; allowed: c2p, p2c or both"),
        (lambda: deberta(relative_attention=True, pos_att_type=["p2p"]), "pos_att_type is .'p2p'.*; allowed: c2p, p2c"),
        (lambda: deberta(relative_attention=True, conv_kernel_size=3), "conv_kernel_size is 3 in .*; allowed: 0"),
        (lambda: deberta(relative_attention=True, pooler_hidden_act="tanh"), "pooler_hidden_act is 'tanh' .* 'gelu'"),
        (lambda: llama(attention_bias=True), "attention_bias is True"),
        (lambda: llama(hidden_act="gelu"), "hidden_act is 'gelu' in the model's config; allowed: 'silu'"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not allowed; use a transformers model, or its folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(make: Any, message: str) -> None:
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(make())


# What config.json of a folder holds instead (ABSENT: no such key), and what the one message must say.
ABSENT = "absent"
WRONG_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\} .*; allowed: None"),
    ("llama", {"num_hidden_layers": ABSENT}, "'num_hidden_layers' is missing in config.json; Llama needs it"),
    ("llama", {"hidden_size": ABSENT}, "'hidden_size' is missing in config.json; Llama needs it"),
    ("llama", {"num_attention_heads": 0, "head_dim": ABSENT}, "model.heads: got 0; allowed: an integer of at least 1"),
    ("llama", {"num_key_value_heads": 0}, "model.kv_heads: got 0"),
    ("llama", {"rope_parameters": "default"}, "rope_parameters is 'default' in the model's config; allowed: an object"),
    ("llama", {"rope_parameters": {"rope_theta": "abc"}}, "model.rope_theta: got 'abc'; allowed: a number above 0"),
    ("llama", {"rope_parameters": {"rope_type": ["a"]}}, r"rope_scaling.rope_type: \['a'\] is not allowed"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": np.inf}}, "factor: inf is not allowed"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": np.nan}}, "factor: nan is not allowed"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2 in the model's config; allowed: 1"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is .*; allowed: LlamaForCausalLM"),
    ("llama", {"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    ("masked_lm", {"id2label": 3}, "id2label is 3 in the model's config; allowed: an object"),
    ("masked_lm", {"architectures": {"a": 1}}, "architectures is {'a': 1} in .*; allowed: BertForMaskedLM"),
    ("masked_lm", {"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\] in the model's config; allowed: 'gelu'"),
    ("roberta", {"pad_token_id": None}, "pad_token_id is None in .*; allowed: an integer of at least 0"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings is 2 .*; allowed: an integer of at least 3"),
    ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key' .* 'absolute'"),
    ("roberta", {"is_decoder": True}, "is_decoder is True in the model's config; allowed: False"),
    ("distilbert", {"n_heads": 5}, "model.heads: got 5; allowed: a divisor of model.embed = 24"),
    ("distilbert", {"hidden_dim": ABSENT}, "'hidden_dim' is missing in config.json; DistilBERT needs it"),
    ("albert", {"num_hidden_groups": 4}, "model.groups: got 4; allowed: 1 to model.layers = 3"),
    ("albert", {"inner_group_num": 0}, "model.inner: got 0; allowed: an integer of at least 1"),
    ("albert groups", {"num_labels": 3}, "model.classes: got 3; allowed: 2 with head: pretraining"),
    ("modernbert", {"norm_bias": True}, "norm_bias is True in the model's config; allowed: False"),
    ("modernbert", {"decoder_bias": False}, "decoder_bias is False in the model's config; allowed: True"),
    ("modernbert", {"layer_types": ["sliding_attention"] * 5}, "layer_types is .*; allowed: full_attention in every"),
    ("modernbert", {"layer_types": 3}, "layer_types is 3 in the model's config; allowed: full_attention in every"),
    ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn' .* 'default'"),
    ("modernbert", {"rope_parameters": 3}, "rope_parameters is 3 in the model's config; allowed: an object"),
    ("modernbert classification", {"classifier_pooling": "mean"}, "classifier_pooling is 'mean' .*; allowed: 'cls'"),
    ("masked_lm", {"intermediate_size": "few"}, "model.ffn: got 'few'; allowed: an integer"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_CONFIGS)
def test_wrong_configs_of_a_folder(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    """From Python and from a YAML alike."""
    made(name).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({key: one for key, one in raw.items() if one is not ABSENT}))
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"words": 0}, "words")).save(str(tmp_path / "tokenizer.json"))
    config = {"model": {"from": str(tmp_path)}, "data": {"source": f"{tmp_path}/text.txt"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"train": {"batch": 1, "seq": 4, "steps": 1}}))
    with pytest.raises(nt.ConfigError, match=message):
        build_model(load(tmp_path / "run.yaml"))


def test_layers_and_wavelengths_of_older_folders(tmp_path: Path) -> None:
    """As published with ModernBERT: numbers in the place of lists for each layer."""
    made("modernbert").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del raw[key]
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 3000}
    (tmp_path / "config.json").write_text(json.dumps(raw | older))
    model = nt.models.from_hf(tmp_path)
    assert [model.config.is_global(layer) for layer in range(5)] == [True, False, True, False, True]
    assert (model.config.global_theta, model.config.local_theta) == (5000.0, 3000.0)
    theirs = model.to_hf().config
    assert theirs.layer_types == transformers.AutoConfig.from_pretrained(tmp_path).layer_types
    for kind in ("full_attention", "sliding_attention"):
        assert theirs.rope_parameters[kind]["rope_theta"] == model.hf_config()["rope_parameters"][kind]["rope_theta"]


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, ""])
def test_a_config_that_is_no_json(tmp_path: Path, text: str) -> None:
    made("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(nt.ConfigError, match=r"config\.json"):
        nt.models.from_hf(tmp_path)
    made("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(nt.ConfigError, match=r"index\.json"):
        nt.models.from_hf(tmp_path)


def changed_weights(folder: Path, name: str, change: Any) -> Path:
    """The folder of a model whose weights `change` has turned into others."""
    made(name).save_pretrained(folder)
    add_weights(folder, change)
    return folder


def add_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file({name: value.clone() for name, value in change(load_file(file)).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("kind", ["int8", "bool", "complex64", "float8_e4m3fn", "int64"])
def test_weights_that_are_no_floats(tmp_path: Path, kind: str) -> None:
    """What a quantised model has."""
    wrong = "model.layers.0.self_attn.k_proj.weight"
    folder = changed_weights(tmp_path, "llama", lambda w: w | {wrong: w[wrong].to(getattr(torch, kind))})
    message = f"weight {re.escape(wrong)} is {kind}; allowed: float16, bfloat16, float32, float64"
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(folder)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_weights_of_every_float(tmp_path: Path, kind: str) -> None:
    dtype = getattr(torch, kind)
    folder = changed_weights(tmp_path, "llama", lambda w: {name: value.to(dtype) for name, value in w.items()})
    hf = made("llama").to(dtype)
    for model in (nt.models.from_hf(folder), nt.models.from_hf(hf)):
        assert {value.dtype for value in model.weights.values()} == {np.dtype("f8" if kind == "float64" else "f4")}
        assert all(np.array_equal(value, hf.state_dict()[name].double()) for name, value in model.weights.items())


def test_more_weights_than_the_model_has(tmp_path: Path) -> None:
    """Buffers, other heads and a pooler are left out; a bias of a layer that has none here is not."""
    i8, more = torch.ones(3, 3, dtype=torch.int8), torch.ones(3, 3)
    unused = {
        "masked_lm": {"bert.embeddings.position_ids": i8, "bert.pooler.dense.weight": more,
                      "cls.seq_relationship.weight": more, "cls.predictions.decoder.bias": more},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": more, "score.weight": more, "extra": more},
    }  # fmt: skip
    for name, extra in unused.items():
        model = nt.models.from_hf(changed_weights(tmp_path / name, name, lambda w, extra=extra: w | extra))
        assert same(model.weights, nt.models.from_hf(made(name)).weights)
    hf = transformers.GPT2Model(transformers.GPT2Config(vocab_size=9, n_embd=4, n_head=2, n_layer=1, n_positions=5))
    hf.save_pretrained(tmp_path / "gpt2")  # the bare model, with the buffers that it had in old versions
    buffers = {"h.0.attn.bias": i8.bool(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    add_weights(tmp_path / "gpt2", lambda w: w | buffers)
    read = nt.models.from_hf(tmp_path / "gpt2").weights["transformer.wte.weight"]
    assert np.array_equal(read, hf.wte.weight.detach())
    add_weights(tmp_path / "gpt2", lambda w: w | {"h.0.attn.c_attn.scale": more})
    with pytest.raises(nt.ConfigError, match=r"the checkpoint has transformer\.h\.0\.attn\.c_attn\.scale; "):
        nt.models.from_hf(tmp_path / "gpt2")
    bias = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(nt.ConfigError, match=f"the checkpoint has {re.escape(bias)}; this model's layers have no such"):
        nt.models.from_hf(changed_weights(tmp_path / "bias", "llama", lambda w: w | {bias: torch.ones(12)}))


def test_sizes_that_transformers_refuses() -> None:
    config = nt.models.LlamaConfig(layers=1, embed=10, heads=4, head_dim=6, ffn=8, vocab=9, positions=5)
    with pytest.raises(nt.ConfigError, match=r"transformers does not take these sizes .*hidden size"):
        nt.models.Llama(config).to_hf()


def test_the_wrong_class() -> None:
    with pytest.raises(nt.ConfigError, match=r"model_type is 't5'; .*bert.*llama.* can be read"):
        nt.models.from_hf(transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=8, d_ff=8, d_kv=4)))
    for cls, name in ((nt.models.Llama, "masked_lm"), (nt.models.BERT, "llama"), (nt.models.GPT2, "llama")):
        with pytest.raises(nt.ConfigError, match="model_type is"):
            cls.from_hf(made(name))


# -- wrong inputs of a step

GOOD = {"input_ids": np.ones((BATCH, SEQ), int), "labels": np.ones((BATCH, SEQ), int)}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"labels": None}, "labels: missing; the model needs input_ids, labels"),
    ({"mask": np.ones((BATCH, SEQ))}, "mask: unknown input; allowed are .*input_ids.*token_type_ids.*attention_mask"),
    ({"input_ids": np.ones((BATCH, SEQ + 1), int)}, r"input_ids: int64 \(4, 13\) .* expected ints \(4, 12\)"),
    ({"input_ids": np.ones((BATCH, SEQ))}, "input_ids: float64 .*expected ints"),
    ({"input_ids": np.full((BATCH, SEQ), VOCAB)}, "input_ids: values go from 60 to 60; allowed are 0 to 59"),
    ({"input_ids": np.full((BATCH, SEQ), -100)}, "input_ids: values go from -100 to -100; allowed are 0 to 59"),
    ({"input_ids": [[1, 2], [3]]}, "input_ids: .*expected ints"),
    ({"input_ids": "text"}, "input_ids: .*expected ints"),
    ({"labels": np.full((BATCH, SEQ), -1)}, "labels: values go from -1 to -1; allowed are 0 to 59 and -100"),
    ({"labels": np.ones(BATCH, int)}, r"labels: int64 \(4,\) is not allowed"),
    ({"token_type_ids": np.full((BATCH, SEQ), 2)}, "token_type_ids: values go from 2 to 2; allowed are 0 to 1"),
    ({"attention_mask": np.full((BATCH, SEQ), 2)}, "attention_mask: values go from 2"),
    ({"attention_mask": np.zeros((BATCH, 1), int)}, r"attention_mask: int64 \(4, 1\) is not allowed"),
    ({"attention_mask": np.ones((BATCH, 1), int)}, r"attention_mask: int64 \(4, 1\) is not allowed"),
    ({"attention_mask": np.zeros((BATCH, SEQ))}, "attention_mask: float64"),
    ({"attention_mask": [[1, 1], [1]]}, r"attention_mask: is no array \(ValueError: .*\); expected ints \(4, 12\)"),
    ({"attention_mask": torch.ones(BATCH, SEQ, dtype=torch.bfloat16)}, "attention_mask: is no array .*BFloat16"),
    ({"attention_mask": object()}, r"attention_mask: object \(\) is not allowed"),
    ({"input_ids": torch.ones(BATCH, SEQ).bfloat16()}, "input_ids: is no array .*BFloat16"),
    ({"input_ids": torch.ones(BATCH, SEQ, requires_grad=True)}, "input_ids: is no array .*detach"),
    ({"labels": torch.ones(BATCH, SEQ, dtype=torch.int64).to_sparse()}, "labels: is no array .*expected ints"),
    ({"labels": torch.ones(BATCH, SEQ, dtype=torch.int64).to("meta")}, "labels: is no array .*expected ints"),
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
    trainer = nt.Trainer(nt.models.Encoder(nt.models.EncoderConfig(embed=8, heads=2)), 1, 3)
    with pytest.raises(ValueError, match=r"x: <U1 \(\) is not allowed; expected numbers \(1, 3, 8\)"):
        trainer.step({"x": "x", "labels": np.zeros((1, 3, 8))})
    with pytest.raises(ValueError, match="x: missing; the model needs x, labels"):
        trainer.step({"labels": np.zeros((1, 3, 8))})
    for value in (torch.ones(1, 3, 8).bfloat16(), torch.ones(1, 3, 8, requires_grad=True)):
        with pytest.raises(ValueError, match=r"x: is no array .*; expected numbers \(1, 3, 8\)"):
            trainer.step({"x": value, "labels": np.zeros((1, 3, 8))})


def test_outputs_without_labels(runtime: nt.Runtime) -> None:
    """The loss of none is nan, for tokens and for numbers; without outputs to return, labels are needed."""
    encoder = nt.models.Encoder(nt.models.EncoderConfig(embed=8, heads=2))
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
        config = nt.models.EncoderConfig(embed=8, heads=2)
        trainer = nt.Trainer(nt.models.Encoder(config), 1, 3, optimizer=nt.SGD(lr=np.float32(0.25)))
        trainer.step(inputs, lr=lr)
        return trainer.state_dict()

    want = after(0.5)
    assert same(after(np.float32(0.5)), want) and same(after(Fraction(1, 2)), want) and not same(after(None), want)
    assert same(after(1), after(np.int64(1)))
    for wrong in (True, np.True_, "1", -1, np.float32("nan"), float("inf"), torch.tensor(0.5), np.ones(2), 1j):
        for call in (after, lambda lr: nt.AdamW(lr=lr)):
            with pytest.raises(nt.ConfigError, match=r"optimizer\.lr: .* is not allowed; use a number of 0 or more"):
                call(wrong)
