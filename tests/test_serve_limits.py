"""Limits of `nntile serve`: the queue, seconds, clients that go, vectors that are not finite, endless templates."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from test_eval import models, words
from test_serve import client, service, serving

import nntile_py as nt
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.inference.api_server import Api
from nntile_py.inference.generated_text import Options
from nntile_py.inference.open_model import open_model
from nntile_py.inference.service import JobPart, Service, TooBusy

__all__ = ["models", "service"]
httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.filterwarnings("ignore")  # of starlette and httpx


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_and_a_slow_answer(models: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Service(open_model(models("gpt2")[0]), batch=1, queue=1)
    hold, parts = threading.Event(), list[JobPart]()
    small._later(lambda: bool(hold.wait(20)))  # the thread works on something long
    options = Options(max_tokens=3, temperature=0)
    for _ in range(2):
        small.add([1, 2], options, (0,), parts.append)
    with pytest.raises(TooBusy, match="2 texts generated or waiting; allowed: 2"):
        small.add([1, 2], options, (0,), parts.append)
    with monkeypatch.context() as patch:
        patch.delattr(Service, "tokens")  # the prompt is not tokenized
        answer = client(small).post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    hold.set()
    end = time.monotonic() + 20
    while sum(part.reason is not None for part in parts) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert [part.reason for part in parts if part.reason] == ["length", "length"]
    assert sum(part.tokens for part in parts) == 6
    hold.clear()
    small._later(lambda: bool(hold.wait(20)))
    answer = client(small, timeout=0.1).post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 504 and "no complete answer within 0.1 s" in answer.text
    hold.set()
    assert client(small).post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    small.stop()


def test_requests_for_vectors_wait_in_the_same_queue(models: Any, runtime: Any) -> None:
    small, hold = Service(open_model(models("gpt2")[0]), batch=1, queue=1), threading.Event()
    small._later(lambda: bool(hold.wait(20)))
    parts = list[JobPart]()
    small.add([1, 2], Options(max_tokens=3), (0,), parts.append)
    tokens = small.tokens_to_embed(["a"])
    future = small.embed(tokens)
    with pytest.raises(TooBusy, match="2 texts generated or waiting; allowed: 2"):
        small.embed(tokens)
    answer = client(small).post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    hold.set()
    assert future.result(20).shape == (1, 16)
    until(lambda: bool(parts) and parts[-1].reason is not None)
    assert client(small).post("/v1/embeddings", json={"input": "a"}).status_code == 200
    small.stop()


def test_vectors_that_come_too_late_are_not_computed(
    models: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 texts take several passes: after status 504, no further pass begins, and the server goes on."""
    own = Service(open_model(models("gpt2")[0]), batch=1)
    texts = [words(seed, 9) for seed in range(64)]
    tokens = own.tokens_to_embed(texts)
    want = own.embed(tokens).result(60)
    encoder, calls = own._encoder, list[int]()
    assert encoder
    real, encoder.batch_tokens = encoder.each_tokenized, 100

    def slow(chunks: Any) -> Any:
        calls.extend(map(len, chunks))
        time.sleep(0.05)
        return real(chunks)

    monkeypatch.setattr(encoder, "each_tokenized", slow)
    np.testing.assert_allclose(own.embed(tokens).result(60), want, atol=1e-5)
    assert len(calls) > 5 and sum(calls) == 64
    calls.clear()
    answer = client(own, timeout=0.1).post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 504 and "no complete answer within 0.1 s" in answer.text
    until(lambda: not own._embedding)
    assert sum(calls) < 64
    monkeypatch.undo()
    assert client(own).post("/v1/embeddings", json={"input": "a"}).status_code == 200 and not own.failed
    own.stop()


def test_a_cancelled_request_that_waits_is_not_begun(models: Any, runtime: Any) -> None:
    own, hold = Service(open_model(models("gpt2")[0]), batch=1), threading.Event()
    tokens = own.tokens_to_embed(["a"])
    own._later(lambda: bool(hold.wait(20)))
    future = own.embed(tokens)
    assert future.cancel()
    hold.set()
    until(lambda: not own._embedding)
    assert own._encoder and not own._encoder.programs and not own.failed
    with pytest.raises(CancelledError):
        future.result()
    own.stop()


def test_long_texts_are_tokenized_beside_other_requests(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers other requests while a text of 1 MB is tokenized, and stops to wait when the time is over."""
    monkeypatch.setattr("nntile_py.inference.service.MOST_CHARACTERS", 2**20)
    text = "a tile of words " * 60_000
    begun = time.monotonic()
    service.tokenizer.encode_batch([text])
    alone = time.monotonic() - begun

    async def run(path: str, body: dict[str, Any], timeout: float) -> tuple[int, float]:
        """Return the status, and the longest time between two steps of the event loop while the request is open."""
        transport = httpx.ASGITransport(Api(service, "m", timeout).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://a", timeout=60) as http:
            asked, longest, last = asyncio.create_task(http.post(f"/v1/{path}", json=body)), 0.0, time.monotonic()
            while not asked.done():
                await asyncio.sleep(0.005)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            return (await asked).status_code, longest

    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": text}, "embeddings": {"input": text},
        "chat/completions": {"messages": [{"role": "user", "content": text}]},
    }  # fmt: skip
    for path, body in bodies.items():
        status, longest = asyncio.run(run(path, body, 60))
        assert status == (200 if path == "embeddings" else 400) and longest < 0.7 * alone
        assert asyncio.run(run(path, body, alone / 4))[0] == 504


def test_texts_that_are_far_too_long_are_not_tokenized(service: Service) -> None:
    """The message counts characters, not tokens. A conversation is checked before and after the chat template."""
    most, http = 24 * 64, client(service)
    for path, body, here in (
        ("completions", {"prompt": ["a", "a" * (most + 1)]}, "prompt[1]"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * most}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * (most - 4)}]}, "messages"),
    ):
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{here}: 15"), answer.text
        assert f" characters; allowed: {most}, 64 for each of 24 tokens" in answer.text


def test_long_texts_for_vectors_are_cut_before_they_are_tokenized(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = words(1, 400)
    texts = [text, [text, "a"], text[:1537]]
    service.tokens_to_embed([[1, 2]])
    given, encoder = list[Any](), service._encoder
    assert encoder
    real = encoder.tokens
    monkeypatch.setattr(encoder, "tokens", lambda some, noun: (given.extend(some), real(some, noun=noun))[1])
    tokens = service.tokens_to_embed(texts)
    assert given == [text[:1536], [text[:1536], "a"], text[:1536]]  # 64 characters for each of 24 tokens
    for one, whole in zip(tokens, real(texts), strict=True):
        np.testing.assert_array_equal(one.ids, whole.ids)


def test_a_body_that_comes_too_slowly_gets_an_error(service: Service) -> None:
    async def run() -> Any:
        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(20)

        transport = httpx.ASGITransport(Api(service, "m", 0.2).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://a", timeout=60) as http:
            return await http.post("/v1/completions", content=body())

    answer = asyncio.run(run())
    assert answer.status_code == 504 and "no complete answer within 0.2 s" in answer.text


def asked(
    service: Service, path: str, body: dict[str, Any], version: str, stays: float, timeout: float = 60.0,
    before: Callable[[], Any] = lambda: None,
) -> list[Any]:  # fmt: skip
    """Send a request whose client goes after `stays` seconds. Return the messages that the server sent.

    before: Is called in the event loop before the request.
    """
    sent: list[Any] = []

    async def run() -> None:
        before()
        received, gone = False, asyncio.get_running_loop().time() + stays

        async def receive() -> Any:
            nonlocal received
            if not received:
                received = True
                return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            if (left := gone - asyncio.get_running_loop().time()) > 0:  # else at once, as uvicorn does
                await asyncio.sleep(left)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": version}, "http_version": "1.1",
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [], "scheme": "http", "server": ("a", 80), "client": ("b", 1),
        }  # fmt: skip
        await Api(service, "m", timeout).app()(scope, receive, send)

    asyncio.run(run())
    return sent


@pytest.mark.parametrize(("stays", "timeout"), [(0.1, 60.0), (60.0, 0.1)], ids=["gone", "late"])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
def test_a_text_that_waits_for_a_thread_is_dropped(
    service: Service, path: str, stays: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only thread of the pool works on something else. Meanwhile the client goes, or the time is over."""
    calls = list[Any]()
    for name in ("tokens", "tokens_of_chat", "tokens_to_embed"):
        monkeypatch.setattr(service, name, lambda *arguments: calls.append(arguments) or [])
    monkeypatch.setattr("nntile_py.inference.api_connection.CHECK_SECONDS", 0.05)

    def fill_pool() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_in_executor(None, time.sleep, 0.5)

    body = {"prompt": "a"} if path == "completions" else {"input": "a"}
    body = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else body
    asked(service, f"/v1/{path}", body, "2.3", stays, timeout, fill_pool)
    assert not calls


def test_connections_without_a_complete_header_are_closed(models: Any) -> None:
    """The process may open two more files. Clients that never end their headers hold the server up for a second."""
    with serving(str(models("gpt2")[0]), "--timeout", "1") as (process, address):
        host, port = address.removeprefix("http://").split(":")
        kept = socket.create_connection((host, int(port)), timeout=20)
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        while not kept.recv(2**16).endswith(b"}"):
            pass
        kept.sendall(b"GET /hea")
        most = max(int(file.name) for file in Path(f"/proc/{process.pid}/fd").iterdir()) + 3
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
        silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(6)]
        for one in silent:
            one.sendall(b"GET /hea")
        assert [one.recv(1) for one in [kept, *silent]] == [b""] * 7
        assert json.load(urlopen(f"{address}/health", timeout=20)) == {"status": "ok"}
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert error.count("Too many open files (open connections: ") == 1 and "further connections wait; `ulimit" in error
    assert "Traceback" not in error and process.returncode == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_the_text_of_a_client_that_goes_before_the_first_event_is_cancelled(
    models: Any, runtime: Any, version: str, stream: bool
) -> None:
    own, hold, cancelled = Service(open_model(models("gpt2")[0]), batch=1), threading.Event(), list[Any]()
    cancel = own.cancel
    own.cancel = lambda job: (cancelled.append(job), cancel(job))[1]  # type: ignore[method-assign,func-returns-value]
    own._later(lambda: bool(hold.wait(20)))
    body = {"prompt": "a", "max_tokens": 20, "stream": stream}
    begun = time.monotonic()
    asked(own, "/v1/completions", body, version, 0.0)
    assert len(cancelled) == 1 and time.monotonic() - begun < 10
    hold.set()
    until(lambda: not own._jobs and not own._new)
    assert cancelled[0].request.ended and not cancelled[0].request.row
    own.stop()


def test_a_client_that_goes_while_tokens_come_is_noticed(
    models: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part comes each 20 ms, so that the server never waits a second for one."""
    own = Service(open_model(models("gpt2")[0]), batch=1)
    real, steps = own._engine.step, list[float]()

    def slow() -> None:
        steps.append(time.monotonic())
        time.sleep(0.02)
        real()

    monkeypatch.setattr(own._engine, "step", slow)
    monkeypatch.setattr("nntile_py.inference.api_connection.CHECK_SECONDS", 0.1)
    asked(own, "/v1/completions", {"prompt": "a", "max_tokens": 20, "n": 64}, "2.3", 0.1)
    until(lambda: not own._jobs)
    assert len(steps) < 64
    own.stop()


def test_vectors_that_are_not_finite_are_an_error_of_the_server(models: Any, runtime: Any) -> None:
    opened = open_model(models("bert")[0])
    name = next(name for name in opened.model.weights if "word_embeddings" in name)
    opened.model.weights = dict(opened.model.weights) | {name: np.full_like(opened.model.weights[name], np.nan)}
    own = Service(opened)
    for form in ("float", "base64"):
        answer = client(own).post("/v1/embeddings", json={"input": "a", "encoding_format": form})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "input: a vector is nan or infinite; allowed: a model with finite" in answer.json()["error"]["message"]
    own.stop()


def test_logits_that_are_not_finite_are_an_error_of_the_server(models: Any, runtime: Any) -> None:
    opened = open_model(models("gpt2")[0])
    name = next(name for name in opened.model.weights if "wpe" in name)
    table = opened.model.weights[name].copy()
    table[5] = np.nan
    opened.model.weights = dict(opened.model.weights) | {name: table}
    own = Service(opened)
    answer = client(own).post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 8, "temperature": 0})
    assert answer.status_code == 500 and "the text: the logits of new token 5 are nan" in answer.text
    assert client(own).post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 4}).status_code == 200
    own.stop()


LOOP = "{% for _ in range(99999) %}"


MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("body", [LOOP * 3 + "{% endfor %}" * 3, MACRO], ids=["loops", "macro"])
def test_a_template_that_does_not_end_is_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(body)
    begun = time.monotonic()
    message = "chat template: it (has not ended after 2,000,000 lines of code|takes more)"
    with pytest.raises(nt.ConfigError, match=message):
        ChatTemplate(tmp_path).prompt([{"role": "user", "content": "a"}])
    assert time.monotonic() - begun < 30
