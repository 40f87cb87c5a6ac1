"""head: sentence_embedding: the contrastive loss against torch, and `nntile train` on tables of texts."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from test_objectives import nntile

import nntile_py as nt
from nntile_py.config.run_config import load
from nntile_py.data.text_pairs import PairCorpus, PairDataset, TokenizedPairs, read_pairs
from nntile_py.errors import ConfigError
from nntile_py.tasks.cross_entropy import IGNORED

ROWS, SEQ, VOCAB, EMBED = 12, 10, 60, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 16, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
    "pad_token_id": 0,
}  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
KINDS: dict[str, dict[str, Any]] = {
    "Roberta": {"max_position_embeddings": 18}, "Albert": {"embedding_size": 8}, "Deberta": {},
    "DebertaV2": {"pos_att_type": ["p2c", "c2p"], "relative_attention": True},
    "ModernBert": {"local_attention": 4, **dict.fromkeys(TOKENS, 1)},
    "DistilBert": {"dim": EMBED, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "dropout": 0, "attention_dropout": 0,
                   "vocab_size": VOCAB, "max_position_embeddings": 16, "pad_token_id": 0},
}  # fmt: skip


def texts(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ids, mask = rng.integers(3, VOCAB, (ROWS, SEQ)), np.ones((ROWS, SEQ), np.int64)
    for row in range(ROWS):
        mask[row, rng.integers(3, SEQ + 1) :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def torch_loss(model: Any, inputs: dict[str, Any], choices: int, pooling: str, temperature: float) -> torch.Tensor:
    """The loss of sentence-transformers' MultipleNegativesRankingLoss, written here."""
    given = {name: torch.tensor(value) for name, value in inputs.items()}
    hidden, mask = model(**given).last_hidden_state, given["attention_mask"][:, :, None]
    vectors = (hidden * mask).sum(1) / mask.sum(1) if pooling == "mean" else hidden[:, 0]
    groups = torch.nn.functional.normalize(vectors, dim=-1).view(-1, choices, EMBED).unbind(1)
    scores = groups[0] @ torch.cat(groups[1:]).T / temperature
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def made(kind: str = "Bert") -> Any:
    torch.manual_seed(0)
    own = KINDS.get(kind, {})
    sizes = own if "dim" in own else SIZES | own
    config = getattr(transformers, f"{kind}Config")(**sizes)
    options = {"add_pooling_layer": False} if kind in ("Bert", "Roberta", "Albert") else {}
    return getattr(transformers, f"{kind}Model")(config, **options).double().eval()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("choices", "pooling", "tiles", "temperature"),
    [
        (2, "mean", {}, 0.05),
        (3, "mean", {"batch": 5, "embed": 7, "seq": 4, "heads": 2}, 0.1),
        (4, "cls", {"batch": 4}, 0.05),
        (2, "cls", {"batch": 7, "embed": 5, "ffn": 11, "vocab": 13}, 1.0),
    ],
    ids=str,
)
def test_steps_as_in_torch(choices: int, pooling: str, tiles: Any, temperature: float, runtime: Any) -> None:
    theirs = made()
    fields = {"choices": choices, "sentence_pooling": pooling, "temperature": temperature}
    ours = nt.models.from_hf(theirs, head="sentence_embedding", **fields)
    trainer = nt.Trainer(
        ours, batch=ROWS, seq=SEQ, tiles=tiles, precision="fp64", optimizer=nt.AdamW(lr=1e-3, weight_decay=0.01)
    )
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(3):
        inputs = texts(step)
        optimizer.zero_grad()
        loss = torch_loss(theirs, inputs, choices, pooling, temperature)
        loss.backward()
        optimizer.step()
        assert trainer.step(inputs) == pytest.approx(loss.item(), rel=1e-8)
    trainer.state_dict()
    state = theirs.state_dict()
    for name, value in ours.to_hf().state_dict().items():
        np.testing.assert_allclose(value, state[name], atol=1e-7, err_msg=name)
    assert type(ours.to_hf()).__name__ == "BertModel"


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_other_models(kind: str, runtime: Any) -> None:
    theirs, inputs = made(kind), texts(0)
    ours = nt.models.from_hf(theirs, head="sentence_embedding")
    trainer = nt.Trainer(ours, batch=ROWS, seq=SEQ, tiles={"batch": 5, "embed": 7}, precision="fp64")
    loss = torch_loss(theirs, inputs, 2, "mean", 0.05)
    loss.backward()
    assert trainer.step(inputs) == pytest.approx(loss.item(), rel=1e-7)
    found, named = trainer.gradients(), dict(theirs.named_parameters())
    for name, value in found.items():
        own = named[name if name in named else name.removeprefix(ours.prefix)].grad
        near = 1e-5 if kind == "Deberta" else 1e-7  # its LayerNorm of transformers computes in fp32
        np.testing.assert_allclose(value, 0 if own is None else own, atol=near, err_msg=name)


def test_several_micro_batches(runtime: Any) -> None:
    """Candidates are the answers of a micro-batch; the loss is the mean over the questions of all micro-batches."""
    theirs, inputs, half = made(), texts(0), ROWS // 2
    ours = nt.models.from_hf(theirs, head="sentence_embedding")
    trainer = nt.Trainer(ours, batch=half, seq=SEQ, precision="fp64", grad_accumulation=2)
    parts = [{name: value[k : k + half] for name, value in inputs.items()} for k in (0, half)]
    want = [torch_loss(theirs, part, 2, "mean", 0.05).item() for part in parts]
    assert trainer.evaluate(parts[0]) == pytest.approx(want[0], rel=1e-8)
    assert trainer.step(inputs) == pytest.approx(np.mean(want), rel=1e-8)


def test_a_question_that_does_not_count(runtime: Any) -> None:
    """Its answer stays a candidate for the others."""
    theirs, inputs = made(), texts(0)
    trainer = nt.Trainer(
        nt.models.from_hf(theirs, head="sentence_embedding"), batch=ROWS, seq=SEQ, tiles={"batch": 4}, precision="fp64"
    )
    labels = np.arange(ROWS // 2)
    labels[2] = IGNORED
    loss, logits = trainer.evaluate(inputs | {"labels": labels}, return_logits=True)
    rest = np.delete(logits, 2, axis=0)
    wanted = np.log(np.exp(rest).sum(1)) - rest[np.arange(5), np.delete(labels, 2)]
    assert logits.shape == (6, 6) and loss == pytest.approx(wanted.mean(), rel=1e-8)


@pytest.mark.parametrize(
    ("fields", "batch", "options", "told"),
    [
        ({"choices": 1}, 4, {}, "model.choices: got 1; allowed: at least 2"),
        ({"choices": 3}, 4, {}, "model.choices: got 3; allowed: with batch = 4 a divisor of it"),
        ({}, 4, {"pack": True}, "model.head: got sentence_embedding; allowed with packed sequences: another head"),
        ({"temperature": 0}, 4, {}, "temperature: got 0"),
    ],
    ids=str,
)
def test_what_is_refused(fields: Any, batch: int, options: Any, told: str, runtime: Any) -> None:
    with pytest.raises(ConfigError, match=told):
        model = nt.models.from_hf(made(), head="sentence_embedding", **fields)
        nt.Trainer(model, batch=batch, seq=SEQ, **options)


# -- nntile train

TREE: dict[str, Any] = {
    "model": {"type": "bert", "layers": 1, "embed": 16, "heads": 2, "head": "sentence_embedding"},
    "data": {"source": "pairs.csv", "texts": ["q", "a", "w"], "val_fraction": 0.2},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 40, "batch": 12, "seq": 12, "eval_every": 20, "log_every": 10},
    "optimizer": {"lr": 0.02, "warmup_steps": 2},
    "tiles": {"batch": 5, "embed": 7},
    "runtime": {"cpus": 2},
}
KNOWN = ["apple fruit", "iron metal", "cow animal", "oak tree", "lily flower", "bee insect"]


def table(folder: Path, rows: int = 60) -> Path:
    rng, path = np.random.default_rng(0), folder / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["q", "a", "w"])
        for number in range(rows):
            (word, kind), (_, other) = KNOWN[number % 6].split(), KNOWN[(number + 1) % 6].split()
            writer.writerow([f"{word} {number}", f"a {kind} {rng.integers(9)}", f"no {other}"])
    return path


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TREE | changes))
    return path


def test_a_run_is_a_folder_of_sentence_transformers(tmp_path: Path, runtime: Any) -> None:
    table(tmp_path)
    write(tmp_path)
    done = nntile(tmp_path, "train", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "48 rows to train on, 12 held out, 3 texts in a row" in done.stdout
    run = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out_loss"] < 0.8 * lines[0]["held_out_loss_before"]
    assert 0.5 < lines[-1]["accuracy"] <= 1
    modules = json.loads((run / "modules.json").read_text())
    assert [one["type"].rpartition(".")[2] for one in modules] == ["Transformer", "Pooling", "Normalize"]
    rows = read_pairs("data.source", str(tmp_path / "pairs.csv"), ("q", "a", "w"))
    with nt.Encoder.from_hf(run) as encoder, nt.Encoder.from_hf(run, "hidden") as hidden:
        questions, answers = (np.stack(encoder([row[column] for row in rows])) for column in (0, 1))
        mean = np.stack([one.mean(0) for one in hidden([row[0] for row in rows])])
    np.testing.assert_allclose(questions, mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-5)
    # `nntile eval`: rank of the own answer among all answers and wrong answers of the table
    done = nntile(tmp_path, "eval", "runs/tiny", "--data", "pairs.csv", "--json")
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(done.stdout)
    with nt.Encoder.from_hf(run) as encoder:
        wrong = np.stack(encoder([row[2] for row in rows]))
    similar = questions @ np.concatenate([answers, wrong]).T
    ranks = 1 + (similar > np.diag(similar)[:, None] + 1e-6).sum(1)
    assert measured["predicts"] == "contrastive" and measured["texts"] == 180
    assert measured["accuracy"] == pytest.approx((ranks == 1).mean(), abs=0.02)
    assert measured["mrr"] == pytest.approx((1 / ranks).mean(), abs=0.02)


def test_sentence_transformers_reads_a_run(tmp_path: Path, runtime: Any) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    table(tmp_path)
    write(tmp_path)
    done = nntile(tmp_path, "train", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    run, texts = tmp_path / "runs" / "tiny", [row[0] for row in read_pairs("", str(tmp_path / "pairs.csv"), ("q", "a"))]
    with nt.Encoder.from_hf(run) as encoder:
        vectors = np.stack(encoder(texts))
    theirs = sentence_transformers.SentenceTransformer(str(run), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, theirs, atol=1e-6)


def test_a_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    table(tmp_path)
    write(tmp_path, optimizer=TREE["optimizer"] | {"schedule": "constant"})
    for steps in (40, 20):
        done = nntile(tmp_path, "train", "tiny.yaml", "--out", f"of{steps}", "--set", f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    done = nntile(tmp_path, "train", "--resume", "of20", "--set", "train.steps=40")
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("of40", "of20"))
    assert first == second


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": TREE["train"] | {"batch": 7}}, "train.batch: got 7; allowed: a multiple of 3, the texts in a row"),
        ({"train": TREE["train"] | {"batch": 3}}, "train.batch: got 3; allowed: a multiple of 3, .*, and at least two"),
        ({"data": TREE["data"] | {"texts": ["q"]}}, r"data.texts: got \['q'\]; allowed: at least two columns"),
        ({"data": TREE["data"] | {"texts": ["q", "q"]}}, "data.texts: .*each once"),
        ({"data": TREE["data"] | {"texts": ["q", "b"]}, "train": TREE["train"] | {"batch": 4}}, "no column 'b'"),
        ({"train": TREE["train"] | {"batch": 147}}, "train.batch: got 147; allowed: at most 144, the texts"),
        ({"train": TREE["train"] | {"pack": True}}, "train.pack: got true with model.head: sent"),
        ({"data": TREE["data"] | {"label": "a"}}, "data.label: got a with model.head: sentence_embed"),
        ({"data": TREE["data"] | {"max_bytes": 9}}, "data.max_bytes: got 9; allowed: null"),
        ({"model": TREE["model"] | {"choices": 2}}, "model.choices: got 2; allowed: 3, the columns of data.texts"),
        ({"data": {"source": "python-stdlib", "texts": ["q", "a", "w"]}}, "data.texts: got 3 columns; allowed with"),
        ({"model": {"type": "bert", "layers": 1, "embed": 16, "heads": 2}}, "data.texts: allowed with model.head"),
    ],
)  # fmt: skip
def test_a_bad_config_is_one_clear_message(changes: Any, told: str, tmp_path: Path) -> None:
    table(tmp_path)
    write(tmp_path, **changes)
    done = nntile(tmp_path, "train", "tiny.yaml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(told, " ".join(done.stderr.split())), done.stderr


def test_batches() -> None:
    """Each epoch has each row once; a short held-out batch is filled up with rows that do not count."""

    def rows(count: int, first: int) -> TokenizedPairs:
        return [[np.array([first + k]), np.array([100 + first + k] * 2)] for k in range(count)]

    corpus = PairCorpus(None, 2, rows(9, 0), rows(5, 50), 0)  # type: ignore[arg-type]
    data = PairDataset(corpus, seq=4, batch=6, passes=3)
    for first in (1, 2):
        inputs = data.train(first)
        assert sorted(inputs["input_ids"][::2, 0]) == list(range(9))
        assert (inputs["input_ids"][1::2, 0] - inputs["input_ids"][::2, 0] == 100).all()
        assert inputs["labels"].tolist() == [0, 1, 2] * 3
    batches = list(data.held_out(whole=True))
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1, 2], [0, 1, IGNORED]]
    assert batches[1]["input_ids"][::2, 0].tolist() == [53, 54, 0]


@pytest.mark.long
def test_docstrings_with_their_code() -> None:
    pairs = read_pairs("data.source", "python-stdlib", ())
    told, code = next(pair for pair in pairs if pair[1].startswith("def join(") or pair[1].startswith("def wrap("))
    assert not any(first in rest for first, rest in pairs)
    assert all(rest.lstrip().startswith("def ") for _, rest in pairs)
    assert len(pairs) > 3000 and told not in code and math.isfinite(len(code))


def test_the_example(tmp_path: Path) -> None:
    config = load(Path(__file__).parent.parent / "experiments" / "bert_sentences.yaml")
    assert config.aim == "contrastive" and config.model.choices == 2
