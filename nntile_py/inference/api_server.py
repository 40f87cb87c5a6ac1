"""HTTP interface of a Service, compatible with OpenAI's: completions, chat, embeddings. Needs the extra `serve`.

Source: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nntile_py.data.chat_template import ChatTemplate
from nntile_py.data.token_texts import TokenTexts
from nntile_py.errors import ConfigError
from nntile_py.inference.api_answer import CHAT, TEXT, CompletionKind, ScoredToken
from nntile_py.inference.api_connection import EventStream, Watch
from nntile_py.inference.api_request import (
    DRAWING,
    MOST_TEXTS,
    ApiError,
    given,
    read_body,
    read_logprobs,
    read_messages,
    read_stops,
    shown,
)
from nntile_py.inference.generated_text import Options
from nntile_py.inference.service import ENDS, Job, JobPart, Service, TooBusy, new_seed
from nntile_py.system.units import counted

T = TypeVar("T")


class Api:
    """Answers the HTTP requests of clients by a Service.

    Args:
        service: Generates texts and encodes texts.
        name: Name of the model in answers.
        timeout: Seconds after which a request ends.
    """

    def __init__(self, service: Service, name: str, timeout: float) -> None:
        self._service, self._name, self._timeout = service, name, timeout
        self._template, self._texts = ChatTemplate(service.opened.folder), TokenTexts(service.tokenizer)
        self._started = int(time.time())

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._answered(self._health)),
                Route("/v1/models", self._answered(self._models)),
                Route("/v1/completions", self._answered(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._answered(self._chat), methods=["POST"]),
                Route("/v1/embeddings", self._answered(self._embeddings), methods=["POST"]),
            ],
            exception_handlers={HTTPException: _unknown},
        )

    def _answered(self, handler: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        """Return a handler that turns the exceptions of `handler` into error answers.

        `request.state.end` is the time of the event loop at which the request times out."""

        async def answer(request: HttpRequest) -> Response:
            request.state.end = asyncio.get_running_loop().time() + self._timeout
            try:
                response: Response = await handler(request)
                return response
            except ApiError as error:
                return error.response()
            except (ValueError, ConfigError) as error:  # a prompt that is too long, an option out of range
                return ApiError(400, str(error)).response()
            except TooBusy as error:
                return ApiError(429, str(error)).response()
            except asyncio.CancelledError:  # at the end, asyncio.run cancels the requests that are still open
                if not self._service.ending:
                    raise
                return _failure(ENDS).response()
            except Exception as error:  # a task that failed, or a fault of the server
                return _failure(str(error) or type(error).__name__).response()

        return answer

    # -- requests

    async def _in_thread(self, request: HttpRequest, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call in a thread of the event loop's pool; see _result."""
        return await self._result(request, asyncio.get_running_loop().run_in_executor(None, work, *arguments))

    async def _result(self, request: HttpRequest, future: asyncio.Future[T]) -> T:
        """Return the result of work in another thread.

        Raise ApiError if the client disconnects or the request times out. Work that has not begun is then dropped.
        """
        watch = self._watch(request)
        try:
            while not future.done():
                await asyncio.wait([future], timeout=watch.seconds)
                if not future.done():
                    await watch.check()
            return future.result()
        finally:
            future.cancel()

    async def _body(self, request: HttpRequest, *known: str) -> dict[str, Any]:
        """Return the JSON object of a request, see read_body. Raise ApiError if it asks for another model."""
        try:
            async with asyncio.timeout_at(request.state.end):
                body = await read_body(request, *known)
        except TimeoutError:
            raise self._late() from None
        if (name := given(body, "model", self._name)) != self._name:
            message = f"model: {shown(name)} is not served; allowed: {self._name}"
            raise ApiError(404, message, code="model_not_found")
        return body

    def _late(self) -> ApiError:
        return ApiError(504, f"no complete answer within {self._timeout:g} s")

    async def _health(self, request: HttpRequest) -> Response:
        failed = self._service.failed
        return JSONResponse({"status": failed or "ok"}, 500 if failed else 200)

    async def _models(self, request: HttpRequest) -> Response:
        model = {"id": self._name, "object": "model", "created": self._started, "owned_by": "nntile_py"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: HttpRequest) -> Response:
        body = await self._body(request, "prompt", "max_tokens", "echo", "logprobs")
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            prompt = [prompt]
        if not isinstance(prompt, str | list) or prompt == []:
            got = "missing" if prompt is None else f"got {shown(prompt)}"
            raise ApiError(400, f"prompt: {got}; allowed: a text, a list of texts, or lists of token numbers")
        options = self._options(body, given(body, "max_tokens", 16))
        self._check_number(body, 1 if isinstance(prompt, str) else len(prompt))
        ids = await self._in_thread(request, self._service.tokens, prompt, options, "prompt")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        texts = [text if isinstance(text, str) else self._service.tokenizer.decode(text) for text in prompts]
        return await self._generated(request, body, TEXT, ids, options, texts if body.get("echo") else [])

    async def _chat(self, request: HttpRequest) -> Response:
        fields = "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"
        body = await self._body(request, *fields)
        messages = read_messages(body.get("messages"))
        self._check_generates()
        self._check_number(body, 1)
        ids = await self._in_thread(request, self._service.tokens_of_chat, messages, self._template)
        most = given(body, "max_completion_tokens", body.get("max_tokens"))
        longest = self._service.max_length
        options = self._options(body, max(longest - len(ids), 1) if most is None else most, self._template.stops)
        room = longest - (options.max_tokens or 1)
        if room > 0 and not 1 <= len(ids) <= room:
            limit = f"1 to {room}, as it and its answer together have at most {longest}"
            raise ApiError(400, f"messages: the conversation has {len(ids)} tokens; allowed: {limit}")
        return await self._generated(request, body, CHAT, self._service.tokens([ids], options, "messages"), options)

    async def _embeddings(self, request: HttpRequest) -> Response:
        body = await self._body(request, "input", "encoding_format")
        texts = body.get("input")
        if isinstance(texts, str) or (isinstance(texts, list) and texts and all(type(item) is int for item in texts)):
            texts = [texts]
        if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_TEXTS:
            got = "missing" if texts is None else f"got {shown(texts)}"
            raise ApiError(400, f"input: {got}; allowed: a text, or a list of 1 to {MOST_TEXTS} texts")
        form = given(body, "encoding_format", "float")
        if form not in ("float", "base64"):
            raise ApiError(400, f"encoding_format: got {shown(form)}; allowed: float or base64")
        self._service.check_room(1)
        tokens = await self._in_thread(request, self._service.tokens_to_embed, texts)
        vectors = await self._result(request, asyncio.wrap_future(self._service.embed(tokens)))
        count = sum(len(text.ids) for text in tokens)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, form)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "model": self._name, "data": data, "usage": usage})

    def _watch(self, request: HttpRequest) -> Watch:
        return Watch(request, self._late())

    # -- generation

    def _check_generates(self) -> None:
        if not self._service.generates:
            raise ApiError(404, f"{self._name} does not predict the next token; allowed: /v1/embeddings")

    def _options(self, body: dict[str, Any], most: Any, stops: Sequence[str] = ()) -> Options:
        """Return the options of a request, with OpenAI's defaults."""
        self._check_generates()
        drawing = {name: body[name] for name in DRAWING if body.get(name) is not None}
        how: dict[str, Any] = {"max_tokens": most, "stop": [*read_stops(body), *stops], "logprobs": read_logprobs(body)}
        return Options(**{"temperature": 1.0, **drawing}, **how)

    def _check_number(self, body: dict[str, Any], prompts: int) -> None:
        """Raise an error if there is no room for a request's texts: `n` texts for each of its prompts."""
        number, most = given(body, "n", 1), min(MOST_TEXTS, self._service.room)
        if not 1 <= number * prompts <= most:
            asked = f"n: got {counted(number, 'text')} for each of {counted(prompts, 'prompt')}"
            raise ApiError(400, f"{asked}; allowed: 1 to {counted(most, 'text')} in a request", "n")
        self._service.check_room(number * prompts)

    async def _generated(
        self,
        request: HttpRequest,
        body: dict[str, Any],
        kind: CompletionKind,
        prompts: list[list[int]],
        options: Options,
        echoed: Sequence[str] = (),
    ) -> Response:
        """Generate `n` texts for each prompt, and answer with all of them or with a stream.

        echoed: Texts of the prompts, with which the answers begin. Empty: answers do not repeat the prompts."""
        number, seed = given(body, "n", 1), given(body, "seed", new_seed())
        if not 0 <= seed < 2**63:
            raise ApiError(400, f"seed: got {seed}; allowed: 0 to 2^63 - 1", "seed")
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[int, JobPart]]()
        jobs: list[Job] = []
        beginnings = [text for text in echoed or [""] * len(prompts) for _ in range(number)]
        scored_echo = bool(echoed) and options.logprobs is not None
        kind = kind if options.logprobs is None else kind.with_logprobs(self._texts)
        try:
            for index, ids in enumerate([ids for ids in prompts for _ in range(number)]):

                def tell(part: JobPart, index: int = index) -> None:
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(parts.put_nowait, (index, part))

                echo = beginnings[index] if scored_echo else None
                jobs.append(self._service.add(ids, options, (seed, index), tell, echo))
        except BaseException:
            self._cancel(jobs)
            raise
        if scored_echo:  # the first part of each job repeats the prompt, with log-probabilities
            beginnings = [""] * len(jobs)
        count = sum(map(len, prompts))
        facts = {"id": f"{kind.id}-{new_seed():x}", "created": int(time.time()), "model": self._name}
        if body.get("stream"):
            wants = given(body, "stream_options", {}).get("include_usage")
            events = self._events(request, jobs, parts, kind, facts, beginnings, count if wants else None)
            return EventStream(events, lambda: self._cancel(jobs))
        return await self._complete(request, jobs, parts, kind, facts, beginnings, count)

    async def _complete(
        self, request: HttpRequest, jobs: list[Job], parts: asyncio.Queue[tuple[int, JobPart]], kind: CompletionKind,
        facts: dict[str, Any], beginnings: list[str], count: int,
    ) -> Response:  # fmt: skip
        texts, reasons, new = list(beginnings), ["length" for _ in jobs], 0
        scored = [list[ScoredToken]() for _ in jobs]
        async for index, part in self._parts(request, jobs, parts):
            texts[index] += part.text
            scored[index] += part.scored
            new += part.tokens
            reasons[index] = part.reason or reasons[index]
        choices = [kind.choice(index, *row) for index, row in enumerate(zip(texts, reasons, scored, strict=True))]
        return JSONResponse(facts | {"object": kind.complete, "choices": choices, "usage": _usage(count, new)})

    async def _events(
        self, request: HttpRequest, jobs: list[Job], parts: asyncio.Queue[tuple[int, JobPart]], kind: CompletionKind,
        facts: dict[str, Any], beginnings: list[str], count: int | None,
    ) -> AsyncIterator[str]:  # fmt: skip
        """Yield server-sent events.

        beginnings: For each answer, the text with which it begins.
        count: Number of the prompts' tokens, if the client asked for numbers of tokens; else None."""
        facts, new = facts | {"object": kind.chunk}, 0
        for index, text in enumerate(beginnings):
            if kind.chat or text:
                yield _event(facts | {"choices": [kind.first(index, text)]})
        try:
            async for index, part in self._parts(request, jobs, parts):
                new += part.tokens
                if part.text or part.scored:
                    choice = kind.choice(index, part.text, None, part.scored, streamed=True)
                    yield _event(facts | {"choices": [choice]})
                if part.reason:
                    yield _event(facts | {"choices": [kind.choice(index, None, part.reason, streamed=True)]})
            if count is not None:
                yield _event(facts | {"choices": [], "usage": _usage(count, new)})
        except ApiError as error:
            yield _event({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}})
            return
        yield "data: [DONE]\n\n"

    async def _parts(
        self, request: HttpRequest, jobs: list[Job], parts: asyncio.Queue[tuple[int, JobPart]]
    ) -> AsyncIterator[tuple[int, JobPart]]:
        """Yield (number of the text, part) until all texts have ended. If the client disconnects, cancel the jobs."""
        left, watch = len(jobs), self._watch(request)
        try:
            while left:
                if watch.seconds <= 0:
                    await watch.check()
                try:
                    index, part = await asyncio.wait_for(parts.get(), watch.seconds)
                except TimeoutError:
                    continue
                if part.error:
                    raise _failure(part.error)
                left -= part.reason is not None
                yield index, part
        finally:
            self._cancel(jobs)

    def _cancel(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.request.ended:
                self._service.cancel(job)


async def _unknown(request: HttpRequest, error: Exception) -> Response:
    """Answer a request with an unknown path or method by a JSON error, as OpenAI does."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow") or ", ".join(route.path for route in request.app.routes)
    message = f"{request.method} {request.url.path}: {error.detail}; allowed: {allowed}"
    answer = ApiError(error.status_code, message).response()
    answer.headers.update(error.headers or {})
    return answer


def _failure(message: str) -> ApiError:
    """Return the error of a request that the server cannot answer: 503 if the server ends, else 500."""
    return ApiError(503 if message == ENDS else 500, message)


def _usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _encoded(vector: np.ndarray[Any, Any], form: str) -> Any:
    values = vector.astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if form == "base64" else values.tolist()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
