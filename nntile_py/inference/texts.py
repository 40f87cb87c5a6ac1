"""Texts: out of files, and into tokens."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.folders import read
from nntile_py.tokenizer import CLS, SEP, frame

Array = np.ndarray[Any, Any]


class Tokens(NamedTuple):
    """Of one text: the numbers of its tokens and their kinds, int64 [tokens]; whether the text was cut."""

    ids: Array
    kinds: Array
    cut: bool = False


# -- to tokens


def with_limit(tokenizer: Tokenizer, longest: int, framed: bool) -> Tokenizer:
    """A copy that cuts texts at `longest` tokens and fills none up.

    framed: one without a template gets [CLS] before and [SEP] behind, as `nntile train` frames what it trains on."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    there = all(own.token_to_id(token) is not None for token in (CLS, SEP))
    if framed and there and not own.num_special_tokens_to_add(False):
        frame(own)
    if (least := own.num_special_tokens_to_add(True)) >= longest:
        raise ConfigError(f"max_length: {longest} is not allowed; the tokenizer's template alone has {least} tokens")
    own.enable_truncation(longest)
    return own


def tokens_of(texts: Any) -> Sequence[Any]:
    """`texts` as a sequence; ValueError for what is none of texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray):
        raise ValueError(f"texts: got {short(texts)}; allowed: a list of texts, or of lists of token numbers")
    return list(texts)


def to_tokens(
    texts: Sequence[Any], tokenizer: Tokenizer | None, longest: int, vocab: int | None, first: int
) -> list[Tokens]:
    """Tokens of texts, of pairs of texts, or of lists of token numbers, which are these already.

    first: the number of the first one, for messages. Raises ValueError for one that has no tokens or too many, and for
    numbers from `vocab` on."""
    if all(map(_is_text, texts)) and len(texts):
        if tokenizer is None:
            raise ConfigError("texts: there is no tokenizer; give one, a folder with tokenizer.json, or token numbers")
        made = tokenizer.encode_batch(list(map(_plain, texts)))
        found = [Tokens(np.array(e.ids, np.int64), np.array(e.type_ids, np.int64), bool(e.overflowing)) for e in made]
    else:
        found = [_numbers(one, f"texts[{first + k}]") for k, one in enumerate(texts)]
    for k, one in enumerate(found):
        here, n = f"texts[{first + k}]", len(one.ids)
        if not 1 <= n <= longest:
            raise ValueError(f"{here}: {n} tokens; allowed: 1 to {longest}")
        if one.ids.min() < 0 or (vocab and one.ids.max() >= vocab):
            told = f"token numbers from {one.ids.min()} to {one.ids.max()}"
            raise ValueError(f"{here}: {told}; allowed: 0 to {(vocab or 0) - 1}, those of the model")
    return found


def _is_text(one: Any) -> bool:
    pair = isinstance(one, tuple | list) and len(one) == 2 and all(isinstance(part, str) for part in one)
    return isinstance(one, str) or pair


def _plain(one: Any) -> Any:
    return one if isinstance(one, str) else tuple(one)


def _numbers(one: Any, here: str) -> Tokens:
    need = "a text, a pair of texts, or a list of token numbers; all of one sort"
    try:
        ids = np.asarray(one)
    except ValueError:
        ids = np.array("")
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"{here}: got {short(one)}; allowed: {need}")
    return Tokens(ids.astype(np.int64), np.zeros(len(ids), np.int64))


# -- out of files


def read_texts(path: Path, key: str) -> list[str]:
    """The texts of a .jsonl file of objects or a .csv with a header, under this key, or of a .txt with a text a line.

    Raises ConfigError, which names the file and the line, where one is missing or cannot be read."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"--input: {path} is not allowed; use a file that ends in {', '.join(_READERS)}")
    try:
        content = read(path)
    except OSError as error:
        raise ConfigError(f"--input: cannot read {path}: {error.strerror}; allowed: {', '.join(_READERS)}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"--input: {path}, line {line}: not UTF-8; allowed: UTF-8") from None
    texts = list(reader(text, key, f"--input: {path}"))
    if not texts:
        raise ConfigError(f"--input: no texts in {path}; allowed: one or more")
    return texts


def _lines(text: str, key: str, here: str) -> Iterator[str]:
    lines = text.split("\n")
    yield from (line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1]))


def _json_lines(text: str, key: str, here: str) -> Iterator[str]:
    for number, line in enumerate(_lines(text, key, here), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            told = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise ConfigError(f'{here}, line {number}: no JSON ({told}); allowed: {{"{key}": "..."}}') from None
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            got = f"{key!r} is {short(row[key])}" if isinstance(row, dict) and key in row else f"there is no {key!r}"
            have = f" among {', '.join(map(repr, row))}" if isinstance(row, dict) and key not in row and row else ""
            raise ConfigError(f'{here}, line {number}: {got}{have}; allowed: {{"{key}": "..."}}, or --text KEY')
        yield row[key]


def _table(text: str, key: str, here: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
        if header.count(key) != 1:
            told = "twice" if key in header else "not"
            raise ConfigError(f"{here}: the column {key!r} is {told} there; allowed with --text: {', '.join(header)}")
        end = rows.line_num
        for row in rows:
            line, end = end + 1, rows.line_num
            if len(row) != len(header):
                raise ConfigError(f"{here}, line {line}: {len(row)} cells; allowed: {len(header)}, as in line 1")
            yield row[header.index(key)]
    except csv.Error as error:
        raise ConfigError(f"{here}, line {rows.line_num}: {error}; allowed: CSV") from None


_READERS: dict[str, Callable[[str, str, str], Iterator[str]]] = {
    ".jsonl": _json_lines, ".csv": _table, ".txt": _lines
}  # fmt: skip
