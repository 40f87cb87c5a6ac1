"""Texts whose words have labels: read them from a CoNLL file or from JSON lines, and find the words' first tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from nntile_py.data.collators import Array
from nntile_py.data.files import format_suffix
from nntile_py.data.rows import is_dataset, place, read_rows
from nntile_py.data.tables import LabelledText, lines_of, name_of, read_labelled_texts, read_text, text_of
from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.folders import STDLIB
from nntile_py.system.units import counted
from nntile_py.tasks.cross_entropy import IGNORED

# A text has one label (`one`), any number of labels (`several`), or one label for each word (`words`).
LabelKind = Literal["one", "several", "words"]
ONE, SEVERAL, WORDS = get_args(LabelKind)
CONLL = (".conll", ".iob", ".iob2", ".bio", ".tsv", ".txt")  # suffixes of files with a word and its label in each line
_LISTS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")  # suffixes of tables whose rows may have lists
_DOCUMENT = "-DOCSTART-"  # in the data of CoNLL 2003, a line with this word begins a document


def read_samples(key: str, source: str, text: str, label: str, kind: LabelKind) -> list[LabelledText]:
    """Return the texts of a file with their labels.

    Args:
        key: Key of the config that names the file, for messages.
        source: The file.
        text: Column of the texts.
        label: Column of the labels.
        kind: A text has one label, several labels, or one label for each word.

    Raises:
        ConfigError: The file cannot be read, or a text or label is missing. The message names file and line.
    """
    if kind != WORDS:
        return read_labelled_texts(key, source, text, label, several=kind == SEVERAL)
    if source == STDLIB:
        raise ConfigError(f"{key}: {STDLIB} has no labels of words; allowed: {_allowed(text, label)}")
    try:
        stat = os.stat(source)
        return _read(key, source, text, label, (stat.st_mtime_ns, stat.st_size))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {source}: {error.strerror}; allowed: {_allowed(text, label)}") from None


def _allowed(text: str, label: str) -> str:
    return (
        f"with head: token_classification a file {', '.join(CONLL)} with a word and its label in each line, or"
        f" {_LISTS[0]} with lists of equal length at the keys {text!r} and {label!r} (data.text and data.label name"
        " others)"
    )


@lru_cache(maxsize=2)
def _read(key: str, source: str, text: str, label: str, changed: tuple[int, int]) -> list[LabelledText]:
    """Read a file. The result is cached. changed: time and size of the file, so that a changed file is read again."""
    where, need, path = f"{key}: {source}", _allowed(text, label), Path(source)
    if path.suffix.lower() in CONLL:
        samples = list(_conll_texts(where, path))
    elif format_suffix(path) in _LISTS or is_dataset(path):
        rows = read_rows(where, path, (text, label), need)
        samples = [_row_text(f"{where}, {place(path, line)}", row, text, label, line) for line, row in rows]
    else:
        raise ConfigError(f"{where}: not the name of a file of labelled words; allowed: {need}")
    if not samples:
        raise ConfigError(f"{where}: no rows; allowed: {need}")
    return samples


def _conll_texts(where: str, path: Path) -> Iterator[LabelledText]:
    """Yield the texts of a CoNLL file. An empty line, or a line that begins with -DOCSTART-, ends a text.

    The first column is the word and the last column its label. Columns are separated by tabs; in a line without tabs,
    by blanks."""
    words: list[str] = []
    labels: list[str] = []
    columns = 0
    for number, line in enumerate([*lines_of(read_text(where, path)), ""], 1):
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if not any(fields) or fields[0] == _DOCUMENT:
            if words:
                yield _text(words, labels, number - len(words))
            words, labels = [], []
            continue
        columns = columns or len(fields)
        if len(fields) < 2 or len(fields) != columns:
            need = f"{columns}, as in the first line" if columns > 1 else "a word and its label, or more columns"
            raise ConfigError(f"{where}, line {number}: {counted(len(fields), 'column')}; allowed: {need}")
        words.append(text_of(f"{where}, line {number}", "word", fields[0]))
        labels.append(name_of(f"{where}, line {number}", "label", fields[-1]))


def _row_text(here: str, row: dict[str, Any], text: str, label: str, line: int) -> LabelledText:
    for key in (text, label):
        if not isinstance(row[key], list) or not row[key]:
            raise ConfigError(f"{here}: {key!r} is {short(row[key])}; allowed: a list with an item for each word")
    if len(row[text]) != len(row[label]):
        counts = f"{len(row[text])} in {text!r}, {len(row[label])} in {label!r}"
        raise ConfigError(f"{here}: lists of unequal lengths: {counts}; allowed: a label for each word")
    words = [text_of(here, text, word) for word in row[text]]
    return _text(words, [name_of(here, label, one) for one in row[label]], line)


def _text(words: list[str], labels: list[str], line: int) -> LabelledText:
    return LabelledText(" ".join(words), "", line, tuple(labels), tuple(words))


# -- tokens


def first_tokens(
    words: Sequence[str], offsets: Sequence[tuple[int, int]], special: Sequence[int]
) -> tuple[Array, Array]:
    """Return the places of the first tokens of words, and the numbers of these words, both in order.

    If the space before a word is a token of its own, it counts as the first token of the word. A word that the
    tokenizer cut away, or that has no tokens, is missing in the result.

    Args:
        words: The words of the text.
        offsets: Where each token begins and ends in the words joined by single spaces.
        special: 1 for special tokens such as [CLS], which belong to no word.
    """
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = ends - [len(word) for word in words]
    spans = np.array(offsets)
    numbers = np.searchsorted(ends, spans[:, 0], side="right")  # first word that ends behind the token's start
    reached = starts[np.minimum(numbers, len(words) - 1)] <= spans[:, 1]
    inside = np.flatnonzero((numbers < len(words)) & reached & (np.array(special) == 0))
    found, first = np.unique(numbers[inside], return_index=True)
    return inside[first], found


def classes_of_tokens(found: Sequence[tuple[Array, Array]]) -> Array:
    """Return the classes of texts' tokens, int16 [texts, longest text]; IGNORED for tokens that do not begin a word.

    Args:
        found: For each text: the places of tokens, and the classes of these tokens.
    """
    longest = max((int(places[-1]) + 1 for places, _ in found if len(places)), default=1)
    classes = np.full((len(found), longest), IGNORED, np.int16)
    for row, (places, numbers) in enumerate(found):
        classes[row, places] = numbers
    return classes
