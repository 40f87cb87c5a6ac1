"""`nntile eval`: measures of trained models on a text or a table, against loops with transformers."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, processors

from nntile_py.data.tokenization import train_tokenizer
from nntile_py.data.tokenizer import MASKED, frame
from nntile_py.data.windows import spans
from nntile_py.errors import ConfigError
from nntile_py.inference import eval_command
from nntile_py.inference.evaluation import mask_text
from nntile_py.inference.open_model import open_model
from nntile_py.system.progress import progress_bar

POSITIONS = 24
WORDS = ["tile", "task", "step", "weight", "graph", "rank", "the", "of", "a", "worker"]
LABELS, TAGS = ["bad", "fair", "good"], ["O", "B-PART", "I-PART"]


def words(seed: int, count: int) -> str:
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(count))


@functools.cache
def tokenizer(start: bool = False) -> Tokenizer:
    """A tokenizer of all models; `start`: with a template that begins a text with a special token, as Llama's."""
    made = train_tokenizer([words(0, 3000)], 300, MASKED)
    if start:
        ends = [("[CLS]", made.token_to_id("[CLS]"))]
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A", pair="[CLS] $A $B", special_tokens=ends)
    return made


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}),
    "llama": ("Llama", "ForCausalLM", SIZES | {"num_key_value_heads": 1, "max_position_embeddings": POSITIONS}),
    "bert": ("Bert", "ForMaskedLM", SIZES | {"max_position_embeddings": POSITIONS}),
    "classifier": (
        "Bert", "ForSequenceClassification",
        SIZES | {"max_position_embeddings": POSITIONS, "id2label": dict(enumerate(LABELS)), "num_labels": 3},
    ),
    "several": (
        "Bert", "ForSequenceClassification",
        SIZES | {
            "max_position_embeddings": POSITIONS, "id2label": dict(enumerate(LABELS)), "num_labels": 3,
            "problem_type": "multi_label_classification",
        },
    ),
    "bare": ("Bert", "Model", SIZES | {"max_position_embeddings": POSITIONS}),
    "words": (
        "Bert", "ForTokenClassification",
        SIZES | {"max_position_embeddings": POSITIONS, "id2label": dict(enumerate(TAGS)), "num_labels": 3},
    ),
    "answers": ("Bert", "ForQuestionAnswering", SIZES | {"max_position_embeddings": POSITIONS}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`models(name)`: folder and transformers model of a row of MODELS; the same at each call."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str) -> tuple[Path, Any]:
        torch.manual_seed(1)
        family, kind, sizes = MODELS[name]
        config = getattr(transformers, f"{family}Config")(vocab_size=300, **sizes)
        model = getattr(transformers, f"{family}{kind}")(config).eval()
        with torch.no_grad():
            for param in model.parameters():
                param += 0.2 * torch.randn_like(param)
        model.save_pretrained(root / name)
        tokenizer(start=name == "llama").save(str(root / name / "tokenizer.json"))
        return root / name, model

    return make


@pytest.fixture
def nntile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """`nntile(arguments)` in a folder with the text text.txt: exit status, what it printed, its errors."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(words(3, 150))

    def run(*arguments: Any) -> tuple[int, str, str]:
        return command.nntile("eval", *arguments, "--set", "runtime.cpus=2"), *capsys.readouterr()

    return run


def measures(nntile: Any, *arguments: Any) -> dict[str, Any]:
    status, out, error = nntile(*arguments, "--json")
    assert status == 0, error
    (row,) = json.loads(out)
    return dict(row)


# -- causal models


def loop(model: Any, ids: list[int], seq: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' guide on perplexity: mean loss of the predicted tokens, their number."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + seq, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        targets = inputs.clone()
        targets[:, : -(end - before)] = -100
        with torch.no_grad():
            logits = model(inputs).logits
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], targets[0, 1:], reduction="none")
        total, count, before = total + float(losses.sum()), count + int((targets[0, 1:] != -100).sum()), end
        if end == len(ids):
            break
    return total / count, count


TILES = "--set", "tiles.embed=7", "--set", "tiles.vocab=128", "--set", "tiles.heads=1", "--set", "tiles.ffn=10"


@pytest.mark.parametrize(
    ("name", "seq", "stride", "more"),
    [
        ("gpt2", 24, 12, ()),
        ("gpt2", 24, 24, (*TILES, "--set", "tiles.seq=9", "--set", "tiles.batch=3")),
        ("gpt2", 17, 5, ("--batch", 3, "--set", "precision=fp64")),
        ("llama", 24, 1, (*TILES, "--batch", 64)),
        ("llama", 20, 13, ("--set", "tiles.seq=6", "--set", "model.attention=flash")),
    ],
)
def test_causal_models_as_transformers_guide_measures_them(
    nntile: Any, models: Any, name: str, seq: int, stride: int, more: tuple[str, ...]
) -> None:
    folder, model = models(name)
    text = Path("text.txt").read_text()
    ids = tokenizer(start=name == "llama").encode(text).ids
    loss, count = loop(model, ids, seq, stride)
    row = measures(nntile, folder, "--data", "text.txt", "--seq", seq, "--stride", stride, *more)
    assert row["tokens"] == count and row["loss"] == pytest.approx(loss, abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    own = len(tokenizer().encode(text).ids)
    assert row["bits_per_byte"] == pytest.approx(loss / math.log(2) * own / len(text.encode()), rel=1e-5)


def test_each_token_is_predicted_once() -> None:
    for tokens, seq in itertools.product(range(1, 40), range(1, 12)):
        for stride in range(1, seq + 1):
            new = [range(first, end) for _, first, end in spans(tokens, seq, stride)]
            assert [token for part in new for token in part] == list(range(tokens))
            assert all(begin <= first < end <= begin + seq for begin, first, end in spans(tokens, seq, stride))


def test_a_text_shorter_than_a_window(nntile: Any, models: Any) -> None:
    folder, model = models("gpt2")
    Path("short.txt").write_text("tile of task")
    ids = tokenizer().encode("tile of task").ids
    assert 2 <= len(ids) < POSITIONS
    loss, count = loop(model, ids, POSITIONS, POSITIONS)
    row = measures(nntile, folder, "--data", "short.txt")
    assert (row["tokens"], row["seq"], row["stride"]) == (count, 24, 12)
    assert row["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_folder_is_read_as_in_training(nntile: Any, models: Any, name: str) -> None:
    """Files with the extensions of training, in the order of their names, with the end of a text between them."""
    folder, model = models(name)
    texts = {"b.md": words(5, 40), "a.txt": words(6, 50), "sub/c.txt": words(7, 30)}
    for file, text in {**texts, "d.bin": words(8, 30), "e.txt": " \n"}.items():
        (Path("texts") / file).parent.mkdir(parents=True, exist_ok=True)
        (Path("texts") / file).write_text(text)
    end = tokenizer().token_to_id("<|endoftext|>")
    parts = [tokenizer().encode(texts[file]).ids for file in ("a.txt", "b.md", "sub/c.txt")]
    ids = [*parts[0], end, *parts[1], end, *parts[2]]
    row = measures(nntile, folder, "--data", "texts")
    if name == "gpt2":
        loss, count = loop(model, ids, POSITIONS, 12)
        assert end is not None and row["tokens"] == count and row["loss"] == pytest.approx(loss, abs=1e-5)
        bits = loss / math.log(2) * (len(ids) - 2) / sum(len(text) for text in texts.values())
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    else:
        _, labels, _ = mask_text(open_model(folder), np.array(ids), 0.15, 0)
        assert row["tokens"] == (labels != -100).sum()
    only = measures(nntile, folder, "--data", "texts", "--set", "data.extensions=[.md]")
    Path("b.txt").write_text(texts["b.md"])
    assert only["loss"] == measures(nntile, folder, "--data", "b.txt")["loss"]


def test_rows_of_a_table_are_documents_of_a_language_model(nntile: Any, models: Any) -> None:
    texts = [words(3, 40), words(50, 90)]
    Path("t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("texts").mkdir()
    for number, text in enumerate(texts):
        Path(f"texts/{number}.txt").write_text(text)
    rows = [measures(nntile, models("gpt2")[0], "--data", data) for data in ("t.jsonl", "texts")]
    assert rows[0]["tokens"] > 0 and [row["tokens"] for row in rows] == [rows[0]["tokens"]] * 2
    assert rows[0]["loss"] == rows[1]["loss"]


# -- masked models


@pytest.mark.parametrize(("seq", "stride", "more"), [(24, 22, TILES), (16, 5, ("--batch", 2))])
def test_masked_models_as_transformers_loop(
    nntile: Any, models: Any, seq: int, stride: int, more: tuple[str, ...]
) -> None:
    folder, model = models("bert")
    ids = np.array(tokenizer().encode(Path("text.txt").read_text()).ids)
    seen, labels, (cls, sep) = mask_text(open_model(folder), ids, 0.15, 5)
    assert (cls, sep) == tuple(map(tokenizer().token_to_id, ("[CLS]", "[SEP]")))
    total = right = count = before = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + seq - 2, len(ids))
        inputs = [cls, *ids[begin:before], *seen[max(begin, before) : end], sep]
        with torch.no_grad():
            logits = model(torch.tensor([inputs])).logits[0, 1:-1].double()
        wanted = torch.tensor(labels[begin:end])
        wanted[: before - begin] = -100
        total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        right += int((logits.argmax(-1) == wanted).sum())
        count += int((wanted != -100).sum())
        before = end
        if end == len(ids):
            break
    assert count == (labels != -100).sum() and 0.08 < count / len(ids) < 0.22
    row = measures(nntile, folder, "--data", "text.txt", "--seq", seq, "--stride", stride, "--set", "seed=5", *more)
    assert row["tokens"] == count and row["loss"] == pytest.approx(total / count, abs=1e-5)
    assert row["accuracy"] == right / count


# -- classifiers


def rows(several: bool) -> list[tuple[str, Any]]:
    drawn = random.Random(4)
    texts = [words(seed, drawn.randint(1, 30)) for seed in range(40)]
    return [(text, [x for x in LABELS if drawn.random() < 0.4] if several else drawn.choice(LABELS)) for text in texts]


def logits_of(model: Any, samples: list[tuple[str, Any]]) -> Any:
    cutting = Tokenizer.from_str(tokenizer().to_str())
    frame(cutting)
    cutting.enable_truncation(POSITIONS)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([cutting.encode(text).ids])).logits for text, _ in samples]).double()


def test_classifiers_as_transformers(nntile: Any, models: Any) -> None:
    folder, model = models("classifier")
    samples = rows(several=False)
    Path("t.csv").write_text("review,stars\n" + "".join(f"{text},{label}\n" for text, label in samples))
    logits, wanted = logits_of(model, samples), torch.tensor([LABELS.index(label) for _, label in samples])
    columns = "--set", "data.text=review", "--set", "data.label=stars"
    row = measures(nntile, folder, "--data", "t.csv", *columns, *TILES[:4], "--set", "tiles.batch=3")
    assert row["texts"] == len(samples) and row["cut"] > 0
    assert row["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, wanted)), abs=1e-5)
    guess = logits.argmax(-1)
    assert row["accuracy"] == float((guess == wanted).double().mean())
    each = []
    for number in range(3):
        right = int(((guess == number) & (wanted == number)).sum())
        each.append(2 * right / int((guess == number).sum() + (wanted == number).sum()))
    assert row["f1_macro"] == pytest.approx(sum(each) / 3)


def test_classifiers_of_several_labels_as_transformers(nntile: Any, models: Any) -> None:
    folder, model = models("several")
    samples = rows(several=True)
    Path("t.jsonl").write_text("".join(json.dumps({"text": t, "label": labels}) + "\n" for t, labels in samples))
    wanted = torch.tensor([[float(name in labels) for name in LABELS] for _, labels in samples]).double()
    logits = logits_of(model, samples)
    row = measures(nntile, folder, "--data", "t.jsonl")
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)
    assert row["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert row["accuracy"] == float(((logits > 0) == (wanted > 0.5)).all(1).double().mean())


def test_classifiers_of_words_as_transformers(nntile: Any, models: Any) -> None:
    folder, model = models("words")
    drawn = random.Random(7)
    texts = [[(drawn.choice(WORDS), drawn.choice(TAGS)) for _ in range(drawn.randint(1, 9))] for _ in range(20)]
    Path("t.conll").write_text("\n".join("".join(f"{word} {tag}\n" for word, tag in text) for text in texts))
    framed = Tokenizer.from_str(tokenizer().to_str())
    frame(framed)
    logits, wanted = [], []
    for text in texts:
        encoding = framed.encode(" ".join(word for word, _ in text))
        with torch.no_grad():
            made = model(torch.tensor([encoding.ids])).logits[0].double()
        start = 0
        for word, tag in text:
            place = next(k for k, (a, b) in enumerate(encoding.offsets) if a <= start < b)
            logits.append(made[place])
            wanted.append(TAGS.index(tag))
            start += len(word) + 1
    loss = torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor(wanted))
    row = measures(nntile, folder, "--data", "t.conll", *TILES)
    assert (row["texts"], row["words"]) == (20, len(wanted))
    assert row["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert row["accuracy"] == pytest.approx(
        float((torch.stack(logits).argmax(-1) == torch.tensor(wanted)).double().mean())
    )
    assert 0 <= row["f1"] <= 1


# -- the command


def test_one_table_of_several_models(nntile: Any, models: Any) -> None:
    gpt2, llama = models("gpt2")[0], models("llama")[0]
    status, out, _ = nntile(gpt2, llama, gpt2, "--data", "text.txt", "--stride", 24)
    head, *lines = out.splitlines()
    assert status == 0 and head.split() == ["run", "tokens", "loss", "perplexity", "bits/byte", "s"]
    assert [Path(line.split()[0]).name for line in lines] == ["gpt2", "llama", "gpt2"]
    assert lines[0].split()[1:5] == lines[2].split()[1:5] != lines[1].split()[1:5]


def test_a_terminal_of_80_columns_shows_names_whole_and_measures_in_columns(
    nntile: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose name leaves room for its measures has one line, a run with a longer name has two lines."""
    short, long = Path("runs/my_run/best"), Path("a_folder_with_a_name") / "of_more_than_eighty_characters" / ("x" * 40)
    for link in (short, long):
        link.parent.mkdir(parents=True)
        link.symlink_to(models("gpt2")[0])
    monkeypatch.setenv("FORCE_COLOR", "1")  # like a terminal
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = nntile(short, "--data", "text.txt")
    head, line = out.splitlines()
    assert status == 0 and line.startswith(f"{short}  ") and len(head) == len(line) <= 80 and "bits/byte" in head
    status, out, _ = nntile(short, long, "--data", "text.txt")
    run, head, *lines = out.splitlines()
    assert status == 0 and run == "run" and lines[::2] == [str(short), str(long)]
    assert len(head) == len(lines[1]) == len(lines[3]) <= 80 and "bits/byte" in head


def test_the_table_of_a_classifier_fits_80_columns() -> None:
    row = {"run": "runs/classifier/best", "step": 1000, "texts": 26248, "loss": 0.25, "accuracy": 0.5}
    row |= {"f1_macro": 0.5, "seconds": 100.0}
    for more, count in (({}, 2), ({"f1": 0.5, "cut": 12}, 4)):
        lines = eval_command.table([row | more], 80).splitlines()
        assert len(lines) == count and all(len(line) <= 80 for line in lines)


def test_the_bar_fits_80_columns_names_its_times_and_vanishes() -> None:
    screen = io.StringIO()
    with progress_bar(Console(file=screen, force_terminal=True, color_system=None, width=80)) as progress:
        times = [100.0]
        progress.get_time = lambda: times[-1]
        bar = progress.add_task("10 of 12: " + "long_name" * 9, total=22225, unit="windows")
        for now in (101.0, 111.0):
            times.append(now)
            progress.update(bar, advance=5500)
        progress.refresh()
    lines = [line.strip() for line in screen.getvalue().split("\x1b[2K") if "11,000" in line]
    assert re.fullmatch(r"10 of 12: \w+… [━╸╺]+ *11,000/22,225 windows  0:00:11 elapsed, 0:00:21 left", lines[0]), lines
    assert len(lines[0]) <= 80
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")
    log = io.StringIO()
    with pytest.raises(ConfigError), progress_bar(Console(file=log)) as progress:
        progress.add_task("run", total=None)
        raise ConfigError("wrong")
    assert not log.getvalue()


def test_all_folders_are_checked_before_the_first_measurement(
    nntile: Any, models: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their kinds of models and tokenizers."""
    gpt2 = models("gpt2")[0]
    models("gpt2")[1].save_pretrained("bare")
    for run, message in (
        ("nowhere", "nowhere: no such folder; allowed: the folder of a run"),
        (__file__, f"{__file__}: is a file; allowed: the folder of a run"),
        ("bare", "bare has no tokenizer.json, which turns texts into tokens"),
        (models("answers")[0], "BERT has head: question_answering; allowed: models with the head"),
        (models("classifier")[0], "--data: text.txt: not the name of a table"),
    ):
        capsys.readouterr()  # what save_pretrained prints
        status, out, error = nntile(gpt2, run, "--data", "text.txt")
        assert status == 2 and not out and error.startswith("error: ") and message in error


def test_what_was_measured_is_shown_before_an_error(nntile: Any, models: Any) -> None:
    """An error that only the tokens of the text show."""
    models("gpt2")[1].save_pretrained("other")
    train_tokenizer([words(0, 3000) + "".join(map(chr, range(0x4E00, 0x4F00))) * 3], 700).save("other/tokenizer.json")
    Path("text.txt").write_text("".join(map(chr, range(0x4E00, 0x4F00))))
    status, out, error = nntile(models("gpt2")[0], "other", "--data", "text.txt")
    assert status == 2 and "perplexity" in out and "error: RUN: other/tokenizer.json has the token number" in error


def test_json_names_the_folder_only_if_it_is_not_the_run(
    nntile: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run without weights of its own, whose newest checkpoint is measured."""
    row = measures(nntile, f"{models('gpt2')[0]}/", "--data", "text.txt")
    assert row["run"] == f"{models('gpt2')[0]}/" and "folder" not in row
    monkeypatch.setattr(eval_command, "open_model", lambda run, fields: open_model(models("gpt2")[0], fields))
    assert measures(nntile, "run", "--data", "text.txt")["folder"] == str(models("gpt2")[0])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gpt2", "--data text.txt --stride 0", "--stride: got 0; allowed: 1 to 24 (--seq = 24)"),
        ("gpt2", "--data text.txt --stride 25", "--stride: got 25; allowed: 1 to 24 (--seq = 24)"),
        ("gpt2", "--data text.txt --seq 25", "--seq: got 25; allowed: at most the 24 positions of the model"),
        ("gpt2", "--data text.txt --seq 1", "--seq: got 1; allowed: at least 2"),
        ("gpt2", "--data text.txt --seq 0", "--seq"),
        ("gpt2", "--data text.txt --batch 0", "--batch"),
        ("bert", "--data text.txt --seq 2", "--seq: got 2; allowed: at least 3"),
        ("bert", "--data text.txt --stride 23", "--stride: got 23; allowed: 1 to 22 (--seq = 24, less [CLS]"),
        ("gpt2", "--data none.txt", "--data: none.txt is no such file or folder; allowed: a text file, a folder"),
        ("gpt2", "--data empty", "--data: no text in empty; allowed: a text file, a table, or a folder of such"),
        ("gpt2", "--data . --set data.extensions=[.bin]", "--data: no file with one of the extensions .bin in ."),
        ("classifier", "--data .", "--data: . is a folder; allowed for a classifier: a table"),
        ("gpt2", "--data empty.txt", "--data: no text in empty.txt; allowed"),
        ("gpt2", "--data one.txt", "--data: the text has 1 token; allowed: at least 2"),
        ("bert", "--data one.txt", "--data: the text has 1 token; allowed: at least 2"),
        ("gpt2", "--data latin.txt", "--data: latin.txt: byte 3 (0xe9) is not UTF-8"),
        ("gpt2", "--data t.csv --set data.text=body", "--data: t.csv, line 1: no column 'body'; there are 'text', 'l"),
        ("classifier", "--data text.txt", "--data: text.txt: not the name of a table; allowed: a table"),
        ("classifier", "--data t.csv --stride 3", "--stride: got 3 for a classifier, "),
        ("classifier", "--data other.csv", "--data: other.csv, line 2: the label 'poor'; allowed: the classes of the"),
        ("classifier", "--data t.csv --set data.label=stars", "no column 'stars'"),
        ("bare", "--data text.txt", "BERT has head: none; allowed: models with the head causal_lm, masked_lm,"),
        ("answers", "--data text.txt", "BERT has head: question_answering; allowed: models with the head"),
        ("words", "--data t.csv", "--data: t.csv: not the name of a file of labelled words; allowed: with head: token"),
        ("gpt2", "--data text.txt --set optimizer.lr=1", "--set optimizer.lr=1: unknown key; allowed: precision"),
        ("gpt2", "--data text.txt --set tiles.foo=1", "tiles.foo: unknown key; allowed: batch, seq"),
        ("gpt2", "--data text.txt --set precision=bf16", "precision: bf16 needs GPUs"),
        ("gpt2", "--data text.txt --set model.embed=12", "gpt2"),
        (".", "--data text.txt", ".: no model.safetensors or pytorch_model.bin; allowed: the folder of a run"),
    ],
)  # fmt: skip
def test_wrong_input_ends_with_one_message(nntile: Any, models: Any, name: str, arguments: str, message: str) -> None:
    Path("empty").mkdir()
    Path("empty/empty.txt").write_text(" \n")
    Path("empty.txt").write_text(" \n")
    Path("one.txt").write_text("a")
    Path("latin.txt").write_bytes(b"caf\xe9 of the tile")
    Path("t.csv").write_text("text,label\na tile,good\n")
    Path("other.csv").write_text("text,label\na tile,poor\n")
    status, out, error = nntile(models(name)[0] if name in MODELS else name, *arguments.split())
    assert status == 2 and message in error and out == ""
    assert "Traceback" not in error and error.count("rror") == 1


def test_folders_without_a_tokenizer_or_with_one_of_another_model(nntile: Any, models: Any, tmp_path: Path) -> None:
    models("gpt2")[1].save_pretrained("bare")
    status, _, error = nntile("bare", "--data", "text.txt")
    assert status == 2 and "error: bare has no tokenizer.json, which turns texts into tokens" in error
    other = train_tokenizer([words(0, 3000) + "".join(map(chr, range(0x4E00, 0x4F00))) * 3], 700)
    other.save("bare/tokenizer.json")
    Path("text.txt").write_text("".join(map(chr, range(0x4E00, 0x4F00))))
    status, _, error = nntile("bare", "--data", "text.txt")
    assert status == 2 and "allowed: a tokenizer of the model, whose token numbers are 0 to 299" in error
