"""Training data of a language model: read documents, split off held-out text, train a tokenizer, make batches."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nntile_py.data.array_cache import Arrays, cached
from nntile_py.data.collators import Array, Collator
from nntile_py.data.dataset import Evaluator, Inputs
from nntile_py.data.sampler import Sampler
from nntile_py.data.tables import lines_of
from nntile_py.data.tokenizer import END_OF_TEXT, token_numbers, without_limits
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import Bins
from nntile_py.graph.padding import MASK as ATTENTION_MASK
from nntile_py.graph.step_inputs import SequencePlace
from nntile_py.system.folders import STDLIB, files_in, read, stdlib, stdlib_files

LONGEST_WORD = 256  # characters; a new tokenizer splits longer runs of letters or spaces
LONG_TEXT = 1_000_000  # characters; the tokens of longer texts are cached, as tokenizing them takes a second or more
Report = Callable[[str], None]
HELD_OUT_STEP = 2**40  # the first held-out batch is collated as this step, a number that no training step reaches


# -- documents


def read_documents(source: str, extensions: Sequence[str], max_bytes: int | None = None) -> list[str]:
    """Return the text of each document in a file or folder, in an order that depends only on file names.

    Args:
        source: `python-stdlib`, a text file, or a folder.
        extensions: File name endings to read in a folder.
        max_bytes: Upper bound on the bytes to read. A character that the bound cuts becomes U+FFFD.

    Raises:
        ConfigError: There is no text, or a file is not UTF-8. In Python's standard library, which no user can correct,
            bytes that are not UTF-8 become U+FFFD.
    """
    documents, left = [], max_bytes
    try:
        if source == STDLIB:
            root, paths = stdlib(), stdlib_files()
        else:
            root = Path(source)
            paths = list(files_in(root, extensions)) if root.is_dir() else [root]
        for path in paths:
            if left == 0:
                break
            content = read(path, left)
            cut = len(content) == left
            left = None if left is None else left - len(content)
            text = _decoded(content, path, cut, "replace" if source == STDLIB else "strict")
            if text.strip():
                documents.append(text)
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {error.filename}: {error.strerror}; allowed: text files") from None
    if not documents:
        what = f"no file with one of the extensions {', '.join(extensions)}" if root.is_dir() else "no text"
        need = "a text file, or a folder of text files (data.extensions)"
        raise ConfigError(f"data.source: {what} in {root}; allowed: {need}")
    return documents


def _decoded(content: bytes, path: Path, cut: bool, errors: str) -> str:
    """Decode UTF-8 without a byte order mark. cut: the last character may be incomplete; it then becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    try:
        text = decoder.decode(content, final=not cut).removeprefix("\ufeff")
        return text + "\ufffd" * bool(decoder.getstate()[0])
    except UnicodeDecodeError as error:
        wrong = f"{path}: byte {error.start} (0x{content[error.start]:02x}) is not UTF-8 ({error.reason})"
        need = "text in UTF-8 (`iconv -f LATIN1 -t UTF-8` converts Latin-1); for a folder also other data.extensions"
        raise ConfigError(f"data.source: {wrong}; allowed: {need}") from None


def split(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Split documents into training documents and held-out documents. The same text always gives the same split.

    Documents are held out whole, in the order of their hashes, up to about `val_fraction` of the text. If documents are
    too few or too long for that, the end of the text is held out."""
    target = val_fraction * sum(map(len, documents))
    held: set[int] = set()
    size = 0
    for index in sorted(range(len(documents)), key=lambda i: hashlib.sha1(documents[i].encode()).digest()):
        if size < target and size + len(documents[index]) <= 1.5 * target:
            held.add(index)
            size += len(documents[index])
    if size >= 0.5 * target:
        return (
            [text for i, text in enumerate(documents) if i not in held],
            [text for i, text in enumerate(documents) if i in held],
        )
    text = "\n".join(documents)
    cut = len(text) - int(target)
    cut = text.find("\n", cut) + 1 or cut  # at the end of a line, if the held-out part has one
    return [text[:cut]], [text[cut:]]


def split_into_sequences(documents: list[str], unit: str) -> list[str]:
    """Split documents into sequences that are not blank.

    unit: "lines", "paragraphs" or "documents"; with "window", the documents stay whole. Lines and paragraphs have \\n
    in the place of \\r\\n."""
    if unit == "lines":
        parts = [line for text in documents for line in lines_of(text)]
    elif unit == "paragraphs":
        texts = (text.replace("\r\n", "\n") for text in documents)
        parts = [part.strip("\n") for text in texts for part in re.split(r"\n\s*\n", text)]
    else:
        parts = documents
    return [part for part in parts if part.strip()]


# -- tokens


def silent(message: str) -> None:
    """Show nothing."""


def train_tokenizer(
    documents: list[str], vocab_size: int, special: Sequence[str] = (), report: Report = silent
) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's. It encodes any text without loss; the same text gives the same tokenizer.

    report: Shows a message if the training takes seconds."""
    if (length := sum(map(len, documents))) >= LONG_TEXT:
        report(f"training a tokenizer of {vocab_size:,} tokens on {length:,} characters")
    tokenizer = Tokenizer(models.BPE())
    # Without this bound a long run of letters or of spaces is one word, and training takes minutes.
    parts = pre_tokenizers.Split(Regex(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str], end: int | None = None) -> tuple[Array, Array]:
    """Encode documents. Returns one array with all documents' token numbers in turn, and each document's length.

    end: number of the token that closes each document; None: no token does."""
    tail, tokenizer = [] if end is None else [end], without_limits(tokenizer)
    dtype = np.uint16 if token_numbers(tokenizer) <= 2**16 else np.int32
    parts = []
    for first in range(0, len(documents), 64):  # in chunks: the library's encodings take 100 bytes a token
        for encoding in tokenizer.encode_batch_fast(documents[first : first + 64], add_special_tokens=False):
            parts.append(np.array(encoding.ids + tail, dtype=dtype))
    lengths = np.array([len(part) for part in parts], np.int64)
    return np.concatenate(parts) if parts else np.zeros(0, dtype), lengths


@dataclass
class Corpus:
    """A tokenized text.

    Attributes:
        train: Tokens of the training text, a 1-D integer array.
        held_out: Tokens of the held-out text, a 1-D integer array.
        train_lengths: Tokens of each sequence of the training text; None if sequences are windows of the text.
        held_out_lengths: The same for the held-out text.
        end: Token that ends a document. None: documents have no such token."""

    tokenizer: Tokenizer
    train: Array
    held_out: Array
    train_lengths: Array | None = None
    held_out_lengths: Array | None = None
    end: int | None = None


def read_corpus(
    source: str,
    *,
    extensions: Sequence[str] = (),
    max_bytes: int | None = None,
    val_fraction: float = 0.05,
    unit: str = "window",
    seq: int = 1,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    special: Sequence[str] = (),
    end: int | None = None,
    report: Report = silent,
) -> Corpus:
    """Read, split and tokenize text. The cache folder keeps the tokens of a long text.

    Args:
        source: `python-stdlib`, a text file, or a folder.
        extensions: File name endings to read in a folder.
        max_bytes: Upper bound on the bytes to read.
        val_fraction: Share of the text to hold out.
        unit: What a sequence is: window, lines, paragraphs or documents.
        seq: Tokens of a window.
        tokenizer: An existing tokenizer. None: a new one is trained on the training text.
        vocab_size: Size of a new tokenizer.
        special: Special tokens of a new tokenizer besides END_OF_TEXT. If there are any, a line, paragraph or document
            has no end token.
        end: Token that ends a document with an existing tokenizer. A new tokenizer's is END_OF_TEXT.
        report: Shows a message before work that takes seconds.

    Raises:
        ConfigError: There is no text, or less than one sequence of it.
    """
    documents = read_documents(source, extensions, max_bytes)
    whole = unit == "window" or not special  # lines, paragraphs and documents of a masked model end in [SEP]

    def close(used: Tokenizer) -> int | None:
        """Return the token that ends a document."""
        number: int | None = end if tokenizer else used.token_to_id(END_OF_TEXT)
        return number if whole else None

    def make() -> Arrays:
        train_text, held_out_text = split(documents, val_fraction)
        used = tokenizer or train_tokenizer(train_text, vocab_size, special, report)
        arrays = {"tokenizer": np.frombuffer(used.to_str().encode(), np.uint8)}
        for name, text in (("train", train_text), ("held_out", held_out_text)):
            tokens, lengths = encode(used, split_into_sequences(text, unit), close(used))
            arrays |= {name: tokens, f"{name}_lengths": lengths}
        return arrays

    settings = f"{tokenizer.to_str() if tokenizer else vocab_size} {unit} {[*special]} {end}"
    long = sum(map(len, documents)) >= LONG_TEXT
    arrays = cached("corpus", _key(documents, val_fraction, settings), make) if long else make()
    lengths = {} if unit == "window" else {name: arrays[name] for name in ("train_lengths", "held_out_lengths")}
    used = Tokenizer.from_str(arrays["tokenizer"].tobytes().decode())
    corpus = Corpus(used, arrays["train"], arrays["held_out"], **lengths, end=close(used))
    for name, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        _check_size(f"the {name} text of {source}", len(tokens), unit, seq, max_bytes)
    return corpus


def _check_size(text: str, tokens: int, unit: str, seq: int, max_bytes: int | None) -> None:
    if unit != "window" and not tokens:
        raise ConfigError(
            f"data.sequences: {text} has no {unit} with a token in it; allowed: another data.val_fraction, or more text"
        )
    if unit == "window" and tokens < seq:
        larger = ", a larger data.max_bytes" if max_bytes else ""
        raise ConfigError(
            f"data.source: {text} has {tokens} tokens; allowed: at least train.seq = {seq}"
            f" (give more text{larger}, a smaller train.seq or another data.val_fraction)"
        )


def _key(documents: list[str], val_fraction: float, settings: str) -> str:
    """Return a hash of everything that determines a corpus: the text, its split, the tokenizer, and this module."""
    made_by = Path(__file__).read_text(encoding="utf-8"), tokenizers.__version__
    digest = hashlib.sha256()
    for part in (*made_by, repr(val_fraction), settings, *documents):
        digest.update(f"{len(part)} ".encode() + part.encode())
    return digest.hexdigest()[:32]


# -- batches


class Pieces:
    """Sequences of a text, where a sequence of more than `longest` tokens is cut into several pieces.

    `pieces[k]` has the token numbers of piece k, int64 [tokens].

    Args:
        tokens: Tokens of all sequences, one after the other.
        lengths: Tokens of each sequence.
        longest: Largest number of tokens of a piece.

    Attributes:
        lengths: Tokens of each piece.
        cut: Number of sequences that were longer than `longest`.
    """

    def __init__(self, tokens: Array, lengths: Array, longest: int) -> None:
        counts = -(-lengths // longest)
        first = np.repeat(np.cumsum(lengths) - lengths, counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._tokens, self._starts = tokens, first + number * longest
        self.lengths = np.minimum(np.repeat(lengths, counts) - number * longest, longest)
        self.cut = int((lengths > longest).sum())

    def __getitem__(self, number: int) -> Array:
        start = self._starts[number]
        return self._tokens[start : start + self.lengths[number]].astype(np.int64)


def training_batch(tokens: Array, rows: int, seq: int, seed: int, step: int) -> Array:
    """Return `rows` windows of `seq` tokens at random positions, int64 [rows, seq]. Only seed and step decide them."""
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - seq + 1, rows)
    return _windows(tokens, starts, seq)


def held_out_batches(tokens: Array, rows: int, seq: int, count: int) -> Iterator[Array]:
    """Yield `count` batches of windows of `seq` tokens, int64 [rows, seq], spread evenly over the text."""
    starts = np.linspace(0, len(tokens) - seq, count * rows).astype(np.int64)
    for part in starts.reshape(count, rows):
        yield _windows(tokens, part, seq)


def _windows(tokens: Array, starts: Array, seq: int) -> Array:
    return tokens[starts[:, None] + np.arange(seq)].astype(np.int64)


class TextDataset:
    """The Dataset of a causal or a masked language model: batches of tokenized text.

    Args:
        corpus: Tokens, as of `read_corpus`.
        collator: Turns token numbers into the inputs of the model.
        seq: Largest number of tokens of a sequence, `ends` included.
        batch: Number of sequences in one forward and backward pass.
        passes: Number of forward and backward passes in a step.
        eval_batches: Number of batches in one evaluation.
        seed: Decides which sequences a step reads.
        ends: The tokens before and after a sequence's text: [CLS] and [SEP] for a masked model, none for a causal one.
        bins: Packs sequences into bins instead of padding them; needs a corpus with lengths.
        unit: What a sequence is called in `describe_lengths`.
    """

    class_names: list[str] | None = None

    def __init__(
        self,
        corpus: Corpus,
        collator: Collator,
        *,
        seq: int,
        batch: int,
        passes: int = 1,
        eval_batches: int = 4,
        seed: int = 0,
        ends: tuple[int, ...] = (),
        bins: Bins | None = None,
        unit: str = "sequences",
    ) -> None:
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self._collator, self._seed, self._ends, self._unit = collator, seed, ends, unit
        self._rows, self._passes = batch * passes, passes
        self._text = seq - len(ends)  # tokens of text in a sequence
        self._pieces: Pieces | None = None
        self._bins = bins if corpus.train_lengths is not None else None
        self._held_out: list[Inputs]
        self.example: Mapping[str, Array] | None
        if corpus.train_lengths is None:
            parts = held_out_batches(corpus.held_out, batch, self._text, eval_batches)
            arrays = self.collate(self._framed(np.concatenate(list(parts))), 0)  # no training step has the number 0
            self._held_out = [
                {name: array[row : row + batch] for name, array in arrays.items()}
                for row in range(0, batch * eval_batches, batch)
            ]
            self.example = {name: array[:batch] for name, array in arrays.items()}
        else:
            self._cut_sequences(batch, eval_batches)

    def _cut_sequences(self, batch: int, eval_batches: int) -> None:
        """Prepare the sampler, the held-out batches and the example for sequences of lines, paragraphs or documents."""
        corpus, frame = self.corpus, len(self._ends)
        assert corpus.train_lengths is not None and corpus.held_out_lengths is not None
        self._pieces = Pieces(corpus.train, corpus.train_lengths, self._text)
        held_out = Pieces(corpus.held_out, corpus.held_out_lengths, self._text)
        self._sampler = Sampler(self._pieces.lengths + frame, self._seed, self._rows, self._bins, self._passes)
        fixed = Sampler(held_out.lengths + frame, 0, batch, self._bins)  # seed 0: the run's seed does not change these
        self._held_out = [
            self._inputs(held_out, *fixed.step(k + 1), 1, HELD_OUT_STEP + k) for k in range(eval_batches)
        ]
        self.example = self.collate(self._samples(held_out, fixed.step(1)[0][:batch]), 0)

    def describe(self) -> str:
        endless = ", no token ends a document" if self.corpus.end is None and not self._ends else ""
        return f"{len(self.corpus.train):,} tokens to train on, {len(self.corpus.held_out):,} held out{endless}"

    def describe_lengths(self) -> str:
        if not self._pieces:
            return ""
        lengths = self._pieces.lengths + len(self._ends)
        filled = ""
        if self._bins:
            filled = f", {self._sampler.fill():.1%} of the bins' {self._bins.room} tokens filled"
        return (
            f"{len(lengths):,} {self._unit} of {lengths.min()} to {lengths.max()} tokens,"
            f" {lengths.mean():.1f} on average ({self._pieces.cut:,} were longer and are cut){filled}"
        )

    def contents(self) -> dict[str, bytes]:
        corpus = self.corpus
        parts = (corpus.train, corpus.train_lengths), (corpus.held_out, corpus.held_out_lengths)
        train, held_out = (text.tobytes() + (b"" if of is None else of.tobytes()) for text, of in parts)
        return {"training text": train, "held-out text": held_out}

    def train(self, step: int) -> Inputs:
        if self._pieces:
            return self._inputs(self._pieces, *self._sampler.step(step), self._passes, step)
        windows = training_batch(self.corpus.train, self._rows, self._text, self._seed, step)
        return self.collate(self._framed(windows), step)

    def held_out(self, whole: bool = False) -> list[Inputs]:
        """Return the held-out batches, always with the same tokens masked. `whole` has no effect."""
        return self._held_out

    def collate(self, samples: Any, step: int = 0) -> dict[str, Array]:
        return self._collator(samples, step)

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        losses = [model.evaluate(inputs) for inputs in self.held_out(whole)]  # type: ignore[arg-type]
        return {"held_out_loss": float(np.mean(losses))}

    def _inputs(
        self, pieces: Pieces, numbers: list[int], places: list[SequencePlace], passes: int, step: int
    ) -> Inputs:
        padded = self.collate(self._samples(pieces, numbers), step)
        if not self._bins:
            return padded
        padded.pop(ATTENTION_MASK, None)
        return self._bins.filled(padded, places, passes, shift=True)

    def _samples(self, pieces: Pieces, numbers: list[int]) -> list[Array]:
        return [self._framed(pieces[number][None])[0] for number in numbers]

    def _framed(self, ids: Array) -> Array:
        return np.pad(ids, ((0, 0), (1, 1)), constant_values=[(0, 0), self._ends]) if self._ends else ids
