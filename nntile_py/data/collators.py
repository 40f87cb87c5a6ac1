"""Collators: turn samples of token numbers into the dict of inputs of a training step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.typed import typed, typed_fields

Array = np.ndarray[Any, Any]
Samples = Sequence[Any] | Array  # lists or arrays of token numbers, of any lengths; or an int array [rows, seq]


def most_masked(tokens: int, probability: float) -> int:
    """Return a limit for the masked tokens of a sequence of `tokens` tokens, each masked with this probability.

    The limit is three standard deviations above the mean: without it, about one of 700 sequences would have more masked
    tokens. It is rounded up to a multiple of 8, for GPUs, and is at most `tokens`."""
    mean = tokens * probability
    return min(tokens, 8 * math.ceil((mean + 3 * math.sqrt(mean * (1 - probability))) / 8))


class Collator(Protocol):
    """Turns samples of token numbers into a model's inputs. step: number of the training step, for random choices."""

    def __call__(self, samples: Samples, step: int = 0) -> dict[str, Array]: ...


@typed_fields
@dataclass(frozen=True)
class CausalCollator:
    """Makes the inputs of a causal model: pads each sample at its end to `seq` tokens with the token `pad`.

    Returns input_ids and labels, int64 [rows, seq]; labels of padding are -100. If there is padding, returns also
    attention_mask [rows, seq], 0 for padding. The trainer shifts the labels. Raises ValueError for a sample of more
    than `seq` tokens."""

    seq: int
    pad: int = 0

    @typed
    def __call__(self, samples: Samples, step: int = 0) -> dict[str, Array]:
        """Return the inputs. `step` has no effect; other collators, such as MaskedCollator, use it."""
        ids, real = _padded(samples, self.seq, self.pad)
        return _inputs(ids, np.where(real, ids, IGNORED), real)


@typed_fields
@dataclass(frozen=True)
class MaskedCollator:
    """Makes the inputs of a masked language model: pads samples like CausalCollator, then masks tokens.

    Source: Devlin et al. (2019), BERT, section 3.1.

    The model predicts a share `probability` of the tokens that are not in `special`; other labels are -100. 80 % of
    the predicted tokens become the token `mask`, 10 % become a random token from 0 to vocab - 1 that is not in
    `special`, and 10 % stay unchanged. The choice is a function of seed, step and position only. A row has at most
    `most` predicted tokens, and may have none. `most` None: the result of the function most_masked."""

    seq: int
    vocab: int
    mask: int
    special: Collection[int] = ()  # tokens that are never masked, such as [CLS]; `mask` is always one of them
    pad: int = 0
    probability: float = 0.15
    seed: int = 0
    most: int | None = None
    _ordinary: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.seq, int) or self.seq < 1:
            raise ConfigError(f"seq: got {self.seq!r}; allowed: an integer of at least 1")
        if not 0 < self.probability < 1:
            raise ConfigError(f"probability: got {self.probability}; allowed: a number above 0 and below 1")
        if not 0 < self.vocab < 2**31:
            raise ConfigError(f"vocab: got {self.vocab}; allowed: a number of tokens below 2^31")
        if not 0 <= self.mask < self.vocab:
            raise ConfigError(f"mask: got {self.mask}; allowed: a token, from 0, below vocab = {self.vocab}")
        ordinary = np.setdiff1d(np.arange(self.vocab), [*self.special, self.mask])
        if not ordinary.size:
            raise ConfigError(f"special: all {self.vocab} tokens are in it; allowed: fewer")
        object.__setattr__(self, "_ordinary", ordinary)
        if self.most is None:
            object.__setattr__(self, "most", most_masked(self.seq, self.probability))
        elif self.most < 1:
            raise ConfigError(f"most: got {self.most}; allowed: at least 1")

    @typed
    def __call__(self, samples: Samples, step: int = 0) -> dict[str, Array]:
        ids, real = _padded(samples, self.seq, self.pad)
        rng = np.random.default_rng([self.seed, step, 1])  # [seed, step] seeds the positions of a step's sequences
        draws = np.where(np.isin(ids, self._ordinary) & real, rng.random(ids.shape), 1.0)
        chosen = (draws < self.probability) & (draws.argsort(axis=1).argsort(axis=1) < (self.most or self.seq))
        how, other = rng.random(ids.shape), rng.choice(self._ordinary, ids.shape)
        seen = np.where(chosen & (how < 0.8), self.mask, np.where(chosen & (how >= 0.9), other, ids))
        return _inputs(seen, np.where(chosen, ids, IGNORED), real)


@typed_fields
@dataclass(frozen=True)
class LabelledCollator:
    """Makes the inputs of a classifier from pairs (token numbers, class), padded like CausalCollator's samples.

    Returns input_ids, int64 [rows, seq], labels [rows], and attention_mask if there is padding. If a text may have
    several labels, its class is an array with a 0 or 1 for each class, and labels are [rows, classes]."""

    seq: int
    pad: int = 0

    @typed
    def __call__(self, samples: Iterable[tuple[Any, Any]], step: int = 0) -> dict[str, Array]:
        tokens, classes = [], []
        for row, pair in enumerate(samples):
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                raise ValueError(f"samples[{row}]: got {pair!r:.60}; allowed: (token numbers, class)")
            tokens.append(pair[0])
            classes.append(pair[1])
        ids, real = _padded(tokens, self.seq, self.pad)
        return _inputs(ids, np.array(classes, np.float32 if classes and np.ndim(classes[0]) else np.int64), real)


@typed_fields
@dataclass(frozen=True)
class TokenLabelCollator:
    """Makes the inputs of a classifier of tokens from pairs (token numbers, classes). Pads like CausalCollator.

    Class k is the label of token k. Tokens without a class, and padding, have the label -100. Returns input_ids and
    labels, int64 [rows, seq], and attention_mask if there is padding."""

    seq: int
    pad: int = 0

    @typed
    def __call__(self, samples: Iterable[tuple[Any, Any]], step: int = 0) -> dict[str, Array]:
        pairs = list(samples)
        ids, real = _padded([tokens for tokens, _ in pairs], self.seq, self.pad)
        labels = np.full(ids.shape, IGNORED, np.int64)
        for row, (tokens, classes) in enumerate(pairs):
            count = min(len(tokens), len(classes))
            labels[row, :count] = classes[:count]
        return _inputs(ids, labels, real)


@typed_fields
@dataclass(frozen=True)
class PairCollator:
    """Makes the inputs of head: sentence_embedding from rows of texts, padded like CausalCollator's samples.

    A row has the token numbers of a question, its answer, and wrong answers. Returns input_ids, int64
    [rows * texts in a row, seq], labels [rows] = 0, 1, 2, ..., and attention_mask if there is padding."""

    seq: int
    pad: int = 0

    @typed
    def __call__(self, samples: Iterable[Any], step: int = 0) -> dict[str, Array]:
        rows = [list(row) for row in samples]
        if len({len(row) for row in rows}) > 1:
            raise ValueError("samples: rows of unequal numbers of texts; allowed: the same number in each row")
        ids, real = _padded([text for row in rows for text in row], self.seq, self.pad)
        return _inputs(ids, np.arange(len(rows)), real)


def _padded(samples: Samples, seq: int, pad: int) -> tuple[Array, Array]:
    """Return token numbers [rows, seq], and a mask that is False for padding."""
    ids, real = np.full((len(samples), seq), pad, np.int64), np.zeros((len(samples), seq), np.bool_)
    for row, sample in enumerate(samples):
        tokens = np.asarray(sample)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(f"samples[{row}]: got {tokens.dtype} {tokens.shape}; allowed: a list of ints")
        if len(tokens) > seq:
            raise ValueError(f"samples[{row}]: {len(tokens)} tokens; allowed: at most seq = {seq}")
        ids[row, : len(tokens)], real[row, : len(tokens)] = tokens, True
    return ids, real


def _inputs(ids: Array, labels: Array, real: Array) -> dict[str, Array]:
    mask = {} if real.all() else {"attention_mask": real.astype(np.int64)}
    return {"input_ids": ids, "labels": labels} | mask
