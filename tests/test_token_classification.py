"""`nntile train` of a classifier of tokens: its files, which tokens have labels, what it measures."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pages import blocks
from test_classify import TREE as CLASSIFIER
from test_objectives import nntile
from test_readme import DOCS

import nntile_py as nt
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.data.classification import split_samples
from nntile_py.data.entities import EntityScores, entities, has_entities
from nntile_py.data.labelled_words import WORDS, read_samples
from nntile_py.data.token_classification import TokenClassificationDataset
from nntile_py.errors import ConfigError
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.training.datasets import build_dataset, check_objective

TREE: dict[str, Any] = CLASSIFIER | {
    "model": CLASSIFIER["model"] | {"head": "token_classification"},
    "data": {"source": "toy.conll", "val_fraction": 0.25},
    "train": CLASSIFIER["train"] | {"seq": 16},
}
NAMES = {"PER": [["Ann"], ["Bob", "Smith"]], "LOC": [["Rome"], ["New", "York"]]}
OTHER = ["went", "saw", "likes", "to", "in", "and", "the", "of-course", "some"]


def texts(count: int, seed: int = 0) -> list[list[tuple[str, str]]]:
    """Texts of words with labels: names of people and places among other words."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        text: list[tuple[str, str]] = []
        for _ in range(rng.integers(1, 4)):
            kind = [*NAMES][rng.integers(2)]
            name = NAMES[kind][rng.integers(2)]
            text += [(word, f"{'BI'[k > 0]}-{kind}") for k, word in enumerate(name)]
            text += [(str(word), "O") for word in rng.choice(OTHER, rng.integers(0, 3))]
        found.append(text)
    return found


def conll(found: list[list[tuple[str, str]]], separator: str = " ") -> str:
    return "\n".join("".join(f"{word}{separator}x{separator}{label}\n" for word, label in text) for text in found)


def write(tmp_path: Path, name: str = "toy.conll", content: str | None = None, **changes: Any) -> Path:
    (tmp_path / name).write_text(conll(texts(90)) if content is None else content)
    tree = TREE | {"data": TREE["data"] | {"source": str(tmp_path / name)} | changes.pop("data", {})} | changes
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def dataset(config: RunConfig) -> TokenClassificationDataset:
    made = build_dataset(config, step_spec(config))
    assert isinstance(made, TokenClassificationDataset)
    return made


# -- files


def test_the_same_from_each_kind_of_file(tmp_path: Path) -> None:
    """CoNLL with blanks or tabs, with lines between documents, Windows' ends of lines; JSON lines."""
    found = texts(5)
    lists = [{"w": [word for word, _ in text], "y": [label for _, label in text]} for text in found]
    files = {
        "a.conll": conll(found), "b.tsv": conll(found, "\t"), "c.txt": "-DOCSTART- x O\n\n" + conll(found) + "\n\n",
        "d.iob2": conll(found).replace("\n", "\r\n"), "e.jsonl": "\n".join(map(json.dumps, lists)),
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode())
        read = read_samples("data.source", str(tmp_path / name), "w", "y", WORDS)
        assert [[*zip(one.words or (), one.labels, strict=True)] for one in read] == found
        assert read[1].line == {"e": 2, "c": 5 + len(found[0]) - 1}.get(name[0], len(found[0]) + 2)


BAD = {
    "one column": ("a.conll", "Ann B-PER\nwent\n", r"line 2: 1 column; allowed: 2, as in the first line"),
    "words only": ("a.conll", "Ann\n", r"line 1: 1 column; allowed: a word and its label, or more columns"),
    "no label": ("a.tsv", "Ann\tB-PER\nwent\t \n", r"line 2: 'label' is ''; allowed: a name or an integer"),
    "nothing": ("a.txt", "\n\n", r"a.txt: no rows; allowed: with head: token_classification a file .conll, "),
    "no list": ("a.jsonl", '{"text": "Ann went", "label": ["O"]}', "line 1: 'text' is 'Ann went'; allowed: a list"),
    "lengths": ("a.jsonl", '{"text": ["Ann"], "label": []}', r"line 1: 'label' is \[\]; allowed: a list with an item"),
    "unequal": ("a.jsonl", '{"text": ["a", "b"], "label": ["O"]}', "unequal lengths: 2 in 'text', 1 in 'label'; all"),
    "empty word": ("a.jsonl", '{"text": ["a", " "], "label": [1, 0]}', "line 1: 'text' is ' '; allowed: a text that"),
    "table": ("a.csv", "text,label\n", "not the name of a file of labelled words; allowed: with head: token_class"),
    "one class": ("a.bio", "a O\n\nb O\n", "all 2 rows have the label 'O'; allowed: at least two labels"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_clear_message(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    with pytest.raises(ConfigError, match=rf"data.source: .*{message}"):
        load(write(tmp_path, name, content))


def test_pythons_library_has_no_labels_of_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.source: python-stdlib has no labels of words; allowed: with head: "):
        load(write(tmp_path), ["data.source=python-stdlib"])


def test_no_text_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 1 row; allowed: two different texts or more, or a table of its own"):
        dataset(load(write(tmp_path, content="Ann B-PER\nwent O\n")))
    with pytest.raises(ConfigError, match=r"has 60 rows, all with the same text; allowed: two different texts"):
        dataset(load(write(tmp_path, content="Ann B-PER\nwent O\n\n" * 60)))


# -- tokens


def test_first_tokens_of_words_have_labels(tmp_path: Path) -> None:
    """Tokens as transformers makes them of words; other tokens have no label; a text that is too long is cut."""
    config = load(write(tmp_path, train=TREE["train"] | {"seq": 12}))
    assert check_objective(config, step_spec(config)) == "classification"
    data = dataset(config)
    corpus = data.corpus
    assert corpus.names == config.model.labels == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    samples, _ = split_samples(read_samples("data.source", config.data.source, "text", "label", WORDS), 0.25)
    assert any(len(ids) == 12 for ids in corpus.train.sequences) and f"{corpus.cut} cut" in data.describe()
    for sample, ids, classes in zip(samples, *corpus.train, strict=True):
        tokens, own = [corpus.tokenizer.token_to_id("[CLS]")], [IGNORED]
        for k, (word, label) in enumerate(zip(sample.words or (), sample.labels, strict=True)):
            parts = corpus.tokenizer.encode(f"{' ' * (k > 0)}{word}", add_special_tokens=False).ids
            tokens += parts
            own += [corpus.names.index(label), *[IGNORED] * (len(parts) - 1)]
        assert ids.tolist() == [*tokens[:11], corpus.tokenizer.token_to_id("[SEP]")]
        want = own[:11] + [IGNORED] * len(classes)
        assert classes.tolist() == want[: len(classes)] and set(want[len(classes) :]) <= {IGNORED}
    batch = data.train(1)
    assert batch["labels"].shape == batch["input_ids"].shape == (6, 12)
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()


def test_word_pieces_as_in_transformers(tmp_path: Path) -> None:
    """Of a tokenizer that cuts words at hyphens, makes them lower case and strips accents."""
    transformers = pytest.importorskip("transformers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "an", "##n", "went", "of", "-", "course", "ren", "##e"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    theirs = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    theirs.save_pretrained(tmp_path)
    words, labels = ["Ann", "of-course", "ü", "René", "went"], ["B-PER", "O", "O", "B-PER", "O"]
    rows = "".join(json.dumps({"text": words[k:], "label": labels[k:]}) + "\n" for k in range(4))
    changes = {"tokenizer": {"path": str(tmp_path / "tokenizer.json")}, "train": TREE["train"] | {"seq": 32}}
    model = TREE["model"] | {"labels": ["O", "B-PER"]}
    data = dataset(load(write(tmp_path, "a.jsonl", rows, data={"val_fraction": 0.3}, model=model, **changes)))
    assert len(data.corpus.train) == 3
    for ids, classes in zip(*data.corpus.train, strict=True):
        k = next(k for k in range(4) if theirs(words[k:], is_split_into_words=True)["input_ids"] == ids.tolist())
        places = theirs(words[k:], is_split_into_words=True).word_ids()
        first = [place if place not in places[:at] else None for at, place in enumerate(places)]
        numbers = [IGNORED if place is None else int(labels[k + place] == "B-PER") for place in first]
        assert [*classes, *[IGNORED] * len(ids)][: len(ids)] == numbers


# -- measurements


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ("B-A I-A O B-A B-A", {("A", 0, 1), ("A", 3, 3), ("A", 4, 4)}),
        ("I-A I-A O I-A I-B", {("A", 0, 1), ("A", 3, 3), ("B", 4, 4)}),  # IOB1
        ("B-A I-B O I-B B-B I-B", {("A", 0, 0), ("B", 1, 1), ("B", 3, 3), ("B", 4, 5)}),
        ("B-A I-A E-A S-A O S-B I-B", {("A", 0, 2), ("A", 3, 3), ("B", 5, 5), ("B", 6, 6)}),  # BIOES
        ("U-A B-A L-A L-A", {("A", 0, 0), ("A", 1, 2), ("A", 3, 3)}),  # BILOU
        ("O O", set()),
    ],
)
def test_entities(labels: str, found: set[Any]) -> None:
    assert entities(labels.split()) == found and has_entities(["O", *labels.split()]) == bool(found)


def test_scores_by_hand() -> None:
    """Two true entities of A, one of B; predicted: one right A, one A too long, B right."""
    names = ["O", "B-A", "I-A", "B-B", "I-B"]
    scores = EntityScores(names)
    scores.add([1, 2, 0], [1, 2, 0])
    scores.add([1, 0, 3, 4], [1, 2, 3, 4])
    scores.add([0, 0], [0, 1])
    found = scores.metrics()
    assert found["entities"] == {"A": [1, 3, 2], "B": [1, 1, 1]} and found["accuracy"] == pytest.approx(7 / 9)
    assert (found["precision"], found["recall"], found["f1"]) == pytest.approx((2 / 4, 2 / 3, 4 / 7))
    assert found["f1_macro"] == pytest.approx((2 / 5 + 1) / 2)
    lines = EntityScores(names, found["entities"]).table().split("\n")
    assert lines == scores.table().split("\n")
    assert [line.split() for line in lines[1:]] == [
        ["A", "2", "0.333", "0.500", "0.400"], ["B", "1", "1.000", "1.000", "1.000"],
        ["all", "3", "0.500", "0.667", "0.571"],
    ]  # fmt: skip


def test_scores_of_other_labels() -> None:
    """Parts of speech are no entities: the scores are those of words."""
    scores = EntityScores(["NOUN", "VERB", "X"])
    scores.add([0, 0, 1], [0, 1, 1])
    found = scores.metrics()
    assert "f1" not in found and found["accuracy"] == pytest.approx(2 / 3)
    assert found["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert scores.table().split("\n")[1].split() == ["NOUN", "2", "1.000", "0.500", "0.667"]
    assert np.isnan(EntityScores(["NOUN", "VERB"]).metrics()["accuracy"])


@pytest.mark.parametrize("pack", [False, True])
def test_labels_of_words_are_learnt(tmp_path: Path, pack: bool) -> None:
    """The measured loss and accuracy are those of transformers."""
    config = load(write(tmp_path, train=TREE["train"] | {"pack": pack}))
    spec, data = step_spec(config), dataset(config)
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer.of_spec(spec)
        before = data.measure(trainer)
        for step in range(1, 31):
            trainer.step(data.train(step), lr=0.01)
        measured = data.measure(trainer, whole=True)
        trainer.close()
    assert measured["held_out_loss"] < 0.6 * before["held_out_loss"] and measured["f1"] > before["f1"]
    torch, theirs = pytest.importorskip("torch"), trainer.model.to_hf()
    assert type(theirs).__name__ == "BertForTokenClassification" and theirs.config.id2label[4] == "O"
    found, want = [], []
    for batch in data.held_out(whole=True):
        rows = (batch["labels"] != IGNORED).any(1)
        given = {name: torch.from_numpy(value[rows]) for name, value in batch.items() if name != "labels"}
        real = batch["labels"][rows] != IGNORED
        found.append(theirs(**given).logits.detach()[torch.from_numpy(real)])
        want.append(torch.from_numpy(batch["labels"][rows][real]))
    logits, labels = torch.cat(found), torch.cat(want)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert measured["held_out_loss"] == pytest.approx(loss, rel=1e-4)
    assert measured["accuracy"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item())


def test_a_run_and_the_next_from_its_folder(tmp_path: Path) -> None:
    """A run of the page's config prints scores of entities; transformers reads it; its labels stay in the next run."""
    transformers = pytest.importorskip("transformers")
    (page,) = (text for text in blocks(DOCS / "fine-tune.md", "yaml") if "token_classification" in text)
    of_page = yaml.safe_load(page)["data"]
    path = write(tmp_path, of_page.pop("source"), data=of_page)
    output = nntile(tmp_path, "train", "tiny.yaml", "--out", "run").stdout
    assert re.search(r"accuracy \d\.\d+  F1 \d\.\d+", output)
    assert re.search(r"entity +entities  precision  recall     F1\nLOC +\d+ .*\nPER +\d+ .*\nall +\d+ ", output)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["f1"] > 0.5 and {"precision", "recall", "accuracy", "f1_macro", "entities"} <= last.keys()
    first, *_ = transformers.pipeline("token-classification", str(tmp_path / "run"))("Ann likes New York")
    assert first["entity"] == "B-PER" and first["start"] == 0
    sizes = [f"model.{key}=null" for key in ("layers", "embed", "heads")]
    again = load(path, [f"model.from={tmp_path / 'run'}", *sizes])
    assert again.model.labels == load(path).model.labels
    kept = [*reversed(again.model.labels)]
    assert load(path, [f"model.labels={json.dumps(kept)}"]).model.labels == kept
