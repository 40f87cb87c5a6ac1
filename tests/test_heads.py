"""Heads of public checkpoints: outputs, loss and all gradients in fp64 are those of transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import BATCH, SEQ, VOCAB
from published import DECODER, SIZES, Published
from test_published import CASES, DEBERTA, GPT2, ROBERTA, SINGLE, TILES, V3

import nntile_py as nt
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.testing import error

CLASSES, CHOICES, PAD = 3, 2, 5
NAMES = {"id2label": {0: "red", 1: "green", 2: "blue"}, "label2id": {"red": 0, "green": 1, "blue": 2}}
MULTI = {"problem_type": "multi_label_classification"} | NAMES
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SIZES, "Roberta": ROBERTA, "XLMRoberta": ROBERTA, "Camembert": ROBERTA,
    "DistilBert": dict(CASES["distilbert-base-uncased"].config) | {"seq_classif_dropout": 0.0, "qa_dropout": 0.0},
    "Albert": SIZES | {"embedding_size": 10, "classifier_dropout_prob": 0.0},
    "Deberta": DEBERTA | {"pos_att_type": ["c2p"]}, "DebertaV2": V3,
    "ModernBert": dict(CASES["modernbert"].config) | {"classifier_pooling": "cls"},
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "GPT2": GPT2 | {"pad_token_id": PAD}, "Llama": DECODER | {"pad_token_id": PAD},
    "Mistral": DECODER | {"pad_token_id": PAD, "sliding_window": 5}, "Qwen2": DECODER | {"pad_token_id": PAD},
    "Qwen3": DECODER | {"pad_token_id": PAD, "head_dim": 8},
}  # fmt: skip
ROTARY = "ModernBert", "Llama", "Mistral", "Qwen2", "Qwen3"  # the angles' frequencies are fp32 in transformers
# {head: end of transformers' class, config}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "multi_label_classification": ("ForSequenceClassification", MULTI),
    "token_classification": ("ForTokenClassification", NAMES),
    "question_answering": ("ForQuestionAnswering", {}),
    "multiple_choice": ("ForMultipleChoice", {}),
    "classification": ("ForSequenceClassification", NAMES),
    "regression": ("ForSequenceClassification", {"num_labels": 1}),
    "next_sentence_prediction": ("ForNextSentencePrediction", {}),
}
# XLM-RoBERTa and CamemBERT share all code with RoBERTa: a head each. transformers' DeBERTa has no multiple choice.
LACK = dict.fromkeys(HEADS, ("XLMRoberta", "Camembert")) | {
    "token_classification": ("XLMRoberta",), "question_answering": ("Camembert",),
    "multiple_choice": ("XLMRoberta", "Camembert", "Deberta"),
}  # fmt: skip
CUT = itertools.cycle([{}, TILES, {"batch": 1, "seq": 7, "embed": 10}])
ROWS = [
    *((kind, head, next(CUT)) for head in list(HEADS)[:4] for kind in FAMILIES if kind not in LACK.get(head, ())),
    *((kind, "classification", next(CUT)) for kind in DECODERS),
    ("GPT2", "regression", {}), ("Llama", "multi_label_classification", TILES),
    ("Bert", "next_sentence_prediction", TILES),
]  # fmt: skip


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes losses, angles and square roots in fp32: here in fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def made(kind: str, head: str) -> Published:
    end, config = HEADS[head]
    return Published(kind + end, (FAMILIES | DECODERS)[kind] | config)


def inputs(kind: str, head: str, seed: int = 0) -> dict[str, Any]:
    """Padding at the right; the padding token also within the text, for decoders as the last tokens of a sequence."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (BATCH, SEQ))
    mask = np.ones_like(ids)
    mask[1, 7:] = mask[2, 3:] = 0
    if kind in DECODERS:
        ids = np.where(mask == 1, ids, PAD)
        ids[0, -2:], ids[3, 4], ids[2, 0] = PAD, PAD, 9
    labels: Any = rng.integers(0, CLASSES, BATCH)
    match head:
        case "multi_label_classification":
            labels = rng.integers(0, 2, (BATCH, CLASSES)) * 0.75
        case "token_classification":
            labels = np.where((rng.random(ids.shape) < 0.5) & (mask == 1), rng.integers(0, CLASSES, ids.shape), IGNORED)
        case "question_answering":
            ends = {"start_positions": np.array([2, 0, -7, SEQ + 9]), "end_positions": np.array([4, SEQ, SEQ - 1, 5])}
            return {"input_ids": ids, "attention_mask": mask} | ends
        case "multiple_choice":
            ids, mask, labels = ids.reshape(-1, CHOICES, SEQ), mask.reshape(-1, CHOICES, SEQ), np.array([1, 0])
        case "next_sentence_prediction":
            labels = np.array([0, 1, IGNORED, 1])
        case "regression":
            labels = rng.standard_normal(BATCH)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def difference(got: Any, want: Any) -> float:
    """Return the largest error of a gradient, relative to the largest gradient: some are nothing but rounding."""
    assert got.keys() == want.keys()
    largest = max(np.linalg.norm(value) for value in want.values())
    return max(float(np.linalg.norm(got[name] - want[name]) / largest) for name in want)


@pytest.mark.few(8)
@pytest.mark.parametrize(("kind", "head", "tiles"), ROWS, ids=[f"{kind} {head}" for kind, head, _ in ROWS])
def test_head(runtime: nt.Runtime, tmp_path: Path, kind: str, head: str, tiles: dict[str, int]) -> None:
    case, given = made(kind, head), inputs(kind, head)
    limit = SINGLE if kind in ROTARY else 1e-9
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs))
    assert ours.config.head == head
    out = theirs(**{name: torch.from_numpy(value) for name, value in given.items()})
    out.loss.backward()
    want = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    trainer = nt.Trainer(ours, BATCH, SEQ, tiles, "fp64")
    loss, outputs = trainer.evaluate(given, return_outputs=True)
    assert abs(loss / out.loss.item() - 1) < limit
    assert outputs.keys() == {name for name in out if name.endswith("logits")}
    for name, value in outputs.items():
        assert error(value, out[name].detach()) < limit
    assert abs(trainer.step(given) / out.loss.item() - 1) < limit
    got = trainer.gradients()
    trainer.close()
    assert difference(got, want) < limit


@pytest.mark.parametrize("head", HEADS)
def test_there_and_back(tmp_path: Path, head: str) -> None:
    """config.json and weights, from transformers and to transformers; another head is drawn anew."""
    case = made("Bert", head)
    theirs = case.model()
    ours = nt.models.from_hf(case.write(tmp_path, theirs))
    back = ours.to_hf()
    assert type(back) is type(theirs) and (back.config.problem_type or "") in ("", head)
    assert back.config.num_labels == theirs.config.num_labels and back.config.id2label == theirs.config.id2label
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in back.state_dict().items())
    again = nt.models.from_hf(back)
    assert again.config == ours.config
    for other in HEADS:
        new = nt.models.from_hf(tmp_path, head=other)
        assert new.config.head == other and new.hf_config()["architectures"] == ["Bert" + HEADS[other][0]]
        assert new.hf_config().get("problem_type") in (None, other)
        kept = [name for name in new.weights if name.startswith("bert.encoder")]
        assert len(kept) > 10 and all(np.array_equal(new.weights[name], state[name]) for name in kept)
        assert new.to_hf().config.num_labels == new.config.classes


@pytest.mark.parametrize("kind", ["GPT2Model", "LlamaForCausalLM", "Qwen3ForSequenceClassification"])
def test_hidden_states_of_decoders(runtime: nt.Runtime, tmp_path: Path, kind: str) -> None:
    """nt.Encoder reads them from a checkpoint with any head."""
    theirs = Published(kind, DECODERS[kind.partition("For")[0].removesuffix("Model")]).model().eval()
    folder = Published(kind, {}).write(tmp_path, theirs)
    with nt.Encoder.from_hf(folder, precision="fp64") as encoder:
        (got,) = encoder([[3, 1, 4]])
    want = theirs.base_model(torch.tensor([[3, 1, 4]])).last_hidden_state[0]
    assert error(got, want.detach()) < SINGLE


@pytest.mark.parametrize(
    ("kind", "head", "name"),
    [("LlamaModel", "classification", "score.weight"), ("GPT2LMHeadModel", "regression", "score.weight"),
     ("LlamaForSequenceClassification", "causal_lm", "lm_head.weight")],
)  # fmt: skip
def test_new_heads_of_decoders(runtime: nt.Runtime, tmp_path: Path, kind: str, head: str, name: str) -> None:
    """Another head is drawn anew, as for encoders, and is trained; the other weights stay."""
    family = "Llama" if "Llama" in kind else "GPT2"
    case = Published(kind, DECODERS[family] | {"tie_word_embeddings": False})
    theirs = case.model()
    model = nt.models.from_hf(case.write(tmp_path, theirs), head=head)
    state, given = theirs.state_dict(), inputs(family, head)
    assert 0.01 < model.weights[name].std() < 0.03
    for key, value in model.weights.items():
        saved = state.get(key, state.get(key.removeprefix(model.prefix)))
        assert key == name or np.array_equal(value, saved), key
    other = {"causal_lm": given["input_ids"], "classification": given["labels"] % 2}
    given["labels"] = other.get(head, given["labels"])
    trainer = nt.Trainer(model, BATCH, SEQ)
    assert 0 < trainer.step(given) < 10
    trainer.close()
    assert type(model.to_hf()).__name__ == model.architectures()[head]


PACKED = [
    ("Bert", "multi_label_classification"), ("Roberta", "multi_label_classification"),
    *((kind, "token_classification") for kind in ("Albert", "DistilBert", "Deberta", "DebertaV2", "ModernBert")),
    ("Bert", "next_sentence_prediction"), ("GPT2", "classification"), ("Llama", "multi_label_classification"),
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "head"), PACKED)
def test_packed(runtime: nt.Runtime, kind: str, head: str) -> None:
    """As padded, with ignored labels and an empty bin; nt.Encoder gives the same logits."""
    model, given = nt.models.from_hf(made(kind, head).model()), inputs(kind, head)
    given["labels"][3] = IGNORED
    found = []
    for pack in (False, True):
        trainer = nt.Trainer(model, BATCH, SEQ, {"batch": 1, "embed": 9}, "fp64", pack=pack, optimizer=nt.SGD(lr=0.0))
        step = {name: value[:3] for name, value in given.items()} if pack else given
        loss = trainer.step(step)
        found.append((loss, trainer.gradients(), *trainer.evaluate(step, return_outputs=True)))
        trainer.close()
    (loss, grads, measured, outputs), (other, packed, also, packed_outputs) = found
    assert abs(other / loss - 1) < 1e-12 and abs(also / measured - 1) < 1e-12
    assert difference(packed, grads) < 1e-12
    real = given["attention_mask"][:3] == 1 if head == "token_classification" else slice(None)
    assert error(packed_outputs["logits"][real], outputs["logits"][:3][real]) < 1e-12
    with nt.Encoder(model, "logits", precision="fp64") as encoder:
        ids = [row[mask == 1] for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
        assert error(np.concatenate([np.atleast_2d(one) for one in encoder(ids)[:3]]),
                     outputs["logits"][:3][real].reshape(-1, outputs["logits"].shape[-1])) < 1e-12  # fmt: skip


@pytest.mark.parametrize(("head", "width"), [("regression", 1), ("question_answering", 2), ("multiple_choice", 1)])
def test_heads_that_do_not_pack(runtime: nt.Runtime, head: str, width: int) -> None:
    """Training says so; nt.Encoder, which packs, has their logits."""
    theirs = made("Bert", head).model().eval()
    model, ids = nt.models.from_hf(theirs), np.arange(9)[None] + 1
    with pytest.raises(nt.ConfigError, match=f"model.head: got {head}; allowed with packed sequences: another head"):
        nt.Trainer(model, BATCH, SEQ, pack=True)
    if head == "question_answering":
        out = theirs(torch.from_numpy(ids))
        want = torch.stack([out.start_logits, out.end_logits], -1)[0]
    else:
        want = theirs(torch.from_numpy(ids)[None] if head == "multiple_choice" else torch.from_numpy(ids)).logits[0]
    with nt.Encoder(model, "logits", precision="fp64") as encoder:
        (got,) = encoder(ids.tolist())
        assert got.shape == ((9, 2) if width == 2 else (1,)) and error(got, want.detach()) < 1e-9


def test_several_passes(runtime: nt.Runtime) -> None:
    """Labels of questions and weighted means are divided among the passes of a step as its sequences are."""
    for head in ("multiple_choice", "question_answering", "multi_label_classification"):
        model, given = nt.models.from_hf(made("Bert", head).model()), inputs("Bert", head)
        found = []
        for batch in (BATCH, BATCH // 2):
            options = {"grad_accumulation": BATCH // batch, "optimizer": nt.SGD(lr=0.0)}
            trainer = nt.Trainer(model, batch, SEQ, {}, "fp64", **options)
            found.append((trainer.step(given), trainer.gradients()))
            trainer.close()
        assert abs(found[0][0] / found[1][0] - 1) < 1e-12
        assert difference(found[1][1], found[0][1]) < 1e-12


def test_what_a_head_is_not_given(runtime: nt.Runtime) -> None:
    """Without labels the loss is nan; labels of another form are refused, and the message says what they need."""
    ids = {"input_ids": np.ones((BATCH, SEQ), int)}
    for head in HEADS:
        trainer = nt.Trainer(nt.models.from_hf(made("Bert", head).model()), BATCH, SEQ)
        loss, outputs = trainer.evaluate(ids, return_outputs=True)
        assert np.isnan(loss) and all(np.isfinite(value).all() for value in outputs.values())
        with pytest.raises(ValueError, match=r"(labels|start_positions): missing; the model needs"):
            trainer.step(ids)
        if head == "classification":
            with pytest.raises(
                ValueError, match=r"labels: got float64 \(4, 3\); .* ints \(4,\); .*: multi_label_class"
            ):
                trainer.step(ids | {"labels": np.ones((BATCH, CLASSES))})
        trainer.close()
    with pytest.raises(nt.ConfigError, match=r"batch: got 5; allowed: a multiple of model.choices = 2"):
        nt.Trainer(nt.models.from_hf(made("Bert", "multiple_choice").model()), 5, SEQ)
    llama = nt.models.from_hf(made("Llama", "classification").model(), padding_idx=None)
    with pytest.raises(nt.ConfigError, match=r"model.padding_idx: got null; allowed with head: classification: .*pad_"):
        nt.Trainer(llama, BATCH, SEQ)
    for fields, message in (
        ({"head": "question_answering", "classes": 3}, r"model.classes: got 3; allowed: 2 with head: question_an"),
        ({"head": "multi_label_classification", "labels": ["a", "a"]}, r"model.labels: a name is there twice"),
    ):
        with pytest.raises(nt.ConfigError, match=message):
            nt.models.BERTConfig(layers=1, embed=8, heads=2, **fields)
