"""`nntile train` of a classifier whose texts have any number of labels: tables, batches, what it measures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_classify import TREE, dataset, write

import nntile_py as nt
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.data.confusion import LabelScores
from nntile_py.errors import ConfigError
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.training.datasets import check_objective

SEVERAL = {"fruit,metal": "apple and iron", "fruit": "pear then some", "": "some and then", "animal, metal": "cow gold"}


def several(tmp_path: Path, suffix: str = "csv", **changes: Any) -> RunConfig:
    found = [[f"{text} {number}", labels] for number in range(16) for labels, text in SEVERAL.items()]
    model = TREE["model"] | {"head": "multi_label_classification"} | changes.pop("model", {})
    path = write(tmp_path, found, model=model, **changes)
    if suffix == "jsonl":
        lists = [{"words": text, "kind": [one.strip() for one in labels.split(",") if one]} for text, labels in found]
        (tmp_path / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
        path.write_text(path.read_text().replace("toy.csv", "toy.jsonl"))
    return load(path)


def test_tables_with_several_labels(tmp_path: Path) -> None:
    """The same from commas and from lists; rows of padding do not count."""
    config, other = several(tmp_path), several(tmp_path, "jsonl")
    assert config.model.labels == other.model.labels == ["animal", "fruit", "metal"] and config.model.classes == 3
    assert check_objective(config, step_spec(config)) == "classification"
    one, two = dataset(config), dataset(other)
    assert one.contents() == two.contents()
    batch = one.train(1)
    assert batch["labels"].shape == (6, 3) and batch["labels"].dtype == np.float32
    texts = [one.tokenizer.decode(row) for row in batch["input_ids"]]
    for text, labels in zip(texts, batch["labels"], strict=True):
        want = next(labels for labels, words in SEVERAL.items() if words in text)
        assert [name in want for name in config.model.labels] == labels.tolist()
    *_, last = one.held_out(whole=True)
    count = len(one.corpus.held_out) % 6
    assert count and (last["labels"][count:] == IGNORED).all() and (last["labels"][:count] >= 0).all()


@pytest.mark.parametrize(
    ("cell", "message"),
    [(3, "line 1: 'kind' is 3; allowed: a list of names or integers, or names separated by commas"),
     (["a", None], "line 1: 'kind' is None; allowed: a name or an integer"), ([], "no row has a label; allowed: at l")],
)  # fmt: skip
def test_bad_tables_with_several_labels(tmp_path: Path, cell: Any, message: str) -> None:
    path = write(tmp_path, model=TREE["model"] | {"head": "multi_label_classification"})
    (tmp_path / "toy.jsonl").write_text(json.dumps({"words": "some", "kind": cell}))
    path.write_text(path.read_text().replace("toy.csv", "toy.jsonl"))
    with pytest.raises(ConfigError, match=message):
        load(path)


@pytest.mark.parametrize("pack", [False, True])
def test_several_labels_are_learnt(tmp_path: Path, pack: bool) -> None:
    """The measured loss and scores are those of transformers."""
    config = several(tmp_path, train=TREE["train"] | {"pack": pack})
    spec, texts = step_spec(config), dataset(config)
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer.of_spec(spec)
        before = texts.measure(trainer)
        for step in range(1, 41):
            trainer.step(texts.train(step), lr=0.01)
        measured = texts.measure(trainer, whole=True)
        trainer.close()
    assert measured["held_out_loss"] < 0.7 * before["held_out_loss"]
    torch, theirs = pytest.importorskip("torch"), trainer.model.to_hf()
    assert theirs.config.problem_type == "multi_label_classification"
    found, want = [], []
    for batch in texts.held_out(whole=True):
        real = batch["labels"][:, 0] != IGNORED
        given = {name: torch.from_numpy(value[real]) for name, value in batch.items() if name != "labels"}
        found.append(theirs(**given).logits.detach())
        want.append(torch.from_numpy(batch["labels"][real]))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.cat(found), torch.cat(want)).item()
    assert measured["held_out_loss"] == pytest.approx(loss, rel=1e-4)
    right = ((torch.cat(found) > 0) == (torch.cat(want) > 0)).all(1).double().mean().item()
    assert measured["accuracy"] == pytest.approx(right)


def test_scores_of_several_labels() -> None:
    """By hand: two of three texts have all labels right; F1 of the classes is 1, 4/5 and, of none, left out."""
    scores = LabelScores(3)
    assert np.isnan(scores.metrics()["f1"])
    true = np.array([[1, 1, 0], [0, 1, 0], [1, 0, 0]])
    scores.add(true[:2], true[:2] > 0)
    scores.add(true[2:], np.array([[True, True, False]]))
    found = scores.metrics()
    assert found["accuracy"] == pytest.approx(2 / 3) and found["f1_macro"] == pytest.approx((1 + 4 / 5) / 2)
    assert found["f1"] == pytest.approx(8 / 9)


@pytest.mark.parametrize(("kind", "key"), [("gpt2", "padding_token"), ("llama", "padding_idx")])
def test_decoders_learn_from_tables(tmp_path: Path, kind: str, key: str) -> None:
    """They need the number of the tokenizer's padding token."""
    def made(**fields: Any) -> RunConfig:
        sizes = {"type": kind, "layers": 1, "embed": 16, "heads": 2, "ffn": 24, "head": "classification"}
        return load(write(tmp_path, model=sizes | fields))

    with pytest.raises(ConfigError, match=f"model.{key}: got null; allowed with head: classification: the"):
        check_objective(config := made(), step_spec(config))
    with pytest.raises(ConfigError, match=rf"model.{key}: got 9; allowed: 1, the tokenizer's \[PAD\]"):
        dataset(made(**{key: 9}))
    config = made(**{key: 1})
    texts = dataset(config)
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer.of_spec(step_spec(config))
        before = texts.measure(trainer)["held_out_loss"]
        for step in range(1, 31):
            trainer.step(texts.train(step), lr=0.01)
        assert texts.measure(trainer)["held_out_loss"] < 0.8 * before
