"""What config.json may say, by family: loss and all gradients are those of transformers, or the key is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from model_cases import BATCH, SEQ, VOCAB
from published import DECODER, SIZES, Published, batch, compare
from test_published import CASES as PUBLISHED
from test_published import DEBERTA, GPT2, ROBERTA, SINGLE, V3

import nntile_py as nt

TILES = {"seq": 5}  # other axes are cut in test_published.py
LEGACY: dict[str, Any] = {"legacy": True, "type_vocab_size": 2, "position_biased_input": True}
V1: dict[str, Any] = DEBERTA | LEGACY
V2: dict[str, Any] = V3 | LEGACY

MODERN: dict[str, Any] = {**PUBLISHED["modernbert"].config, "hidden_activation": "gelu", "num_hidden_layers": 3}
DISTIL: dict[str, Any] = {**PUBLISHED["distilbert-base-uncased"].config}
BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
UNTIED = {"tie_word_embeddings": False}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """Return rope_parameters: the original length is shorter than the test's sequences."""
    return {"rope_type": kind, "rope_theta": 500.0, **options}


HALF = {"factor": 4.0, "original_max_position_embeddings": 6}
ROPES: dict[str, dict[str, Any]] = {
    "linear": rope("linear", factor=2.5),
    "dynamic": rope("dynamic", factor=4.0),
    "yarn": rope("yarn", **HALF),
    "yarn scales": rope("yarn", **HALF, mscale=0.7, mscale_all_dim=1.3, beta_fast=3, beta_slow=0.5, truncate=False),
    "yarn factor": rope("yarn", **HALF, attention_factor=1.7),
    "longrope": rope("longrope", **HALF, short_factor=[1.0, 1.5], long_factor=[2.0, 3.0]),
    "longrope short": rope("longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 3.0], factor=3.0),
    "llama3": rope("llama3", **HALF, low_freq_factor=1.0, high_freq_factor=4.0),
}
MODERN_ROPES = {"full_attention": ROPES["yarn"], "sliding_attention": ROPES["linear"]}
QWEN: dict[str, Any] = DECODER | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 4}
MIXED = ["sliding_attention", "full_attention"]

# {name: class of transformers, its config}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta's defaults": ("DebertaForMaskedLM", V1 | {"relative_attention": False, "pos_att_type": None}),
    "deberta by content": ("DebertaForMaskedLM", V1 | {"relative_attention": False, "pos_att_type": ["p2c"]}),
    "deberta c2p": ("DebertaForMaskedLM", V1 | {"pos_att_type": "C2P"}),
    "deberta no terms": ("DebertaForMaskedLM", V1 | {"pos_att_type": []}),
    "deberta narrow": ("DebertaForMaskedLM", V1 | {"embedding_size": 10, "max_relative_positions": 5}),
    "deberta pooler": ("DebertaForSequenceClassification", V1 | {"pooler_hidden_act": "tanh"}),
    "deberta-v2's defaults": ("DebertaV2ForMaskedLM", V2 | {"relative_attention": False, "pos_att_type": None}),
    "deberta-v2 p2c": ("DebertaV2ForMaskedLM", V2 | {"pos_att_type": "p2c", "share_att_key": False}),
    "deberta-v2 narrow": ("DebertaV2ForMaskedLM", V2 | {"embedding_size": 10, "norm_rel_ebd": "none"}),
    "deberta-v2-xlarge": ("DebertaV2ForMaskedLM", V2 | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v2 wide conv": ("DebertaV2ForMaskedLM", V2 | {"conv_kernel_size": 5, "position_buckets": -1}),
    "deberta-v3": ("DebertaV2ForSequenceClassification", V3),
    **{f"llama {name}": ("LlamaForCausalLM", DECODER | {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama wide heads": ("LlamaForCausalLM", DECODER | {"head_dim": 10, "hidden_act": "relu2"}),
    "mistral yarn": ("MistralForCausalLM", DECODER | {"rope_parameters": ROPES["yarn"], "sliding_window": 3}),
    "qwen2 layers": ("Qwen2ForCausalLM", QWEN | {"layer_types": MIXED}),
    "qwen2 first layers": ("Qwen2ForCausalLM", QWEN | {"max_window_layers": 1, "hidden_act": "gelu_new"}),
    "qwen3 layers": ("Qwen3ForCausalLM", QWEN | {"layer_types": MIXED, "hidden_act": "hardswish"}),
    "gpt2 unscaled": ("GPT2LMHeadModel", GPT2 | UNTIED | {"scale_attn_weights": False, "n_inner": 31}),
    "gpt2 by layer": ("GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 31}),
    "gpt2 upcast": ("GPT2LMHeadModel", GPT2 | {"reorder_and_upcast_attn": True, "activation_function": "leaky_relu"}),
    "bert untied": ("BertForMaskedLM", SIZES | UNTIED | {"hidden_act": "relu6"}),
    "roberta untied": ("RobertaForMaskedLM", ROBERTA | UNTIED | {"hidden_act": "mish"}),
    "distilbert untied": ("DistilBertForMaskedLM", DISTIL | UNTIED | {"activation": "relu"}),
    "albert untied": (
        "AlbertForMaskedLM", SIZES | UNTIED | {"embedding_size": 10, "hidden_act": "sigmoid"}
    ),
    "deberta untied": ("DebertaForMaskedLM", V1 | UNTIED | {"embedding_size": 10, "hidden_act": "gelu_fast"}),
    "modernbert biases": ("ModernBertForMaskedLM", MODERN | BIASES | {"classifier_activation": "tanh"}),
    "modernbert untied": ("ModernBertForMaskedLM", MODERN | UNTIED | {"decoder_bias": False}),
    "modernbert mean": ("ModernBertForSequenceClassification", MODERN | BIASES | {"classifier_pooling": "mean"}),
    "modernbert layers": ("ModernBertForMaskedLM", MODERN | {"layer_types": [*MIXED, "full_attention"]}),
    "modernbert ropes": ("ModernBertForMaskedLM", MODERN | {"rope_parameters": MODERN_ROPES}),
}  # fmt: skip


def inputs_of(kind: str) -> dict[str, Any]:
    """Return random inputs: ids from all of the vocabulary, padding left, right and between, labels there, too."""
    causal, rng = "CausalLM" in kind or "LMHead" in kind, np.random.default_rng(5)
    given = batch(7, causal=causal, classes=2 if "Classification" in kind else 0)
    if not causal and "Classification" not in kind and "Modern" not in kind:
        given["labels"] = rng.integers(0, VOCAB, (BATCH, SEQ))
    return given


@pytest.mark.few(12)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(runtime: nt.Runtime, tmp_path: Path, name: str) -> None:
    """From a folder, with cut tiles; and the model that to_hf returns has the same loss."""
    kind, config = CASES[name]
    case, inputs = Published(kind, config), inputs_of(kind)
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs))
    given = {key: torch.from_numpy(value) for key, value in inputs.items()}
    with torch.no_grad():
        assert abs(ours.to_hf()(**given).loss - theirs(**given).loss) < 1e-5
    exact = kind.startswith(("Bert", "Roberta", "Distil", "Albert", "GPT2"))
    compare(ours, theirs, inputs, tiles=TILES, limit=1e-9 if exact else SINGLE, fusion=False)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name",
    ["bert untied", "roberta untied", "distilbert untied", "albert untied", "deberta c2p", "modernbert layers",
     "gpt2 by layer", "llama yarn", "qwen3 layers"],
)  # fmt: skip
def test_position_ids(runtime: nt.Runtime, name: str) -> None:
    """As an input: each row has positions of its own, some of them twice."""
    kind, config = CASES[name]
    theirs, inputs = Published(kind, config).model(), inputs_of(kind)
    inputs["position_ids"] = np.random.default_rng(6).integers(0, SEQ, (BATCH, SEQ))
    compare(nt.models.from_hf(theirs), theirs, inputs, tiles={"batch": 1, "seq": 5}, limit=SINGLE, fusion=False)


def test_position_ids_that_are_refused(runtime: nt.Runtime) -> None:
    """With packed sequences, which have positions of their own; beyond the table."""
    model = nt.models.from_hf(Published(*CASES["gpt2 by layer"]).model())
    inputs = batch(causal=True) | {"position_ids": np.full((BATCH, SEQ), SEQ + 3)}
    with pytest.raises(ValueError, match="position_ids: unknown input"):
        nt.Trainer(model, BATCH, SEQ, pack=True).step(inputs)
    with pytest.raises(ValueError, match="position_ids: values go from 15 to 15; allowed: 0 to 14"):
        nt.Trainer(model, BATCH, SEQ).step(inputs)


@pytest.mark.parametrize("tiles", [{}, {"batch": 1, "seq": 5}])
def test_padding_of_deberta_is_fused(runtime: nt.Runtime, tiles: dict[str, int]) -> None:
    kind, config = CASES["deberta-v2-xlarge"]
    theirs = Published(kind, config).model()
    compare(nt.models.from_hf(theirs), theirs, inputs_of(kind), tiles=tiles, limit=SINGLE)


def test_convolution_of_packed_sequences(runtime: nt.Runtime) -> None:
    """No tap of the convolution leaves its sequence."""
    model = nt.models.from_hf(Published(*CASES["deberta-v2 wide conv"]).model())
    inputs = batch(3)
    inputs["attention_mask"][:] = np.arange(SEQ) < np.array([[7], [3], [12], [2]])
    inputs["labels"] = np.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
    found = []
    for pack in (False, True):
        trainer = nt.Trainer(model, BATCH, SEQ, {"batch": BATCH}, "fp64", pack=pack)
        found.append((trainer.step(inputs), trainer.gradients()))
        trainer.close()
        model = nt.models.from_hf(Published(*CASES["deberta-v2 wide conv"]).model())
    (want_loss, want), (loss, got) = found
    assert abs(loss / want_loss - 1) < 1e-12
    assert all(np.abs(got[name] - want[name]).max() < 1e-10 for name in want)


_TABLE = {"deberta.encoder.rel_embeddings.weight"}
_NORM = {f"deberta.encoder.LayerNorm.{part}" for part in ("weight", "bias")}


@pytest.mark.parametrize(
    ("kind", "config", "unused"),
    [
        ("DebertaForMaskedLM", V1 | {"pos_att_type": []}, _TABLE),
        ("DebertaV2ForMaskedLM", V2 | {"pos_att_type": []}, _TABLE | _NORM),
        ("DebertaV2ForMaskedLM", V2 | {"relative_attention": False}, _NORM),
        ("DebertaV2ForMaskedLM", V2, set()),
    ],
)
def test_only_weights_that_transformers_does_not_use_are_dropped(
    kind: str, config: dict[str, Any], unused: set[str]
) -> None:
    """The logits of the model that to_hf returns are those of the checkpoint, whatever the dropped weights are."""
    theirs = Published(kind, config).model().double().eval()
    ours = nt.models.from_hf(theirs).to_hf().double()
    before, after = theirs.state_dict(), ours.state_dict()
    assert before.keys() - after.keys() == unused and not after.keys() - before.keys()
    with torch.no_grad():
        for name in unused:
            before[name].fill_(torch.nan)
    inputs = {"input_ids": torch.arange(2 * SEQ).reshape(2, SEQ) % VOCAB}
    want, got = (model(**inputs).logits for model in (theirs, ours))
    assert torch.equal(want.isnan(), torch.zeros_like(want).bool()) and (want - got).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 4}, "model.conv: got 4; allowed: 0 or an odd number"),
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups is 2 in .*; allowed: 1"),
        ("DebertaV2ForMaskedLM", {"legacy": False, "embedding_size": 10}, "model.embedding: got 10; allowed: model."),
        ("DebertaForMaskedLM", {"talking_head": True}, "talking_head is True"),
        ("Qwen2ForCausalLM", {"layer_types": MIXED[:1]}, "model.layer_types: got 1 types; allowed: one for each"),
        ("Qwen2ForCausalLM", {"layer_types": ["full"] * 2}, "model.layer_types"),
        ("ModernBertForMaskedLM", {"layer_types": MIXED}, "model.layer_types: got 2 types; allowed: one for each of m"),
    ],
)
def test_what_is_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    config = {"Deberta": V1, "DebertaV": V2, "Qwen": QWEN, "ModernBert": MODERN}[re.split(r"\d|For", kind)[0]]
    cls = getattr(transformers, kind)
    raw = cls.config_class(**config).to_dict() | {"architectures": [kind]} | change
    with pytest.raises(nt.ConfigError, match=message):
        ours = nt.models.registry.of_hf_type(raw["model_type"])
        ours.Config(**ours.saved_fields(raw))
