"""Weights and configs of transformers: read, refused, given back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
import yaml
from model_cases import CASES, SEQ, bert, deberta, distilbert, llama, made, reference, same
from safetensors.torch import load_file, save_file

import nntile_py as nt
from nntile_py.config.builders import build_model
from nntile_py.config.run_config import load
from nntile_py.graph.step import StepSpec

HF = [name for name in CASES if name not in ("masked_lm plain", "encoder", "decoder") and "gathered" not in name]


@pytest.mark.few(8)
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
    with pytest.raises(nt.ConfigError, match="with head: none has no loss; allowed in training: another head, such as"):
        StepSpec(model, 2, SEQ).step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bert("BertForMaskedLM", hidden_act="laplace"), "hidden_act is 'laplace' in the .*; allowed: 'gelu'"),
        (lambda: bert("BertLMHeadModel"), "model.decoder: got False; allowed with head: causal_lm: true"),
        (lambda: bert("BertForMaskedLM", is_encoder_decoder=True), "is_encoder_decoder is True in .*; allowed: False"),
        (lambda: distilbert("DistilBertForMaskedLM", activation="laplace"), "activation is 'laplace' .*: 'gelu'"),
        (lambda: distilbert("DistilBertForMaskedLM", sinusoidal_pos_embds=True), "sinusoidal_pos_embds is True.*False"),
        (lambda: deberta(relative_attention=True, pos_att_type=["p2p"]), "pos_att_type is .'p2p'.*; allowed: c2p, p2c"),
        (lambda: llama(hidden_act="laplace"), "hidden_act is 'laplace' in the model's config; allowed: 'silu'"),
        (lambda: torch.nn.Linear(2, 2), "model: got Linear; allowed: a transformers model, or its folder"),
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
    ("llama", {"rope_parameters": {"rope_type": ["a"]}}, r"rope_scaling.rope_type: got \['a'\]; allowed: "),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": np.inf}}, "factor: got inf; allowed with rope_"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": np.nan}}, "factor: got nan; allowed with rope_"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2 in the model's config; allowed: 1"),
    ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, "architectures is .*; allowed: LlamaForCausalLM"),
    ("llama", {"model_type": ["llama"]}, r"got model_type \['llama'\]; allowed: "),
    ("masked_lm", {"id2label": 3}, "id2label is 3 in the model's config; allowed: an object"),
    ("masked_lm", {"architectures": {"a": 1}}, "architectures is {'a': 1} in .*; allowed: BertForMaskedLM"),
    ("masked_lm", {"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\] in the model's config; allowed: 'gelu'"),
    ("roberta", {"pad_token_id": None}, "pad_token_id is None in .*; allowed: an integer of at least 0"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings is 2 .*; allowed: an integer of at least 3"),
    ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key' .* 'absolute'"),
    ("roberta", {"add_cross_attention": True}, "model.decoder: got False; allowed with cross_attention: true: true"),
    ("distilbert", {"n_heads": 5}, "model.heads: got 5; allowed: a divisor of model.embed = 24"),
    ("distilbert", {"hidden_dim": ABSENT}, "'hidden_dim' is missing in config.json; DistilBERT needs it"),
    ("albert", {"num_hidden_groups": 4}, "model.groups: got 4; allowed: 1 to model.layers = 3"),
    ("albert", {"inner_group_num": 0}, "model.inner: got 0; allowed: an integer of at least 1"),
    ("albert groups", {"num_labels": 3}, "model.classes: got 3; allowed: 2 with head: pretraining"),
    ("modernbert", {"layer_types": 3}, "model.layer_types: got 3; allowed: "),
    ("modernbert", {"rope_parameters": 3}, "rope_parameters is 3 in the model's config; allowed: an object"),
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


def test_a_type_that_the_folder_has_not(tmp_path: Path) -> None:
    """The message names the folder's type, if it is a model of nntile_py."""
    made("llama").save_pretrained(tmp_path)
    config = {"model": {"from": str(tmp_path), "type": "gpt2"}, "train": {"batch": 1, "seq": 4, "steps": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    told = rf"run.yaml: model\.type: got gpt2; allowed: llama, as in {tmp_path}/config.json, or leave model\.type out"
    with pytest.raises(nt.ConfigError, match=told):
        load(tmp_path / "run.yaml")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    with pytest.raises(nt.ConfigError, match=r"model\.from: .* got model_type 'opt'; allowed: gpt2, model\.type: t"):
        load(tmp_path / "run.yaml")


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
                      "cls.seq_relationship.weight": more},
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
    told = r"^model: got model_type 't5'; allowed: the models in docs/fine-tune\.md, .* my_file\.py:YourModel.{0,40}$"
    with pytest.raises(nt.ConfigError, match=told):
        nt.models.from_hf(transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=8, d_ff=8, d_kv=4)))
    for cls, name in ((nt.models.Llama, "masked_lm"), (nt.models.BERT, "llama"), (nt.models.GPT2, "llama")):
        with pytest.raises(nt.ConfigError, match=r"model: got model_type .*; allowed: "):
            cls.from_hf(made(name))
