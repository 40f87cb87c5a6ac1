"""Windows over a long text, in which a language model predicts each token once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nntile_py.data.collators import Array
from nntile_py.tasks.cross_entropy import IGNORED


def spans(tokens: int, seq: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end) of windows of at most `seq` tokens that begin every `stride` tokens.

    The window has the tokens begin to end - 1. Its new tokens, which no earlier window had, begin at `first`.

    Source: the loop of transformers' guide "Perplexity of fixed-length models".
    """
    first = 0
    for begin in range(0, tokens, stride):
        end = min(begin + seq, tokens)
        yield begin, first, end
        if end == tokens:
            return
        first = end


def causal_windows(ids: Array, seq: int, stride: int) -> Iterator[tuple[Array, Array]]:
    """Yield (input_ids, labels) of each window, both [tokens of the window]; labels of earlier tokens are -100.

    Labels have the positions of the tokens, as in transformers: the model's loss shifts them, so that a window's first
    token is never predicted.
    """
    for begin, first, end in spans(len(ids), seq, stride):
        part = ids[begin:end].astype(np.int64)
        yield part, np.where(np.arange(begin, end) < first, IGNORED, part)


def masked_windows(
    ids: Array, seen: Array, labels: Array, ends: tuple[int, int], seq: int, stride: int
) -> Iterator[tuple[Array, Array]]:
    """Yield (input_ids, labels) of each window of a masked model: [CLS], at most seq - 2 tokens, [SEP].

    Tokens that an earlier window had are not masked and have no label; only new tokens are masked and have labels.

    Args:
        ids: The text.
        seen: The text with masked tokens.
        labels: The original token at the places to predict, else -100.
        ends: The tokens [CLS] and [SEP].
        seq: Largest number of tokens of a window, with both ends.
        stride: Number of tokens from the beginning of a window to the beginning of the next window.
    """
    for begin, first, end in spans(len(ids), seq - 2, stride):
        part = np.concatenate([ids[begin:first], seen[first:end]]).astype(np.int64)
        new = np.where(np.arange(begin, end) < first, IGNORED, labels[begin:end])
        yield np.pad(part, 1, constant_values=[ends]), np.pad(new, 1, constant_values=IGNORED)
