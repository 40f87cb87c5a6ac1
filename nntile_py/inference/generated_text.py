"""Options of a generation, and its results: complete texts, or a stream of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from nntile_py.data.tables import check_whole
from nntile_py.errors import ConfigError
from nntile_py.inference.engine import Reason
from nntile_py.inference.token_logprobs import TokenLogProbs
from nntile_py.tasks.sample import SETTINGS
from nntile_py.tasks.top_logprobs import MOST_RANKED

MOST_TOKENS = 128  # new tokens of a text by default


@dataclass(frozen=True)
class Options:
    """How texts are generated.

    Attributes:
        max_tokens: Largest number of new tokens of a text. None: MOST_TOKENS, or fewer if the model
            has fewer positions left.
        temperature: Divisor of the logits; 0: the most probable token is taken (greedy).
        top_k: Draw among the k most probable tokens; None, 0 or -1: among all tokens.
        top_p: Draw among the most probable tokens whose probabilities together reach this value.
        min_p: Draw among tokens whose probability is at least min_p times the largest probability.
        repetition_penalty: For tokens that the text already has: positive logits are divided by this value, negative
            logits are multiplied by it.
        seed: Seed of the draws. The draws of prompt number n of a call depend on (seed, n) alone.
        stop: Stop texts. A generated text ends before the first stop text.
        logprobs: Return the log-probability of each new token, and of this number of most probable tokens. None:
            no log-probabilities.

    Raises:
        ConfigError: A value is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._check("max_tokens", 1, 2**31 - 1, integer=True)
        self._check("temperature", 0, 1e6)
        if self.top_k is not None:
            self._check("top_k", -1, 2**24, integer=True)
            object.__setattr__(self, "top_k", self.top_k if self.top_k > 0 else None)
        self._check("top_p", 0, 1, exclusive=True)
        self._check("min_p", 0, 1)
        self._check("repetition_penalty", 0, 1e6, exclusive=True)
        self._check("seed", 0, 2**63 - 1, integer=True)
        if self.logprobs is not None:
            self._check("logprobs", 0, MOST_RANKED, integer=True)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) and text for text in stops):
            raise ConfigError(f"stop: got {self.stop!r}; allowed: texts that are not empty")
        for text in stops:
            check_whole("stop", text, ConfigError)
        object.__setattr__(self, "stop", tuple(stops))

    def _check(self, name: str, least: float, most: float, *, integer: bool = False, exclusive: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | np.integer if integer else Real | np.floating) and not isinstance(value, bool)
        if number and least <= value <= most and not (exclusive and value == least):
            object.__setattr__(self, name, int(value) if integer else float(value))
            return
        kind = "an integer" if integer else "a number"
        lower = f"above {least}" if exclusive else f"of at least {least}"
        upper = f" and at most {most if integer else format(most, 'g')}"
        raise ConfigError(f"{name}: got {value!r:.40}; allowed: {kind} {lower}{upper}")

    @property
    def settings(self) -> tuple[float, ...]:
        """The sampling settings of a row of the decoder, in the order of tasks.sample.SETTINGS."""
        return tuple(float(getattr(self, name) or 0) for name in SETTINGS)


@dataclass(frozen=True)
class GeneratedText:
    """A generated text.

    Attributes:
        text: The text without the prompt; None: the generator has no tokenizer.
        tokens: Numbers of the new tokens, without the token that ended the text.
        prompt_tokens: Number of the prompt's tokens.
        reason: `stop`: a token or a text of `stop` ended the text; `length`: it has `max_tokens` tokens.
        logprobs: Log-probabilities of each token of `tokens`; None: the option `logprobs` is None.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    reason: Reason
    logprobs: list[TokenLogProbs] | None = None


@dataclass(frozen=True)
class GeneratedPart:
    """A new token of a text, as `stream=True` yields it.

    Attributes:
        index: Number of the prompt.
        token: Number of the token.
        text: New text. It may be empty, because a character may consist of several tokens. It is always empty if the
            generator has no tokenizer.
        reason: Why the text ends here; None: it continues.
        logprobs: Log-probabilities of the token; None: the option `logprobs` is None.
    """

    index: int
    token: int
    text: str
    reason: Reason | None
    logprobs: TokenLogProbs | None = None
