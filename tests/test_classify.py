"""`nntile train` of a classifier: its tables, its batches, what it measures, what it leaves, from which weights."""

import csv
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_objectives import EXPERIMENTS, nntile

import nntile_py as nt
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.data import tokenization as data
from nntile_py.data.classification import ClassificationDataset, split_samples
from nntile_py.data.collators import LabelledCollator
from nntile_py.data.confusion import Confusion
from nntile_py.data.tables import MIN_FUNCTIONS, LabelledText, class_numbers, labels_of, read_labelled_texts
from nntile_py.errors import ConfigError
from nntile_py.models.bert import BERTConfig
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.training.datasets import build_dataset, check_objective

TREE: dict[str, Any] = {
    "model": {"type": "bert", "layers": 1, "embed": 16, "heads": 2, "head": "classification", "dropout": 0.1},
    "data": {"source": "toy.csv", "text": "words", "label": "kind", "val_fraction": 0.25},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 60, "batch": 6, "seq": 10, "eval_every": 20, "eval_batches": 2, "log_every": 10},
    "optimizer": {"lr": 0.01, "warmup_steps": 2, "clip_grad_norm": 1.0},
    "tiles": {"batch": 4, "embed": 7, "heads": 1, "ffn": 15, "vocab": 130},
    "runtime": {"cpus": 2},
}
WORDS = {"fruit": ["apple", "pear", "plum"], "metal": ["iron", "zinc", "gold"], "animal": ["cow", "hen", "dog"]}


def rows(count: int, kinds: int = 3, seed: int = 0) -> list[list[str]]:
    """Texts of one to several words, of which the first says the label."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        kind = [*WORDS][number % kinds]
        filler = rng.choice(["and", "then", "some", "more, or less", "of\nit"], rng.integers(0, 6))
        found.append([" ".join([rng.choice(WORDS[kind]), *filler]), kind])
    return found


def write(tmp_path: Path, found: list[list[str]] | None = None, **changes: Any) -> Path:
    with (tmp_path / "toy.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["words", "kind"], *(rows(83) if found is None else found)])
    tree = TREE | {"data": TREE["data"] | {"source": str(tmp_path / "toy.csv")}}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


# -- tables

GOOD = "text,label\na,x\nb,y\n"
BAD = {
    "separator": ("a.csv", "text;label\na;x\n", r"1: the columns 'text', 'label' have the separator ';'; .* file: ','"),
    "quoted": ("a.csv", '"text";"label"\n"a";"x"\n', r"line 1: the columns 'text', 'label' have the separator ';'"),
    "commas": ("a.tsv", "text,label\na,x\n", r"have the separator ','; allowed in a .tsv file: '\\t'"),
    "no column": ("a.csv", "words,label\na,x\n", r"line 1: no column 'text'; there are 'words', 'label'; allowed: a"),
    "no key": ("a.jsonl", '{"text": "a", "label": 1}\n\n{"text": "a"}\n', r"line 3: no 'label'; it has 'text'; all"),
    "twice": ("a.csv", "text,label,text\n", "line 1: the column 'text' is there twice; allowed: once"),
    "empty text": ("a.csv", GOOD + '"  ",x\n', "line 4: 'text' is '  '; allowed: a text that is not empty"),
    "after a long row": ("a.csv", GOOD + '"c\nd\ne",x\n,y\n', "line 7: 'text' is ''; allowed: a text that"),
    "no text": ("a.jsonl", '{"text": 1, "label": 1}\n', "line 1: 'text' is 1; allowed: a text that is not empty"),
    "empty label": ("a.tsv", "text\tlabel\na\t \n", "line 2: 'label' is ' '; allowed: a name or an integer"),
    "half": ("a.jsonl", '{"text": "a", "label": 0.5}', "line 1: 'label' is 0.5; allowed: a name or an integer"),
    "null": ("a.jsonl", '{"text": "a", "label": null}', "line 1: 'label' is None; allowed: a name or an integer"),
    "fields": ("a.csv", GOOD + "a,b,c\n", "line 4: 3 fields; allowed: 2, one for each column"),
    "field": ("a.csv", GOOD + "a\n", "line 4: 1 field; allowed: 2, one for each column"),
    "one row": ("a.csv", "text,label\na,x\n", "the only row has the label 'x'; allowed: at least two labels"),
    "quote": ("a.csv", GOOD + '"open,x\n', r"line 4: unexpected end of data; allowed: fields with"),
    "JSON": ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', r"line 2: broken JSON \(Expecting .*; allowed: one"),
    "deep JSON": ("a.jsonl", "[" * 100_000, r"line 1: broken JSON \(.*; allowed: one JSON object a line"),
    "no object": ("a.jsonl", "[1]", r"line 1: holds \[1\]; allowed: one JSON object a line"),
    "surrogate": ("a.jsonl", r'{"text": "\ud800", "label": 1}', "line 1: half of a character .*; allowed: whole"),
    "not UTF-8": ("a.csv", GOOD.encode() + b"caf\xe9,x\n", r"line 4: not UTF-8 .*; allowed: text in UTF-8"),
    "null byte": ("a.csv", GOOD + "a\0b,x\n", "line 4: has a null byte; allowed: text in UTF-8"),
    "no rows": ("a.csv", "text,label\n", "a.csv: no rows; allowed: a table with the columns 'text' and"),
    "nothing": ("a.jsonl", "", "a.jsonl: no rows; allowed: a table"),
    "other file": ("a.txt", GOOD, "a.txt: not the name of a table; allowed: a table with"),
    "one label": ("a.csv", "text,label\na,x\nb,x\n", "all 2 rows have the label 'x'; allowed: at least two labels"),
    "many": ("a.csv", "text,label\n" + "".join(f"a,{k}\n" for k in range(300)), "has 300 labels in 300 rows; all"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_one_clear_message(case: str, tmp_path: Path) -> None:
    name, content, told = BAD[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for _ in range(2):  # what is kept of a file is no message
        with pytest.raises(ConfigError, match=rf"^data.source: .*{told}") as refused:
            labels_of(str(path), read_labelled_texts("data.source", str(path), "text", "label"))
        assert "\n" not in str(refused.value)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(ConfigError, match=r"data.source: cannot read .*a.csv: is a folder; allowed: a table"):
        read_labelled_texts("data.source", str(tmp_path / "a.csv"), "text", "label")


def test_good_tables(tmp_path: Path) -> None:
    """With other columns beside, empty lines, a byte order mark, fields over lines and longer than csv's own limit."""
    long = "w " * 100_000
    wanted = [("a\n\"b\", ü", "10", 2), (long, "9", 5), ("c", "-1", 6)]
    (tmp_path / "a.csv").write_text(f'\ufefflabel,more,text\n10,m,"a\n""b"", ü"\n\n9,,{long}\n -1 ,,c\n', "utf-8")
    lines = [json.dumps({"text": text, "label": int(label), "more": [1]}) for text, label, _ in wanted]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "c.tsv").write_text('text\tlabel\n"a\n""b"", ü"\t10\n' + f"{long}\t9\nc\t-1", "utf-8")
    for name, places in (("a.csv", (2, 5, 6)), ("b.jsonl", (1, 3, 5)), ("c.tsv", (2, 4, 5))):
        found = read_labelled_texts("data.source", str(tmp_path / name), "text", "label")
        assert found == [LabelledText(text, label, line) for (text, label, _), line in zip(wanted, places, strict=True)]
        assert labels_of(name, found) == ["-1", "9", "10"]  # numbers as such
    (tmp_path / "c.tsv").write_text("text\tlabel\nother\ttrue\n")
    found = read_labelled_texts("data.source", str(tmp_path / "c.tsv"), "text", "label")
    assert found == [LabelledText("other", "true", 2)]


@pytest.mark.parametrize(
    ("names", "used", "meant"),
    [
        (["neg", "pos"], ["pos", "neg"], {"neg": 0, "pos": 1}),  # those of another table are then names, too
        (["neg", "pos"], ["1"], {"neg": 0, "pos": 1, "0": 0, "1": 1}),
        (["0", "5", "9"], ["5"], {"0": 0, "5": 1, "9": 2}),
        (["0", "5", "9"], ["1"], {"0": 0, "5": 1, "9": 2}),
        (None, ["1"], {"0": 0, "1": 1}),
    ],
)
def test_the_class_that_a_label_means(names: list[str] | None, used: list[str], meant: dict[str, int]) -> None:
    found = class_numbers(names, len(names or "ab"), [LabelledText("a", label, 1) for label in used])
    assert found == meant


def test_labels_that_are_no_names_are_refused(tmp_path: Path) -> None:
    """Numbers are not positions in the list of names, neither of this table nor of another's."""
    table, other = tmp_path / "a.csv", tmp_path / "b.csv"
    for labels, held in (("059", "1"), (("neg", "pos"), "1")):
        table.write_text("text,label\n" + "".join(f"text {k},{label}\n" for k, label in enumerate([*labels] * 4)))
        other.write_text(f"text,label\na,{held}\n")
        config = load("experiments/bert_classify.yaml", [f"data.source={table}", f"data.held_out={other}"])
        with pytest.raises(ConfigError, match=rf"line 2: the label '1' is not in data.source; allowed: {labels[0]}, "):
            dataset(config)
    with pytest.raises(ConfigError, match=r"data\.label: got verdict; allowed: label, since only classifiers"):
        load("experiments/bert_tiny.yaml", ["data.label=verdict"])


def test_functions_of_the_standard_library() -> None:
    found = read_labelled_texts("data.source", "python-stdlib", "text", "label")
    labels = labels_of("python-stdlib", found)
    assert {"asyncio", "email", "unittest", "xml"} <= {*labels}
    assert all(sum(one.label == label for one in found) >= MIN_FUNCTIONS for label in labels)
    assert all("def " in one.text.split("\n")[0] and "(" in one.text for one in found)
    texts = {one.text for one in found if one.label == "asyncio"}
    assert any(text.endswith("    return current_task(loop)") is False and text.count("\n") > 5 for text in texts)
    assert not any(text.startswith("            def") for text in texts)  # those within others are parts of them


def test_the_split() -> None:
    samples = [LabelledText(f"text {k % 70}", "ab"[k % 70 % 7 == 0], k + 2) for k in range(100)]
    samples.append(LabelledText("one", "c", 102))
    train, held = split_samples(samples, 0.2)
    assert sorted(train + held) == sorted(samples)
    assert not {one.text for one in train} & {one.text for one in held}
    count = {label: len({one.text for one in held if one.label == label}) for label in "abc"}
    assert count == {"a": 12, "b": 2, "c": 0}  # of 60, 10 and 1 texts
    assert {*split_samples(samples[::-1], 0.2)[1]} == {*held}


# -- batches


def dataset(config: RunConfig) -> ClassificationDataset:
    made = build_dataset(config, step_spec(config))
    assert isinstance(made, ClassificationDataset)
    return made


def test_batches_come_from_seed_and_step_alone(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["train.grad_accumulation=2"])
    batches, again = dataset(config), dataset(config)
    corpus = batches.corpus
    other = dataset(load(tmp_path / "tiny.yaml", ["train.grad_accumulation=2", "seed=1"]))
    last = again.train(7)
    for step in (7, 1):
        assert all((last[name] == batches.train(step)[name]).all() for name in last) == (step == 7)
    assert (other.train(7)["input_ids"] != last["input_ids"]).any()
    count = len(corpus.train)
    epochs = [batches.samples(step) for step in range(1, count + 1)]  # twelve times all samples
    seen = [(one.tobytes(), int(kind)) for part in epochs for one, kind in zip(*part, strict=True)]
    whole = sorted((one.tobytes(), int(kind)) for one, kind in zip(*corpus.train, strict=True))
    orders = [seen[at : at + count] for at in range(0, 12 * count, count)]
    assert all(sorted(order) == whole for order in orders)
    assert len({tuple(order) for order in orders}) == 12


def test_sequences_are_framed_cut_and_padded(tmp_path: Path) -> None:
    config = load(write(tmp_path))
    assert check_objective(config, step_spec(config)) == "classification"
    batches = dataset(config)
    corpus = batches.corpus
    assert corpus.names == config.model.labels == ["animal", "fruit", "metal"]
    cls, sep, pad = (corpus.tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    longer = 0
    texts, _ = split_samples(read_labelled_texts("data.source", config.data.source, "words", "kind"), 0.25)
    for sample, ids, kind in zip(texts, *corpus.train, strict=True):
        plain = corpus.tokenizer.encode(sample.text, add_special_tokens=False).ids
        assert ids.tolist() == [cls, *plain[: 10 - 2], sep] and corpus.names[kind] == sample.label
        longer += len(plain) > 8
    assert 0 < longer <= corpus.cut and f"{corpus.cut} cut at train.seq, 3 labels" in batches.describe()
    batch = batches.train(1)
    assert batch["input_ids"].shape == (6, 10) and batch["labels"].shape == (6,)
    assert ((batch["input_ids"] == pad) == (batch["attention_mask"] == 0)).all() and not batch["attention_mask"].all()
    assert corpus.tokenizer.truncation is None  # what is saved cuts nothing


def test_held_out_samples_are_read_once(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["train.batch=5"])
    batches = dataset(config)
    corpus = batches.corpus
    for whole, count in ((True, len(corpus.held_out)), (False, 10)):
        labels = np.concatenate([inputs["labels"] for inputs in batches.held_out(whole)])
        assert len(labels) % 5 == 0 and (labels != IGNORED).sum() == count
    assert len(corpus.held_out) % 5  # the last batch is filled up
    found = np.concatenate([inputs["labels"] for inputs in batches.held_out(True)])
    assert (found[found != IGNORED] == corpus.held_out.classes).all()


# -- what is measured


def test_confusion() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 4, 200), rng.integers(0, 3, 200)  # 3 is never predicted, 4 is not there
    made = Confusion([*"abcde"])
    made.add(true[:50], predicted[:50])
    made.add(true[50:], predicted[50:])
    told, scores = made.metrics(), []
    assert told["accuracy"] == np.mean(true == predicted)
    for kind in range(4):
        precision = np.mean(true[predicted == kind] == kind) if (predicted == kind).any() else 0.0
        recall = np.mean(predicted[true == kind] == kind)
        scores.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    np.testing.assert_allclose(made.f1, [*scores, np.nan])
    assert told["f1_macro"] == pytest.approx(np.mean(scores)) and "f1" not in told
    assert told["confusion"] == [[int(((true == i) & (predicted == k)).sum()) for k in range(5)] for i in range(5)]
    two = Confusion(["no", "yes"], [[50, 10], [5, 35]]).metrics()
    assert (two["accuracy"], two["f1"]) == (0.85, pytest.approx(70 / 85))
    assert "f1" in two and np.isnan(Confusion(["no", "yes"]).metrics()["accuracy"])


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    made = Confusion(["no", "yes $x_1$ ü"], [[50, 10], [5, 35]])
    head, names, first, second = made.table().split("\n")
    assert "predicted class" in head
    assert names.split() == ["true", "class", "0", "1", "samples", "precision", "recall", "F1"]
    assert first.split() == ["0", "no", "50", "10", "60", "0.909", "0.833", "0.870"]
    assert second.split()[-6:] == ["5", "35", "40", "0.778", "0.875", "0.824"]
    assert len(first) == len(second) == len(names)
    made.save(tmp_path)
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "confusion.svg").read_text()
    long = Confusion(["x" * 5000, "y" * 5000, "short"])._drawn().axes[0]
    assert [label.get_text() for label in long.get_xticklabels()] == [f"{'x' * 23}…", f"{'y' * 23}…", "short"]
    assert len(Confusion([f"kind {k}" for k in range(1500)])._drawn().axes[0].get_yticklabels()) < 30  # numbers
    many = Confusion([f"kind {k}" for k in range(30)], np.eye(30, dtype=int))
    assert len(many.table().split("\n")) == 31 and "1.000" in many.table()
    many.save(tmp_path)


# -- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that has learnt, with what it printed."""
    path = tmp_path_factory.mktemp("run")
    write(path)
    done = nntile(path, "train", "tiny.yaml", "--set", "checkpoint.every=20")
    assert done.returncode == 0, done.stderr
    return path / "runs" / "tiny", done.stdout


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_measures_and_draws(run: tuple[Path, str]) -> None:
    folder, said = run
    measured = [line for line in lines(folder) if "held_out_loss" in line]
    assert [sum(map(sum, line["confusion"])) for line in measured] == [12, 12, len(held_out(folder))]
    last = measured[-1]
    assert last["accuracy"] > 0.6 and last["held_out_loss"] < lines(folder)[0]["held_out_loss_before"] - 0.3
    assert f"accuracy {last['accuracy']:.4f}, F1 {last['f1_macro']:.4f} (mean of the classes)" in said
    assert Confusion(["animal", "fruit", "metal"], last["confusion"]).table() in said
    assert (folder / "confusion.png").is_file() and (folder / "confusion.svg").is_file()
    assert f"drawn in {folder.resolve()}/confusion.png" in said and "sample:" not in said


def held_out(folder: Path) -> list[LabelledText]:
    source = load(folder / "config.yaml").data.source
    return split_samples(read_labelled_texts("data.source", source, "words", "kind"), 0.25)[1]


def test_transformers_reads_it(run: tuple[Path, str]) -> None:
    """With its tokenizer and the names of the classes; it finds the same."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder = run[0]
    model, found = transformers.BertForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in found.items() if value} == {}
    assert model.config.id2label == {0: "animal", 1: "fruit", 2: "metal"}
    assert model.config.label2id == {"animal": 0, "fruit": 1, "metal": 2}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    samples, last = held_out(folder), lines(folder)[-1]
    inputs = tokenizer([one.text for one in samples], truncation=True, max_length=10, padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[one.label] for one in samples])
    with torch.no_grad():
        made = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
    assert made.loss.item() == pytest.approx(last["held_out_loss"], rel=1e-5)
    theirs = Confusion(["animal", "fruit", "metal"])
    theirs.add(labels.numpy(), made.logits.argmax(-1).numpy())
    assert theirs.counts.tolist() == last["confusion"]


def test_a_run_goes_on_to_the_bit(run: tuple[Path, str], tmp_path: Path) -> None:
    whole = run[0]
    write(tmp_path)
    other = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    for step in (40, 60):
        shutil.rmtree(other / "checkpoints" / f"step-0000{step}")
    (other / "confusion.png").unlink()
    sets = ("--set", "checkpoint.every=20", "--set", "runtime.cpus=1")
    done = nntile(tmp_path, "train", "tiny.yaml", *sets, "--resume")
    assert done.returncode == 0, done.stderr
    assert "going on after step 20" in done.stdout and (other / "confusion.png").is_file()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "checkpoints/step-000060/optimizer.safetensors"):
        assert (other / name).read_bytes() == (whole / name).read_bytes()
    same = ("step", "loss", "grad_norm", "held_out_loss", "confusion")
    both = [[{name: line[name] for name in same if name in line} for line in lines(one)] for one in (other, whole)]
    assert both[0] == both[1]
    with (tmp_path / "toy.csv").open("a") as table:
        table.write("zinc again,metal\n")
    done = nntile(tmp_path, "train", "tiny.yaml", "--resume", "--set", "train.steps=61")
    assert done.returncode == 2 and "is of another run: another " in done.stderr


# -- from the weights of a folder


def test_a_head_is_new_where_the_folder_has_another(run: tuple[Path, str], tmp_path: Path) -> None:
    folder = run[0]
    tuned = nt.models.from_hf(folder)
    again = {"type": "bert", "from": str(folder), "head": "classification"}
    head = ("classifier.weight", "classifier.bias")

    def made(found: list[list[str]], model: dict[str, Any] = again) -> Any:
        config = load(write(tmp_path, found, model=model, tokenizer={}))
        assert config.tokenizer.path == str(folder / "tokenizer.json")
        return nt.models.BERT.from_hf(folder, seed=3, **config.model.model_dump(by_alias=True))

    same = made(rows(30)[::-1])
    assert same.config.labels == tuned.config.labels and all(
        (same.weights[name] == tuned.weights[name]).all() for name in tuned.weights
    )
    assert (made([[text, str([*sorted(WORDS)].index(kind))] for text, kind in rows(30)]).weights[head[0]]
            == tuned.weights[head[0]]).all()  # numbers for classes  # fmt: skip
    other = made([[text, kind.upper()] for text, kind in rows(30, 2)])
    assert other.config.labels == ["FRUIT", "METAL"] and other.weights[head[0]].shape == (2, 16)
    assert all((other.weights[name] == tuned.weights[name]).all() for name in tuned.weights if name not in head)
    assert not np.allclose(other.weights[head[0]], tuned.weights[head[0]][:2])
    assert other.hf_config()["id2label"] == {"0": "FRUIT", "1": "METAL"}
    masked = nt.models.BERT.from_hf(folder, head="masked_lm", seed=3)
    new = {name for name in masked.weights if name.startswith("cls.")}
    assert masked.weights.keys() == (tuned.weights.keys() - {*head} - pooler(tuned)) | new
    assert masked.to_hf().__class__.__name__ == "BertForMaskedLM"
    back = nt.models.BERT.from_hf(masked.to_hf(), head="classification", labels=["a", "b"], seed=4)
    assert (back.weights["bert.pooler.dense.weight"] != tuned.weights["bert.pooler.dense.weight"]).any()
    assert back.to_hf().config.id2label == {0: "a", 1: "b"}


@pytest.mark.parametrize("kind", ["BERT", "RoBERTa", "DeBERTaV2"])
def test_a_new_head_is_not_the_one_that_the_folder_began_with(kind: str) -> None:
    """Though the seed is the same; nor is the head after that one."""
    cls = getattr(nt.models, kind)
    sizes = {"layers": 1, "embed": 16, "heads": 2, "vocab": 30, "positions": 8}
    model = cls(cls.Config(**sizes, head="classification", labels=["a", "b"]), seed=3)
    heads = []
    for labels in (["a", "b"], ["c", "d"], ["e", "f"]):
        if heads:
            again = cls.from_hf(model.to_hf(), head="classification", labels=labels, seed=3)
            model = cls.from_hf(model.to_hf(), head="classification", labels=labels, seed=3)
            assert all((again.weights[name] == value).all() for name, value in model.weights.items())
        heads += [value for name, value in model.weights.items() if "classifier" in name and value.shape == (2, 16)]
    assert len(heads) == 3 and not any(np.isin(one, other).any() for one, other in itertools.combinations(heads, 2))


def pooler(model: Any) -> set[str]:
    return {name for name in model.weights if "pooler" in name}


def test_a_weight_that_both_heads_have_must_be_there(run: tuple[Path, str], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(run[0], tmp_path / "broken", ignore=shutil.ignore_patterns("checkpoints"))
    weights = load_file(folder / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.bias"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weight bert.encoder.layer.0.output.dense.bias is missing"):
        nt.models.BERT.from_hf(folder, head="classification", labels=["a", "b"])


# -- what is refused, and the example


def test_settings_that_are_refused(tmp_path: Path) -> None:
    model, of = TREE["model"], {"source": str(tmp_path / "toy.csv"), "text": "words", "label": "kind"}
    (tmp_path / "held.csv").write_text("words,kind\napple,fruit\nidea,thought\n")
    data.train_tokenizer(["some text"], 300).save(str(tmp_path / "plain.json"))
    for changes, told in (
        ({"model": model | {"classes": 4}}, r"model.classes: got 4; allowed: 3, the number of labels in .*toy.csv"),
        ({"model": model | {"labels": ["fruit", "metal"]}}, r"toy.csv, line \d+: the label 'animal'; allowed: fruit"),
        ({"model": model | {"labels": ["a", "a"]}}, r"model.labels: a name is there twice; allowed: each once"),
        ({"model": model | {"labels": ["a"], "classes": 2}}, r"model.labels: got 1 names; allowed: a name for each of"),
        ({"data": of | {"max_bytes": 100}}, r"data.max_bytes: got 100; allowed: null"),
        ({"data": of | {"label": "sort"}}, r"toy.csv, line 1: no column 'sort'; there are 'words', 'kind'; allowed"),
        ({"data": of | {"label": "kin"}}, r"no column 'kin' \(did you mean 'kind'\?\); there are"),
        ({"data": of | {"held_out": str(tmp_path / "none.csv")}}, "data.held_out: no such file"),
        ({"data": of | {"held_out": str(tmp_path / "held.csv")}},
         r"data.held_out: .*held.csv, line 3: the label 'thought' is not in data.source; allowed: animal, fruit, met"),
        ({"model": model | {"head": "masked_lm"}, "data": {"held_out": str(tmp_path / "held.csv")}},
         r"data.held_out: .*held.csv, line 1: no column 'text'; there are 'words', 'kind'; allowed: a table with"),
        ({"tokenizer": {"path": str(tmp_path / "plain.json")}}, r"plain.json has no token \[CLS\], \[SEP\]; allowed"),
        ({"tokenizer": {"vocab_size": 260}}, "tokenizer.vocab_size: got 260; allowed: at least 261"),
        ({"train": TREE["train"] | {"seq": 2}}, "train.seq: got 2; allowed: at least 3"),
    ):  # fmt: skip
        path = write(tmp_path, **changes)
        with pytest.raises(ConfigError, match=told):
            config = load(path)
            check_objective(config, step_spec(config))
            dataset(config)
    with pytest.raises(ConfigError, match=r"has 2 rows, but only one text of each label; allowed: two d.* of a label"):
        dataset(load(write(tmp_path, [["apple", "fruit"], ["iron", "metal"]])))


def test_a_table_of_its_own_to_measure_on(tmp_path: Path) -> None:
    write(tmp_path)
    held = [{"words": "apple pie", "kind": "fruit"}, {"words": "old iron", "kind": "metal"}]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, held)))
    config = load(tmp_path / "tiny.yaml", [f"data.held_out={tmp_path}/held.jsonl", "model.labels=[metal,fruit,animal]"])
    corpus = dataset(config).corpus
    assert (len(corpus.train), len(corpus.held_out)) == (83, 2)
    assert corpus.held_out.classes.tolist() == [1, 0] and corpus.names == ["metal", "fruit", "animal"]


def test_packed_as_padded(tmp_path: Path) -> None:
    """The loss of the sequences of a step is that of the padded batch, and so is what is measured of held-out ones."""
    how = ["train.pack=true", "train.grad_accumulation=2", "model.dropout=0"]
    config = load(write(tmp_path), how)
    assert check_objective(config, step_spec(config)) == "classification"
    batches = dataset(config)
    corpus = batches.corpus
    assert re.fullmatch(r"\d+\.\d% of the bins' 30 tokens filled", batches.describe_lengths())
    step = max(range(1, 9), key=lambda k: len(batches.samples(k)))
    samples = batches.samples(step)
    assert len(samples) > 12  # more than padded
    padded = LabelledCollator(10, corpus.tokenizer.token_to_id("[PAD]"))(zip(*samples, strict=True))
    with nt.Runtime(cpus=2):
        found = []
        for pack, inputs, rows in ((True, batches.train(step), 6), (False, padded, len(samples))):
            model = build_model(config)
            spec = replace(step_spec(config, model), pack=pack, batch=rows, grad_accumulation=2 if pack else 1)
            trainer = nt.Trainer.of_spec(spec)
            loss = trainer.step(inputs)
            trainer.close()
            again = nt.Trainer.of_spec(replace(spec, batch=6, model=build_model(config)))
            found.append((loss, batches.measure(again, whole=True)))
            again.close()
    assert found[0][0] == pytest.approx(found[1][0], rel=2e-6)
    assert found[0][1].pop("held_out_loss") == pytest.approx(found[1][1].pop("held_out_loss"), rel=2e-6)
    assert found[0][1] == found[1][1]  # with the confusion matrix


def test_a_packed_run_learns(tmp_path: Path) -> None:
    write(tmp_path)
    done = nntile(tmp_path, "train", "tiny.yaml", "--set", "train.pack=true")
    assert done.returncode == 0, done.stderr
    assert "of the bins' 30 tokens filled" in done.stdout
    assert lines(tmp_path / "runs" / "tiny")[-1]["accuracy"] > 0.6


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["distilbert", "roberta"])
def test_others_of_the_family(kind: str, tmp_path: Path) -> None:
    model = TREE["model"] | {"type": kind}
    write(tmp_path, model=model)
    done = nntile(tmp_path, "train", "tiny.yaml", "--set", "train.steps=3")
    assert done.returncode == 0, done.stderr
    assert nt.models.from_hf(tmp_path / "runs" / "tiny").config.labels == ["animal", "fruit", "metal"]


def test_the_example(tmp_path: Path) -> None:
    config = load(EXPERIMENTS / "bert_classify.yaml")
    assert check_objective(config, step_spec(config)) == "classification"
    assert config.model.classes == len(config.model.labels) >= 5
    assert isinstance(config.model, BERTConfig) and config.data.source == "python-stdlib"
