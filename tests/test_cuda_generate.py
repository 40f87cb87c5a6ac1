"""Generation on a GPU: the texts of CPU workers, as CUDA graphs and as tasks; a cache that leaves the GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import nntile_py as nt
from nntile_py.execution.cuda_graph import Served
from nntile_py.inference.decoder import GREEDY, Decoder
from nntile_py.inference.engine import Request

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

VOCAB, NEW = 211, 50
SIZES = {"layers": 2, "embed": 64, "heads": 4, "vocab": VOCAB, "positions": 700}
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: nt.models.GPT2(nt.models.GPT2Config(**SIZES), seed=1),
    "llama": lambda: nt.models.Llama(nt.models.LlamaConfig(**SIZES, kv_heads=2, ffn=96), seed=1),
}


@functools.cache
def model(kind: str) -> Any:
    """Weights that are far apart, so that no two logits are nearly equal."""
    made = CONFIGS[kind]()
    made.weights = {name: value * (10 if value.ndim > 1 else 1) for name, value in made.weights.items()}
    return made


@functools.cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, n).tolist() for n in [1, 600, *rng.integers(2, 300, 10)]]


@functools.cache
def on_cpus(kind: str, **options: Any) -> Any:
    with nt.Runtime(cpus=2), nt.Generator(model(kind)) as generator:
        return generator(prompts(), max_tokens=NEW, **options)


DRAWS = {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("how", ["greedy", "draws"])
@pytest.mark.parametrize(
    ("tiles", "captured"), [({}, None), ({}, True), ({}, False), ({"heads": 2, "vocab": 100, "batch": 3}, False)]
)
def test_texts_are_those_of_cpus(kind: str, how: str, tiles: dict[str, int], captured: bool | None) -> None:
    options: dict[str, Any] = {"temperature": 0} if how == "greedy" else DRAWS
    with nt.Runtime(cuda=1), nt.Generator(model(kind), tiles=tiles, captured=captured) as generator:
        texts = generator(prompts(), max_tokens=NEW, **options)
        assert generator(prompts(), max_tokens=NEW, **options) == texts
    wrong = [k for k, pair in enumerate(zip(texts, on_cpus(kind, **options), strict=True)) if pair[0] != pair[1]]
    assert not wrong


@pytest.mark.parametrize(
    ("tiles", "captured"),
    [({"batch": 3}, True), ({"batch": 3}, False), ({"heads": 2, "vocab": 100}, None), (None, None)],
)
def test_texts_on_several_gpus(tiles: dict[str, int] | None, captured: bool | None) -> None:
    """With a cut batch, which is the default, each GPU has its own pages and graphs."""
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip("there is one GPU")
    with nt.Runtime(cuda=count), nt.Generator(model("llama"), tiles=tiles, captured=captured) as generator:
        texts = generator(prompts(), max_tokens=NEW, temperature=0)
        passes = programs(generator)
    assert [one.tokens for one in texts] == [one.tokens for one in on_cpus("llama", temperature=0)]
    workers = {len({task.worker for task in one.program.list.tasks}) for one in passes}
    assert max(workers) == 2
    if captured:
        assert all(one.graphs for one in passes)
    assert captured is not None or not tiles or not any(one.graphs for one in passes)  # tiles of heads are exchanged


def programs(generator: nt.Generator) -> list[Served]:
    decoder: Decoder = generator._engine.decoder  # type: ignore[union-attr]
    return [one.served for one in decoder.bound.programs.values()]


def test_decoding_passes_are_graphs() -> None:
    with nt.Runtime(cuda=1), nt.Generator(model("llama"), captured=True) as generator:
        generator(prompts()[:1], max_tokens=9, temperature=0)
        graphs = [one.graphs for one in programs(generator)]
    assert graphs and all(graphs), graphs


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(precision: str) -> None:
    """Graphs and tasks give the same tokens; most are those of fp32."""
    texts = []
    for captured in (True, False):
        with nt.Runtime(cuda=1), nt.Generator(model("gpt2"), precision=precision, captured=captured) as generator:
            texts.append(generator(prompts()[:4], max_tokens=8, temperature=0))
    assert [one.tokens for one in texts[0]] == [one.tokens for one in texts[1]]
    assert sum(a.tokens[0] == b.tokens[0] for a, b in zip(texts[0], on_cpus("gpt2", temperature=0), strict=False)) >= 3


def test_a_cache_that_leaves_the_gpu() -> None:
    """Room for a part of the cache: StarPU moves pages to main memory."""
    with nt.Runtime(cuda=1, cuda_memory="24MiB"), nt.Generator(model("llama"), captured=False) as generator:
        texts = generator(prompts(), max_tokens=NEW, temperature=0)
    assert [one.tokens for one in texts] == [one.tokens for one in on_cpus("llama", temperature=0)]


@pytest.mark.parametrize("how", ["greedy", "draws"])
@pytest.mark.parametrize(("tiles", "captured"), [({}, True), ({}, False), ({"vocab": 100, "batch": 3}, False)])
def test_log_probabilities_are_those_of_cpus(how: str, tiles: dict[str, int], captured: bool) -> None:
    """Also those of prompts, with which the server answers `echo`."""
    options: dict[str, Any] = {"logprobs": 20, **({"temperature": 0} if how == "greedy" else DRAWS)}
    with nt.Runtime(cuda=1), nt.Generator(model("gpt2"), tiles=tiles, captured=captured) as generator:
        texts = generator(prompts(), max_tokens=NEW, **options)
        on_gpu = prompt_logprobs(generator)
    for text, want in zip(texts, on_cpus("gpt2", **options), strict=True):
        assert text.tokens == want.tokens
        check_logprobs(text.logprobs, want.logprobs)
    with nt.Runtime(cpus=2), nt.Generator(model("gpt2")) as generator:
        want_of_prompts = prompt_logprobs(generator)
    for rows, want_rows in zip(on_gpu, want_of_prompts, strict=True):
        check_logprobs(rows, want_rows)


def prompt_logprobs(generator: nt.Generator) -> list[Any]:
    """The log-probabilities of some prompts' tokens."""
    engine = generator.engine(4, 700)
    requests = [Request(ids, 2, GREEDY, logprobs=20, of_prompt=True) for ids in prompts()[:4]]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    rows = [request.row.prompt_logprobs for request in requests if request.row]
    assert [len(one or []) for one in rows] == [len(ids) - 1 for ids in prompts()[:4]]
    return rows


def check_logprobs(rows: Any, want: Any) -> None:
    """Compare values; tokens only of the most probable one, since others may be nearly equal."""
    assert [row.token for row in rows] == [row.token for row in want]
    np.testing.assert_allclose([row.logprob for row in rows], [row.logprob for row in want], rtol=1e-4, atol=1e-4)
    values, wanted = ([[value for _, value in row.top] for row in one] for one in (rows, want))
    np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-4)
    assert [row.top[0][0] for row in rows] == [row.top[0][0] for row in want]
