"""Conversations, or prompts with responses, as training data: a model learns the answers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nntile_py.data.chat_template import ChatTemplate, Message, deadline
from nntile_py.data.tables import text_of
from nntile_py.errors import ConfigError
from nntile_py.schema import short

# Keys of a message: in data for OpenAI and transformers, and in data of ShareGPT. _ROLES: {ShareGPT's role: role}.
_KEYS = (("role", "content"), ("from", "value"))
_ROLES = {"human": "user", "gpt": "assistant"}
ANSWERS = "assistant"  # the role whose messages are learned


class Columns(NamedTuple):
    """Columns of a table of instructions.

    Attributes:
        messages: Column with a list of messages; "" if each row has a prompt and a response.
        prompt: Column of the prompt.
        response: Column of the response."""

    messages: str = ""
    prompt: str = ""
    response: str = ""


class Spans(NamedTuple):
    """A text, and which parts of it are learned: (begin, end) in characters."""

    text: str
    learned: tuple[tuple[int, int], ...]


class Instructions:
    """Turns the rows of a table into texts, and finds the answers in these texts.

    Messages become text by the chat template of the tokenizer's folder; without a template, as in `nntile generate
    --chat`. A prompt and its response become two messages if the folder has a template. Else the response directly
    follows the prompt.

    Args:
        columns: The columns.
        template: The chat template.
    """

    def __init__(self, columns: Columns, template: ChatTemplate) -> None:
        self._of, self._template = columns, template
        self.columns = [name for name in columns if name]
        self.key = f"{columns} {template.source}"  # determines the texts

    @property
    def ended(self) -> bool:
        """True if the template itself ends an answer: no end token is then added to a text."""
        return self._template.own

    def render(self, here: str, row: Mapping[str, Any]) -> Spans | None:
        """Return the text of a row, None if its columns are all null.

        Raises:
            ConfigError: A message is wrong, or the template refuses the messages. The message begins with `here`.
        """
        if all(row[name] is None for name in self.columns):
            return None
        if self._of.messages:
            return self._conversation(here, _messages(here, self._of.messages, row[self._of.messages]))
        prompt, response = (
            text_of(here, name, row[name], empty=empty)
            for name, empty in ((self._of.prompt, True), (self._of.response, False))
        )
        if self._template.own:
            messages = [{"role": "user", "content": prompt}, {"role": ANSWERS, "content": response}]
            return self._conversation(here, messages)
        return Spans(prompt + response, ((len(prompt), len(prompt + response)),))

    def _conversation(self, here: str, messages: list[Message]) -> Spans:
        try:
            end = deadline(messages)
            text, spans = self._template.render(messages, end=end), []
            for number, message in enumerate(messages):
                if message["role"] != ANSWERS:
                    continue
                before = self._template.render(messages[:number], answer=True, end=end)
                through = self._template.render(messages[: number + 1], end=end)
                if not (text.startswith(through) and through.startswith(before)):
                    changed = f"chat template: message {number + 1} changes the text before it"
                    raise ConfigError(f"{changed}; allowed: templates that only add text for each message")
                spans.append((len(before), len(through)))
        except ConfigError as error:
            raise ConfigError(f"{here}: {error}") from None
        return Spans(text, tuple(spans))


def _messages(here: str, column: str, value: Any) -> list[Message]:
    """Return the messages of a row as {role, content} for a template. Raises ConfigError, which begins with `here`."""
    need = 'a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{here}: {column!r} is {short(value)}; allowed: {need}")
    messages = []
    for number, one in enumerate(value, 1):
        keys = next((keys for keys in _KEYS if isinstance(one, Mapping) and all(key in one for key in keys)), None)
        if keys is None or not isinstance(one[keys[0]], str):
            raise ConfigError(f"{here}: message {number} of {column!r} is {short(one)}; allowed: {need}")
        content = text_of(f"{here}, message {number}", keys[1], one[keys[1]], empty=True)
        messages.append({"role": _ROLES.get(one[keys[0]], one[keys[0]]), "content": content})
    if not any(message["role"] == ANSWERS for message in messages):
        raise ConfigError(f"{here}: {column!r} has no message of the role {ANSWERS!r}, whose text is learned")
    return messages
