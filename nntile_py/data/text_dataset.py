"""Training data of a language model: batches of tokenized text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nntile_py.data.collators import Array, Collator
from nntile_py.data.corpus import Corpus, fingerprint
from nntile_py.data.dataset import Evaluator, Inputs, padding_note
from nntile_py.data.sampler import Sampler
from nntile_py.data.sequences import Answered, Concatenated, Mixture, Pieces, SequenceTable, TextWindows
from nntile_py.data.token_files import Tokens
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import Bins
from nntile_py.graph.padding import MASK as ATTENTION_MASK
from nntile_py.graph.step_inputs import SequencePlace
from nntile_py.tasks.cross_entropy import IGNORED

HELD_OUT_STEP = 2**40  # the first held-out batch is collated as this step, a number that no training step reaches


class TextDataset:
    """The Dataset of a causal or a masked language model: batches of tokenized text.

    Args:
        corpus: Tokens, as `read_corpus` returns them.
        collator: Turns token numbers into the inputs of the model.
        seq: Largest number of tokens of a sequence, `ends` included.
        batch: Number of sequences in one forward and backward pass.
        passes: Number of forward and backward passes in a step.
        eval_batches: Number of batches in one evaluation.
        seed: Decides which sequences a step reads.
        ends: The tokens before and after a sequence's text: [CLS] and [SEP] for a masked model, none for a causal one.
        bins: Packs sequences into bins instead of padding them.
        concatenate: Windows cross the ends of documents.

    Raises:
        ConfigError: With `concatenate`, the text is shorter than a window or has conversations. Or no conversation has
            an answer within `seq` tokens.
    """

    class_names: list[str] | None = None

    def __init__(
        self, corpus: Corpus, collator: Collator, *, seq: int, batch: int, passes: int = 1, eval_batches: int = 4,
        seed: int = 0, ends: tuple[int, ...] = (), bins: Bins | None = None, concatenate: bool = False,
    ) -> None:  # fmt: skip
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self._collator, self._ends, self._bins, self._passes = collator, ends, bins, passes
        self._batch, self._eval_batches, self._seq, self._concatenate = batch, eval_batches, seq, concatenate
        self._left_out = 0  # conversations without an answer in `seq` tokens
        self._train = self._mixture(corpus.train, corpus.weights, "training", seed)
        self._measured = self._mixture(corpus.held_out, corpus.weights[: len(corpus.held_out)], "held-out", None)
        lengths = self._framed_lengths(self._train)
        self._sampler = Sampler(lengths, seed, batch * passes, bins, passes, order=self._train.order)
        self._held_out: list[Inputs] = self._held_out_batches()
        self.example: Mapping[str, Array] | None = self._collated(self._measured, self._measured.spread(batch), 0)

    def _mixture(self, tokens: Sequence[Tokens], weights: Sequence[float], name: str, seed: int | None) -> Mixture:
        """Return the sequences of a part of all sources. seed: None for the held-out part, which never changes."""
        text = self._seq - len(self._ends)  # tokens of text in a sequence
        sequences = list[SequenceTable]()
        for source in tokens:
            if source.learned is not None:
                if self._concatenate:
                    raise ConfigError("data.concatenate: got true; allowed: false, since the tokens are conversations")
                sequences.append(answered := Answered(source, text))
                self._left_out += answered.left_out
                if not len(answered.lengths):
                    need = "a larger train.seq, or other data"
                    raise ConfigError(f"data: no {name} conversation has an answer in {text} tokens; allowed: {need}")
            elif self.corpus.unit != "window":
                sequences.append(Pieces(source.lengths, text))
            elif not self._concatenate:
                sequences.append(TextWindows(source.lengths, text, seed))
            else:
                try:
                    sequences.append(Concatenated(source.lengths, text, seed))
                except ValueError as error:
                    need = f"at least train.seq = {self._seq} with data.concatenate"
                    raise ConfigError(f"data.source: the {name} text has {error}; allowed: {need}") from None
        return Mixture(tokens, sequences, weights, seed or 0)

    def _framed_lengths(self, sequences: Mixture) -> Array:
        """Return the lengths of sequences with `ends`."""
        return sequences.lengths + len(self._ends) if self._ends else sequences.lengths

    def _held_out_batches(self) -> list[Inputs]:
        measured, count = self._measured, self._eval_batches
        if self._bins:
            lengths = self._framed_lengths(measured)
            fixed = Sampler(lengths, 0, self._batch, self._bins, order=measured.order)
            return [self._inputs(measured, *fixed.step(k + 1), 1, HELD_OUT_STEP + k) for k in range(count)]
        numbers = np.array(measured.spread(count * self._batch)).reshape(count, self._batch)
        return [self._collated(measured, row.tolist(), HELD_OUT_STEP + k) for k, row in enumerate(numbers)]

    def describe(self) -> str:
        train, held_out = (sum(len(one.ids) for one in part) for part in (self.corpus.train, self.corpus.held_out))
        answered = self.corpus.train[0].learned is not None  # the chat template ends an answer
        endless = "" if self.corpus.end is not None or self._ends or answered else ", no token ends a document"
        notes = "".join(f"{note}\n" for note in self.corpus.notes)
        return f"{notes}{train:,} tokens to train on, {held_out:,} held out{endless}"

    def describe_lengths(self) -> str:
        lengths = self._framed_lengths(self._train)
        if self.corpus.train[0].learned is None and not self._bins and lengths.min() == lengths.max() == self._seq:
            return ""
        if self._bins:
            filled = f", {self._sampler.fill():.1%} of the bins' {self._bins.room} tokens filled"
        else:
            remedy = "train.pack: true" + ", or data.concatenate: true," * (self.corpus.unit == "window")
            filled = f"; {note}" if (note := padding_note(lengths, self._seq, remedy)) else ""
        asked = self.corpus.train[0].learned is not None
        windows = self.corpus.unit == "window" and not asked
        unit = "conversations" if asked else "windows of the text" if windows else self.corpus.unit
        cut = f" ({self._train.cut:,} were longer and are cut)" if not windows else ""
        if self._left_out:
            cut += f", {self._left_out:,} left out: they have no answer in their first {self._seq} tokens"
        sizes = f"{lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.1f}"
        return f"{len(lengths):,} training sequences ({unit}): {sizes}{cut}{filled}"

    def contents(self) -> dict[str, bytes]:
        def hashes(part: Sequence[Tokens]) -> bytes:
            return b"".join(fingerprint(array) for tokens in part for array in tokens)

        return {"training text": hashes(self.corpus.train), "held-out text": hashes(self.corpus.held_out)}

    def train(self, step: int) -> Inputs:
        return self._inputs(self._train, *self._sampler.step(step), self._passes, step)

    def padded(self, step: int) -> dict[str, Array]:
        """Return the sequences of a training step as a padded batch, even if training packs them into bins."""
        return self._collated(self._train, self._sampler.step(step)[0], step)

    def held_out(self, whole: bool = False) -> list[Inputs]:
        """Return the held-out batches, always with the same tokens masked. `whole` has no effect."""
        return self._held_out

    def collate(self, samples: Any, step: int = 0) -> dict[str, Array]:
        return self._collator(samples, step)

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        losses = [model.evaluate(inputs) for inputs in self.held_out(whole)]  # type: ignore[arg-type]
        return {"held_out_loss": float(np.mean(losses))}

    def _inputs(
        self, mixture: Mixture, numbers: list[int], places: list[SequencePlace], passes: int, step: int
    ) -> Inputs:
        padded = self._collated(mixture, numbers, step)
        if not self._bins:
            return padded
        padded.pop(ATTENTION_MASK, None)
        return self._bins.filled(padded, places, passes, shift=True)

    def _collated(self, mixture: Mixture, numbers: Sequence[int], step: int) -> dict[str, Array]:
        """Return the padded inputs of sequences. Tokens that are not learned have the label -100."""
        samples = [mixture.take(number) for number in numbers]
        inputs = self.collate([self._framed(ids) for ids, _ in samples], step)
        for row, (_, learned) in enumerate(samples):
            if learned is not None:
                inputs["labels"][row, : len(learned)][learned == 0] = IGNORED
        if not self._ends:  # in a causal model, no token sees the padding, which comes after it
            inputs.pop(ATTENTION_MASK, None)
        return inputs

    def _framed(self, ids: Array) -> Array:
        return np.array([self._ends[0], *ids, self._ends[1]], np.int64) if self._ends else ids
