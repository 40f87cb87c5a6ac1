"""Read texts from files and turn them into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from nntile_py.data.rows import place, read_rows, table_names
from nntile_py.data.tables import check_whole, lines_of, read_text, text_of
from nntile_py.data.tokenizer import frame
from nntile_py.errors import ConfigError
from nntile_py.schema import short

Array = np.ndarray[Any, Any]


class TokenizedText(NamedTuple):
    """A text as tokens.

    Attributes:
        ids: Token numbers, int64 [tokens].
        kinds: Token types, int64 [tokens]; with BERT's template 1 for the second text of a pair, else 0.
        cut: The text had too many tokens and was cut.
        is_text: True for a text, False for token numbers that the caller passed.
    """

    ids: Array
    kinds: Array
    cut: bool = False
    is_text: bool = False


class WrongText(ValueError):
    """A text that a model cannot take.

    Attributes:
        number: The text's position among the texts.
        reason: What is wrong with the text, and what is allowed.
    """

    def __init__(self, noun: str, number: int, reason: str) -> None:
        super().__init__(f"{noun}[{number}]: {reason}")
        self.number, self.reason = number, reason


# -- to tokens


def with_limit(tokenizer: Tokenizer, longest: int, framed: bool) -> Tokenizer:
    """Return a copy of a tokenizer that cuts texts at `longest` tokens and never pads.

    framed: Give the copy a template if the tokenizer has none; see tokenizer.frame."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    if framed:
        frame(own)
    if (least := own.num_special_tokens_to_add(False)) >= longest:
        raise ConfigError(f"max_length: got {longest}; allowed: more than {least}, as the template has {least} tokens")
    own.enable_truncation(longest)
    return own


def listed(texts: Any, noun: str = "texts") -> list[Any]:
    """Return `texts` as a list. A single text or list of token numbers is a list of one.

    Raises ValueError for anything that is not a sequence."""
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Sequence | np.ndarray):
        raise ValueError(f"{noun}: got {short(texts)}; allowed: a list of texts, or of lists of token numbers")
    is_one = len(texts) > 0 and isinstance(texts[0], int | np.integer)
    return [texts] if is_one else list(texts)


def prompted(texts: Sequence[Any], prompt: str, prepare: Callable[[str], str], first: int) -> list[Any]:
    """Return texts with a prompt before each text, after `prepare`; token numbers are left unchanged.

    first: Number of the first text, for messages. Raises ValueError for a pair of texts with a prompt."""
    result: list[Any] = []
    for number, text in enumerate(texts, first):
        if isinstance(text, str):
            result.append(prepare(prompt + text))
        elif prompt and _is_text(text):
            raise ValueError(f"texts[{number}]: a pair, with a prompt; allowed with a prompt: single texts")
        else:
            result.append([prepare(part) for part in text] if _is_text(text) else text)
    return result


def to_tokens(
    texts: Sequence[Any], tokenizer: Tokenizer | None, longest: int, vocab: int | None, first: int,
    noun: str = "texts",
) -> list[TokenizedText]:  # fmt: skip
    """Return the tokens of each text, pair of texts, or list of token numbers.

    Args:
        texts: Texts and pairs of texts, or lists of token numbers; not both.
        tokenizer: Turns texts into tokens. None: texts are refused.
        longest: Largest number of tokens of a text.
        vocab: See check_tokens.
        first: Number of the first text, for messages.
        noun: Word for the texts in messages.

    Raises:
        ValueError: A text has no tokens, too many tokens, or token numbers outside the vocabulary.
    """
    if tokenizer:
        _check_pairs(texts, tokenizer.num_special_tokens_to_add(True), longest, first)
    tokens = tokenized(texts, tokenizer, first, noun, pairs=True)
    check_tokens(tokens, longest, vocab, first, noun)
    return tokens


def tokenized(
    texts: Sequence[Any], tokenizer: Tokenizer | None, first: int, noun: str, *, pairs: bool
) -> list[TokenizedText]:
    """Return tokens as `to_tokens`, without the checks of `check_tokens`. pairs: Pairs of texts are allowed."""
    if len(texts) and all(_is_text(text, pairs) for text in texts):
        if tokenizer is None:
            need = "give one, a folder with tokenizer.json, or token numbers"
            raise ConfigError(f"{noun}: there is no tokenizer; {need}")
        for k, text in enumerate(texts):
            check_whole(f"{noun}[{first + k}]", "".join(text), ValueError)
        # encode_batch, unlike encode, lets other threads run meanwhile.
        return [
            TokenizedText(np.array(e.ids, np.int64), np.array(e.type_ids, np.int64), bool(e.overflowing), True)
            for e in tokenizer.encode_batch(list(map(_plain, texts)))
        ]
    kinds = "texts and pairs of texts" if pairs else "texts"
    need = f"{kinds}, or lists of token numbers; not both"
    return [_numbers(text, f"{noun}[{first + k}]", need) for k, text in enumerate(texts)]


def check_tokens(
    tokens: Sequence[TokenizedText], longest: int, vocab: int | None, first: int, noun: str, reason: str = ""
) -> None:
    """Check that each text has 1 to `longest` tokens, and that the model has these tokens.

    Args:
        tokens: Texts as tokens.
        longest: Largest number of tokens of a text.
        vocab: Number of tokens of the model: token numbers must be smaller. None: no limit.
        first: Number of the first text, for messages.
        noun: Word for the texts in messages.
        reason: Where the limit `longest` comes from, for the message.

    Raises:
        WrongText: A text has no tokens, too many tokens, or token numbers outside the vocabulary.
    """
    for k, text in enumerate(tokens):
        n = len(text.ids)
        if not 1 <= n <= longest:
            need = f"1 to {longest}{f', as {reason}' if reason else ''}"
            raise WrongText(noun, first + k, f"{n} tokens; allowed: {need}")
        if text.ids.min() < 0 or (vocab and text.ids.max() >= vocab):
            numbers = f"token numbers from {text.ids.min()} to {text.ids.max()}"
            cause = ". The tokenizer does not fit the model" if text.is_text else ""
            need = f"0 to {(vocab or 0) - 1}, the model's vocabulary{cause}"
            raise WrongText(noun, first + k, f"{numbers}; allowed: {need}")


def _is_text(value: Any, pairs: bool = True) -> bool:
    """Return True for a text or, if `pairs` is true, for a pair of texts."""
    pair = (
        pairs and isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )
    return isinstance(value, str) or pair


def _check_pairs(texts: Sequence[Any], least: int, longest: int, first: int) -> None:
    """Raise ValueError for a pair of texts if the tokenizer's template for pairs leaves no room for text.

    least: Number of the template's own tokens. (`with_limit` checks the template for single texts.)"""
    for number, text in enumerate(texts if least >= longest else (), first):
        if not isinstance(text, str) and _is_text(text):
            need = f"single texts, or a max_length above {least}"
            raise ValueError(f"texts[{number}]: a pair, whose template alone has {least} tokens; allowed: {need}")


def _plain(text: Any) -> Any:
    """Return a text, or a pair of texts as a tuple."""
    return text if isinstance(text, str) else tuple(text)


def _numbers(value: Any, here: str, need: str) -> TokenizedText:
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.array("")
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"{here}: got {short(value)}; allowed: {need}")
    return TokenizedText(ids.astype(np.int64), np.zeros(len(ids), np.int64))


# -- from files


def placed_texts(path: Path, key: str) -> list[tuple[str, str]]:
    """Return the texts of a table's column `key` (see tables.read_rows), or the lines of a .txt file.

    Each text comes with its place for messages: `--input: FILE, line N`.

    Raises ConfigError for a missing or unreadable text; the message names the file and the line."""
    where = f"--input: {path}"
    need = f"a table with {key!r} (--text names another column): {table_names()}; or .txt with a text a line"
    try:
        if path.suffix.lower() == ".txt":
            lines = lines_of(read_text(where, path))
            texts = [(line, f"{where}, line {number}") for number, line in enumerate(lines, 1)]
        else:
            rows = read_rows(where, path, [key], need)
            placed = ((f"{where}, {place(path, number)}", row[key]) for number, row in rows)
            texts = [(text_of(here, key, value, empty=True), here) for here, value in placed]
    except OSError as error:
        raise ConfigError(f"--input: cannot read {path}: {error.strerror}; allowed: {need}") from None
    if not texts:
        raise ConfigError(f"--input: no texts in {path}; allowed: one or more")
    return texts
