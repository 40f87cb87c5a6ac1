"""Training data of a classifier: read a table of texts with labels, tokenize it, and make batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from nntile_py.data.collators import Array, Collator, LabelledCollator
from nntile_py.data.confusion import Confusion, LabelScores
from nntile_py.data.dataset import Evaluator, Inputs, padding_note
from nntile_py.data.labelled_words import ONE, LabelKind, classes_of_tokens, first_tokens, read_samples
from nntile_py.data.sampler import Sampler
from nntile_py.data.tables import LabelledText, class_numbers, labels_of, unknown_label
from nntile_py.data.tokenization import Report, silent, train_tokenizer
from nntile_py.data.tokenizer import CLS, MASKED, ROBERTA, SEP, frame, lacking
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import Bins
from nntile_py.graph.padding import MASK
from nntile_py.system.units import counted
from nntile_py.tasks.cross_entropy import IGNORED

LOOKAHEAD_STEPS = 16  # the sampler looks for a sample that fits a bin among the samples of this many steps


class TokenizedTexts(NamedTuple):
    """Texts as a classifier reads them.

    Attributes:
        sequences: Token numbers of each text.
        classes: Number of each text's class, int64 [texts]. If texts have any number of labels, float32
            [texts, classes]: 1 for each class that applies. If words have labels, int16 [texts, longest text]: the
            class of each token that begins a word, else IGNORED.
    """

    sequences: list[Array]
    classes: Array

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: Array) -> TokenizedTexts:
        return TokenizedTexts([self.sequences[row] for row in rows], self.classes[rows])

    def tobytes(self) -> bytes:
        """Return the lengths, tokens and classes as bytes, to compare them with other texts."""
        lengths = np.array([len(sequence) for sequence in self.sequences])
        return b"".join(part.tobytes() for part in (lengths, *self.sequences, self.classes))


@dataclass
class LabelledCorpus:
    """Tokenized training texts and held-out texts.

    Attributes:
        names: Names of the classes.
        cut: Number of texts, training and held-out, that had too many tokens and were cut.
    """

    tokenizer: Tokenizer
    names: list[str]
    train: TokenizedTexts
    held_out: TokenizedTexts
    cut: int


def read_labelled_corpus(
    source: str,
    *,
    seq: int,
    text: str = "text",
    label: str = "label",
    held_out: str | None = None,
    val_fraction: float = 0.05,
    classes: int | None = None,
    class_names: list[str] | None = None,
    kind: LabelKind = "one",
    tokenizer: Tokenizer | None = None,
    tokenizer_path: str | None = None,
    vocab_size: int = 4096,
    report: Report = silent,
) -> LabelledCorpus:
    """Read, split and tokenize a table of texts with labels.

    Args:
        source: The table, see `labelled_words.read_samples`.
        seq: Largest number of tokens of a text. Longer texts are cut.
        text: Column of the texts.
        label: Column of the labels.
        held_out: The table of held-out texts. None: hold out `val_fraction` of `source`.
        val_fraction: Share of each label's texts to hold out.
        classes: Number of the model's classes. None: the labels of `source` are the classes.
        class_names: Names of the model's classes.
        kind: A text has one label, several labels, or one label for each word.
        tokenizer: An existing tokenizer. None: a new one is trained on the training texts.
        tokenizer_path: File of the existing tokenizer, for messages.
        vocab_size: Size of a new tokenizer.
        report: Shows a message before work that takes seconds.

    Raises:
        ConfigError: A label is not a class, nothing is left to hold out, or the tokenizer cannot frame a sequence.
    """
    samples = read_samples("data.source", source, text, label, kind)
    if classes is not None:
        numbers = class_numbers(class_names, classes, samples)
        names = class_names or list(map(str, range(classes)))
    else:  # a model of the user's own, which declares no classes
        names = labels_of(source, samples)
        numbers = class_numbers(names, len(names), samples)
    if held_out:
        train, measured = samples, read_samples("data.held_out", held_out, text, label, kind)
        _check_labels(measured, numbers, held_out)
    else:
        train, measured = split_samples(samples, val_fraction)
        if not measured:
            why = ", all with the same text" * (len(samples) > 1)
            why, of = (", but only one text of each label", " of a label") if kind == ONE else (why, "")
            need = f"two different texts or more{of}, or a table of its own for data.held_out"
            raise ConfigError(f"data.source: {source} has {counted(len(samples), 'row')}{why}; allowed: {need}")
    if tokenizer is None:
        tokenizer = train_tokenizer([sample.text for sample in train], vocab_size, MASKED, report)
    check_frames(tokenizer, tokenizer_path)
    (first, cut), (second, cut_held_out) = (tokenized(tokenizer, part, numbers, seq) for part in (train, measured))
    return LabelledCorpus(tokenizer, names, first, second, cut + cut_held_out)


def _check_labels(samples: list[LabelledText], numbers: Mapping[str, int], held_out: str) -> None:
    """Raise ConfigError if a label of the table `held_out` is not a class. numbers: {class: number}."""
    if unknown := unknown_label(samples, numbers):
        here = f"data.held_out: {held_out}, line {unknown[0]}"
        need = ", ".join(numbers)
        raise ConfigError(f"{here}: the label {unknown[1]!r} is not in data.source; allowed: {need}")


def split_samples(
    samples: list[LabelledText], fraction: float
) -> tuple[list[LabelledText], list[LabelledText]]:
    """Split samples into training samples and held-out samples.

    Holds out `fraction` of each label's texts, at least one text if a label has two or more. No text is in both parts.
    Equal texts always give an equal split, because the hash of a text decides."""
    texts: dict[str, set[str]] = {}
    for sample in samples:
        texts.setdefault(sample.label, set()).add(sample.text)
    held: set[str] = set()
    for own in texts.values():
        ordered = sorted(own, key=lambda text: hashlib.sha1(text.encode()).digest())
        held.update(ordered[: max(round(fraction * len(own)), 1) if len(own) > 1 else 0])
    return [s for s in samples if s.text not in held], [s for s in samples if s.text in held]


def check_frames(tokenizer: Tokenizer, path: str | None, key: str = "tokenizer.path") -> None:
    """Give the tokenizer the template [CLS] text [SEP] if it has none; raise ConfigError if it lacks these tokens.

    path: The tokenizer's file, for the message. key: Key of the config that the message names."""
    frame(tokenizer)
    if not tokenizer.num_special_tokens_to_add(False):
        missing = ", ".join(lacking(tokenizer, (CLS, SEP)))
        need = f"a tokenizer with a template, with {CLS} and {SEP}, or with {ROBERTA[CLS]} and {ROBERTA[SEP]}"
        raise ConfigError(f"{key}: {path} has no token {missing}; allowed: {need}")


def tokenized(
    tokenizer: Tokenizer, samples: list[LabelledText], numbers: dict[str, int], seq: int
) -> tuple[TokenizedTexts, int]:
    """Encode samples; texts of more than `seq` tokens are cut. Returns the encoded texts and how many were cut."""
    sequences, of_tokens, cut = list[Array](), list[tuple[Array, Array]](), 0
    for sample, encoding in zip(samples, encoded(tokenizer, [sample.text for sample in samples], seq), strict=True):
        sequences.append(np.array(encoding.ids, np.int32))
        cut += bool(encoding.overflowing)
        if sample.words is not None:
            places, words = first_tokens(sample.words, encoding.offsets, encoding.special_tokens_mask)
            of_tokens.append((places, np.array([numbers[sample.labels[word]] for word in words], np.int16)))
    return TokenizedTexts(sequences, classes_of_tokens(of_tokens) if of_tokens else _classes(samples, numbers)), cut


def encoded(tokenizer: Tokenizer, texts: list[str], seq: int) -> Iterator[Encoding]:
    """Yield the encodings of texts, cut at `seq` tokens."""
    cutting = Tokenizer.from_str(tokenizer.to_str())  # a copy: the run saves the original, which must not cut texts
    cutting.no_padding()
    cutting.enable_truncation(seq)
    for first in range(0, len(texts), 256):  # in chunks: the library's encodings take 100 bytes a token
        yield from cutting.encode_batch(texts[first : first + 256])


def _classes(samples: list[LabelledText], numbers: dict[str, int]) -> Array:
    """Return the classes of samples with one or several labels, in the form of TokenizedTexts.classes."""
    if not any(sample.several is not None for sample in samples):
        return np.array([numbers[sample.label] for sample in samples], np.int64)
    classes = np.zeros((len(samples), max(numbers.values()) + 1), np.float32)
    for row, sample in enumerate(samples):
        classes[row, [numbers[label] for label in sample.labels]] = 1
    return classes


class ClassificationDataset:
    """The Dataset of a classifier: batches of tokenized texts with their classes.

    Args:
        corpus: Texts, as `read_labelled_corpus` returns them.
        seq: Largest number of tokens of a text.
        batch: Number of texts in one forward and backward pass.
        passes: Number of forward and backward passes in a step.
        eval_batches: Number of batches in an evaluation that does not read all held-out texts.
        seed: Decides which texts a step reads.
        pad: Token number of padding.
        bins: Packs texts into bins instead of padding them.
    """

    example: Mapping[str, Array] | None = None

    def __init__(
        self, corpus: LabelledCorpus, *, seq: int, batch: int, passes: int = 1, eval_batches: int = 4, seed: int = 0,
        pad: int = 0, bins: Bins | None = None,
    ) -> None:  # fmt: skip
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self.class_names: list[str] | None = corpus.names
        self._batch, self._passes, self._eval_batches, self._bins = batch, passes, eval_batches, bins
        self._lengths, self._seq = np.array([len(sequence) for sequence in corpus.train.sequences]), seq
        rows = batch * passes
        self._sampler = Sampler(self._lengths, seed, rows, bins, passes, lookahead=LOOKAHEAD_STEPS * rows)
        self._collator: Collator = LabelledCollator(seq, pad)

    def describe(self) -> str:
        corpus = self.corpus
        cut = f", {corpus.cut:,} cut at train.seq" if corpus.cut else ""
        sizes = f"{counted(len(corpus.train), 'text')} to train on, {len(corpus.held_out):,} held out"
        return f"{sizes}{cut}, {len(corpus.names)} labels"

    def describe_lengths(self) -> str:
        if self._bins:
            return f"{self._sampler.fill():.1%} of the bins' {self._bins.room} tokens filled"
        return padding_note(self._lengths, self._seq)

    def contents(self) -> dict[str, bytes]:
        return {"training text": self.corpus.train.tobytes(), "held-out text": self.corpus.held_out.tobytes()}

    def train(self, step: int) -> Inputs:
        padded = self.padded(step)
        if not self._bins:
            return padded
        padded.pop(MASK, None)
        return self._bins.filled(padded, self._sampler.step(step)[1], self._passes, shift=False)

    def padded(self, step: int) -> dict[str, Array]:
        """Return the texts of a training step as a padded batch, even if training packs them into bins."""
        return self.collate(zip(*self.samples(step), strict=True))

    def samples(self, step: int) -> TokenizedTexts:
        """Return the texts that a training step reads. Each epoch has every text once, in an order set by the seed."""
        texts = self.corpus.train
        return texts.take(np.array(self._sampler.step(step)[0]) % len(texts))

    def held_out(self, whole: bool = False) -> Iterator[dict[str, Array]]:
        """Yield batches of held-out texts: `eval_batches` batches, spread evenly over the texts, or all if `whole`.

        The last batch is filled up with rows whose labels are ignored."""
        texts, rows = self.corpus.held_out, self._batch
        count = len(texts) if whole else min(len(texts), self._eval_batches * rows)
        numbers = np.linspace(0, len(texts) - 1, count).astype(np.int64)
        for first in range(0, count, rows):
            part = numbers[first : first + rows]
            filled = texts.take(np.resize(part, rows))
            labels = filled.classes.copy()
            labels[len(part) :] = IGNORED
            yield self.collate(zip(filled.sequences, labels, strict=True))

    def collate(self, samples: Any, step: int = 0) -> dict[str, Array]:
        return self._collator(samples, step)

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        """Evaluate the model on held-out texts. Returns loss, accuracy, F1; for single labels the confusion matrix."""
        losses: list[float] = []
        several, counts = self.corpus.held_out.classes.ndim > 1, list[int]()
        scores = LabelScores(len(self.corpus.names)) if several else Confusion(self.corpus.names)
        for inputs in self.held_out(whole):
            loss, logits = model.evaluate(inputs, return_logits=True)
            labels = inputs["labels"]
            real = (labels[:, 0] if several else labels) != IGNORED
            losses.append(loss)
            counts.append(int(real.sum()))
            scores.add(labels[real], logits[real] > 0 if several else logits[real].argmax(-1))
        return {"held_out_loss": float(np.average(losses, weights=counts))} | scores.metrics()
