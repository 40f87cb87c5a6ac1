"""What config.json may say, by family: loss and all gradients are those of transformers, or the key is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import BATCH, SEQ, VOCAB
from published import Published, batch, compare
from test_published import DEBERTA, SINGLE, V3

import nntile_py as nt

TILES = {"batch": 3, "seq": 5, "embed": 9, "heads": 4, "ffn": 15, "vocab": 23}
LEGACY: dict[str, Any] = {"legacy": True, "type_vocab_size": 2, "position_biased_input": True}
V1: dict[str, Any] = DEBERTA | LEGACY
V2: dict[str, Any] = V3 | LEGACY

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
}  # fmt: skip


def inputs_of(kind: str) -> dict[str, Any]:
    """Return random inputs: ids from all of the vocabulary, padding left, right and between, labels there, too."""
    causal, rng = "CausalLM" in kind or "LMHead" in kind, np.random.default_rng(5)
    given = batch(7, causal=causal, classes=2 if "Classification" in kind else 0)
    if not causal and "Classification" not in kind:
        given["labels"] = rng.integers(0, VOCAB, (BATCH, SEQ))
    return given


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
    compare(ours, theirs, inputs, tiles=TILES, limit=SINGLE if "eberta" in name else 1e-9, fusion=False)


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


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 4}, "model.conv: got 4; allowed: 0 or an odd number"),
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups is 2 in .*; allowed: 1"),
        ("DebertaV2ForMaskedLM", {"legacy": False, "embedding_size": 10}, "model.embedding: got 10; allowed: model.em"),
        ("DebertaForMaskedLM", {"talking_head": True}, "talking_head is True"),
    ],
)
def test_what_is_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(Published(kind, (V2 if "V2" in kind else V1) | change).model())
