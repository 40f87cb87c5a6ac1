"""Corpus, tokenizer, split and batches."""

import json
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nntile_py.config.builders import step_spec
from nntile_py.config.data_section import DataSection
from nntile_py.config.run_config import RunConfig, load
from nntile_py.data import text_dataset
from nntile_py.data import tokenization as data
from nntile_py.data.corpus import Corpus
from nntile_py.data.documents import Documents, TextPart
from nntile_py.data.tables import read_labelled_texts
from nntile_py.data.tokenizer import END_OF_TEXT, load_tokenizer, token_numbers
from nntile_py.errors import ConfigError
from nntile_py.inference.texts import placed_texts
from nntile_py.system.folders import stdlib_files
from nntile_py.training.datasets import build_dataset


def config(tmp_path: Path, source: str, *overrides: str) -> RunConfig:
    tree = {"model": {"layers": 1, "embed": 8, "heads": 2}, "train": {"steps": 1, "batch": 2, "seq": 8}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree | {"data": {"source": source}, "tokenizer": {"vocab_size": 300}}))
    return load(path, overrides)


def documents_of(**settings: Any) -> list[str]:
    section = DataSection(**settings)
    documents = Documents(section.name, section.extensions, section.text, section.max_bytes)
    return [part.text for part in documents]


def tokens_of(tokenizer: Tokenizer, text: str, end: int | None = None) -> np.ndarray:
    blocks = [block for _, some in data.tokenize([(TextPart(text), False)], tokenizer, "window", end) for block in some]
    return np.concatenate([block.ids for block in blocks] or [np.zeros(0, int)])


def corpus_of(config: RunConfig) -> Corpus:
    dataset = build_dataset(config, step_spec(config))
    assert isinstance(dataset, text_dataset.TextDataset)
    return dataset.corpus


def test_the_standard_library_without_its_tests(tmp_path: Path) -> None:
    documents = documents_of(max_bytes=2_000_000)
    assert 1_900_000 < sum(len(d.encode()) for d in documents) < 2_100_000
    assert documents == documents_of(max_bytes=2_000_000)
    everything = documents_of()
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").read_text(encoding="utf-8") in everything
    assert (root / "json" / "decoder.py").read_text(encoding="utf-8") in everything
    assert (root / "unittest" / "case.py").read_text(encoding="utf-8") in everything
    assert not any("site-packages" in str(p) or "/test/" in str(p) for p in stdlib_files())


def test_a_folder_by_extension_in_the_order_of_names(tmp_path: Path) -> None:
    for name, text in {
        "b.md": "second",
        "a.TXT": "first",
        "c.bin": "no",
        "d/e.txt": "third",
        "tests/t.txt": "fourth",
    }.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text)
    (tmp_path / "text" / "empty.txt").write_text(" \n")
    (tmp_path / "text" / "f.txt").write_text("caf\u00e9")
    source = str(tmp_path / "text")
    assert documents_of(source=source) == ["first", "second", "third", "café", "fourth"]
    assert documents_of(source=source, extensions=[".bin"]) == ["no"]
    assert documents_of(source=source, max_bytes=8) == ["first", "sec"]
    assert documents_of(source=source, max_bytes=20) == ["first", "second", "third", "caf\ufffd"]
    (tmp_path / "text" / "latin.txt").write_bytes(b"caf\xe9")
    assert documents_of(source=source) == ["first", "second", "third", "café", "fourth"]
    with pytest.raises(ConfigError, match=r"data.source: .*latin.txt: byte 3 \(0xe9\) is not UTF-8 .*allowed: text in"):
        documents_of(source=f"{source}/latin.txt")


ODD = "one\u2028still\x0cone\x0b\x85\x1c\rone"  # characters at which str.splitlines ends a line


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """Form feeds and Unicode's line separators are part of a line; a byte order mark is not part of the text."""
    for end in ("\n", "\r\n"):
        for last in ("", end):
            text = end.join([ODD, "two", "", "  ", "three", "four"]) + last
            (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
            documents = documents_of(source=str(tmp_path / "x.txt"))
            assert documents == [text]
            names = "window", "lines", "paragraphs"
            units = {unit: data.split_into_sequences(TextPart(text), unit) for unit in names}
            assert units["window"] == [TextPart(text)]
            assert [part.text for part in units["lines"]] == [ODD, "two", "three", "four"]
            assert [part.text for part in units["paragraphs"]] == [f"{ODD}\ntwo", "three\nfour"]
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf \n")
    with pytest.raises(ConfigError, match=r"data\.source: no text in"):
        documents_of(source=str(tmp_path / "x.txt"))


def test_lines_of_tables(tmp_path: Path) -> None:
    texts = {ODD: "a", "two\ufeff": "b"}
    for end in ("\n", "\r\n"):
        rows = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in texts.items()]
        content = {"x.jsonl": rows, "x.csv": ["text,label", *(f'"{text}",{label}' for text, label in texts.items())]}
        for name, lines in content.items():
            (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + end.join([*lines, ""]).encode())
            found = read_labelled_texts("data.source", str(tmp_path / name), "text", "label")
            assert {one.text: one.label for one in found} == texts
            assert [text for text, _ in placed_texts(tmp_path / name, "text")] == [*texts]
        (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + end.join([*texts, ""]).encode())
        assert [text for text, _ in placed_texts(tmp_path / "x.txt", "text")] == [*texts]


@pytest.mark.parametrize("content", [b"", b"  \n"])
def test_no_text_is_a_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data.source: no text in .*x.txt; allowed: a text file, a table, or"):
        corpus_of(config(tmp_path, str(path)))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"data.source: no file with one of the extensions .txt, .*data.extensions"):
        corpus_of(config(tmp_path, str(tmp_path / "folder")))


def test_too_little_text_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a few")
    with pytest.raises(ConfigError, match=r"the held-out text of .* has not even two tokens; allowed: more text"):
        corpus_of(config(tmp_path, str(path)))


def test_the_tokenizer_is_the_same_each_time_and_loses_nothing(tmp_path: Path) -> None:
    documents = documents_of(max_bytes=300_000)
    first, second = data.train_tokenizer(documents, 400), data.train_tokenizer(documents, 400)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 400
    text = "def f(x):\n\treturn 'Zürich ☃ \x00'  # 日本\n"
    assert first.decode(first.encode(text).ids) == text
    first.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(text).ids == first.encode(text).ids


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = data.train_tokenizer(["def f(): pass\n"], 270)
    ids = tokens_of(tokenizer, text, tokenizer.token_to_id(END_OF_TEXT))
    assert tokenizer.decode(ids[:-1].tolist()) == text
    assert ids[-1] == tokenizer.token_to_id(END_OF_TEXT)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.path: cannot read .*; allowed: a tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_given_tokenizer_is_used(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("to be or not to be\n" * 100)
    tokenizer = data.train_tokenizer(["other words"], 280)
    tokenizer.save(str(tmp_path / "mine.json"))
    asked = config(tmp_path, str(tmp_path / "x.txt"), f"tokenizer={{path: {tmp_path}/mine.json}}")
    assert asked.model.vocab == tokenizer.get_vocab_size()
    corpus = corpus_of(asked)
    assert corpus.tokenizer.to_str() == tokenizer.to_str()
    assert corpus.train[0].ids.max() < asked.model.vocab


def test_numbers_of_tokens_with_gaps() -> None:
    tree = json.loads(data.train_tokenizer(["some text"], 260).to_str())
    vocab = tree["model"]["vocab"]
    vocab["e"] = 70000  # more than 16 bits hold
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    assert tokenizer.get_vocab_size() == 260 and token_numbers(tokenizer) == 70001
    tokens = tokens_of(tokenizer, "e")
    assert tokens[0] == 70000 and tokenizer.decode(tokens.tolist()) == "e"


@pytest.mark.parametrize("text", ["a" * 10**6, " " * 10**6, "".join(np.random.default_rng(0).choice([*"ACGT"], 10**6))])
def test_text_without_words(text: str) -> None:
    """It is not one word of a million letters, which would take minutes; and comes back from its tokens."""
    begin = time.process_time()
    tokenizer = data.train_tokenizer([text], 300)
    tokens = tokens_of(tokenizer, text)
    assert time.process_time() - begin < 30  # of the processor: other work may share the machine
    assert tokenizer.decode(tokens.tolist()) == text


@pytest.mark.parametrize("item", ["path:a.txt", "weight:2", "text:body"])
def test_a_source_whose_key_has_no_space_after_its_colon(
    item: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    need = "with no space after the colon of the key NAME; allowed: a path, or {path: ..., weight: ..., text: ...}"
    message = f"data.source[0]: got '{item}', {need}".replace("NAME", item.partition(":")[0])
    with pytest.raises(ConfigError, match=f"{re.escape(message)}$"):
        config(tmp_path, str(tmp_path), f"data.source=[{item}]")
    with pytest.raises(ConfigError, match=r"data.source\[0\].path: no such file: c:a.txt"):
        config(tmp_path, str(tmp_path), "data.source=[c:a.txt]")
    (tmp_path / item).write_text("a file of this name\n" * 50)
    of = config(tmp_path, str(tmp_path), f"data.source=[{item}]")
    assert of.data.name == str(tmp_path / item)
