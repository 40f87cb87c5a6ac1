"""Training data of a language model: batches of tokenized text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nntile_py.data.collators import Array, Collator
from nntile_py.data.dataset import Evaluator, Inputs
from nntile_py.data.sampler import Sampler
from nntile_py.data.text import Corpus
from nntile_py.graph.bin_packing import Bins
from nntile_py.graph.padding import MASK as ATTENTION_MASK
from nntile_py.graph.step_inputs import SequencePlace

HELD_OUT_STEP = 2**40  # the first held-out batch is collated as this step, a number that no training step reaches


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
