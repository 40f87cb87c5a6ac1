"""Choices of completions in the format of OpenAI's API, with log-probabilities.

Source: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from nntile_py.data.token_texts import TokenTexts
from nntile_py.inference.token_logprobs import TokenLogProbs

ROLE = {"role": "assistant"}
LEAST = -9999.0  # is written instead of smaller log-probabilities, because JSON has no -inf


class ScoredToken(NamedTuple):
    """A token of an answer.

    Attributes:
        token: Number of the token.
        logprobs: Its log-probabilities; None for the first token of a prompt, which follows no token.
        offset: Number of the answer's characters before the token.
    """

    token: int
    logprobs: TokenLogProbs | None
    offset: int


@dataclass(frozen=True)
class CompletionKind:
    """Format of a completion in the API's answers: text or chat.

    Attributes:
        id: Beginning of the field `id`.
        complete: Field `object` of a complete answer.
        chunk: Field `object` of a streamed part.
        chat: True for chat completions.
        texts: Turns token numbers into text for the field `logprobs`. None: the field is null.
    """

    id: str
    complete: str
    chunk: str
    chat: bool
    texts: TokenTexts | None = None

    def with_logprobs(self, texts: TokenTexts) -> Self:
        """Return the kind whose answers have log-probabilities."""
        return replace(self, texts=texts)

    def choice(
        self, index: int, text: str | None, reason: str | None, scored: Sequence[ScoredToken] = (),
        streamed: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a choice of an answer, or of a streamed part of an answer. scored: the tokens of the text."""
        facts = {"index": index, "logprobs": self._logprobs(scored, streamed), "finish_reason": reason}
        if not self.chat:
            return facts | {"text": text or ""}
        message: dict[str, Any] = {} if text is None else {"content": text}
        return facts | ({"delta": message} if streamed else {"message": ROLE | message})

    def first(self, index: int, text: str) -> dict[str, Any]:
        """Return the first streamed part of an answer. In a chat, only this part has the role."""
        choice = self.choice(index, text, None, streamed=True)
        return choice | {"delta": ROLE | choice["delta"]} if self.chat else choice

    def _logprobs(self, scored: Sequence[ScoredToken], streamed: bool) -> dict[str, Any] | None:
        """Return the field `logprobs`; None if no log-probabilities were asked for, or a streamed part has no token."""
        if not self.texts or (streamed and not scored):
            return None
        texts = self.texts
        if self.chat:
            rows = [one.logprobs for one in scored if one.logprobs]
            content = [
                _entry(texts, row.token, row.logprob) | {"top_logprobs": [_entry(texts, *other) for other in row.top]}
                for row in rows
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [texts.text(one.token) for one in scored],
            "token_logprobs": [one.logprobs and _finite(one.logprobs.logprob) for one in scored],
            "top_logprobs": [one.logprobs and _by_text(texts, one.logprobs) for one in scored],
            "text_offset": [one.offset for one in scored],
        }


TEXT = CompletionKind("cmpl", "text_completion", "text_completion", chat=False)
CHAT = CompletionKind("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    """Return a token of a chat's log-probabilities."""
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": [*texts.bytes(token)]}


def _by_text(texts: TokenTexts, row: TokenLogProbs) -> dict[str, float]:
    """Return {text: log-probability} of the most probable tokens and the token itself, as OpenAI does.

    If several tokens have the same text, the most probable of these tokens counts.
    """
    result: dict[str, float] = {}
    for token, logprob in (*row.top, (row.token, row.logprob)):
        result.setdefault(texts.text(token), _finite(logprob))
    return result
