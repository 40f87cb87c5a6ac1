"""`nntile serve`: OpenAI's interface, against the Generator and the Encoder; limits, errors, the end of the server."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from test_eval import models, tokenizer, words

import nntile_py as nt
from nntile_py import cli
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.inference.open_model import open_model
from nntile_py.inference.service import Service

__all__ = ["models"]
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytestmark = pytest.mark.filterwarnings("ignore")  # of starlette and httpx


def client(service: Service, timeout: float = 60.0) -> Any:
    from starlette.testclient import TestClient

    from nntile_py.inference.api_server import Api

    return TestClient(Api(service, "my_model", timeout).app())


@pytest.fixture(scope="module")
def service(models: Any, runtime: Any) -> Iterator[Service]:
    made = Service(open_model(models("gpt2")[0]), batch=4)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def http(service: Service) -> Any:
    return client(service)


@pytest.fixture(scope="module")
def expected(models: Any, runtime: Any) -> Any:
    """`expected(prompt, **options)`: the text that a Generator gives."""
    generator = nt.Generator(str(models("gpt2")[0]))
    yield lambda prompt, **options: generator(prompt, **options)[0]
    generator.close()


def events(response: Any) -> list[Any]:
    """The content of server-sent events."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.headers["content-type"].startswith("text/event-stream") and lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completions_are_those_of_the_generator(http: Any, expected: Any) -> None:
    prompts = [words(seed, 3) for seed in range(5)]
    body = {"model": "my_model", "max_tokens": 7, "temperature": 0}
    answer = http.post("/v1/completions", json=body | {"prompt": prompts}).json()
    texts = [expected(prompt, max_tokens=7, temperature=0) for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == [text.text for text in texts]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [text.reason for text in texts]
    count = sum(text.prompt_tokens for text in texts)
    assert answer["usage"]["prompt_tokens"] == count and answer["object"] == "text_completion"
    drawn = body | {"prompt": prompts[0], "temperature": 0.9, "top_k": 20, "n": 2, "seed": 5}
    first, again = (http.post("/v1/completions", json=drawn).json()["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in again] and first[0]["text"] != first[1]["text"]
    assert [c["index"] for c in first] == [0, 1]


def test_a_stream_has_the_same_text(http: Any, expected: Any) -> None:
    body = {"prompt": words(1, 4), "max_tokens": 9, "temperature": 0, "stream": True}
    parts = events(http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}}))
    text = expected(body["prompt"], max_tokens=9, temperature=0)
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == text.text
    assert parts[-2]["choices"][0]["finish_reason"] == text.reason
    assert parts[-1]["usage"]["prompt_tokens"] == text.prompt_tokens
    stop = text.text[3:5]
    ended = events(http.post("/v1/completions", json=body | {"stop": stop}))
    assert "".join(part["choices"][0]["text"] for part in ended) == text.text[: text.text.index(stop)]
    assert ended[-1]["choices"][0]["finish_reason"] == "stop"


def test_chat_follows_the_template(http: Any, expected: Any, models: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    template = ChatTemplate(models("gpt2")[0])
    text = expected(template.prompt(messages), max_tokens=5, temperature=0, stop=template.stops)
    body = {"messages": messages, "max_completion_tokens": 5, "temperature": 0}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text.text}
    parted = body | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    assert http.post("/v1/chat/completions", json=parted).json()["choices"] == [choice]
    parts = events(http.post("/v1/chat/completions", json=body | {"stream": True}))
    first, *deltas = (part["choices"][0]["delta"] for part in parts)
    assert first == {"role": "assistant", "content": ""} and all({*one} <= {"content"} for one in deltas)
    assert "".join(one.get("content", "") for one in deltas) == text.text and deltas[-1] == {}
    two = events(http.post("/v1/chat/completions", json=body | {"stream": True, "n": 2}))
    assert [part["choices"][0]["index"] for part in two if "role" in part["choices"][0]["delta"]] == [0, 1]


def test_echo_puts_the_prompt_before_its_continuation(http: Any, expected: Any) -> None:
    prompts, body = [words(1, 3), words(2, 2)], {"max_tokens": 5, "temperature": 0, "echo": True}
    texts = [prompt + expected(prompt, max_tokens=5, temperature=0).text for prompt in prompts]
    answer = http.post("/v1/completions", json=body | {"prompt": prompts, "n": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
    assert answer["usage"]["completion_tokens"] <= 20
    ids = tokenizer().encode(prompts[0]).ids
    (choice,) = http.post("/v1/completions", json=body | {"prompt": ids}).json()["choices"]
    assert choice["text"] == texts[0]
    parts = events(http.post("/v1/completions", json=body | {"prompt": prompts[1], "stream": True}))
    assert parts[0]["choices"][0]["text"] == prompts[1]
    assert "".join(part["choices"][0]["text"] for part in parts) == texts[1]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_embeddings_are_those_of_the_encoder(name: str, models: Any, runtime: Any, service: Service) -> None:
    own = service if name == "gpt2" else Service(open_model(models(name)[0]))
    texts = ["a tile", words(2, 9), "task"]
    encoder = nt.Encoder.from_hf(models(name)[0], "mean")
    vectors = encoder(texts)
    encoder.close()
    http = client(own)
    answer = http.post("/v1/embeddings", json={"model": "my_model", "input": texts}).json()
    np.testing.assert_allclose([one["embedding"] for one in answer["data"]], vectors, atol=1e-6)
    (one,) = http.post("/v1/embeddings", json={"input": "task", "encoding_format": "base64"}).json()["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), vectors[2], atol=1e-6)
    if name == "bert":
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 404 and "allowed: /v1/embeddings" in answer.json()["error"]["message"]
        own.stop()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "a", "max_tokens": 24}, "max_tokens: got 24; allowed: less than 24"),
        ("completions", {"prompt": words(1, 60), "max_tokens": 4}, "tokens; allowed: 1 to 20"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p: got 0; allowed: "),
        ("completions", {"prompt": "a", "temperature": "hot"}, "temperature: got 'hot'; allowed: "),
        ("completions", {"prompt": "a", "max_tokens": "x"}, 'max_tokens: got "x"; allowed: '),
        ("completions", {"prompt": "a", "n": 0.5}, "n: got 0.5; allowed: an integer"),
        ("completions", {"prompt": "a", "n": False}, "n: got false; allowed: an integer"),
        ("completions", {"prompt": "a", "n": 0}, "n: got 0 texts for each of 1 prompt; allowed: 1 to 68 texts"),
        ("completions", {"prompt": ["a"] * 23, "n": 3}, "n: got 3 texts for each of 23 prompts; allowed: 1 to 68"),
        ("completions", {"prompt": "a", "stop": {}}, "stop: got {}; allowed: a text, or a list of texts"),
        ("completions", {"prompt": "a", "stop": ""}, "stop: got ['']; allowed: texts that are not empty"),
        ("completions", {"prompt": "a", "stop": "\ud800"}, "stop: half of a character"),
        ("completions", {"prompt": "a", "stop": ["ab"] * 17}, "stop: got 17 texts of up to 2 characters; allowed"),
        ("completions", {"prompt": "a", "stop": "a" * 257}, "stop: got 1 text of up to 257 characters; allowed"),
        ("completions", {"prompt": "a", "stop": [1] * 300_000}, "stop: got 300,000 texts of up to 0 characters; allow"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": 1}}, "include_usage: got 1; allowed: "),
        ("completions", {"prompt": "a", "\ud800": 1}, "\\ud800: unknown field; allowed: echo, logprobs, max_tokens"),
        ("chat/completions", {"messages": [], "max_tokens": False}, "max_tokens: got false; allowed: an int"),
        ("chat/completions", {"messages": [], "top_logprobs": []}, "top_logprobs: got []; allowed: an int"),
        ("embeddings", {"input": ["a", []]}, "allowed: texts and pairs of texts, or lists of token numbers"),
        ("completions", {"prompt": "a", "seed": -1}, "seed: got -1; allowed: 0 to"),
        ("completions", {"prompt": "a", "stop": 3}, "stop: got 3; allowed: a text"),
        ("completions", {"prompt": "a", "echo": 1}, "echo: got 1; allowed: true or false"),
        ("chat/completions", {"messages": [], "echo": True}, "echo: got true; allowed: false, the default"),
        ("completions", {"prompt": "a", "tempperature": 1}, "tempperature: unknown field; did you mean temperature?"),
        ("completions", {"prompt": []}, "prompt: got []; allowed: a text"),
        ("completions", {"max_tokens": 3}, "prompt: missing; allowed: a text"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of: got 2; allowed: 1, the default"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, "messages: the role 'robot'; allowed"),
        ("completions", {"prompt": [[300]]}, "allowed: 0 to 299, the model's vocabulary"),
        ("completions", [], "the request is not a JSON object"),
        ("completions", {"prompt": "a", "stream": "false"}, 'stream: got "false"; allowed: true or false'),
        ("completions", {"prompt": "a", "stream_options": [1]}, "stream_options: got [1]; allowed: an object"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens: got 0; allowed: "),
        ("chat/completions", {"messages": "a"}, "messages: allowed: a list"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: allowed"),
        ("chat/completions", {"messages": [{"role": "user", "content": words(1, 60)}]}, "messages: the conv"),
        ("embeddings", {"input": []}, "input: got []; allowed: a text"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, 'encoding_format: got "hex"; allowed: '),
        ("embeddings", {"input": [300]}, "allowed: 0 to 299"),
    ],
)  # fmt: skip
def test_wrong_requests_get_status_400(http: Any, path: str, body: Any, message: str) -> None:
    answer = http.post(f"/v1/{path}", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"] and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [{"x" * 2**21: 1}, {"tools": ["x" * 2**21]}, {"model": "x" * 2**21}, {"stop": [[1] * 2**20]}],
    ids=["field", "tools", "model", "stop"],
)
def test_errors_do_not_repeat_long_values(http: Any, body: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a"} | body)
    assert answer.status_code in (400, 404) and len(answer.text) < 1500
    message = answer.json()["error"]["message"]
    assert "allowed: " in message


def test_other_requests_that_are_refused(http: Any) -> None:
    assert http.post("/v1/completions", content="{").status_code == 400
    assert http.post("/v1/completions", content=b" " * (2**22 + 1)).status_code == 413
    assert http.get("/v1/completions").status_code == 405 and http.get("/v2").status_code == 404
    assert "allowed: POST" in http.get("/v1/completions").json()["error"]["message"]
    other = http.post("/v1/completions", json={"prompt": "a", "model": "gpt-5"})
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
    assert 'model: "gpt-5" is not served; allowed: my_model' in other.json()["error"]["message"]
    fields = {"max_tokens": 24, "prompt": [[300]], "temperature": "hot"}
    for name, value in fields.items():
        answer = http.post("/v1/completions", json={"prompt": "a"} | {name: value})
        assert answer.json()["error"]["param"] == name
    assert "allowed: /health, /v1/models" in http.get("/v2").json()["error"]["message"]
    assert http.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["my_model"]


def test_many_clients_at_once_get_the_texts_of_one_after_the_other(http: Any) -> None:
    def ask(seed: int) -> str:
        body = {"prompt": words(seed, seed % 5 + 1), "max_tokens": 6, "temperature": 0.7, "seed": seed}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(40)))
    assert together == [ask(seed) for seed in range(40)]


def test_a_failed_task_fails_all_requests(models: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Service(open_model(models("gpt2")[0]), batch=2)

    def fail() -> None:
        raise nt.TaskError("the kernel has failed")

    monkeypatch.setattr(own._engine, "step", fail)
    http = client(own)
    answer = http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500 and "the kernel has failed" in answer.text
    assert http.get("/health").status_code == 500
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 500
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 500
    own.stop()


def test_vectors_that_wait_at_the_end_are_answered(models: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, begun, hold = Service(open_model(models("gpt2")[0]), batch=2), threading.Event(), threading.Event()
    tokens = own.tokens_to_embed(["a"])

    def wait(*_: Any) -> Any:
        begun.set()
        hold.wait(30)
        raise SystemExit  # ends the thread

    monkeypatch.setattr(own._encoder, "each_tokenized", wait)
    first = own.embed(tokens)
    assert begun.wait(30)
    second = own.embed(tokens)
    hold.set()
    for future in (first, second):
        with pytest.raises(nt.NNTileError, match="SystemExit"):
            future.result(30)
    own.stop()


# -- the command


@contextmanager
def serving(*arguments: str, code: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, which runs `code` first, and its address."""
    code += "import sys; from nntile_py.cli import main; sys.argv[0] = 'nntile'; main()"
    command = [sys.executable, "-c", code, "serve", *arguments, "--port", "0", "--cpus", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().split(" on ")[1].split("/v1")[0]
        end = time.monotonic() + 30
        while True:
            try:
                assert json.load(urlopen(f"{address}/health", timeout=5)) == {"status": "ok"}
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.05)
        try:
            yield process, address
        finally:
            process.kill()


def test_the_server_ends_by_a_signal(models: Any) -> None:
    with serving(str(models("gpt2")[0])) as (process, address):
        vectors = json.load(urlopen(Request(f"{address}/v1/embeddings", json.dumps({"input": words(1, 60)}).encode())))
        assert vectors["usage"]["prompt_tokens"] == 24  # the text is cut, without a note
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=60)
    assert process.returncode == 0 and '"GET /health HTTP/1.1" 200' in output
    assert error.startswith("the server ends: open requests have 10 s") and error.endswith("the server has ended\n")


def test_a_second_signal_ends_open_requests_at_once(models: Any) -> None:
    """One client sends only a part of its request. The other client waits for so many texts that none is complete."""
    with (
        serving(str(models("gpt2")[0]), "--batch", "1", "--queue", "250") as (process, address),
        ThreadPoolExecutor() as pool,
    ):
        host, port = address.removeprefix("http://").split(":")
        half = socket.create_connection((host, int(port)))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        body = json.dumps({"prompt": "a", "max_tokens": 20, "n": 250}).encode()
        answer = pool.submit(urlopen, Request(f"{address}/v1/completions", body), timeout=60)
        time.sleep(0.3)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        with pytest.raises(HTTPError) as failed:
            answer.result()
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - begun < 8 and process.returncode == 0 and "Traceback" not in error
        assert failed.value.code == 503 and json.load(failed.value)["error"]["message"] == "the server ends"
        half.close()


def test_a_request_that_is_not_valid_http_gets_a_json_error(models: Any) -> None:
    """The last client sends the invalid part after its answer has begun, and gets no second answer."""
    body = b"POST /nowhere HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(str(models("gpt2")[0])) as (process, address):
        host, port = address.removeprefix("http://").split(":")
        for parts in ([b"nonsense\r\n\r\n"], [body + b"zzzz\r\n"], [body, b"zzzz\r\n"]):
            with socket.create_connection((host, int(port)), timeout=30) as client, client.makefile("rb") as answer:
                head = b""
                for part in parts:
                    client.sendall(part)
                    head = head or answer.readline()
                headers = dict(line.rstrip().split(b": ") for line in iter(answer.readline, b"\r\n"))
                content = json.loads(answer.read())["error"]["message"]
            begun = len(parts) == 2
            assert head.startswith(b"HTTP/1.1 404 " if begun else b"HTTP/1.1 400 Bad Request")
            assert headers[b"content-type"] == b"application/json" and ("not valid HTTP" in content) != begun
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error


def test_signals_have_no_effect_after_the_server_has_ended(models: Any) -> None:
    """The process still has to release the model when uvicorn has ended; a signal then must not kill the process."""
    code = """
import atexit, os, signal, sys
from nntile_py import _core
from nntile_py.inference import service
def after_signals(function):
    def call(*arguments):
        [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGINT) * 2]
        return function(*arguments)
    return call
service.Service.stop = after_signals(service.Service.stop)
_core.stop = after_signals(_core.stop)
atexit.register(after_signals(int))
"""
    with serving(str(models("gpt2")[0]), "--host", "[127.0.0.1]", code=code) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and error.endswith("the server has ended\n")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gpt2", "--max-length 25", "--max-length: got 25; allowed: at most the 24 positions of the model"),
        ("gpt2", "--precision bf16", "--precision: bf16 needs GPUs"),
        ("gpt2", "--precision fp31", "--precision: got 'fp31'; allowed: fp32, fp64"),
        ("gpt2", "--precision=", "--precision: got ''; allowed: fp32, fp64"),
        ("gpt2", "--name=", "--name: got an empty text; allowed: a text that is not empty"),
        ("gpt2", "--name \udcff", "--name: half of a character"),
        ("gpt2", "--host=", "--host: got an empty text; allowed: an address of this machine"),
        ("gpt2", "--host []", "--host: got an empty text; allowed: an address of this machine"),
        ("gpt2", "--host 256.1.1.1", "--host: cannot listen on 256.1.1.1:0: Name or service not known; allowed: an"),
        ("gpt2", "--host \udcff", "--host: got '\\udcff'; allowed: an address of this machine"),
        ("gpt2", "--cache much", "--cache: got 'much'; allowed: "),
        ("nowhere", "", "nowhere: no such folder; allowed: the folder of a run"),
        ("gpt2", "--port {taken}", "cannot listen on 127.0.0.1:{taken}: Address already in use; allowed: a free port"),
    ],
)
def test_wrong_options_end_with_one_message(
    name: str, arguments: str, message: str, models: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        folder = models(name)[0] if name == "gpt2" else name
        words = arguments.format(taken=taken).split()
        monkeypatch.setattr(sys, "argv", ["nntile", "serve", str(folder), "--port", "0", "--cpus", "1", *words])
        monkeypatch.setattr("nntile_py.execution.runtime.Runtime.__enter__", lambda self: self)
        monkeypatch.setattr("nntile_py.execution.runtime.Runtime.__exit__", lambda self, *error: None)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 2 and message.format(taken=taken) in capsys.readouterr().err


def test_without_starlette_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setattr(sys, "argv", ["nntile", "serve", "runs/my_run"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "the package starlette is missing; allowed: to install it: pip install" in capsys.readouterr().err
