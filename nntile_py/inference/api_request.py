"""Requests to the HTTP server: read and check their JSON, and answer errors in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from nntile_py.data.chat_template import Message
from nntile_py.data.tables import check_whole
from nntile_py.system.units import counted
from nntile_py.tasks.top_logprobs import MOST_RANKED

LARGEST = 2**22  # largest number of bytes of a request
MOST_SHOWN = 40  # largest number of characters of a value in a message
MOST_MESSAGE = 700  # largest number of characters of an error's message
MOST_STOPS, MOST_OF_STOP = 16, 256  # largest number of a request's stop texts, and of the characters of a stop text
MOST_TEXTS = 256  # largest number of prompts or inputs of a request
# Fields that every request may have, whatever their values. Only `stream_options` has an effect.
ACCEPTED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "stream_options")
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # fields that are attributes of Options
# {field of OpenAI's API: values accepted because they change nothing}. Only kinds of requests that pass the field as
# `known` to read_body support other values. The error message suggests the last value of the list.
FIXED = {
    "logprobs": (None, False), "top_logprobs": (None, 0), "best_of": (None, 1), "logit_bias": (None, {}),
    "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "echo": (None, False), "suffix": (None, ""),
    "tools": (None, []), "dimensions": (None,), "response_format": (None, {"type": "text"}),
}  # fmt: skip


# {field: (types, what is allowed)}; null always means that the field is not given.
FLAG, WHOLE = ((bool,), "true or false"), ((int,), "an integer")
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "stream": FLAG, "echo": FLAG, "stream_options": ((dict,), "an object"), "model": ((str,), "a text"),
    "stop": ((str, list), "a text, or a list of texts"), "n": WHOLE, "seed": WHOLE, "max_tokens": WHOLE,
    "max_completion_tokens": WHOLE, "top_logprobs": ((int,), f"an integer from 0 to {MOST_RANKED}"),
}  # fmt: skip


class ApiError(Exception):
    """An error that the client gets as an answer. A long message is shortened in the middle.

    Attributes:
        status: HTTP status.
        param: Name of the wrong field. Default: the field with which the message begins, if it begins with one.
        code: OpenAI's code of the error.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        half = MOST_MESSAGE // 2
        super().__init__(message if len(message) <= MOST_MESSAGE else f"{message[:half]} ... {message[-half:]}")
        self.status, self.param, self.code = status, (param or _field(message) or "")[:MOST_SHOWN] or None, code

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        # A field's name may have half of a character, which is no UTF-8.
        message, param = (text and text.encode(errors="backslashreplace").decode() for text in (str(self), self.param))
        body = {"message": message, "type": kind, "param": param, "code": self.code}
        return JSONResponse({"error": body}, self.status, {"Retry-After": "1"} if self.status == 429 else None)


def _field(message: str) -> str | None:
    """Return the field of a request with which a message begins, such as `prompt` in `prompt[3]: ...`."""
    name = message.partition(":")[0].partition("[")[0]
    return name if name in {*DRAWING, *TYPES, *FIXED, "prompt", "messages", "input", "encoding_format"} else None


async def read_body(request: HttpRequest, *known: str) -> dict[str, Any]:
    """Return the JSON object of a request. known: further fields that requests of this kind may have."""
    if int(request.headers.get("content-length") or 0) > LARGEST:
        raise ApiError(413, f"the request has more than {LARGEST} bytes")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST:
            raise ApiError(413, f"the request has more than {LARGEST} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the request is not a JSON object")
    allowed = {*known, *ACCEPTED, *DRAWING, "n", "seed", "stop", "stream"}
    for name, value in body.items():
        if name not in allowed | FIXED.keys():
            close = get_close_matches(name[:MOST_SHOWN], allowed, 1)
            need = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(sorted(allowed))}"
            raise ApiError(400, f"{name}: unknown field; {need}", name)
        if name not in allowed and not _is_one_of(value, FIXED[name]):
            need = f"{shown(FIXED[name][-1])}, the default"
            raise ApiError(400, f"{name}: got {shown(value)}; allowed: {need}", name)
    for name, (kinds, need) in TYPES.items():
        check_type(body, name, kinds, need)
    check_type(body.get("stream_options") or {}, "include_usage", *FLAG)
    return body


def check_type(body: Mapping[str, Any], name: str, kinds: Sequence[type], need: str) -> None:
    """Raise ApiError if a field of a request is not null and has a type that is not in `kinds`."""
    if body.get(name) is not None and type(body[name]) not in kinds:
        raise ApiError(400, f"{name}: got {shown(body[name])}; allowed: {need}", name)


def shown(value: Any) -> str:
    """Return a value of a request as JSON, for messages."""
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def given(body: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field of a request; the default if the field is missing or null."""
    return default if body.get(name) is None else body[name]


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return True if the value equals one of `allowed`; 0 is not False."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)


def read_logprobs(body: dict[str, Any]) -> int | None:
    """Return how many most probable tokens to list for each token; None: the answer has no log-probabilities.

    In completions this is the field `logprobs`. In a chat, `logprobs` is a flag, and `top_logprobs` is the number.
    """
    value, most = body.get("logprobs"), given(body, "top_logprobs", 0)
    if "messages" not in body:
        name, most = "logprobs", None if value is None or value is False else value
    elif isinstance(value, bool | None):
        name, most = "top_logprobs", most if value or most else None
    else:
        raise ApiError(400, f"logprobs: got {shown(value)}; allowed: true or false", "logprobs")
    if most is not None and not (type(most) is int and 0 <= most <= MOST_RANKED):
        raise ApiError(400, f"{name}: got {shown(most)}; allowed: an integer from 0 to {MOST_RANKED}", name)
    if name == "top_logprobs" and most and not value:
        raise ApiError(400, f"top_logprobs: got {shown(most)}; allowed: only with logprobs: true", "top_logprobs")
    return most


def read_stops(body: Mapping[str, Any]) -> list[str]:
    """Return the stop texts of a request. Their number and lengths are limited, because each new token is compared."""
    value = given(body, "stop", [])
    stops: list[str] = [value] if isinstance(value, str) else value
    longest = max((len(text) for text in stops if isinstance(text, str)), default=0)
    if len(stops) > MOST_STOPS or longest > MOST_OF_STOP:
        need = f"up to {MOST_STOPS} texts of up to {MOST_OF_STOP} characters"
        got = f"{counted(len(stops), 'text')} of up to {counted(longest, 'character')}"
        raise ApiError(400, f"stop: got {got}; allowed: {need}")
    return stops


def read_messages(value: Any) -> list[Message]:
    """Return the messages of a request. If a message has several text parts, they are joined by line ends."""
    messages: list[Message] = []
    for item in value if isinstance(value, list) else []:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            texts = [part.get("text") for part in content]
            content = "\n".join(texts) if texts and all(isinstance(text, str) for text in texts) else None
        if not isinstance(role, str) or not isinstance(content, str):
            messages = []
            break
        check_whole("messages", role + content, ValueError)
        messages.append({"role": role, "content": content})
    if not messages:
        need = "a list of {role: text, content: text}; content may be a list of {type: text, text: ...}"
        raise ApiError(400, f"messages: allowed: {need}", "messages")
    return messages
