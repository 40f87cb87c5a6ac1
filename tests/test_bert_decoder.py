"""BERT and RoBERTa as decoders, with and without attention to an encoder's output: as in transformers, in fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from model_cases import BATCH, EMBED, SEQ, VOCAB
from published import SIZES, Published, batch, compare, loss_of
from test_objectives import TREE, nntile
from test_published import ROBERTA

import nntile_py as nt
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.errors import ConfigError
from nntile_py.training.datasets import build_dataset, check_objective

DECODER = {"is_decoder": True}
CROSS = DECODER | {"add_cross_attention": True}
KEYS = 7  # positions of the encoder's output
TILES = {"batch": 3, "seq": 5, "embed": 10, "heads": 3, "ffn": 17, "vocab": 17}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertLMHeadModel", SIZES | DECODER),
    "bert untied": ("BertLMHeadModel", SIZES | CROSS | {"tie_word_embeddings": False}),
    "bert cross": ("BertLMHeadModel", SIZES | CROSS),
    "masked": ("BertForMaskedLM", SIZES | DECODER),
    "classes": ("BertForTokenClassification", SIZES | DECODER | {"num_labels": 5}),
    "roberta": ("RobertaForCausalLM", ROBERTA | DECODER),
    "roberta cross": ("RobertaForCausalLM", ROBERTA | CROSS),
    "xlm-roberta cross": ("XLMRobertaForCausalLM", ROBERTA | CROSS),
    "camembert": ("CamembertForCausalLM", ROBERTA | DECODER),
}


def inputs_of(name: str, keys: int = KEYS) -> dict[str, Any]:
    """Return random inputs: padding at the left and right, with a hole; so, too, of the encoder's output."""
    kind, config = CASES[name]
    given, rng = batch(3, causal="LM" in kind and "Masked" not in kind), np.random.default_rng(4)
    if "Token" in kind:
        given["labels"] = np.where(given["labels"] >= 0, given["labels"] % 5, given["labels"])
    if "add_cross_attention" in config:
        mask = np.ones((BATCH, keys), np.int64)
        mask[0, 4:] = mask[1, :2] = mask[3, 3] = 0
        given |= {"encoder_hidden_states": rng.standard_normal((BATCH, keys, EMBED)), "encoder_attention_mask": mask}
    return given


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(runtime: nt.Runtime, tmp_path: Path, name: str) -> None:
    """From a folder, with cut tiles; and the model that to_hf returns has the same loss and the same config."""
    kind, config = CASES[name]
    case, given = Published(kind, config), inputs_of(name)
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs), **({"memory": KEYS} if "cross" in name else {}))
    assert ours.config.decoder and ours.config.cross_attention == ("add_cross_attention" in config)
    if "memory" not in ours.config.model_fields_set and ours.config.cross_attention:
        given = inputs_of(name, SEQ)  # as many positions as the sequence has
    back, tensors = ours.to_hf(), {key: torch.from_numpy(value) for key, value in given.items()}
    assert type(back) is type(theirs) and back.config.is_decoder
    with torch.no_grad():
        assert abs(back(**tensors).loss - theirs(**tensors).loss) < 1e-5
    causal = ours.config.head == "causal_lm"
    compare(ours, theirs, given, tiles=TILES, loss=lambda logits, labels: loss_of(logits, labels, causal))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_packed(runtime: nt.Runtime, name: str) -> None:
    """Packed sequences have the loss of padded ones."""
    kind, config = CASES[name]
    theirs = Published(kind, config).model()
    given = inputs_of(name)
    given["attention_mask"] = (np.arange(SEQ) < [[SEQ], [7], [3], [5]]).astype(np.int64)
    given["input_ids"] = np.where(given["attention_mask"], np.maximum(given["input_ids"], 2), 1)
    given["labels"] = np.where(given["attention_mask"], given["input_ids"], -100)
    losses = []
    for pack in (False, True):
        trainer = nt.Trainer(nt.models.from_hf(theirs), BATCH, SEQ, {"batch": 2}, "fp64", pack=pack)
        losses.append(trainer.step(given))
        trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("kind", ["bert", pytest.param("roberta", marks=pytest.mark.long)])
def test_a_run_on_text(tmp_path: Path, kind: str) -> None:
    """`nntile train` predicts the next token, without [CLS] and [SEP], and continues a prompt."""
    model = {"type": kind, "layers": 1, "embed": 16, "heads": 2, "head": "causal_lm", "decoder": True}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE | {"model": model}))
    config = load(tmp_path / "tiny.yaml")
    assert config.aim == check_objective(config, step_spec(config)) == "causal"
    batch = build_dataset(config, step_spec(config)).train(1)
    assert isinstance(batch, dict) and (batch["labels"] == batch["input_ids"]).all() and "attention_mask" not in batch
    done = nntile(tmp_path, "train", "tiny.yaml")
    assert done.returncode == 0 and "sample:\ndef " in done.stdout, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out_loss"] < lines[0]["held_out_loss_before"] - 0.3
    theirs = getattr(transformers, CASES[kind][0]).from_pretrained(tmp_path / "runs" / "tiny")
    assert theirs.config.is_decoder


def test_what_is_refused(runtime: nt.Runtime) -> None:
    sizes: dict[str, Any] = {"layers": 1, "embed": 16, "heads": 2, "vocab": VOCAB, "positions": SEQ}
    more: dict[str, Any] = {"head": "causal_lm", "cross_attention": True}
    for key, value in more.items():
        message = f"model.decoder: got False; allowed with {key}: {str(value).lower()}: true"
        with pytest.raises(ConfigError, match=message):
            nt.models.BERT.Config(**sizes, **{key: value})
    model = nt.models.BERT(nt.models.BERT.Config(**sizes, decoder=True, cross_attention=True))
    with pytest.raises(ConfigError, match=r"model\.cross_attention: got True; allowed with packed sequences: false"):
        nt.Trainer(model, BATCH, SEQ, {"batch": 2}, pack=True)
