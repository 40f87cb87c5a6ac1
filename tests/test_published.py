"""Checkpoints as they are on the hub: loss and all gradients in fp64 are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import BATCH, EMBED, FFN, HEADS, LAYERS, SEQ, VOCAB
from published import ABSENT, DECODER, SIZES, Published, batch, compare, save

import nntile_py as nt

OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
SINGLE = 1e-6  # transformers computes the angles of rotary positions, and DeBERTa's square root, in fp32
DEBERTA = SIZES | {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "legacy": False,
    "type_vocab_size": 0, "max_relative_positions": -1,
}  # fmt: skip
V3 = DEBERTA | {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
ROBERTA = SIZES | {"type_vocab_size": 1, "pad_token_id": 1}
GPT2 = {
    "vocab_size": VOCAB, "n_positions": SEQ + 3, "n_embd": EMBED, "n_layer": LAYERS, "n_head": HEADS,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
NO_HEAD = {"architectures": ABSENT, "legacy": ABSENT, "pad_token_id": ABSENT, "pos_att_type": "c2p|p2c"}

CASES: dict[str, Published] = {
    "bert-base-uncased": Published(
        "BertForMaskedLM", SIZES, names=OLD_NORMS, drop=("cls.predictions.decoder.bias",),
        more={
            "cls.seq_relationship.weight": torch.ones(2, EMBED), "cls.seq_relationship.bias": torch.ones(2),
            "bert.pooler.dense.weight": torch.ones(EMBED, EMBED), "bert.pooler.dense.bias": torch.ones(EMBED),
            "bert.embeddings.position_ids": torch.arange(SEQ + 3)[None],
        },
    ),
    "bert-base-uncased .bin": Published("BertForMaskedLM", SIZES, names=OLD_NORMS, files="bin"),
    "bert in parts": Published("BertForMaskedLM", SIZES, parts=True),
    "bert in parts .bin": Published("BertForMaskedLM", SIZES, files="bin", parts=True),
    "deberta-base": Published("DebertaForMaskedLM", DEBERTA, NO_HEAD, files="bin", limit=SINGLE),
    "deberta-v3-base": Published(
        "DebertaV2ForMaskedLM", V3, NO_HEAD, files="bin", limit=SINGLE,
        more={
            "deberta.embeddings.position_embeddings.weight": torch.ones(SEQ + 3, EMBED),
            "mask_predictions.dense.weight": torch.ones(EMBED, EMBED), "mask_predictions.dense.bias": torch.ones(EMBED),
        },
    ),
    "xlm-roberta-base": Published(
        "XLMRobertaForMaskedLM", ROBERTA,
        {"output_past": True, "xlm_flag": None, "architectures": ["XLMRobertaForMaskedLM"]}, parts=True,
    ),
    "camembert-base": Published("CamembertForMaskedLM", ROBERTA, {"output_past": ABSENT}, files="bin"),
    "distilbert-base-uncased": Published(
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": EMBED, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": FFN,
         "max_position_embeddings": SEQ + 3, "dropout": 0.0, "attention_dropout": 0.0},
        {"tie_weights_": True, "pad_token_id": 0},
    ),
    "albert-base-v2": Published(
        "AlbertForMaskedLM", SIZES | {"embedding_size": 10, "classifier_dropout_prob": 0.0},
        {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0},
    ),
    "gpt2": Published(
        "GPT2LMHeadModel", GPT2, {"n_ctx": SEQ + 3, "summary_type": "cls_index", "summary_proj_to_labels": True},
        names={"transformer.": ""}, drop=("lm_head",),
        more={"h.0.attn.bias": torch.ones(1, 1, SEQ, SEQ), "h.1.attn.masked_bias": torch.tensor(-1e4)},
    ),
    **{
        f"gpt2 {act}": Published("GPT2LMHeadModel", GPT2 | {"activation_function": act})
        for act in ("gelu_fast", "quick_gelu", "tanh", "silu", "swish", "gelu_accurate")
    },
    "bert silu": Published("BertForMaskedLM", SIZES | {"hidden_act": "silu"}),
    "modernbert": Published(
        "ModernBertForMaskedLM",
        {name: value for name, value in SIZES.items() if "prob" not in name}
        | {"local_attention": 5, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
           "sep_token_id": 2, "attn_implementation": "sdpa", "hidden_activation": "quick_gelu"},
        {"reference_compile": False, "position_embedding_type": "absolute", "gradient_checkpointing": False},
        limit=SINGLE,
    ),
    "llama padded": Published("LlamaForCausalLM", DECODER | {"pad_token_id": 5}, limit=SINGLE),
    "llama last row": Published("LlamaForCausalLM", DECODER | {"pad_token_id": -1}, limit=SINGLE),
    "llama biases": Published(
        "LlamaForCausalLM", DECODER | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        {"rope_interleaved": False, "is_llama_config": True},
        limit=SINGLE,
    ),
    "mistral": Published("MistralForCausalLM", DECODER | {"sliding_window": 5, "head_dim": 4}, limit=SINGLE),
    "mistral v0.3": Published(
        "MistralForCausalLM",
        DECODER | {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": ABSENT, "rope_theta": 1e6}, limit=SINGLE,
    ),
    "qwen2": Published(
        "Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True}, {"layer_types": ABSENT, "sliding_window": 32768},
        limit=SINGLE,
    ),
    "qwen2 window": Published(
        "Qwen2ForCausalLM", DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        limit=SINGLE,
    ),
    "qwen3": Published("Qwen3ForCausalLM", DECODER | {"head_dim": 8, "tie_word_embeddings": True}, limit=SINGLE),
    "qwen3 biases": Published(
        "Qwen3ForCausalLM",
        DECODER | {"head_dim": 6, "attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
                   "max_window_layers": 1},
        limit=SINGLE,
    ),
}  # fmt: skip
TILES = {"batch": 3, "seq": 5, "embed": 9, "heads": 4, "ffn": 15, "vocab": 23}


@pytest.mark.few(10)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(runtime: nt.Runtime, tmp_path: Path, name: str) -> None:
    """With cut tiles, from a folder, and from transformers' model through a folder that transformers reads."""
    case = CASES[name]
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs))
    old = {today: name for name, today in ours.old_names.items()}

    def named(weight: str) -> str:
        return next((weight.replace(today, name) for today, name in old.items() if today in weight), weight)

    state, back = theirs.state_dict(), ours.to_hf()
    assert type(back) is type(theirs) and back.config.pad_token_id == theirs.config.pad_token_id
    same = {weight: torch.equal(value, state[named(weight)]) for weight, value in back.state_dict().items()
            if named(weight) in state}  # fmt: skip
    assert all(same.values()) and len(same) > 12
    compare(ours, theirs, batch(causal=ours.objective == "causal"), named=named, limit=case.limit, tiles=TILES)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "tiles"),
    [("chain", {}), ("commute", {"vocab": 7, "seq": 5}), ("redux", {"vocab": 1, "batch": 1}), ("tree", {"embed": 5})],
)
def test_padding_rows(runtime: nt.Runtime, tiles: dict[str, int], policy: str) -> None:
    """Look-ups of the padding token give its row no gradient, under each tiling and policy; the tied head does."""
    for name in ("bert-base-uncased", "xlm-roberta-base", "llama padded"):
        theirs = CASES[name].model()
        inputs, ours = batch(3, causal="llama" in name), nt.models.from_hf(theirs)
        row = theirs.config.pad_token_id
        inputs["input_ids"][:, 2:5] = row
        compare(ours, theirs, inputs, tiles=tiles, policy=policy, limit=CASES[name].limit)
        words = theirs.get_input_embeddings().weight.grad
        assert bool((words[row] == 0).all()) == ("llama" in name)
    with pytest.raises(nt.ConfigError, match=r"model.padding_idx: got 60; allowed: less than model.vocab = 60"):
        nt.models.from_hf(theirs, padding_idx=VOCAB)


def _mse(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(logits.squeeze(-1), labels)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Albert", "DebertaV2", "ModernBert"])
@pytest.mark.parametrize("numbers", [1, 3])
def test_regression(runtime: nt.Runtime, tmp_path: Path, kind: str, numbers: int) -> None:
    """num_labels: 1 is a regression in transformers; with problem_type any number of labels is."""
    sizes: dict[str, Any] = {
        "Roberta": ROBERTA, "Albert": SIZES | {"embedding_size": 10, "classifier_dropout_prob": 0.0}, "DebertaV2": V3,
        "DistilBert": CASES["distilbert-base-uncased"].config | {"seq_classif_dropout": 0.0},
        "ModernBert": CASES["modernbert"].config,
    }.get(kind, SIZES)  # fmt: skip
    problem = {} if numbers == 1 else {"problem_type": "regression"}
    case = Published(f"{kind}ForSequenceClassification", sizes | problem | {"num_labels": numbers})
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs))
    assert (ours.config.head, ours.config.classes) == ("regression", numbers)
    inputs = batch() | {"labels": np.random.default_rng(0).standard_normal((BATCH, numbers)[: 1 + (numbers > 1)])}
    inputs["attention_mask"][2] = 1  # the first token is no padding
    back = ours.to_hf()
    assert back.config.num_labels == numbers and back.config.problem_type == "regression"
    with torch.no_grad():
        given = {key: torch.from_numpy(value) for key, value in inputs.items()}
        assert abs(back(**given).loss - theirs(**given).loss) < 1e-6
    compare(ours, theirs, inputs, loss=_mse, tiles=TILES, limit=SINGLE if kind in ("DebertaV2", "ModernBert") else 1e-9)


def test_a_new_head_of_another_kind(tmp_path: Path) -> None:
    case = Published("BertForSequenceClassification", SIZES | {"num_labels": 3})
    folder = case.write(tmp_path, case.model())
    model = nt.models.from_hf(folder, head="regression", classes=1)
    assert model.config.classes == 1 and model.weights["classifier.weight"].shape == (1, EMBED)
    assert model.hf_config()["problem_type"] == "regression"
    with pytest.raises(nt.ConfigError, match=r"classes: got 1; allowed: at least 2 .*; head: regression predicts"):
        nt.models.from_hf(folder, classes=1)
    case = Published("BertForSequenceClassification", SIZES, {"problem_type": "ranking"})
    with pytest.raises(nt.ConfigError, match=r"problem_type is 'ranking' in .*; allowed: None, 'single_label_classif"):
        nt.models.from_hf(case.write(tmp_path, case.model()))


def test_files_of_a_bare_model_and_of_old_torch(runtime: nt.Runtime, tmp_path: Path) -> None:
    """The names lack the prefix; torch wrote no zip file before version 1.6."""
    case = Published("BertForMaskedLM", SIZES, {"architectures": ["BertModel"]}, names={"bert.": ""} | OLD_NORMS)
    theirs = case.model()
    folder = case.write(tmp_path, theirs)
    tensors = {case.named(name): value for name, value in theirs.state_dict().items() if not name.startswith("cls.")}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model = nt.models.from_hf(folder)
    assert model.config.head == "none"
    for name, value in model.weights.items():
        assert np.array_equal(value, theirs.state_dict()[name])


class Code:
    """Leaves a mark where pickle runs it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda mark: {"weight": Code(mark)}, "cannot read .*model.bin .*holds Python objects, which are never"),
        (lambda mark: {"model": {"weight": torch.ones(2)}}, "does not hold a dict of tensors, as model.state_dict"),
        (lambda mark: [torch.ones(2)], "does not hold a dict of tensors"),
    ],
)
def test_bin_files_that_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    """Code in a file is not run."""
    case = CASES["bert-base-uncased .bin"]
    folder = case.write(tmp_path / "model", case.model())
    torch.save(content(tmp_path / "mark"), folder / "pytorch_model.bin")
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(folder)
    assert not (tmp_path / "mark").exists()


def test_an_error_of_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["bert-base-uncased .bin"]
    folder = case.write(tmp_path / "model", case.model())

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(torch, "load", failing)
    with pytest.raises(nt.ConfigError, match=r"cannot read .*pytorch_model\.bin .*Input/output error"):
        nt.models.from_hf(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    case = CASES["bert-base-uncased"]
    folder = case.write(tmp_path, case.model())
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(nt.ConfigError, match=r"no model\.safetensors or pytorch_model\.bin in"):
        nt.models.from_hf(folder)
    save(folder, {"bert.x": torch.ones(1)}, "bin", parts=True)
    with pytest.raises(nt.ConfigError, match=r"weight bert\..* is missing"):
        nt.models.from_hf(folder)


def test_a_head_beside_the_table_that_it_shares(tmp_path: Path) -> None:
    """Equal weights are one; another head is refused, not dropped."""
    theirs = CASES["gpt2"].model()
    for name, change, refused in (("equal", 0.0, False), ("other", 1.0, True)):
        head = theirs.lm_head.weight.detach() + change
        folder = replace(CASES["gpt2"], more={"lm_head.weight": head}).write(tmp_path / name, theirs)
        if refused:
            with pytest.raises(nt.ConfigError, match=r"lm_head\.weight differs from transformer\.wte\.weight; allowed"):
                nt.models.from_hf(folder)
        else:
            assert "lm_head.weight" not in nt.models.from_hf(folder).weights


TIED = {
    "bert-base-uncased": ("cls.predictions.decoder", "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"),
    "xlm-roberta-base": ("lm_head.decoder", "roberta.embeddings.word_embeddings.weight", "lm_head.bias"),
    "albert-base-v2": ("predictions.decoder", "albert.embeddings.word_embeddings.weight", "predictions.bias"),
}


@pytest.mark.parametrize("name", TIED)
def test_a_masked_head_beside_the_weights_that_it_shares(tmp_path: Path, name: str) -> None:
    """transformers computes with the decoder's own weights if they differ; a file may have only one of two names."""
    decoder, *weights = TIED[name]
    case = replace(CASES[name], parts=False, names={}, drop=())
    theirs = case.model()
    state = theirs.state_dict()
    for part, weight in zip(("weight", "bias"), weights, strict=True):
        copy = f"{decoder}.{part}"
        folder = replace(case, more={copy: state[weight] + 1.0}).write(tmp_path / "other", theirs)
        with pytest.raises(nt.ConfigError, match=rf"{copy} differs from {weight}; allowed: equal weights"):
            nt.models.from_hf(folder)
        folder = replace(case, drop=(weight,)).write(tmp_path / part, theirs)
        assert np.array_equal(nt.models.from_hf(folder).weights[weight], state[weight])


@pytest.mark.parametrize("kind", ["LlamaModel", "Qwen3Model", "GPT2Model"])
def test_a_bare_decoder(runtime: nt.Runtime, tmp_path: Path, kind: str) -> None:
    """The message says how a new head is drawn, which is then trained; the weights of the bare model stay."""
    untied = {"tie_word_embeddings": False}
    case = Published(kind, (GPT2 if kind == "GPT2Model" else DECODER) | untied)
    theirs = case.model()
    folder = case.write(tmp_path, theirs)
    with pytest.raises(nt.ConfigError, match=r"lm_head\.weight is missing: .* has no head; allowed: new_head: true"):
        nt.models.from_hf(folder)
    model = nt.models.from_hf(folder, new_head=True)
    state = theirs.state_dict()
    assert all(np.array_equal(value, state[name.removeprefix(model.prefix)])
               for name, value in model.weights.items() if name != "lm_head.weight")  # fmt: skip
    assert 0.01 < model.weights["lm_head.weight"].std() < 0.03
    trainer = nt.Trainer(model, BATCH, SEQ)
    assert 0 < trainer.step(batch(causal=True)) < 10
    trainer.close()
    assert type(model.to_hf()).__name__ == model.hf_config()["architectures"][0] != kind
