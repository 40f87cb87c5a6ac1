"""Corpus, tokenizer, split and batches."""

import json
import os
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Python
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.config.sections import DataSection
from nntile_py.data import text as data
from nntile_py.data import text_dataset
from nntile_py.data.array_cache import cached
from nntile_py.data.tables import read_labelled_texts
from nntile_py.data.tokenizer import load_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.inference.texts import read_texts
from nntile_py.system.folders import stdlib_files
from nntile_py.training.datasets import build_dataset


def config(tmp_path: Path, source: str, *overrides: str) -> RunConfig:
    tree = {"model": {"layers": 1, "embed": 8, "heads": 2}, "train": {"steps": 1, "batch": 2, "seq": 8}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree | {"data": {"source": source}, "tokenizer": {"vocab_size": 300}}))
    return load(path, overrides)


def documents_of(**settings: Any) -> list[str]:
    section = DataSection(**settings)
    return data.read_documents(section.source, section.extensions, section.max_bytes)


def corpus_of(config: RunConfig) -> data.Corpus:
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
    assert documents_of(source=source, max_bytes=22) == ["first", "second", "third", "caf\ufffd"]
    (tmp_path / "text" / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"data.source: .*latin.txt: byte 3 \(0xe9\) is not UTF-8 .*allowed: text in"):
        documents_of(source=source)


ODD = "one\u2028still\x0cone\x0b\x85\x1c\rone"  # characters at which str.splitlines ends a line


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """Form feeds and Unicode's line separators are part of a line; a byte order mark is not part of the text."""
    for end in ("\n", "\r\n"):
        for last in ("", end):
            text = end.join([ODD, "two", "", "  ", "three", "four"]) + last
            (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
            documents = documents_of(source=str(tmp_path / "x.txt"))
            assert documents == [text]
            assert data.split_into_sequences(documents, "window") == [text]
            assert data.split_into_sequences(documents, "lines") == [ODD, "two", "three", "four"]
            assert data.split_into_sequences(documents, "paragraphs") == [f"{ODD}\ntwo", "three\nfour"]
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
            assert [text for text in read_texts(tmp_path / name, "text")] == [*texts]
        (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + end.join([*texts, ""]).encode())
        assert read_texts(tmp_path / "x.txt", "text") == [*texts]


@pytest.mark.parametrize("content", [b"", b"  \n"])
def test_no_text_is_a_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data.source: no text in .*x.txt; allowed: a text file, or a folder"):
        corpus_of(config(tmp_path, str(path)))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"data.source: no file with one of the extensions .txt, .*data.extensions"):
        corpus_of(config(tmp_path, str(tmp_path / "folder")))


def test_too_little_text_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a few words\n" * 9)
    with pytest.raises(ConfigError, match=r"the held-out text .* tokens; allowed: at least train.seq = 8"):
        corpus_of(config(tmp_path, str(path)))


def test_the_split_is_by_documents_and_near_the_fraction() -> None:
    documents = [f"document {i} " * (20 + i % 7) for i in range(200)]
    train, held = data.split(documents, 0.1)
    assert sorted(train + held) == sorted(documents)
    assert 0.08 < sum(map(len, held)) / sum(map(len, documents)) < 0.15
    assert data.split(documents[::-1], 0.1)[1] == held[::-1]  # the text decides, not its order


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.floats(0.01, 0.5))
@example(["0" * 15, "0" * 19, "0" * 19], 0.5)
def test_the_split_loses_and_repeats_nothing(documents: list[str], fraction: float) -> None:
    train, held = data.split(documents, fraction)
    assert sorted("".join(train + held).replace("\n", "")) == sorted("".join(documents).replace("\n", ""))
    assert sum(map(len, held)) <= 1.5 * fraction * sum(map(len, documents)) + 1e-9  # whole documents overshoot


def test_a_single_file_holds_out_its_end() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    (train,), (held,) = data.split([text], 0.1)
    assert train + held == text
    assert train.endswith("\n")
    assert 0.09 < len(held) / len(text) < 0.11


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
    ids, _ = data.encode(tokenizer, [text], tokenizer.token_to_id(data.END_OF_TEXT))
    assert tokenizer.decode(ids[:-1].tolist()) == text
    assert ids[-1] == tokenizer.token_to_id(data.END_OF_TEXT)


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
    assert corpus.train.max() < asked.model.vocab


def test_training_batches_come_from_seed_and_step_alone() -> None:
    tokens = np.arange(50, dtype=np.uint16)
    batch = text_dataset.training_batch(tokens, 64, 7, seed=3, step=5)
    assert batch.shape == (64, 7)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()
    assert (batch == text_dataset.training_batch(tokens, 64, 7, seed=3, step=5)).all()
    assert (batch != text_dataset.training_batch(tokens, 64, 7, seed=3, step=6)).any()
    assert (batch != text_dataset.training_batch(tokens, 64, 7, seed=4, step=5)).any()
    starts = np.concatenate([text_dataset.training_batch(tokens, 64, 7, 0, step)[:, 0] for step in range(20)])
    assert (starts.min(), starts.max()) == (0, 43)  # the first and the last place are drawn too
    assert (text_dataset.training_batch(tokens[:7], 2, 7, 0, 1) == np.arange(7)).all()


def test_held_out_batches_are_spread_and_fixed() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = list(text_dataset.held_out_batches(tokens, 4, 10, 3))
    assert [b.shape for b in batches] == [(4, 10)] * 3
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 999


def test_numbers_of_tokens_with_gaps() -> None:
    tree = json.loads(data.train_tokenizer(["some text"], 260).to_str())
    vocab = tree["model"]["vocab"]
    vocab["e"] = 70000  # more than 16 bits hold
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    assert tokenizer.get_vocab_size() == 260 and data.token_numbers(tokenizer) == 70001
    tokens, _ = data.encode(tokenizer, ["e"])
    assert tokens[0] == 70000 and tokenizer.decode(tokens.tolist()) == "e"


@pytest.mark.parametrize("text", ["a" * 10**6, " " * 10**6, "".join(np.random.default_rng(0).choice([*"ACGT"], 10**6))])
def test_text_without_words(text: str) -> None:
    """It is not one word of a million letters, which would take minutes; and comes back from its tokens."""
    begin = time.process_time()
    tokenizer = data.train_tokenizer([text], 300)
    tokens, _ = data.encode(tokenizer, [text])
    assert time.process_time() - begin < 30  # of the processor: other work may share the machine
    assert tokenizer.decode(tokens.tolist()) == text


# -- what is kept of a long text


def test_a_long_text_is_made_into_tokens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same corpus, to the bit, from the file; another one where anything that it is made of differs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "LONG_TEXT", 1000)
    text = tmp_path / "text.txt"
    text.write_text("some words, and 12 numbers\n" * 400)
    made = []
    encode = data.encode
    monkeypatch.setattr(data, "encode", lambda *given, **how: made.append(1) or encode(*given, **how))

    def corpus(*overrides: str) -> tuple[str, bytes, bytes, int]:
        made.clear()
        of = corpus_of(config(tmp_path, str(text), *overrides))
        return of.tokenizer.to_str(pretty=True), of.train.tobytes(), of.held_out.tobytes(), len(made)

    *first, times = corpus()
    *again, none = corpus()
    assert first == again and (times, none) == (2, 0)
    monkeypatch.setattr(data, "LONG_TEXT", 10**9)
    assert [*corpus()[:3]] == first  # without the file
    monkeypatch.setattr(data, "LONG_TEXT", 1000)
    for change in ("tokenizer.vocab_size=290", "data.val_fraction=0.2", "data.max_bytes=9000"):
        assert corpus(change)[3] == 2, change
    corpus_of(config(tmp_path, str(text))).tokenizer.save(str(tmp_path / "t.json"))
    other = [f"tokenizer.path={tmp_path}/t.json", "tokenizer.vocab_size=null"]
    assert corpus(*other)[1:] == (first[1], first[2], 2) and corpus(*other)[3] == 0
    text.write_text(text.read_text() + "more")
    assert corpus()[3] == 2


def test_a_damaged_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    right = {"a": np.arange(1000, dtype=np.uint16), "b": np.zeros(0, np.int32)}
    calls = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return right

    def same() -> bool:
        found = cached("test", "key", make)
        return all(found[n].dtype == one.dtype and np.array_equal(found[n], one) for n, one in right.items())

    assert same() and same() and len(calls) == 1
    path = tmp_path / "nntile_py" / "test" / "key.npz"
    whole = path.read_bytes()
    for content in (b"", b"PK", whole[:-30], whole[: len(whole) // 2], b"x" * 100, None):
        before = len(calls)
        if content is None:
            path.unlink()
            path.mkdir()  # nothing can be written in its place
        else:
            path.write_bytes(content)
        assert same() and len(calls) == before + 1
    path.rmdir()
    path.write_bytes(whole)
    for place in range(150, len(whole) - 150, 37):  # within the arrays: a wrong bit is found
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert same(), place
    assert not list(path.parent.glob("*.tmp*"))


def test_what_is_kept_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("nntile_py.data.array_cache.MAX_BYTES", 7000)
    for number, name in enumerate("abc"):
        cached("test", name, lambda: {"x": np.zeros(2000, np.uint8)})
        os.utime(tmp_path / "nntile_py" / "test" / f"{name}.npz", (number, number))
    assert len(cached("test", "a", dict)["x"]) == 2000  # used: now b is the oldest
    cached("test", "d", lambda: {"x": np.zeros(2000, np.uint8)})
    assert {p.stem for p in (tmp_path / "nntile_py" / "test").iterdir()} == {"a", "c", "d"}
    cached("test", "e", lambda: {"x": np.zeros(20_000, np.uint8)})
    assert [p.stem for p in (tmp_path / "nntile_py" / "test").iterdir()] == ["e"]


def test_several_processes_keep_the_same(tmp_path: Path, python: Python) -> None:
    code = (
        "import numpy as np\nfrom nntile_py.data.array_cache import cached\n"
        "for k in range(40):\n"
        "    a = cached('test', str(k % 4), lambda: {'x': np.full(50_000, k % 4, np.int32)})['x']\n"
        "    assert (a == k % 4).all() and len(a) == 50_000\n"
    )
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: python(code, XDG_CACHE_HOME=str(tmp_path)), range(3)))
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 3
