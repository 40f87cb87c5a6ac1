"""Log-probabilities in the answers of `nntile serve`: OpenAI's schema, transformers' values; wrong requests."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from test_eval import models, tokenizer, words
from test_serve import client, events, expected, http, service
from tokenizers import Tokenizer, decoders
from tokenizers import models as token_models

from nntile_py.data.chat_template import ChatTemplate
from nntile_py.data.token_texts import TokenTexts
from nntile_py.inference.api_answer import CHAT, LEAST, TEXT, ScoredToken
from nntile_py.inference.token_logprobs import TokenLogProbs

__all__ = ["client", "expected", "http", "models", "service"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of starlette and httpx
BODY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


def of_transformers(models: Any, ids: list[int]) -> Any:
    """Log-probabilities after each token, [tokens, vocab]."""
    with torch.no_grad():
        return models("gpt2")[1](torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def joined(names: list[str]) -> bytes:
    """The bytes of tokens; a part of a character is named `bytes:\\xe2\\x82`."""
    return b"".join(
        bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode() for name in names
    )


def check_offsets(logprobs: Any, text: str) -> None:
    """A token's offset is the number of characters before it. Text leaves out an incomplete character at its end."""
    assert joined(logprobs["tokens"]).decode(errors="replace").startswith(text)
    for number, offset in enumerate(logprobs["text_offset"]):
        before = joined(logprobs["tokens"][:number])
        with suppress(UnicodeDecodeError):  # the token begins inside of a character
            assert offset == len(before.decode())


def check_completion(logprobs: Any, text: str, ids: list[int], want: Any, most: int) -> None:
    """Check OpenAI's schema of completions. ids: the tokens of the text; want: log-probabilities at their positions."""
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    texts = TokenTexts(tokenizer())
    assert logprobs["tokens"] == [texts.text(token) for token in ids]
    check_offsets(logprobs, text)
    rows = zip(ids, want, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, values, name, logprob, top in rows:
        if values is None:
            assert logprob is None and top is None
            continue
        assert abs(logprob - values[token]) < 1e-5 and abs(top[name] - logprob) < 1e-6
        best = np.argsort(-values[: tokenizer().get_vocab_size()], kind="stable")[:most].tolist()
        assert set(top) == {texts.text(one) for one in [*best, token]}
        for one in best:
            assert abs(top[texts.text(one)] - values[one]) < 1e-5


@pytest.mark.parametrize("most", [0, 3, 20])
def test_completions(http: Any, models: Any, expected: Any, most: int) -> None:
    prompts = [words(1, 2), words(2, 6), words(3, 1)]
    choices = http.post("/v1/completions", json=BODY | {"prompt": prompts, "logprobs": most}).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        text, ids = expected(prompt, max_tokens=8, temperature=0), tokenizer().encode(prompt).ids
        assert choice["text"] == text.text
        want = of_transformers(models, ids + text.tokens)[len(ids) - 1 : -1]
        check_completion(choice["logprobs"], choice["text"], text.tokens, want[: len(text.tokens)], most)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_has_the_values_of_the_prompt(http: Any, models: Any, expected: Any, as_tokens: bool) -> None:
    """The first token follows no token, so its values are null."""
    prompts = [words(1, 5), words(2, 2)]
    ids = [tokenizer().encode(prompt).ids for prompt in prompts]
    body = BODY | {"prompt": ids if as_tokens else prompts, "logprobs": 2, "echo": True, "n": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    streamed = events(http.post("/v1/completions", json=body | {"stream": True}))
    for number, choice in enumerate(choices):
        prompt, tokens = prompts[number // 2], ids[number // 2]
        text = expected(prompt, max_tokens=8, temperature=0)
        complete = tokens + text.tokens
        assert choice["text"] == prompt + text.text
        want = [None, *of_transformers(models, complete)[:-1]]
        check_completion(choice["logprobs"], choice["text"], complete, want, 2)
        check_stream(choice, [one for event in streamed for one in event["choices"] if one["index"] == number])
        plain = {**body, "echo": False}
    (first, *_) = http.post("/v1/completions", json=plain).json()["choices"]
    assert first["logprobs"]["text_offset"][0] == 0 and len(first["logprobs"]["tokens"]) <= 8


def check_stream(choice: Any, parts: list[Any]) -> None:
    """The parts of a stream, joined, are the complete choice; each part has the tokens of its own text."""
    lists: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for part in parts:
        if part["logprobs"] is None:
            assert part["text"] == ""
            continue
        assert joined(part["logprobs"]["tokens"]).decode(errors="replace").startswith(part["text"])
        for name, values in part["logprobs"].items():
            lists[name] += values
    assert lists == choice["logprobs"] and "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_streams_and_stop_texts(http: Any, expected: Any) -> None:
    """A token whose text is held back comes with its text; tokens of a stop text are left out."""
    prompt = words(1, 4)
    text = expected(prompt, max_tokens=8, temperature=0).text
    for stop in ([], [text[5:8]], [text[3] + "\0"]):
        body = BODY | {"prompt": prompt, "logprobs": 1, "stop": stop}
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        parts = events(http.post("/v1/completions", json=body | {"stream": True}))
        offsets = choice["logprobs"]["text_offset"]
        assert all(offset < len(choice["text"]) for offset in offsets) and offsets == sorted(offsets)
        names = [token for part in parts for token in (part["choices"][0]["logprobs"] or {}).get("tokens", [])]
        assert names == choice["logprobs"]["tokens"]
        if not stop:
            check_stream(choice, [part["choices"][0] for part in parts])


def test_chat(http: Any, models: Any, expected: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    template = ChatTemplate(models("gpt2")[0])
    prompt = template.prompt(messages)
    text = expected(prompt, max_tokens=5, temperature=0, stop=template.stops)
    ids, texts = tokenizer().encode(prompt).ids, TokenTexts(tokenizer())
    want = of_transformers(models, ids + text.tokens)[len(ids) - 1 : -1]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "logprobs": True}
    for most in (0, 4):
        (choice,) = http.post("/v1/chat/completions", json=body | {"top_logprobs": most}).json()["choices"]
        assert set(choice["logprobs"]) == {"content", "refusal"} and choice["logprobs"]["refusal"] is None
        content = choice["logprobs"]["content"]
        assert [row["token"] for row in content] == [texts.text(token) for token in text.tokens[: len(content)]]
        data = b"".join(bytes(row["bytes"]) for row in content)
        assert data.decode(errors="replace").startswith(choice["message"]["content"])
        for row, values, token in zip(content, want, text.tokens, strict=False):
            assert set(row) == {"token", "logprob", "bytes", "top_logprobs"}
            assert abs(row["logprob"] - values[token]) < 1e-5
            best = np.argsort(-values[: tokenizer().get_vocab_size()], kind="stable")[:most].tolist()
            assert [one["token"] for one in row["top_logprobs"]] == [texts.text(one) for one in best]
            assert all(set(one) == {"token", "logprob", "bytes"} for one in row["top_logprobs"])
        parts = events(http.post("/v1/chat/completions", json=body | {"top_logprobs": most, "stream": True}))
        lists = [part["choices"][0]["logprobs"] for part in parts]
        assert [row for one in lists if one for row in one["content"]] == content
    (plain,) = http.post("/v1/chat/completions", json=body | {"logprobs": False}).json()["choices"]
    assert plain["logprobs"] is None


def test_values_do_not_depend_on_the_draw(http: Any, models: Any) -> None:
    """Log-probabilities are those before temperature, penalty and filters, whatever token is drawn."""
    how = {"temperature": 1.7, "top_k": 9, "repetition_penalty": 1.5, "seed": 3, "logprobs": 5, "max_tokens": 6}
    ids = tokenizer().encode(words(5, 3)).ids
    (choice,) = http.post("/v1/completions", json=how | {"prompt": [ids]}).json()["choices"]
    texts, new = TokenTexts(tokenizer()), []
    numbers = {texts.text(token): token for token in range(tokenizer().get_vocab_size())}
    new = [numbers[name] for name in choice["logprobs"]["tokens"]]
    want = of_transformers(models, ids + new)[len(ids) - 1 :]
    for token, value, values in zip(new, choice["logprobs"]["token_logprobs"], want, strict=False):
        assert abs(value - values[token]) < 1e-5


NEED = "allowed: an integer from 0 to 20"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "a", "logprobs": -1}, f"logprobs: got -1; {NEED}"),
        ("completions", {"prompt": "a", "logprobs": 21}, f"logprobs: got 21; {NEED}"),
        ("completions", {"prompt": "a", "logprobs": "5"}, f'logprobs: got "5"; {NEED}'),
        ("completions", {"prompt": "a", "logprobs": True}, f"logprobs: got true; {NEED}"),
        ("completions", {"prompt": "a", "logprobs": 1.5}, f"logprobs: got 1.5; {NEED}"),
        (
            "completions",
            {"prompt": "a", "top_logprobs": 3},
            "top_logprobs: got 3; allowed: 0, the default",
        ),
        ("chat/completions", {"logprobs": 3}, "logprobs: got 3; allowed: true or false"),
        ("chat/completions", {"logprobs": "true"}, 'logprobs: got "true"; allowed: true or false'),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, f"top_logprobs: got -1; {NEED}"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, f"top_logprobs: got 21; {NEED}"),
        ("chat/completions", {"logprobs": True, "top_logprobs": "5"}, f'top_logprobs: got "5"; {NEED}'),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs: got 3; allowed: only with logprobs: true"),
        ("embeddings", {"input": "a", "logprobs": 3}, "logprobs: got 3; allowed: false, the default"),
    ],
)
def test_wrong_requests_get_status_400(http: Any, path: str, body: Any, message: str) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else {}
    answer = http.post(f"/v1/{path}", json=body | messages)
    assert answer.status_code == 400, answer.text
    assert (
        answer.json()["error"]["message"].startswith(message)
        and answer.json()["error"]["param"] == message.split(":")[0]
    )


def test_texts_of_tokens() -> None:
    """Byte-level tokens, and tokens of sentencepiece with bytes; parts of characters; special tokens."""
    made = tokenizer()
    texts = TokenTexts(made)
    for text in ("a tile, caf\u00e9 \u20ac \U0001f600", " x\n\ty "):
        assert b"".join(map(texts.bytes, made.encode(text).ids)).decode() == text
    (part,) = made.encode("\u20ac").ids[:1]
    assert texts.text(part).startswith("bytes:\\xe2") and texts.text(10**6) == ""
    pieces = Tokenizer(token_models.BPE({"<unk>": 0, "\u2581the": 1, "<0xE2>": 2}, [], unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces.decoder = decoders.Sequence(steps)
    pieces.add_special_tokens(["<s>"])
    assert [TokenTexts(pieces).bytes(k) for k in (1, 2, 3)] == [b" the", b"\xe2", b"<s>"]


def test_infinite_values_are_written_as_numbers() -> None:
    texts = TokenTexts(tokenizer())
    scored = [ScoredToken(40, TokenLogProbs(40, -math.inf, ((41, 0.0), (42, -math.inf))), 0)]
    for kind in (TEXT, CHAT):
        answer = json.dumps(kind.with_logprobs(texts).choice(0, "x", None, scored), allow_nan=False)
        assert str(LEAST) in answer
