"""Documents in all formats, their split, files of tokens, windows and mixtures."""

import codecs
import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import config, corpus_of

from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.data import corpus as module
from nntile_py.data import prepare
from nntile_py.data.corpus import Reading, TextSource, read_corpus
from nntile_py.data.documents import OPTION, Documents, Split, TextPart
from nntile_py.data.sequences import BLOCK, Concatenated, Mixture, SequenceTable, TextWindows, shares
from nntile_py.data.token_files import Tokens, joined_lengths, read_token_file, read_token_folder
from nntile_py.data.tokenization import split_into_sequences, tokenize, train_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.training.datasets import build_dataset

TEXTS = [f"document {k} says hello {k * 7 % 11} times\n" * (1 + k % 5) for k in range(60)]


def write_tables(folder: Path, column: str = "text") -> list[Path]:
    """Write TEXTS in all formats of tables."""
    pa, zstandard = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    import pyarrow.parquet as parquet

    rows = [{column: text, "n": k} for k, text in enumerate(TEXTS)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.ndjson.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    (folder / "d.csv").write_text(f"n,{column}\n" + "".join(f'{k},"{text}"\n' for k, text in enumerate(TEXTS)))
    (folder / "e.tsv").write_text(f"n\t{column}\n" + "".join(f'{k}\t"{text}"\n' for k, text in enumerate(TEXTS)))
    (folder / "f.json").write_text(json.dumps(rows, indent=1))
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "g.parquet", row_group_size=7)
    with pa.ipc.new_file(folder / "h.arrow", table.schema) as file:
        file.write_table(table)
    saved = folder / "dataset"  # as datasets' save_to_disk writes it
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    names = [f"data-0000{k}-of-00002.arrow" for k in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for name, part in zip(names, (table[:40], table[40:]), strict=True):
        with pa.ipc.new_stream(saved / name, table.schema) as file:
            file.write_table(part)
    return sorted(folder.iterdir())


def test_all_formats_give_the_same_documents(tmp_path: Path) -> None:
    for path in write_tables(tmp_path, "body"):
        assert [part.text for part in Documents(str(path), column="body")] == TEXTS, path
        with pytest.raises(ConfigError, match=r"data\.source: .*'text'.*body.*data\.text names another"):
            list(Documents(str(path)))
        with pytest.raises(ConfigError, match=r"SOURCE: .*'text'.*body.*\(--text names another, --messages conv"):
            list(Documents(str(path), key=OPTION))


def test_damaged_tables(tmp_path: Path) -> None:
    """One message that names the file and the row, for tables cut short, empty, or of mixed types."""
    files = write_tables(tmp_path)
    for path in files:
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            cut = ".csv" in path.name or ".tsv" in path.name  # a cut table may end in a whole row
            try:
                documents = list(Documents(str(path)))
                assert cut and len(documents) < len(TEXTS)
            except ConfigError as error:
                assert path.name in str(error) and "allowed" in str(error)
            path.write_bytes(b"")
            with pytest.raises(ConfigError, match=r"data\.source: .*" + path.name):
                list(Documents(str(path)))
    broken = {
        "x.jsonl": ('{"text": "a"}\n{"text": 3}\n', "line 2: 'text' is 3"),
        "y.jsonl": ('{"text": "a"}\n{"text": "b"\n', "line 2: broken JSON"),
        "z.csv": ('text\na\n"b\nc\nd', "line 3: unexpected end of data"),
        "n.csv": ("text\na\n\0b\n", "line 3: has a null byte"),
        "o.jsonl": ('{"text": "a"}\n{"text": "\\ud800"}\n', "line 2: half of a character"),
        "w.txt": ("a\0b", "w.txt is no text: a binary file"),
    }
    for name, (content, message) in broken.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=message):
            list(Documents(str(tmp_path / name)))
    (tmp_path / "null.jsonl").write_text('{"text": null}\n{"text": " "}\n{"text": "a"}\n')
    assert list(Documents(str(tmp_path / "null.jsonl"))) == [TextPart("a")]
    (tmp_path / "p.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    with pytest.raises(ConfigError, match=r"p\.txt is no text: a PNG file"):
        list(Documents(str(tmp_path / "p.txt")))


@pytest.mark.parametrize("text", ["text\nplain\n", "漢字漢字"], ids=["with null bytes", "without"])
@pytest.mark.parametrize(
    ("codec", "mark", "name"),
    [("utf-16-le", codecs.BOM_UTF16_LE, "UTF-16"), ("utf-16-be", codecs.BOM_UTF16_BE, "UTF-16"),
     ("utf-32-le", codecs.BOM_UTF32_LE, "UTF-32"), ("utf-32-be", codecs.BOM_UTF32_BE, "UTF-32")],
)  # fmt: skip
def test_another_encoding_of_unicode_is_named(tmp_path: Path, text: str, codec: str, mark: bytes, name: str) -> None:
    need = rf"allowed: text in UTF-8 \(`iconv -f {name} -t UTF-8` converts {name}\)"
    for file, what in (("w.txt", rf"w\.txt is in {name}"), ("w.csv", rf"w\.csv, is a {name} file")):
        (tmp_path / file).write_bytes(mark + text.encode(codec))
        with pytest.raises(ConfigError, match=f"{what}; {need}"):
            list(Documents(str(tmp_path / file)))
    (tmp_path / "w.csv").unlink()
    (tmp_path / "a.txt").write_text("plain")
    of_folder = Documents(str(tmp_path), [".txt"])
    assert list(of_folder) == [TextPart("plain")] and of_folder.left_out == {f".txt that is {name}": 1}


def test_a_folder_of_mixed_files(tmp_path: Path) -> None:
    """Files of other kinds are left out and counted; tables are read by their column, never as raw text."""
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "row 1"}\n{"text": "row 2"}\n')
    (tmp_path / "c.csv").write_text("name\nx\n")
    (tmp_path / "d.html").write_bytes(b"caf\xe9 latin")
    (tmp_path / "e.png").write_bytes(b"\x89PNG")
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / ".hidden").write_text("no")
    documents = Documents(str(tmp_path), [".txt", ".jsonl", ".csv", ".html"])
    assert [part.text for part in documents] == ["plain", "row 1", "row 2", "packed"]
    told = documents.describe()
    assert told.startswith(f"read 3 of 6 files in {tmp_path}; left out: ")
    for part in ("1 .csv without the column 'text'", "1 .html that is not UTF-8", "1 .png"):
        assert part in told
    assert [part.text for part in documents] == ["plain", "row 1", "row 2", "packed"] and documents.describe() == told
    (tmp_path / "b.jsonl").write_text('{"text": "row 1"}\n{"text": \n')
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2: broken JSON"):  # damaged, not of another kind
        list(documents)


def test_a_long_document_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts join to the text, end at paragraphs, and give the tokens of the whole text."""
    rng, size = np.random.default_rng(0), 2**17
    monkeypatch.setattr("nntile_py.data.documents.PART", size)
    words = np.array(["one", "two ", "\n", "\n\n", " é", "word", "\r\n", "  "])
    text = "start" + "".join(rng.choice(words, 100_000))
    (tmp_path / "long.txt").write_bytes(text.encode())
    parts = list(Documents(str(tmp_path / "long.txt")))
    assert "".join(part.text for part in parts) == text.replace("\r\n", "\r\n") and len(parts) > 1
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(len(part.text) >= size // 2 for part in parts[:-1])
    tokenizer = train_tokenizer([text[:10_000]], 300)
    whole, cut = (
        np.concatenate([block.ids for _, some in tokenize(all_parts, tokenizer, "window", 7) for block in some])
        for all_parts in ([(TextPart(text), False)], [(part, False) for part in parts])
    )
    assert np.array_equal(whole, cut)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}))
    of_rows = list(Documents(str(tmp_path / "long.jsonl")))
    assert "".join(part.text for part in of_rows) == text + "short" and of_rows[-1] == TextPart("short")
    assert [part.last for part in of_rows] == [False] * (len(of_rows) - 2) + [True] * 2
    assert len(of_rows) > 2 and all(len(part.text) < 2 * size for part in of_rows)
    parts = list(Documents(str(tmp_path / "long.txt"), unit="paragraphs"))
    units = [one.text for part in parts for one in split_into_sequences(part, "paragraphs")]
    assert units == [one.text for one in split_into_sequences(TextPart(text), "paragraphs")]


def held_out_of(folder: Path, fraction: float, source: str = "") -> tuple[list[str], list[str]]:
    documents = Documents(str(folder / source) if source else str(folder), [".txt", ".jsonl"])
    sides: tuple[list[str], list[str]] = ([], [])
    for part, held_out in Split(documents, fraction).parts(documents):
        sides[held_out].append(part.text)
    return sides


def test_the_split_stays_when_documents_are_added(tmp_path: Path) -> None:
    texts = [f"text number {k}, " * 9 for k in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts + texts[:20]))
    train, held_out = held_out_of(tmp_path, 0.2)
    assert sorted(train + held_out) == sorted(texts + texts[:20]) and not set(train) & set(held_out)
    assert 0.1 < len(held_out) / len(train + held_out) < 0.3
    (tmp_path / "0.jsonl").write_text("".join(json.dumps({"text": f"new {k}"}) + "\n" for k in range(100)))
    more, more_held_out = held_out_of(tmp_path, 0.2)
    assert set(train) <= set(more) and set(held_out) <= set(more_held_out)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("ab\n é", min_size=1).filter(str.strip), min_size=1, max_size=5), st.floats(0.01, 0.5))
def test_the_split_loses_and_repeats_nothing(texts: list[str], fraction: float) -> None:
    documents: Any = [TextPart(text) for text in texts]
    split = Split(documents, fraction)
    parts = list(split.parts(documents))
    assert "".join(part.text for part, _ in parts) == "".join(texts)
    assert sum(part.last for part, _ in parts) in (len(texts), len(texts) + 1)
    assert split.characters == sum(map(len, texts))


def test_a_single_file_holds_out_its_end(tmp_path: Path) -> None:
    text = "".join(f"line {k}\n" for k in range(1000))
    (tmp_path / "x.txt").write_text(text)
    (train,), (held_out,) = held_out_of(tmp_path, 0.1, "x.txt")
    assert train + held_out == text and train.endswith("\n") and 0.09 < len(held_out) / len(text) < 0.11


# -- tokens on the disk


def read(source: Path, **changes: Any) -> module.Corpus:
    return read_corpus([TextSource(str(source))], Reading(vocab_size=300, extensions=[".txt"], **changes))


def same(one: module.Corpus, other: module.Corpus) -> bool:
    return all(
        np.array_equal(a, b)
        for x, y in zip([*one.train, *one.held_out], [*other.train, *other.held_out], strict=True)
        for a, b in zip(x[:2], y[:2], strict=True)
    )


def test_a_long_text_is_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory, from the cache, after damage, and after a kill: the same tokens. Others where anything differs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("some words, and 12 numbers\n\n" * 400)
    calls = []
    original = prepare.tokenize
    monkeypatch.setattr(prepare, "tokenize", lambda *args: calls.append(1) or original(*args))
    for unit in ("window", "lines"):
        in_memory = read(text, unit=unit)
        monkeypatch.setattr(module, "LONG_TEXT", 1000)
        first = read(text, unit=unit)
        calls.clear()
        assert same(first, in_memory) and same(read(text, unit=unit), first) and not calls
        assert first.tokenizer.to_str() == in_memory.tokenizer.to_str()
        monkeypatch.setattr(module, "LONG_TEXT", 10**6)
    monkeypatch.setattr(module, "LONG_TEXT", 1000)
    for changes in ({"vocab_size": 290}, {"val_fraction": 0.2}, {"max_bytes": 9000}, {"unit": "paragraphs"}):
        calls.clear()
        read_corpus([TextSource(str(text))], Reading(**{"vocab_size": 300} | changes))
        assert calls, changes
    first = read(text)
    for path in sorted((tmp_path / "cache").rglob("*.tokens")) + sorted((tmp_path / "cache").rglob("tokens.json")):
        content = path.read_bytes()
        for damaged in (content[:-1], b"", bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(damaged)
            assert same(read(text), first)
    text.write_text(text.read_text() + "more")
    calls.clear()
    assert not same(read(text), first) and calls


def test_tokenizing_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    monkeypatch.setattr("nntile_py.data.tokenization.BATCH", 500)
    monkeypatch.setattr(prepare, "SAVE_EVERY", 0)
    documents, tokenizer = Documents(str(tmp_path / "rows.jsonl")), train_tokenizer(TEXTS, 300)
    split = Split(documents, 0.2)
    expected = prepare.tokenize_into_memory(documents, split, tokenizer, "window", 0)
    reports: list[str] = []
    original, folder = prepare.tokenize, tmp_path / "out"
    folder.mkdir()

    def killed(*args: Any) -> Any:
        for count, blocks in enumerate(original(*args)):
            if count == 3:
                raise KeyboardInterrupt
            yield blocks

    for _ in range(3):
        monkeypatch.setattr(prepare, "tokenize", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare.tokenize_into_folder(folder, documents, split, tokenizer, "window", 0, {}, "key")
        with pytest.raises(ConfigError, match="cannot read the tokens"):
            read_token_folder(folder)
    monkeypatch.setattr(prepare, "tokenize", original)
    prepare.tokenize_into_folder(
        folder, documents, split, tokenizer, "window", 0, {"unit": "window"}, "key", reports.append
    )
    assert "going on after" in reports[0]
    made = read_token_folder(folder)
    assert same(*(module.Corpus(tokenizer, [a], [b]) for a, b in
                  ((made.train, made.held_out), (expected["train"], expected["held_out"]))))  # fmt: skip
    assert {path.suffix for path in folder.iterdir()} == {".tokens", ".lengths", ".learned", ".json"}


def test_a_long_piece_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text without spaces is one piece, whose tokens come after minutes without any other message."""
    for name in ("prepare", "documents"):
        monkeypatch.setattr(f"nntile_py.data.{name}.PART", 40)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in (79, 80)))
    documents, reports = Documents(str(tmp_path / "rows.jsonl")), list[str]()
    assert [len(part.text) for part in documents] == [79, 80]
    (tmp_path / "out").mkdir()
    prepare.tokenize_into_folder(
        tmp_path / "out", documents, Split(documents, 0.5), train_tokenizer(["ab"], 300), "window", 0, {}, "key",
        reports.append,
    )  # fmt: skip
    assert reports == ["tokenizing 80 characters without a space as one piece, which can take minutes"]


def test_the_cache_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prepare, "CACHED_BYTES", 2500)
    for number, name in enumerate("abc"):
        folder = prepare.cached_folder(name)
        folder.mkdir(parents=True)
        (folder / "train.tokens").write_bytes(bytes(1000))
        (folder / "tokens.json").write_text("{}")
        os.utime(folder / "tokens.json", (number, number))
    prepare.trim_cache()
    assert {path.name for path in prepare.cached_folder("a").parent.iterdir()} == {"b", "c"}


def test_tokens_of_other_programs(tmp_path: Path) -> None:
    lengths = np.array([5, 1, 9, 30])
    ids = np.random.default_rng(0).integers(1, 250, lengths.sum()).astype(np.uint16)
    ids[np.cumsum(lengths) - 1] = 0
    ids.tofile(tmp_path / "nano.bin")
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + ids.tobytes())
    ids.tofile(tmp_path / "mega.bin")
    index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) + (4).to_bytes(8, "little")
    index += (5).to_bytes(8, "little") + lengths.astype(np.int32).tobytes()
    index += ((np.cumsum(lengths) - lengths) * 2).astype(np.int64).tobytes() + np.arange(5).tobytes()
    (tmp_path / "mega.idx").write_bytes(index)
    for name in ("nano.bin", "llmc.bin", "mega.bin", "mega.idx"):
        tokens = read_token_file(tmp_path / name, 0, 300)
        assert np.array_equal(tokens.ids, ids) and tokens.lengths.tolist() == lengths.tolist(), name
    assert read_token_file(tmp_path / "nano.bin", None, 300).lengths.tolist() == [45]
    for name, content in {"nano.bin": ids.tobytes()[:-1], "llmc.bin": header.tobytes() + ids.tobytes()[:-2],
                          "mega.idx": index[:60]}.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"data\.source: cannot read .*{name}.*allowed: uint16 token numbers"):
            read_token_file(tmp_path / name, 0, 300)
    (tmp_path / "mega.idx").unlink()
    with pytest.raises(ConfigError, match=r"token number .*, and the tokenizer has 20 tokens"):
        read_token_file(tmp_path / "mega.bin", 0, 20)
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(str(tmp_path / "t.json"))
    path = str(tmp_path / "mega.bin")
    with pytest.raises(ConfigError, match=r"has tokens and no tokenizer; allowed with it: tokenizer.path"):
        corpus_of(config(tmp_path, path))
    found = corpus_of(config(tmp_path, path, f"tokenizer={{path: {tmp_path}/t.json}}", "data.val_fraction=0.3"))
    assert np.array_equal(np.concatenate([found.train[0].ids, found.held_out[0].ids]), ids)
    assert found.train[0].lengths.tolist() == [5, 1, 9, 30 - 13] and found.held_out[0].lengths.tolist() == [13]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6))
def test_segments_join_to_sequences(sequences: list[list[int]]) -> None:
    segments = [n if k == len(one) - 1 else -n for one in sequences for k, n in enumerate(one)
                if n or k == len(one) - 1]  # fmt: skip
    assert joined_lengths(np.array(segments, np.int64)).tolist() == [sum(one) for one in sequences if sum(one)]


# -- windows and mixtures


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 12), st.integers(0, 3))
def test_windows_cover_their_documents(lengths: list[int], seq: int, epoch: int) -> None:
    """All tokens, no window in two documents, full windows wherever the document is long enough."""
    windows = TextWindows(np.array(lengths), seq, 5)
    document = np.repeat(np.arange(len(lengths)), lengths)
    covered = np.zeros(sum(lengths), int)
    for number, length in enumerate(windows.lengths):
        (place,) = windows.place(epoch, number)
        inside = document[place]
        assert len(inside) == length == min(seq, lengths[inside[0]]) and len({*inside.tolist()}) == 1
        covered[place] += 1
    assert covered.min() >= 1 and covered.sum() - len(covered) < seq * len(lengths)


def test_windows_begin_elsewhere_in_each_epoch() -> None:
    windows = TextWindows(np.array([105]), 10, 0)
    begins = {windows.place(epoch, 3)[0].start for epoch in range(40)}
    assert len(begins) == 6 and TextWindows(np.array([105]), 10, None).place(7, 3)[0].start == 30


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 12), st.integers(0, 2))
def test_concatenated_windows(lengths: list[int], seq: int, epoch: int) -> None:
    """Each token at most once in an epoch, documents in another order, only a window's length left over."""
    if sum(lengths) < seq:
        with pytest.raises(ValueError, match="tokens"):
            Concatenated(np.array(lengths), seq, 0)
        return
    windows = Concatenated(np.array(lengths), seq, 1)
    tokens = np.arange(sum(lengths))
    found = [np.concatenate([tokens[place] for place in windows.place(epoch, k)]) for k in range(len(windows.lengths))]
    assert {len(one) for one in found} == {seq}
    flat = np.concatenate(found)
    assert len({*flat.tolist()}) == len(flat) > len(tokens) - 2 * seq


def mixture(sizes: list[int], weights: list[float]) -> Mixture:
    tokens = [Tokens(np.arange(size) + 1000 * k, np.ones(size, np.int64)) for k, size in enumerate(sizes)]
    sequences: list[SequenceTable] = [TextWindows(one.lengths, 4, 0) for one in tokens]
    return Mixture(tokens, sequences, weights, 3)


def test_a_mixture_has_its_weights_and_each_source_its_epochs() -> None:
    mixed = mixture([50, 3000, 700], [0.5, 0.3, 0.2])
    numbers = np.concatenate([mixed.order(epoch) for epoch in range(6)])
    assert len(numbers) == 6 * 3750
    values = np.array([mixed.take(int(number))[0][0] for number in numbers])
    for first in range(0, len(values) - BLOCK, BLOCK):
        assert (values[first : first + BLOCK] < 1000).sum() == BLOCK // 2
    blocks = values[: 5 * BLOCK]
    counts = Counter(blocks[blocks < 1000].tolist()).values()  # each epoch of a source has each sequence once
    assert len(counts) == 50 and max(counts) - min(counts) <= 1
    assert np.array_equal(mixed.order(4), mixture([50, 3000, 700], [0.5, 0.3, 0.2]).order(4))
    alone = mixture([40], [2.0])
    assert sorted(alone.order(0).tolist()) == [*range(40)] and sorted(alone.order(2).tolist()) == [*range(80, 120)]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(6, 5000))
def test_shares(weights: list[float], total: int) -> None:
    found = shares(weights, total)
    assert sum(found) == total and min(found) >= 1
    exact = np.array(weights) / sum(weights) * total
    assert all(abs(a - b) <= 1 for a, b in zip(found, exact, strict=True) if exact.min() >= 1)


def test_a_run_reads_a_mixture_and_a_held_out_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha beta gamma\n" * 200)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": f"row {k} delta"}) + "\n" for k in range(300)))
    (tmp_path / "h.txt").write_text("held out text\n" * 50)
    entries = [{"path": str(tmp_path / "a.txt"), "weight": 3}, {"path": str(tmp_path / "b.jsonl"), "text": "body"}]
    of = config(tmp_path, str(tmp_path / "a.txt"), f"data.source={json.dumps(entries)}",
                f"data.held_out={tmp_path}/h.txt", "train.batch=8")  # fmt: skip
    assert load_again(of, tmp_path).data == of.data
    dataset = build_dataset(of, step_spec(of))
    text = [dataset.tokenizer.decode(row) for step in range(1, 60) for row in dataset.train(step)["input_ids"].tolist()]
    share = np.mean(["row" in one or "delta" in one for one in text])
    assert 0.2 < share < 0.3
    rows = [row.tolist() for batch in dataset.held_out() for row in batch["input_ids"]]  # type: ignore[union-attr]
    assert all(dataset.tokenizer.decode(row) in "held out text\n" * 50 for row in rows)
    for wrong, message in (([], "data.source: got \\[\\]"), ([{"path": "nowhere"}], r"data.source\[0\].path: no such"),
                           ([{"weight": 1}], r"data.source\[0\]"), ([{"path": str(tmp_path), "weight": 0}], "weight")):
        with pytest.raises(ConfigError, match=message):
            config(tmp_path, str(tmp_path), f"data.source={json.dumps(wrong)}")


def load_again(of: Any, folder: Path) -> Any:
    (folder / "again.yaml").write_text(of.to_yaml())
    return load(folder / "again.yaml")


def test_short_documents_are_padded_packed_or_concatenated(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"row {k}"}) + "\n" for k in range(300)))

    def dataset(*sets: str) -> Any:
        of = config(tmp_path, str(tmp_path / "b.jsonl"), "train.batch=4", "train.seq=24", *sets)
        return build_dataset(of, step_spec(of))

    padded = dataset()
    batch = padded.train(1)
    assert set(batch) == {"input_ids", "labels"} and (batch["labels"] == -100).any()
    assert "of a batch is padding" in padded.describe_lengths()
    joined = dataset("data.concatenate=true")
    assert (joined.train(1)["labels"] != -100).all() and not joined.describe_lengths()
    packed = dataset("train.pack=true")
    assert packed.train(1).live and "filled" in packed.describe_lengths()
    with pytest.raises(ConfigError, match=r"data.concatenate: got true; allowed with train.pack: true: false"):
        dataset("train.pack=true", "data.concatenate=true")
