"""Text to tokens: the corpus, its byte-level BPE, the held-out part, and the batches of a step."""

import codecs
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nntile_py.config.run_config import RunConfig
from nntile_py.config.sections import DataSection
from nntile_py.data.array_cache import Arrays, kept
from nntile_py.data.tokenizer import END_OF_TEXT, load_tokenizer, token_numbers
from nntile_py.errors import ConfigError
from nntile_py.system.folders import STDLIB, files_in, read, stdlib, stdlib_files

LONGEST_WORD = 256  # characters
LONG_TEXT = 1_000_000  # characters: a second or so to make into tokens


@dataclass
class Corpus:
    """Tokens of the training and of the held-out text, 1-D integer arrays, and the tokenizer that made them.

    lengths: how many tokens of each belong to one sequence after the other; none where those are windows."""

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    train_lengths: np.ndarray | None = None
    held_out_lengths: np.ndarray | None = None

    def told(self) -> str:
        return f"{len(self.train):,} tokens to train on, {len(self.held_out):,} held out"

    def contents(self) -> dict[str, bytes]:
        """What tells it from another."""
        both = ((self.train, self.train_lengths), (self.held_out, self.held_out_lengths))
        train, held_out = (text.tobytes() + (b"" if of is None else of.tobytes()) for text, of in both)
        return {"training text": train, "held-out text": held_out}


def load_corpus(config: RunConfig, special: Sequence[str] = ()) -> Corpus:
    """Read, split and tokenize the text of `config.data`; trains the tokenizer where none is given.

    special: tokens that such a tokenizer has besides END_OF_TEXT. What a long text was made into is kept in the cache
    folder. Raises ConfigError where there is no text, or less than one sequence of it."""
    documents = read_documents(config.data)
    path = config.tokenizer.path
    given = load_tokenizer(Path(path)) if path is not None else None

    def make() -> Arrays:
        train_text, held_text = split(documents, config.data.val_fraction)
        tokenizer = given or train_tokenizer(train_text, config.tokenizer.size(), special)
        found = {"tokenizer": np.frombuffer(tokenizer.to_str().encode(), np.uint8)}
        for name, text in (("train", train_text), ("held_out", held_text)):
            # A masked model's sequences end in a token of their own.
            tokens, lengths = encode(tokenizer, sequences(text, unit), ends=unit == "window" or not special)
            found |= {name: tokens, f"{name}_lengths": lengths}
        return found

    unit = config.data.sequences
    how = f"{given.to_str() if given else config.tokenizer.size()} {unit} {[*special]}"
    long = sum(map(len, documents)) >= LONG_TEXT
    made = kept("corpus", _key(documents, config.data.val_fraction, how), make) if long else make()
    lengths = [None if unit == "window" else made[f"{name}_lengths"] for name in ("train", "held_out")]
    corpus = Corpus(Tokenizer.from_str(made["tokenizer"].tobytes().decode()), made["train"], made["held_out"], *lengths)
    for name, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if unit != "window" and not len(tokens):
            raise ConfigError(
                f"data.sequences: the {name} text of {config.data.source} has no {unit} with a token in it;"
                " allowed: another data.val_fraction, or more text"
            )
        if unit == "window" and len(tokens) < config.train.seq:
            raise ConfigError(
                f"data.source: the {name} text of {config.data.source} has {len(tokens)} tokens;"
                f" allowed: at least train.seq = {config.train.seq}"
                f" (give more text{', a larger data.max_bytes' if config.data.max_bytes else ''}, a smaller train.seq"
                " or another data.val_fraction)"
            )
    return corpus


def _key(documents: list[str], val_fraction: float, how: str) -> str:
    """A hash of all that decides a corpus: the text, how it is split and made into tokens, and what does so."""
    made_by = Path(__file__).read_text(encoding="utf-8"), tokenizers.__version__
    digest = hashlib.sha256()
    for part in (*made_by, repr(val_fraction), how, *documents):
        digest.update(f"{len(part)} ".encode() + part.encode())
    return digest.hexdigest()[:32]


def read_documents(data: DataSection) -> list[str]:
    """The texts of a file or folder, in an order that depends on names only. ConfigError for one that is not UTF-8; in
    Python's standard library, which no user mends, such bytes become U+FFFD."""
    documents, left = [], data.max_bytes
    try:
        if data.source == STDLIB:
            root, paths = stdlib(), stdlib_files()
        else:
            root = Path(data.source)
            paths = list(files_in(root, data.extensions)) if root.is_dir() else [root]
        for path in paths:
            if left == 0:
                break
            content = read(path, left)
            cut = len(content) == left
            left = None if left is None else left - len(content)
            if content.strip():
                documents.append(_decoded(content, path, cut, "replace" if data.source == STDLIB else "strict"))
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {error.filename}: {error.strerror}; allowed: text files") from None
    if not documents:
        what = f"no file with one of the extensions {', '.join(data.extensions)}" if root.is_dir() else "no text"
        raise ConfigError(f"data.source: {what} in {root}; allowed: a text file, or a folder of such (data.extensions)")
    return documents


def _decoded(content: bytes, path: Path, cut: bool, errors: str) -> str:
    """cut: the last character may not be whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    try:
        text = decoder.decode(content, final=not cut)
        return text + "\ufffd" * bool(decoder.getstate()[0])
    except UnicodeDecodeError as error:
        wrong = f"{path}: byte {error.start} (0x{content[error.start]:02x}) is not UTF-8 ({error.reason})"
        need = "text in UTF-8 (`iconv -f LATIN1 -t UTF-8` makes it of Latin-1); of a folder also other data.extensions"
        raise ConfigError(f"data.source: {wrong}; allowed: {need}") from None


def split(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Training and held-out documents. The same text is always split alike, whatever the seed.

    Whole documents, in the order of their hashes; where they are too few or too long, the end of the text."""
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
    cut = text.find("\n", cut) + 1 or cut  # at the end of a line, where there is one
    return [text[:cut]], [text[cut:]]


def sequences(documents: list[str], unit: str) -> list[str]:
    """The lines, paragraphs or documents with something in them; of windows the documents."""
    if unit == "lines":
        parts = [line for text in documents for line in text.splitlines()]
    elif unit == "paragraphs":
        parts = [part.strip("\n") for text in documents for part in re.split(r"\n\s*\n", text)]
    else:
        parts = documents
    return [part for part in parts if part.strip()]


def train_tokenizer(documents: list[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE as GPT-2's: any text can be encoded, and decodes to itself. The same text gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    # What has no spaces, or nothing else, would be one word, and take minutes.
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


def encode(tokenizer: Tokenizer, documents: list[str], *, ends: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """All documents in one 1-D array of token numbers, and how many are of each.

    ends: each is closed by the end-of-text token, where there is one."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    tail = [] if end is None or not ends else [end]
    dtype = np.uint16 if token_numbers(tokenizer) <= 2**16 else np.int32
    parts = []
    for first in range(0, len(documents), 64):  # in parts: an encoding in the library's form takes 100 bytes a token
        for encoding in tokenizer.encode_batch_fast(documents[first : first + 64], add_special_tokens=False):
            parts.append(np.array(encoding.ids + tail, dtype=dtype))
    lengths = np.array([len(part) for part in parts], np.int64)
    return np.concatenate(parts) if parts else np.zeros(0, dtype), lengths


class Parts:
    """Sequences of at most `most` tokens, cut from those of a text; `cut`: how many were longer."""

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, most: int) -> None:
        counts = -(-lengths // most)
        first = np.repeat(np.cumsum(lengths) - lengths, counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._tokens, self._starts = tokens, first + number * most
        self.lengths = np.minimum(np.repeat(lengths, counts) - number * most, most)
        self.cut = int((lengths > most).sum())

    def __getitem__(self, number: int) -> np.ndarray:
        start = self._starts[number]
        return self._tokens[start : start + self.lengths[number]].astype(np.int64)


def training_batch(tokens: np.ndarray, rows: int, seq: int, seed: int, step: int) -> np.ndarray:
    """`rows` sequences from random places, int64 [rows, seq]; decided by seed and step alone."""
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - seq + 1, rows)
    return _windows(tokens, starts, seq)


def held_out_batches(tokens: np.ndarray, rows: int, seq: int, count: int) -> Iterator[np.ndarray]:
    """`count` batches of int64 [rows, seq], evenly spread over the text: the same ones at every evaluation."""
    starts = np.linspace(0, len(tokens) - seq, count * rows).astype(np.int64)
    for part in starts.reshape(count, rows):
        yield _windows(tokens, part, seq)


def _windows(tokens: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(seq)].astype(np.int64)
