"""Log-probabilities of generated tokens: equal to those of transformers, for any tiling, batch and precision."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
from test_generate import OPTIONS, TILINGS, hf_model, prompts

import nntile_py as nt
from nntile_py.inference.decoder import Decoder
from nntile_py.inference.engine import Request
from nntile_py.inference.token_logprobs import TokenLogProbs
from nntile_py.models.registry import from_hf

NEW = 12
# Prompts of unequal lengths: a single token, a prompt of several prefill passes, shorter ones. Llama gets short prompts
# only, because transformers computes rotary angles in fp32, whose error grows with the position.
MIXED = {"gpt2": [0, 1, 4, 5, 7], "llama": [0, 5, 7]}


@pytest.fixture(scope="module", autouse=True)
def _running(runtime: nt.Runtime) -> None:
    """A running StarPU with two CPU workers."""


def log_softmax(kind: str, ids: list[int]) -> Any:
    """The log-probabilities of transformers at each position, [tokens, vocab]."""
    with torch.no_grad():
        return hf_model(kind)(torch.tensor([ids])).logits[0].float().log_softmax(-1).numpy()


def check_values(rows: list[TokenLogProbs], tokens: list[int], want: Any, most: int) -> None:
    """Compare rows with log-probabilities `want` [tokens, vocab] at their positions."""
    assert [row.token for row in rows] == tokens and len(rows) == len(want)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
    for row, values in zip(rows, want, strict=True):
        np.testing.assert_allclose(row.logprob, values[row.token], **close)
        numbers, logprobs = zip(*row.top, strict=True) if most else ((), ())
        np.testing.assert_allclose(logprobs, np.sort(values)[::-1][:most], **close)
        np.testing.assert_allclose(values[np.array(numbers, int)], logprobs, **close)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("tiles", TILINGS)
@pytest.mark.parametrize("options", [{"temperature": 0}, OPTIONS], ids=["greedy", "draws"])
def test_values_are_those_of_transformers(kind: str, tiles: str, options: dict[str, Any]) -> None:
    """Before temperature, penalty and filters; for one prompt, and for prompts of unequal lengths at once."""
    tiling = TILINGS[tiles] | ({"heads": 2} if kind != "gpt2" and "heads" in TILINGS[tiles] else {})
    chosen = [prompts()[k] for k in MIXED[kind]]
    with nt.Generator(from_hf(hf_model(kind)), tiles=tiling, batch=4) as generator:
        single = generator(chosen[1:2], max_tokens=NEW, logprobs=3, **options)
        texts = generator(chosen, max_tokens=NEW, logprobs=5, **options)
        plain = generator(chosen, max_tokens=NEW, **options)
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    assert {text.logprobs for text in plain} == {None}
    for ids, text, most in [*((*pair, 5) for pair in zip(chosen, texts, strict=True)), (chosen[1], single[0], 3)]:
        want = log_softmax(kind, ids + text.tokens)[len(ids) - 1 : -1]
        assert text.logprobs is not None
        check_values(text.logprobs, text.tokens, want, most)


def exact_angles(rotary: Any, x: Any, position_ids: Any) -> Any:
    """Cosines and sines of transformers' rotary frequencies, with angles in fp64."""
    angles = position_ids[..., None].double() * rotary.inv_freq.double()
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


def test_long_prompts_with_rotary_positions() -> None:
    """After 600 tokens the values are nearer to those of fp64 with fp64 angles than transformers' fp32 values are."""
    exact = copy.deepcopy(hf_model("llama")).double()
    exact.model.rotary_emb.forward = types.MethodType(exact_angles, exact.model.rotary_emb)
    ids = prompts()[1]
    with nt.Generator(from_hf(hf_model("llama"))) as generator:
        (text,) = generator([ids], max_tokens=NEW, temperature=0, logprobs=20)
    with torch.no_grad():
        want = exact(torch.tensor([ids + text.tokens])).logits[0].log_softmax(-1).numpy()[len(ids) - 1 : -1]
    theirs = log_softmax("llama", ids + text.tokens)[len(ids) - 1 : -1]
    assert text.logprobs is not None
    numbers = np.array([[number for number, _ in row.top] for row in text.logprobs])
    ours = np.array([[value for _, value in row.top] for row in text.logprobs])
    error, their_error = (abs(x - np.take_along_axis(want, numbers, -1)).max() for x in (
        ours, np.take_along_axis(theirs, numbers, -1)
    ))  # fmt: skip
    assert error < 2e-5 and error < their_error


@pytest.mark.parametrize("most", [0, 20])
def test_passes_read_together_and_streams(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Texts with and without log-probabilities share passes; the stream has the values of the list."""
    monkeypatch.setattr(Decoder, "passes_at_once", 3)
    with nt.Generator(from_hf(hf_model("gpt2")), tiles=TILINGS["even"], batch=4) as generator:
        options: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "logprobs": most}
        texts = generator(prompts()[2:6], **options)
        parts = list(generator(prompts()[2:6], stream=True, **options))
    for number, text in enumerate(texts):
        want = log_softmax("gpt2", prompts()[2 + number] + text.tokens)[-NEW - 1 : -1]
        assert text.logprobs is not None
        check_values(text.logprobs, text.tokens, want, most)
        assert [part.logprobs for part in parts if part.index == number] == text.logprobs


@pytest.mark.parametrize("tiles", TILINGS)
def test_values_of_prompts(tiles: str) -> None:
    """Prompts whose tokens are scored, together with a prompt without scores."""
    model = from_hf(hf_model("gpt2"))
    with nt.Generator(model, tiles=TILINGS[tiles], batch=4) as generator:
        engine = generator.engine(4, 620)
        requests = [Request(prompts()[k], 3, (0, 0, 1, 0, 1), logprobs=4, of_prompt=k < 3) for k in (0, 1, 2, 4)]
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
    for request in requests:
        row, ids = request.row, request.prompt
        assert row and (row.prompt_logprobs is not None) == request.of_prompt
        want = log_softmax("gpt2", row.tokens)
        check_values([event.logprobs for event in request.events if event.logprobs], row.tokens[-3:], want[-4:-1], 4)
        if row.prompt_logprobs is not None:
            check_values(row.prompt_logprobs, ids[1:], want[: len(ids) - 1], 4)


def test_few_tokens_may_be_drawn() -> None:
    """The most probable tokens are those that may be drawn; a small vocabulary has fewer than 20."""
    with nt.Generator(from_hf(hf_model("gpt2"))) as generator:
        generator._vocab = 9
        (text,) = generator([prompts()[4]], max_tokens=3, temperature=0, logprobs=20)
    want = log_softmax("gpt2", prompts()[4] + text.tokens)[-4:-1]
    assert text.logprobs is not None
    for row, values in zip(text.logprobs, want, strict=True):
        assert [number for number, _ in row.top] == np.argsort(-values[:9]).tolist() and row.token == row.top[0][0]
        assert abs(row.logprob - values[row.token]) < 1e-5


@pytest.mark.parametrize("value", [-1, 21, "5", 2.0, True])
def test_wrong_numbers_are_refused(value: Any) -> None:
    generator = nt.Generator(from_hf(hf_model("gpt2")))
    with pytest.raises(nt.ConfigError) as caught:
        generator([[1]], logprobs=value)
    need = "an integer of at least 0 and at most 20"
    assert str(caught.value) == f"logprobs: got {value!r}; allowed: {need}"
