"""Texts with labels to tokens and classes, and to the batches that `nntile train` gives a classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig
from nntile_py.data.collators import Array, LabelledCollator
from nntile_py.data.confusion import Confusion
from nntile_py.data.sampler import Order
from nntile_py.data.tables import Sample, class_numbers, labels_of, read_samples
from nntile_py.data.tokenizer import CLS, MASKED, PAD, ROBERTA, SEP, called, frame, lacking, load_tokenizer, number_of
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import StepInputs, bins_of
from nntile_py.graph.padding import MASK
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.training.data import train_tokenizer

Inputs = dict[str, Array] | StepInputs
AHEAD = 16  # times the samples of a step: among so many one that fits into a bin is looked for


class Tokens(NamedTuple):
    """Samples as a model takes them: the token numbers of each, and its class, int64 [samples]."""

    sequences: list[Array]
    classes: Array

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: Array) -> Tokens:
        return Tokens([self.sequences[row] for row in rows], self.classes[rows])

    def tobytes(self) -> bytes:
        """What tells them from others."""
        lengths = np.array([len(one) for one in self.sequences])
        return b"".join(part.tobytes() for part in (lengths, *self.sequences, self.classes))


@dataclass
class LabelledCorpus:
    """The samples to train on and those held out, the classes' names, how many texts were cut at `train.seq`."""

    tokenizer: Tokenizer
    names: list[str]
    train: Tokens
    held_out: Tokens
    cut: int

    def told(self) -> str:
        cut = f", {self.cut:,} cut at train.seq" if self.cut else ""
        return f"{len(self.train):,} texts to train on, {len(self.held_out):,} held out{cut}, {len(self.names)} labels"

    def contents(self) -> dict[str, bytes]:
        """What tells it from another."""
        return {"training text": self.train.tobytes(), "held-out text": self.held_out.tobytes()}


def load_labelled(config: RunConfig) -> LabelledCorpus:
    """Read, split and tokenize the table of `config.data`; trains the tokenizer where none is given.

    Raises ConfigError for what the config's own check cannot see: held-out rows, a tokenizer that begins no sequence.
    """
    data, model = config.data, config.model
    samples = read_samples("data.source", data.source, data.text, data.label)
    names = getattr(model, "labels", None)
    if "classes" in type(model).model_fields:
        numbers, names = class_numbers(names, model.classes, samples), names or list(map(str, range(model.classes)))
    else:  # a model of the user's
        names = labels_of(data.source, samples)
        numbers = class_numbers(names, len(names), samples)
    if data.held_out:
        train, held_out = samples, read_samples("data.held_out", data.held_out, data.text, data.label)
        if other := next((one for one in held_out if one.label not in numbers), None):
            here = f"data.held_out: {data.held_out}, line {other.line}"
            raise ConfigError(f"{here}: the label {other.label!r} is not in data.source; allowed: {', '.join(numbers)}")
    else:
        train, held_out = split_samples(samples, data.val_fraction)
        if not held_out:
            need = "two texts or more of a label, or a table of its own for data.held_out"
            raise ConfigError(f"data.source: {data.source} has one text of each label; allowed: {need}")
    tokenizer = _tokenizer(config, [sample.text for sample in train])
    (first, cut), (second, also) = (_tokens(tokenizer, part, numbers, config.train.seq) for part in (train, held_out))
    return LabelledCorpus(tokenizer, names, first, second, cut + also)


def split_samples(samples: list[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on and held out: of the texts of each label the share `fraction`, at least one of two or more.

    The same text is never in both, and the same texts are always split alike: in the order of their hashes."""
    texts: dict[str, set[str]] = {}
    for sample in samples:
        texts.setdefault(sample.label, set()).add(sample.text)
    held: set[str] = set()
    for own in texts.values():
        ordered = sorted(own, key=lambda text: hashlib.sha1(text.encode()).digest())
        held.update(ordered[: max(round(fraction * len(own)), 1) if len(own) > 1 else 0])
    return [one for one in samples if one.text not in held], [one for one in samples if one.text in held]


def _tokenizer(config: RunConfig, texts: list[str]) -> Tokenizer:
    """One that frames a sequence as its template says, else as tokenizer.frame does."""
    if path := config.tokenizer.path:
        tokenizer = load_tokenizer(Path(path))
    else:
        tokenizer = train_tokenizer(texts, config.tokenizer.size(), MASKED)
    frame(tokenizer)
    if not tokenizer.num_special_tokens_to_add(False):
        missing = ", ".join(lacking(tokenizer, (CLS, SEP)))
        need = f"a tokenizer with a template, with {CLS} and {SEP}, or with {ROBERTA[CLS]} and {ROBERTA[SEP]}"
        raise ConfigError(f"tokenizer.path: {path} has no token {missing}; allowed: {need}")
    return tokenizer


def _tokens(tokenizer: Tokenizer, samples: list[Sample], numbers: dict[str, int], seq: int) -> tuple[Tokens, int]:
    """The samples, and how many texts had more tokens than `seq`."""
    cutting = Tokenizer.from_str(tokenizer.to_str())  # what is saved cuts nothing
    cutting.no_padding()
    cutting.enable_truncation(seq)
    sequences, cut = [], 0
    for first in range(0, len(samples), 256):  # in parts: an encoding in the library's form takes 100 bytes a token
        for encoding in cutting.encode_batch([sample.text for sample in samples[first : first + 256]]):
            sequences.append(np.array(encoding.ids, np.int32))
            cut += bool(encoding.overflowing)
    return Tokens(sequences, np.array([numbers[sample.label] for sample in samples], np.int64)), cut


class LabelledBatches:
    """Inputs of training steps, and what is measured of held-out samples."""

    def __init__(self, config: RunConfig, corpus: LabelledCorpus) -> None:
        how = config.train
        self._how, self._corpus = how, corpus
        self._bins = bins_of(step_spec(config)) if how.pack else None
        lengths, passes = np.array([len(one) for one in corpus.train.sequences]), how.grad_accumulation
        rows = how.batch * passes
        self._order = Order(lengths, config.seed, rows, self._bins, passes, ahead=AHEAD * rows)
        self.about = ""  # as Batches has it
        if self._bins:
            self.about = f"{self._order.fill():.1%} of the bins' {self._bins.room} tokens filled"
        pad = number_of(corpus.tokenizer, PAD)
        padding = getattr(config.model, "padding_token", pad)
        if pad not in (None, padding):
            need = f"{pad}, the tokenizer's {called(corpus.tokenizer, PAD)}"
            raise ConfigError(f"model.padding_token: got {padding}; allowed: {need}")
        self._collate = LabelledCollator(how.seq, padding or 0)

    def training(self, step: int) -> Inputs:
        """Of step 1, 2, ...: decided by the seed and the step alone."""
        which, places = self._order.step(step)
        padded = self._collate(zip(*self._corpus.train.take(np.array(which)), strict=True))
        if not self._bins:
            return padded
        padded.pop(MASK, None)
        return self._bins.filled(padded, places, self._how.grad_accumulation, shift=False)

    def samples(self, step: int) -> Tokens:
        """The samples of a step: each of them once, in an order that the seed decides, then each in another order. With
        train.pack as many as fit into its bins."""
        return self._corpus.train.take(np.array(self._order.step(step)[0]))

    def held_out(self, whole: bool) -> Iterator[dict[str, Array]]:
        """Batches of held-out samples, evenly spread: `train.eval_batches` of them, or `whole`, all samples.

        The last is filled up with rows without a label."""
        held, rows = self._corpus.held_out, self._how.batch
        count = len(held) if whole else min(len(held), self._how.eval_batches * rows)
        places = np.linspace(0, len(held) - 1, count).astype(np.int64)
        for first in range(0, count, rows):
            part = places[first : first + rows]
            filled = held.take(np.resize(part, rows))
            labels = np.where(np.arange(rows) < len(part), filled.classes, IGNORED)
            yield self._collate(zip(filled.sequences, labels, strict=True))

    def measure(self, trainer: Any, whole: bool = False) -> dict[str, Any]:
        """Of held-out samples, for the metrics: the mean loss, and what Confusion.told says."""
        losses: list[float] = []
        found, counts = Confusion(self._corpus.names), list[int]()
        for inputs in self.held_out(whole):
            loss, logits = trainer.evaluate(inputs, return_logits=True)
            real = inputs["labels"] != IGNORED
            losses.append(loss)
            counts.append(int(real.sum()))
            found.add(inputs["labels"][real], logits[real].argmax(-1))
        return {"held_out_loss": float(np.average(losses, weights=counts))} | found.told()
