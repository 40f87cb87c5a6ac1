"""Rows of texts that belong together, such as a question with its answer: reading, tokens and batches."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from nntile_py.data.classification import check_frames, encoded, split_samples
from nntile_py.data.collators import Array, PairCollator
from nntile_py.data.dataset import Evaluator
from nntile_py.data.rows import place, read_rows, table_names
from nntile_py.data.sampler import Sampler
from nntile_py.data.tables import LabelledText, lines_of, text_of
from nntile_py.data.tokenization import Report, silent, train_tokenizer
from nntile_py.data.tokenizer import MASKED
from nntile_py.errors import ConfigError
from nntile_py.system.folders import STDLIB, read, stdlib_files
from nntile_py.system.units import counted
from nntile_py.tasks.cross_entropy import IGNORED

Texts = tuple[str, ...]  # a question, its answer, wrong answers
TokenizedPairs = list[list[Array]]  # the token numbers of the texts of each row


class PairCorpus(NamedTuple):
    """Tokenized training rows and held-out rows.

    Attributes:
        columns: Number of texts in a row.
        cut: Number of texts, training and held-out, that had too many tokens and were cut.
    """

    tokenizer: Tokenizer
    columns: int
    train: TokenizedPairs
    held_out: TokenizedPairs
    cut: int


def read_pairs(key: str, source: str, columns: Sequence[str]) -> list[Texts]:
    """Return the texts of all rows of a table.

    Args:
        key: Key of the config that names the table, for messages.
        source: A table, or `python-stdlib`: the docstrings of Python's standard library, each with its function's code.
        columns: Columns of the texts.

    Raises:
        ConfigError: The file is not a table, or a row lacks a text. The message names file and line.
    """
    if source == STDLIB:
        return _documented_functions()
    need = f"a table with the columns {', '.join(map(repr, columns))} (data.texts names others): {table_names()}"
    where, path = f"{key}: {source}", Path(source)
    try:
        rows = [
            tuple(text_of(f"{where}, {place(path, line)}", name, row[name]) for name in columns)
            for line, row in read_rows(where, path, columns, need)
        ]
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {source}: {error.strerror}; allowed: {need}") from None
    if not rows:
        raise ConfigError(f"{where}: no rows; allowed: {need}")
    return rows


def _documented_functions() -> list[Texts]:
    """Return (first paragraph of the docstring, code without the docstring) of functions of the standard library."""
    found: dict[str, Texts] = {}
    for path in stdlib_files():
        source = read(path).decode("utf-8-sig", errors="replace")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = lines_of(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)) and len(node.body) > 1:
                first = " ".join(told.split("\n\n")[0].split())
                begin, after = node.body[0].lineno - 1, node.body[1].lineno - 1
                code = "\n".join([*lines[node.lineno - 1 : begin], *lines[after : node.end_lineno]])
                found.setdefault(first, (first, textwrap.dedent(code)))
    return [(first, code) for first, code in found.values() if len(first) > 20 and first not in code]


def read_pair_corpus(
    source: str, columns: Sequence[str], *, seq: int, held_out: str | None = None, val_fraction: float = 0.05,
    tokenizer: Tokenizer | None = None, tokenizer_path: str | None = None, vocab_size: int = 4096,
    report: Report = silent,
) -> PairCorpus:  # fmt: skip
    """Read, split and tokenize a table of texts that belong together.

    Args:
        source: The table, see `read_pairs`.
        columns: Columns of the texts.
        seq: Largest number of tokens of a text. Longer texts are cut.
        held_out: The table of held-out rows. None: hold out `val_fraction` of `source`.
        val_fraction: Share of the rows to hold out, by hashes of their first texts.
        tokenizer: An existing tokenizer. None: a new one is trained on the training texts.
        tokenizer_path: File of the existing tokenizer, for messages.
        vocab_size: Size of a new tokenizer.
        report: Shows a message before work that takes seconds.

    Raises:
        ConfigError: A table is wrong, nothing is left to hold out, or the tokenizer cannot frame a sequence.
    """
    train = read_pairs("data.source", source, columns)
    if held_out:
        measured = read_pairs("data.held_out", held_out, columns)
    else:
        numbered = [LabelledText(row[0], "", number) for number, row in enumerate(train)]  # split by the first text
        train, measured = ([train[one.line] for one in part] for part in split_samples(numbered, val_fraction))
        if not measured:
            need = "two or more different texts, or a table of its own for data.held_out"
            raise ConfigError(f"data.source: {source} has one text in the first column; allowed: {need}")
    if tokenizer is None:
        tokenizer = train_tokenizer([text for row in train for text in row], vocab_size, MASKED, report)
    check_frames(tokenizer, tokenizer_path)
    count = len(train[0])
    (first, cut), (second, cut_held_out) = (_tokenized(tokenizer, part, seq) for part in (train, measured))
    return PairCorpus(tokenizer, count, first, second, cut + cut_held_out)


def _tokenized(tokenizer: Tokenizer, rows: list[Texts], seq: int) -> tuple[TokenizedPairs, int]:
    """Encode rows; texts of more than `seq` tokens are cut. Returns the encoded rows and how many texts were cut."""
    width, cut, tokens = len(rows[0]), 0, list[Array]()
    for encoding in encoded(tokenizer, [text for row in rows for text in row], seq):
        tokens.append(np.array(encoding.ids, np.int32))
        cut += bool(encoding.overflowing)
    return [tokens[k : k + width] for k in range(0, len(tokens), width)], cut


def _bytes_of(rows: TokenizedPairs) -> bytes:
    """Return lengths and tokens as bytes, to compare them with other texts."""
    texts = [text for row in rows for text in row]
    return b"".join(part.tobytes() for part in (np.array([len(text) for text in texts]), *texts))


class PairDataset:
    """The Dataset of sentence embeddings: batches of rows of texts that belong together.

    Args:
        corpus: Rows, as `read_pair_corpus` returns them.
        seq: Largest number of tokens of a text.
        batch: Number of texts in one forward and backward pass; a multiple of the texts in a row.
        passes: Number of forward and backward passes in a step.
        eval_batches: Number of batches in an evaluation that does not read all held-out rows.
        seed: Decides which rows a step reads.
        pad: Token number of padding.
    """

    example: Mapping[str, Array] | None = None
    class_names: list[str] | None = None

    def __init__(
        self, corpus: PairCorpus, *, seq: int, batch: int, passes: int = 1, eval_batches: int = 4, seed: int = 0,
        pad: int = 0,
    ) -> None:  # fmt: skip
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self._rows, self._eval_batches = batch // corpus.columns, eval_batches
        lengths = np.array([sum(map(len, row)) for row in corpus.train])
        self._sampler = Sampler(lengths, seed, self._rows * passes)
        self._collator = PairCollator(seq, pad)

    def describe(self) -> str:
        corpus = self.corpus
        cut = f", {counted(corpus.cut, 'text')} cut at train.seq" if corpus.cut else ""
        sizes = f"{counted(len(corpus.train), 'row')} to train on, {len(corpus.held_out):,} held out"
        return f"{sizes}, {corpus.columns} texts in a row{cut}"

    def describe_lengths(self) -> str:
        return ""

    def contents(self) -> dict[str, bytes]:
        return {"training text": _bytes_of(self.corpus.train), "held-out text": _bytes_of(self.corpus.held_out)}

    def train(self, step: int) -> dict[str, Array]:
        rows = self.corpus.train
        return self.collate([rows[number % len(rows)] for number in self._sampler.step(step)[0]])

    def held_out(self, whole: bool = False) -> Iterator[dict[str, Array]]:
        """Yield batches of held-out rows: `eval_batches` batches, spread evenly over the rows, or all if `whole`.

        The last batch is filled up with training rows. Their labels are ignored: they only add wrong answers."""
        rows, size = self.corpus.held_out, self._rows
        count = len(rows) if whole else min(len(rows), self._eval_batches * size)
        numbers = np.linspace(0, len(rows) - 1, count).astype(np.int64)
        for first in range(0, count, size):
            part = [rows[number] for number in numbers[first : first + size]]
            others = self.corpus.train
            inputs = self.collate([*part, *(others[k % len(others)] for k in range(size - len(part)))])
            inputs["labels"][len(part) :] = IGNORED
            yield inputs

    def collate(self, samples: Any, step: int = 0) -> dict[str, Array]:
        inputs = self._collator(samples, step)
        inputs["labels"] %= self._rows  # number of the row within its pass: a pass compares only its own rows
        return inputs

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        """Evaluate the model on held-out rows.

        Returns the mean loss, and the accuracy: the share of questions whose own answer is the most similar answer of
        the batch."""
        losses, counts, right = list[float](), list[int](), 0
        for inputs in self.held_out(whole):
            loss, logits = model.evaluate(inputs, return_logits=True)
            real = inputs["labels"] != IGNORED
            losses.append(loss)
            counts.append(int(real.sum()))
            right += int((logits.argmax(-1) == inputs["labels"])[real].sum())
        return {"held_out_loss": float(np.average(losses, weights=counts)), "accuracy": right / sum(counts)}
