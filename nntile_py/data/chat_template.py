"""Turns the messages of a conversation into a prompt, by the chat template of a model's folder."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import Environment, Template, TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nntile_py.errors import ConfigError
from nntile_py.models.hf_config import read_json
from nntile_py.system.folders import read

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
PLAIN = "`User: ...`, `Assistant: ...`"  # the plain template, for messages
MOST_STEPS = 2_000_000  # largest number of lines that a template's code runs, about a second
# Limit for a conversation, in seconds of a core: MOST_SECONDS, and SECONDS_EACH for each message. The conversation is
# rendered again before each answer.
MOST_SECONDS, SECONDS_EACH = 10.0, 0.1
# Largest length of a repeated sequence (`a * n`), and largest number of bits of an integer result, in a template. One
# step with more could take hours.
_MOST_ITEMS, _MOST_BITS = 10_000_000, 100_000
ROLES = ("system", "developer", "user", "assistant", "tool")  # roles of messages in the plain template
Message = dict[str, str]  # role, content


class ChatTemplate:
    """The chat template of a folder, see transformers' "Chat templates". A folder without one gets a plain template.

    Attributes:
        own: True: the folder has a template.
        source: The template's text; None: the folder has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.source, self._tokens = _template_of(folder) if folder else (None, {})
        self.own = self.source is not None

    def prompt(self, messages: list[Message]) -> str:
        """Return the text that an assistant's answer continues. Raises ConfigError as `render` does."""
        return self.render(messages, answer=True)

    def render(self, messages: list[Message], answer: bool = False, end: float | None = None) -> str:
        """Return the text of a conversation.

        Args:
            messages: The messages.
            answer: Add the text that begins an assistant's answer.
            end: A `deadline` that several calls share. None: this call has a deadline of its own.

        Raises:
            ConfigError: The template refuses the messages, has an error, or takes too long.
        """
        if self.source is None:
            wrong = next((message["role"] for message in messages if message["role"] not in ROLES), None)
            if wrong is not None:
                raise ConfigError(f"messages: the role {wrong!r:.40}; allowed without a template: {', '.join(ROLES)}")
            lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
            return "".join([*lines, "Assistant:" * answer])
        try:
            with _limited(deadline(messages) if end is None else end):
                return self._compiled.render(messages=messages, add_generation_prompt=answer, **self._tokens)
        except Exception as error:  # a template may compute anything
            text = str(error) or type(error).__name__
            raise ConfigError(f"chat template: {text}; allowed: messages that the model's template takes") from None

    @functools.cached_property
    def _compiled(self) -> Template:
        assert self.source is not None
        return _environment().from_string(self.source)

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer, besides the end tokens."""
        return [] if self.own else ["\nUser:"]


def _template_of(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the folder's template, or None, and the special tokens that templates may use."""
    config = read_json(folder / CONFIG, "a file that save_pretrained wrote") if (folder / CONFIG).is_file() else {}
    tokens = {key: _text(value) for key, value in config.items() if key.endswith("_token")}
    if (folder / TEMPLATE).is_file():
        return read(folder / TEMPLATE).decode(errors="replace"), tokens
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None, tokens


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def deadline(messages: Sized) -> float:
    """Return the time limit for rendering a conversation from now on: a value of time.thread_time()."""
    return time.thread_time() + MOST_SECONDS + SECONDS_EACH * len(messages)


@contextmanager
def _limited(end: float) -> Iterator[None]:
    """Raise TemplateError after MOST_STEPS lines of a template's compiled code, or at `end`, see `deadline`.

    The time is checked at each call, such as the call of a filter, and at every 64th line. Unlike the signal of a
    timer, this works in all threads.
    """
    steps, before = 0, sys.gettrace()

    def check() -> None:
        if time.thread_time() > end:
            raise TemplateError(f"it takes more than {MOST_SECONDS:g} s, and {SECONDS_EACH:g} s for each message")

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal steps
        if event == "call" or steps % 64 == 0:
            check()
        if frame.f_code.co_filename != "<template>":
            return None
        steps += event == "line"
        if steps > MOST_STEPS:
            raise TemplateError(f"it has not ended after {MOST_STEPS:,} lines of code")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
    check()


class _Sandbox(ImmutableSandboxedEnvironment):
    """transformers' sandbox, which also refuses operations on more than _MOST_ITEMS items or _MOST_BITS bits."""

    intercepted_binops = frozenset(("*", "**", "//", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator. Raises TemplateError if it would take too long."""
        size, most = 0, _MOST_ITEMS
        if isinstance(left, int) and isinstance(right, int):
            bits, most = left.bit_length(), _MOST_BITS
            size = bits * right if operator == "**" else bits + right.bit_length()
        elif operator == "*":
            pairs = (left, right), (right, left)
            size = max((len(a) * b for a, b in pairs if isinstance(a, Sized) and isinstance(b, int)), default=0)
        if size > most:
            kind = "bits" if most == _MOST_BITS else "items"
            raise TemplateError(f"{operator} has {size:.1e} {kind}; the most is {most:,}")
        return super().call_binop(context, operator, left, right)


def _environment() -> Environment:
    """Return the environment in which transformers renders templates: sandboxed, without access to files."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    env.globals["raise_exception"] = refuse
    return env
