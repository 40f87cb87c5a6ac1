"""What `nntile train` gives a model: batches of text, made as the model's objective says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import CLASSIFICATION, RunConfig
from nntile_py.data.collators import Array, CausalCollator, Collator, MaskedCollator
from nntile_py.data.sampler import Order
from nntile_py.data.tokenizer import (
    CLS,
    MASK,
    MASKED,
    PAD,
    ROBERTA,
    SEP,
    called,
    lacking,
    load_tokenizer,
    number_of,
    special_numbers,
    token_numbers,
)
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import SequencePlace, StepInputs, bins_of
from nntile_py.graph.padding import MASK as ATTENTION_MASK
from nntile_py.models.registry import known
from nntile_py.training.data import Corpus, Parts, held_out_batches, training_batch

Inputs = dict[str, Array] | StepInputs
# By objective: tokens that the text needs, axes of the labels.
SPECIAL: dict[str, Sequence[str]] = {"causal": (), "masked": MASKED, CLASSIFICATION: MASKED}
_LABELS = {"causal": ["batch", "seq"], "masked": ["batch", "seq"], CLASSIFICATION: ["batch"]}


def objective(config: RunConfig) -> str:
    """One of SPECIAL; raises ConfigError for a model or a tokenizer that text cannot be made into batches for."""
    kind, found = config.model.type, config.aim
    elsewhere = "train it from Python with nt.Trainer"
    if found not in (None, *SPECIAL):
        raise ConfigError(f"model.type: {kind} has the objective {found!r}; allowed: {', '.join(SPECIAL)}, None")
    if found not in SPECIAL:
        text = ", ".join(name for name, cls in known().items() if cls.objective)
        raise ConfigError(
            f"model.type: {kind} is not trained on text (its objective is {found}); allowed: {text}, or {elsewhere}"
        )
    declared = replace(step_spec(config), pack=False).trace()[0].inputs
    asked = {name: one for name, one in declared.items() if one.default is None}
    axes = {name: list(one.tensor.axes) for name, one in asked.items()}
    fits = axes == {"input_ids": ["batch", "seq"], "labels": _LABELS[found]}
    if not fits or (found != CLASSIFICATION and asked["labels"].below != asked["input_ids"].below):
        told = ", ".join(f"{name} [{', '.join(axes[name])}] below {one.below}" for name, one in asked.items())
        head = f" with head: {config.model.head}" if "head" in type(config.model).model_fields else ""
        gives = f"text gives input_ids [batch, seq] and labels [{', '.join(_LABELS[found])}]"
        gives += ", both tokens" if found != CLASSIFICATION else ""
        raise ConfigError(f"model: {kind}{head} needs {told}; allowed: no others, as {gives}; {elsewhere}")
    if found != "causal":
        _check_framed(config, found)
    return found


def _check_framed(config: RunConfig, aim: str) -> None:
    if config.train.seq < 3:
        raise ConfigError(f"train.seq: got {config.train.seq}; allowed: at least 3, as {CLS} and {SEP} take two places")
    if (path := config.tokenizer.path) is None:
        least = 257 + len(MASKED)
        if config.tokenizer.size() < least:
            need = f"at least {least}: all bytes, the end-of-text token, {', '.join(MASKED)}"
            raise ConfigError(f"tokenizer.vocab_size: got {config.tokenizer.size()}; allowed: {need}")
        return
    tokenizer = load_tokenizer(Path(path))
    if aim == CLASSIFICATION:
        return  # what its template says stands in their place
    if missing := lacking(tokenizer):
        need = f"a tokenizer with {', '.join(MASKED)}, or with {', '.join(ROBERTA.values())}"
        raise ConfigError(f"tokenizer.path: {path} has no token {', '.join(missing)}; allowed: {need}")


class Batches:
    """Inputs of training steps and of evaluations. A masked model reads [CLS], a part of the text, [SEP].

    held_out: the same batches, with the same tokens masked, at every evaluation. shown: a padded one of them. about:
    what there is to tell of sequences of unequal lengths."""

    def __init__(self, config: RunConfig, corpus: Corpus, objective: str) -> None:
        self._how, self._seed, self._tokens = config.train, config.seed, corpus.train
        self._ends: tuple[int, ...] = ()  # what stands before and after the text of a sequence
        self._collate: Collator = CausalCollator(config.train.seq)
        if objective == "masked":
            self._ends, self._collate = _masked(config, corpus)
        self._text = config.train.seq - len(self._ends)  # tokens of text in a sequence
        self._parts: Parts | None = None
        self.about = ""
        if corpus.train_lengths is None:
            rows, count = config.train.batch, config.train.eval_batches
            parts = held_out_batches(corpus.held_out, rows, self._text, count)
            whole = self._collate(self._framed(np.concatenate(list(parts))), 0)  # no step of training has the number 0
            self.held_out: list[Inputs] = [
                {name: array[row : row + rows] for name, array in whole.items()} for row in range(0, rows * count, rows)
            ]
            self.shown = {name: array[:rows] for name, array in whole.items()}
        else:
            self._of_parts(config, corpus)

    def _of_parts(self, config: RunConfig, corpus: Corpus) -> None:
        """Sequences as the text has them."""
        how, frame = config.train, len(self._ends)
        self._bins = bins_of(step_spec(config)) if how.pack else None
        assert corpus.train_lengths is not None and corpus.held_out_lengths is not None
        self._parts = Parts(corpus.train, corpus.train_lengths, self._text)
        held_out = Parts(corpus.held_out, corpus.held_out_lengths, self._text)
        passes = how.grad_accumulation
        self._order = Order(self._parts.lengths + frame, self._seed, how.batch * passes, self._bins, passes)
        fixed = Order(held_out.lengths + frame, 0, how.batch, self._bins)  # the same whatever the seed
        draws = 2**40  # no step of training has such a number
        self.held_out = [self._inputs(held_out, *fixed.step(k + 1), 1, draws + k) for k in range(how.eval_batches)]
        self.shown = self._collate(self._samples(held_out, fixed.step(1)[0][: how.batch]), 0)
        lengths = self._parts.lengths + frame
        filled = f", {self._order.fill():.1%} of the bins' {self._bins.room} tokens filled" if self._bins else ""
        self.about = (
            f"{len(lengths):,} {config.data.sequences} of {lengths.min()} to {lengths.max()} tokens,"
            f" {lengths.mean():.1f} on average ({self._parts.cut:,} were longer and are cut){filled}"
        )

    def training(self, step: int) -> Inputs:
        """Of step 1, 2, ...: decided by the seed and the step alone."""
        if self._parts:
            return self._inputs(self._parts, *self._order.step(step), self._how.grad_accumulation, step)
        rows = self._how.batch * self._how.grad_accumulation
        return self._collate(self._framed(training_batch(self._tokens, rows, self._text, self._seed, step)), step)

    def measure(self, trainer: Any, whole: bool = False) -> dict[str, Any]:
        """Of held-out text, for the metrics: the mean loss. `whole` says nothing here."""
        return {"held_out_loss": float(np.mean([trainer.evaluate(inputs) for inputs in self.held_out]))}

    def _inputs(self, parts: Parts, which: list[int], places: list[SequencePlace], passes: int, step: int) -> Inputs:
        padded = self._collate(self._samples(parts, which), step)
        if not self._bins:
            return padded
        padded.pop(ATTENTION_MASK, None)
        return self._bins.filled(padded, places, passes, shift=True)

    def _samples(self, parts: Parts, which: list[int]) -> list[Array]:
        return [self._framed(parts[one][None])[0] for one in which]

    def _framed(self, ids: Array) -> Array:
        return np.pad(ids, ((0, 0), (1, 1)), constant_values=[(0, 0), self._ends]) if self._ends else ids


def _masked(config: RunConfig, corpus: Corpus) -> tuple[tuple[int, int], MaskedCollator]:
    """What stands around a masked model's text, and what masks it."""
    number: dict[str, int] = {token: number_of(corpus.tokenizer, token) or 0 for token in MASKED}  # all there
    if (padding := getattr(config.model, "padding_token", number[PAD])) != number[PAD]:
        need = f"{number[PAD]}, the tokenizer's {called(corpus.tokenizer, PAD)}"
        raise ConfigError(f"model.padding_token: got {padding}; allowed: {need}")
    vocab, special = token_numbers(corpus.tokenizer), special_numbers(corpus.tokenizer)
    return (number[CLS], number[SEP]), MaskedCollator(
        config.train.seq, vocab, number[MASK], frozenset(special | set(number.values())), number[PAD],
        config.train.mask_probability, config.seed, getattr(config.model, "masked", None) or None,
    )  # fmt: skip
