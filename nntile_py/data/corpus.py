"""Corpus: the tokens of a run's text. Reads text, tables and files of tokens; splits off held-out text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from nntile_py.data.collators import Array
from nntile_py.data.documents import Documents, Split
from nntile_py.data.instructions import Instructions
from nntile_py.data.prepare import cached_folder, locked, read_cached, tokenize_into_folder, tokenize_into_memory
from nntile_py.data.prepare import trim_cache as trim_cached_folders
from nntile_py.data.token_files import (
    HELD_OUT,
    TRAIN,
    TokenFolder,
    Tokens,
    is_token_file,
    is_token_folder,
    read_token_file,
    read_token_folder,
)
from nntile_py.data.tokenization import LONG_TEXT, Report, silent, train_tokenizer
from nntile_py.data.tokenizer import END_OF_TEXT, token_numbers
from nntile_py.errors import ConfigError
from nntile_py.system.folders import NO_ROOM, STDLIB

TRAINED_ON = 256 * 2**20  # characters; of a longer text, a new tokenizer is trained on a sample of about this size


class TextSource(NamedTuple):
    """A source of text, and its share of a mixture.

    Attributes:
        path: `python-stdlib`, a text file, a table, a folder, or tokens (token_files).
        weight: Share of the training sequences that come from the source, relative to other sources.
        column: Column of a table with the text."""

    path: str
    weight: float = 1.0
    column: str = "text"


@dataclass(frozen=True)
class Reading:
    """How text is read and tokenized.

    Attributes:
        extensions: File name endings to read in a folder.
        max_bytes: Upper bound on the bytes to read from each source.
        val_fraction: Share of the text to hold out.
        unit: What a sequence is: window, lines, paragraphs or documents.
        tokenizer: An existing tokenizer. None: a new one is trained on the training text.
        vocab_size: Size of a new tokenizer.
        special: Special tokens of a new tokenizer besides END_OF_TEXT, for a masked model. If there are any, a line,
            paragraph or document has no end token, because the sequences of a masked model end in [SEP].
        end: Token that ends a document if `tokenizer` is given. With a new tokenizer, it is END_OF_TEXT.
        report: Shows a message before work that takes seconds.
        instructions: Turns rows of tables into texts whose answers are learned. None: a row's text is in a column.
    """

    extensions: Sequence[str] = ()
    max_bytes: int | None = None
    val_fraction: float = 0.05
    unit: str = "window"
    tokenizer: Tokenizer | None = None
    vocab_size: int = 4096
    special: Sequence[str] = ()
    end: int | None = None
    report: Report = silent
    instructions: Instructions | None = None

    def close(self, tokenizer: Tokenizer) -> int | None:
        """Return the token that ends a sequence's text; None if no token does."""
        number: int | None = self.end if self.tokenizer else tokenizer.token_to_id(END_OF_TEXT)
        if self.instructions and self.instructions.ended:
            return None
        return number if self.unit == "window" or not self.special else None


@dataclass
class Corpus:
    """A tokenized text.

    Attributes:
        tokenizer: The tokenizer of the text.
        train: Tokens of the training part of each source.
        held_out: Tokens of the held-out part of each source.
        weights: Weight of each source.
        unit: What a sequence is: `window`, `lines`, `paragraphs` or `documents`.
        end: Token that ends a document. None: documents have no such token.
        notes: For each source from which files were left out, one line of text on these files."""

    tokenizer: Tokenizer
    train: list[Tokens]
    held_out: list[Tokens]
    weights: list[float] = field(default_factory=lambda: [1.0])
    unit: str = "window"
    end: int | None = None
    notes: list[str] = field(default_factory=list)


def read_corpus(sources: Sequence[TextSource], reading: Reading, held_out: str | None = None) -> Corpus:
    """Read, split and tokenize text. The cache folder keeps the tokens of a long text.

    Args:
        sources: Where the text is. A new tokenizer is trained on the first source.
        reading: How the text is read.
        held_out: A source whose whole text is held out; the sources are then not split. None: the sources are split.

    Raises:
        ConfigError: There is no text, or no held-out text.
    """
    if held_out is not None:
        reading = replace(reading, val_fraction=0.0)
    parts = list[TokenFolder]()
    for source in sources:
        parts.append(_read(source, reading, "data.source"))
        if reading.tokenizer is None:
            tokenizer = Tokenizer.from_str(parts[0].tokenizer)
            reading = replace(reading, tokenizer=tokenizer, end=reading.close(tokenizer))
    assert reading.tokenizer
    measured = [part.held_out for part in parts]
    if held_out is not None:
        column = sources[0].column
        own = _read(TextSource(held_out, column=column), replace(reading, val_fraction=0.0), "data.held_out")
        measured = [own.train]
    corpus = Corpus(
        reading.tokenizer, [part.train for part in parts], measured, [source.weight for source in sources],
        reading.unit, reading.close(reading.tokenizer),
        [note for part in parts if (note := part.facts.get("left_out"))],
    )  # fmt: skip
    _check(corpus, sources, reading, held_out)
    return corpus


def _check(corpus: Corpus, sources: Sequence[TextSource], reading: Reading, held_out: str | None) -> None:
    larger = ", a larger data.max_bytes" if reading.max_bytes else ""
    need = f"more text{larger}, or another data.val_fraction" if held_out is None else "more text"
    unit = "two tokens" if reading.unit == "window" else f"a {reading.unit.removesuffix('s')} with a token in it"
    for name, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        for part, source in zip(tokens, sources, strict=False):
            if len(part.ids) < (2 if reading.unit == "window" else 1):
                where = held_out if held_out is not None and name == "held-out" else source.path
                raise ConfigError(f"data.source: the {name} text of {where} has not even {unit}; allowed: {need}")


def _read(source: TextSource, reading: Reading, key: str) -> TokenFolder:
    path = Path(source.path)
    if reading.instructions and (is_token_folder(path) or is_token_file(path)):
        raise ConfigError(f"{key}: {path} has tokens; allowed with data.messages or data.prompt: tables")
    if source.path != STDLIB and is_token_folder(path):
        return _checked_folder(path, reading, key)
    if source.path != STDLIB and is_token_file(path):
        return _token_file(path, reading, key)
    documents = Documents(source.path, reading.extensions, source.column, reading.max_bytes, reading.unit, key,
                          reading.instructions)  # fmt: skip
    cache_key = tokens_key(documents, reading)
    if cached := read_cached(cache_key):
        return cached
    split = Split(documents, reading.val_fraction)
    tokenizer = reading.tokenizer or new_tokenizer(documents, split, reading)
    unit, end, facts = reading.unit, reading.close(tokenizer), facts_of(documents, split, reading, tokenizer)
    if split.characters >= LONG_TEXT:
        folder = cached_folder(cache_key)
        try:
            with locked(folder, reading.report):
                if not (cached := read_cached(cache_key)):  # another process may have written the tokens meanwhile
                    tokenize_into_folder(
                        folder, documents, split, tokenizer, unit, end, facts, cache_key, reading.report
                    )
                    cached = read_cached(cache_key)
            trim_cached_folders()
            if cached:
                return cached
        except OSError as error:  # a full or read-only disk
            why = f"{error.strerror}: the tokens of {source.path} stay in memory"
            reading.report(f"note: {folder.parent}: {why}" + " until there is room" * (error.errno in NO_ROOM))
    tokens = tokenize_into_memory(documents, split, tokenizer, unit, end)
    return TokenFolder(tokens[TRAIN], tokens[HELD_OUT], tokenizer.to_str(), facts)


def new_tokenizer(documents: Documents, split: Split, reading: Reading) -> Tokenizer:
    """Train a tokenizer on the training part of documents, or on an evenly spread sample of a long text."""
    every = -(-split.characters // TRAINED_ON)
    texts = (part.text for k, (part, held_out) in enumerate(split.parts(documents)) if not held_out and k % every == 0)
    size = split.characters // every
    return train_tokenizer(texts, reading.vocab_size, reading.special, reading.report, size)


def facts_of(documents: Documents, split: Split, reading: Reading, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the facts that are stored with tokens: how the text was read and split, and what was left out."""
    return {
        "unit": reading.unit, "end": reading.close(tokenizer), "val_fraction": reading.val_fraction,
        "special": [*reading.special], "digest": split.digest, "left_out": documents.describe(),
    }  # fmt: skip


def _checked_folder(path: Path, reading: Reading, key: str) -> TokenFolder:
    """Open a folder of tokens. Raises ConfigError if a key of the config contradicts how it was prepared."""
    folder = read_token_folder(path, key)
    facts = folder.facts
    if reading.tokenizer and reading.tokenizer.get_vocab() != Tokenizer.from_str(folder.tokenizer).get_vocab():
        need = f"the tokenizer of {path}/tokenizer.json, or leave tokenizer.path out"
        raise ConfigError(f"{key}: {path} was prepared with another tokenizer; allowed: {need}")
    if facts.get("unit") != reading.unit:
        raise ConfigError(f"data.sequences: got {reading.unit}; allowed: {facts.get('unit')}, as {path} was prepared")
    if bool(facts.get("special")) != bool(reading.special):
        kinds = {True: "a masked model", False: "a causal model"}
        asked, prepared = kinds[bool(reading.special)], kinds[bool(facts.get("special"))]
        raise ConfigError(f"{key}: {path} was prepared for {prepared}; allowed for {asked}: to prepare it again")
    return folder


def _token_file(path: Path, reading: Reading, key: str) -> TokenFolder:
    """Open another program's file of tokens, and split it into training and held-out documents by `val_fraction`."""
    if reading.tokenizer is None:
        need = "tokenizer.path, the tokenizer.json of these tokens"
        raise ConfigError(f"{key}: {path} has tokens and no tokenizer; allowed with it: {need}")
    if reading.unit not in ("window", "documents"):
        raise ConfigError(f"data.sequences: got {reading.unit}; allowed for tokens such as {path}: window, documents")
    tokens = read_token_file(path, reading.end, token_numbers(reading.tokenizer), key)
    total = len(tokens.ids)
    cut = total - int(reading.val_fraction * total)
    ends = np.cumsum(tokens.lengths)
    first = int(np.searchsorted(ends, cut, side="left")) + 1  # documents that are trained on
    bound = int(ends[first - 1]) if first < len(ends) else cut  # if the cut is in the last document: hold out its end
    train = np.minimum(tokens.lengths[:first], bound - (ends - tokens.lengths)[:first])
    held = [total - bound] if first == len(ends) else tokens.lengths[first:]
    parts = (Tokens(tokens.ids[:bound], train), Tokens(tokens.ids[bound:], np.array(held, np.int64)))
    return TokenFolder(*parts, reading.tokenizer.to_str(), {})


def tokens_key(documents: Documents, reading: Reading) -> str:
    """Return a hash of everything that determines the tokens: files with size and time, the split, the tokenizer."""
    digest = hashlib.sha256(tokenizers.__version__.encode())
    for module in ("tokenization", "documents", "rows", "files", "instructions", "corpus"):
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    tokenizer = reading.tokenizer.to_str() if reading.tokenizer else f"{reading.vocab_size} {[*reading.special]}"
    how = reading.instructions.key if reading.instructions else None
    settings = (how, tokenizer, reading.val_fraction, reading.unit, reading.end, documents.column, documents.max_bytes)
    digest.update(repr(settings).encode())
    for path in documents.paths():
        facts = path.stat()
        digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns} ".encode())
    return digest.hexdigest()[:32]


def fingerprint(array: Array | None) -> bytes:
    """Return a hash of an array: of all its bytes, or of an evenly spread sample of a large array."""
    if array is None:
        return b""
    digest, size = hashlib.sha256(f"{array.dtype} {len(array)}".encode()), 2**15
    if array.nbytes <= 2**26:
        digest.update(np.ascontiguousarray(array).tobytes())
    else:
        for first in np.linspace(0, len(array) - size, 1024).astype(np.int64):
            digest.update(array[first : first + size].tobytes())
    return digest.digest()
