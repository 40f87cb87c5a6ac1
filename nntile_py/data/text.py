"""Text for a language model: read documents, split off held-out text, train a tokenizer, turn text into tokens."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nntile_py.data.array_cache import Arrays, cached
from nntile_py.data.collators import Array
from nntile_py.data.tables import lines_of
from nntile_py.data.tokenizer import END_OF_TEXT, token_numbers, without_limits
from nntile_py.errors import ConfigError
from nntile_py.system.folders import STDLIB, files_in, read, stdlib, stdlib_files

LONGEST_WORD = 256  # characters; a new tokenizer splits longer runs of letters or spaces
LONG_TEXT = 1_000_000  # characters; the tokens of longer texts are cached, as tokenizing them takes a second or more
Report = Callable[[str], None]


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
