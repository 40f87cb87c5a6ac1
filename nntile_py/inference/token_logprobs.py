"""Log-probabilities of the tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probability of a token, and the most probable tokens at its position.

    The values are natural logarithms of the softmax of the logits, before temperature, penalty and filters. The softmax
    has all tokens of the model's vocabulary.

    Attributes:
        token: Number of the token.
        logprob: Its log-probability.
        top: (number, log-probability) of the most probable tokens, in falling order. The token itself may be missing.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of_ranks(cls, values: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], most: int) -> Self:
        """Convert a row of TopLogProbs: first the token itself, then the most probable tokens, of which `most` stay."""
        pairs = list(zip(ids[: most + 1].tolist(), values[: most + 1].tolist(), strict=True))
        return cls(*pairs[0], tuple(pairs[1:]))
