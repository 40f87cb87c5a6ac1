"""Train a tokenizer, and turn documents into tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nntile_py.data.collators import Array
from nntile_py.data.documents import PART, TextPart
from nntile_py.data.tables import lines_of
from nntile_py.data.token_files import HELD_OUT, TRAIN
from nntile_py.data.tokenizer import END_OF_TEXT, token_numbers, without_limits
from nntile_py.system.load import cores

LONGEST_WORD = 256  # characters; a new tokenizer splits longer runs of letters or spaces
LONG_TEXT = 1_000_000  # characters; tokenizing a longer text takes a second or more
PARTS = min(4, cores())  # number of parts of a long document that are tokenized at once, each by one core
# Least characters that are tokenized together. The library's encodings take about 100 bytes a token.
BATCH = max(2_000_000, (PARTS - 1) * PART + 1)
Report = Callable[[str], None]


def silent(message: str) -> None:
    """Show nothing."""


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, special: Sequence[str] = (), report: Report = silent, characters: int = 0
) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's. It encodes any text without loss; the same text gives the same tokenizer.

    Args:
        documents: The text.
        vocab_size: Size of the vocabulary.
        special: Special tokens besides END_OF_TEXT.
        report: Shows a message if the training takes seconds.
        characters: Length of the text, for this message.
    """
    if characters >= LONG_TEXT:
        report(f"training a tokenizer of {vocab_size:,} tokens on {characters:,} characters")
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


def split_into_sequences(part: TextPart, unit: str) -> list[TextPart]:
    """Split a part of a document into sequences that are not blank.

    unit: "lines" or "paragraphs"; with "documents" or "window", the part stays whole. Lines and paragraphs have \\n in
    the place of \\r\\n."""
    if unit == "lines":
        texts = lines_of(part.text)
    elif unit == "paragraphs":
        texts = [text.strip("\n") for text in re.split(r"\n\s*\n", part.text.replace("\r\n", "\n"))]
    else:
        return [part]
    return [TextPart(text) for text in texts if text.strip()]


class Block(NamedTuple):
    """Tokens of some parts of documents.

    Attributes:
        name: TRAIN or HELD_OUT.
        ids: Token numbers of the parts, one after the other.
        segments: Number of tokens of each part; negative if its document continues in the next part. int64.
        learned: For each token, 1 if the model learns it, else 0; uint8. None: all tokens are learned.
    """

    name: str
    ids: Array
    segments: Array
    learned: Array | None = None


def token_dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.int32]:
    """Return the type of token numbers in arrays and files."""
    return np.uint16 if token_numbers(tokenizer) <= 2**16 else np.int32


def tokenize(
    parts: Iterable[tuple[TextPart, bool]], tokenizer: Tokenizer, unit: str, end: int | None
) -> Iterator[tuple[int, list[Block]]]:
    """Yield the tokens of documents, some parts at a time, on all cores.

    Args:
        parts: Parts of documents, and whether they are held out, as `Split.parts` yields them.
        tokenizer: The tokenizer.
        unit: What a sequence is: window, lines, paragraphs or documents.
        end: Token that closes each sequence; None: no token does.

    Yields:
        The number of parts that were read so far, and their tokens that were not yielded before.
    """
    tokenizer = without_limits(tokenizer)
    dtype = token_dtype(tokenizer)
    texts: dict[str, list[TextPart]] = {TRAIN: [], HELD_OUT: []}
    count = size = 0

    def blocks() -> list[Block]:
        found = [_block(name, some, tokenizer, dtype, end) for name, some in texts.items() if some]
        for some in texts.values():
            some.clear()
        return found

    for part, held_out in parts:
        texts[HELD_OUT if held_out else TRAIN] += split_into_sequences(part, unit)
        count, size = count + 1, size + len(part.text)
        if size >= BATCH:
            yield count, blocks()
            size = 0
    if any(texts.values()):
        yield count, blocks()


def _block(name: str, parts: Sequence[TextPart], tokenizer: Tokenizer, dtype: type, end: int | None) -> Block:
    tail, texts = [] if end is None else [end], [part.text for part in parts]
    spans = parts[0].learned is not None
    encode = tokenizer.encode_batch if spans else tokenizer.encode_batch_fast  # encode_batch_fast computes no offsets
    encodings = encode(texts, add_special_tokens=False)
    ids: list[Array] = [
        np.array(encoding.ids + tail * part.last, dtype=dtype)
        for part, encoding in zip(parts, encodings, strict=True)
    ]
    lengths = [len(one) if part.last else -len(one) for part, one in zip(parts, ids, strict=True)]
    learned = [_learned(part, encoding.offsets, len(tail)) for part, encoding in zip(parts, encodings, strict=True)]
    return Block(name, np.concatenate(ids), np.array(lengths, np.int64), np.concatenate(learned) if spans else None)


def _learned(part: TextPart, offsets: Sequence[tuple[int, int]], tail: int) -> Array:
    """Return for each token of a part, and for the token that ends it, whether the model learns it.

    A token that is partly in a learned part of the text is learned."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    learned = np.zeros(len(places) + tail, np.uint8)
    for begin, end in part.learned or ():
        learned[: len(places)] |= (places[:, 1] > begin) & (places[:, 0] < end)
    learned[len(places) :] = 1
    return learned

