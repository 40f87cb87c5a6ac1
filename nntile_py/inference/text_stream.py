"""Turns the tokens of a generated text into pieces of text, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of a generation, token by token.

    Text that may be the beginning of a stop text is held back until later tokens decide. The text ends before the first
    stop text.

    Args:
        tokenizer: Turns tokens into text.
        prompt: Tokens of the prompt. Whether the generated text begins with a space may depend on them.
        stops: Texts that end the generation.

    Attributes:
        text: The text so far, without the text that is held back.
        stopped: True after a stop text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops, self._held = tokenizer, list(stops), ""
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self.text, self.stopped = "", False

    @property
    def length(self) -> int:
        """Number of characters so far, with the text that is held back."""
        return len(self.text) + len(self._held)

    def add(self, token: int) -> str:
        """Add a token. Return the new text that cannot belong to a stop text; it may be empty."""
        if self.stopped:
            return ""
        text = self._held + (self._stream.step(self._tokenizer, token) or "")
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._release(text[: min(ends)], "")
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        return self._release(text[: len(text) - held], text[len(text) - held :])

    def finish(self) -> str:
        """End the generation. Return the text that was held back."""
        return "" if self.stopped else self._release(self._held, "")

    def _release(self, text: str, held: str) -> str:
        self._held = held
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
