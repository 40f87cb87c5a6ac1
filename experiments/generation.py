"""Times of generation: ours beside PyTorch's static cache with torch.compile, transformers, and the memory.

    python experiments/generation.py experiments/gpt2_124m.yaml --batch 1 8 --context 128 --tokens 64
    python experiments/generation.py experiments/llama_1b.yaml --cuda 1 --precision bf16 --batch 1 64 --context 1024

Each contestant runs in processes of its own, in turns. Weights are random. The first token is the time from the call to
the first token of each text; the other columns are times between tokens. "of memory" compares the bytes that a
decoding step must read, weights and cached keys and values, with a copy on the GPU, or a read on all CPU cores.

Contestants: ours; torch: a static cache and torch.compile with CUDA graphs, gpt-fast's recipe
(github.com/pytorch-labs/gpt-fast); transformers: generate with a static cache.
Contestants whose packages are missing are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nntile_py.config.builders import build_model
from nntile_py.config.run_config import load
from nntile_py.graph.key_value_cache import RING
from nntile_py.tiles.dtypes import DTYPES

CONTESTANTS = ("ours", "torch", "transformers", "memory")
NEEDS = {"transformers": "transformers"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--cuda", type=int, default=0, help="GPUs")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiles", default="", help="AXIS=SIZE,... of ours")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker:
        print(json.dumps(WORKERS[o.worker](o, o.batch[0])))
        return
    names = [n for n in o.only if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]
    rate = _median([_run(o, "memory", 1)["gb_s"] for _ in range(o.rounds)]) if "memory" in names else math.nan
    print(f"{o.config}, {o.precision}, {o.context} + {o.tokens} tokens; memory {rate:.1f} GB/s", flush=True)
    names_of_columns = ("first ms", "step ms", "p99 ms", "tokens/s", "of memory", "ratio")
    print(f"batch   contestant{''.join(f'{name:>10}' for name in names_of_columns)}")
    for batch in o.batch:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in names if name != "memory"}
        for _ in range(o.rounds):
            for name, rows in results.items():
                rows.append(_run(o, name, batch))
        need = step_bytes(o, batch)
        for name, rows in results.items():
            if not (good := [row for row in rows if "steps" in row]):
                print(f"{batch:5d} {name:>13} {rows[0].get('error', 'no result')}")
                continue
            steps = [ms for row in good for ms in row["steps"]]
            step, first = _median(steps), _median([row["first"] for row in good])
            ours = [_median(row["steps"]) for row in results.get("ours", []) if "steps" in row]
            ratio = f"{_median(ours) / step:.3f}" if ours else ""
            spread = f"{min(_median(r['steps']) for r in good):.3f} to {max(_median(r['steps']) for r in good):.3f}"
            row = [first, step, float(np.percentile(steps, 99)), 1e3 * batch / step, need / step / 1e6 / rate]
            print(f"{batch:5d} {name:>12}{''.join(f'{one:10.3f}' for one in row)}{ratio:>10} ({spread})", flush=True)


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _run(o: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """Run a contestant in a process of its own, and return its result."""
    command = [sys.executable, __file__, o.config, "--worker", name, "--batch", str(batch)]
    for option in ("cuda", "precision", "context", "tokens", "tiles"):
        command += [f"--{option}", str(getattr(o, option))]
    command += [part for one in o.sets for part in ("--set", one)]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        return {"error": (ended.stderr.splitlines() or ["no output"])[-1]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _model(o: argparse.Namespace) -> Any:
    config = load(o.config, [f"train.seq={o.context + o.tokens}", *o.sets])
    return build_model(config)


def step_bytes(o: argparse.Namespace, batch: int) -> float:
    """Return the bytes that a decoding step reads: weights once, and keys and values of half of the new tokens."""
    model, width = _model(o), DTYPES[o.precision].bytes
    c = model.config
    weights = sum(value.size for value in model.weights.values())
    kv_heads, head_dim = getattr(c, "kv_heads", None) or c.heads, getattr(c, "head_dim", None) or c.embed // c.heads
    if not c.tie_embeddings:
        weights -= c.vocab * c.embed  # the embedding's table, of which a step reads a row
    if type(model).__name__ == "GPT2":
        weights -= c.positions * c.embed
    return float(width * (weights + batch * (o.context + o.tokens / 2) * 2 * c.layers * kv_heads * head_dim))


def _measured(tokens: Iterator[Any], start: float) -> dict[str, Any]:
    """Return the time of the first token, and the times between tokens, in ms: means of RING tokens in a row.

    Tokens arrive in groups of RING on a GPU.
    """
    return _steps([time.perf_counter() for _ in tokens], start)


def _steps(times: list[float], start: float) -> dict[str, Any]:
    steps = [1e3 * (b - a) / RING for a, b in zip(times, times[RING:], strict=False)]
    return {"first": 1e3 * (times[0] - start), "steps": steps}


# -- contestants


def _ours(o: argparse.Namespace, batch: int) -> dict[str, Any]:
    import nntile_py as nt

    model = _model(o)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab, (batch, o.context)).tolist()
    tiles = {axis: int(size) for axis, size in (one.split("=") for one in o.tiles.split(",") if one)} or None
    options = {"batch": batch, "max_length": o.context + o.tokens, "precision": o.precision, "tiles": tiles}
    with nt.Runtime(cuda=o.cuda), nt.Generator(model, **options) as generator:
        generator(prompts, max_tokens=min(o.tokens, 8), temperature=0)

        def rounds() -> Iterator[int]:
            for part in generator(prompts, max_tokens=o.tokens, temperature=0, stream=True):
                if part.index == batch - 1:
                    yield part.token

        return _measured(rounds(), time.perf_counter())


def _torch(o: argparse.Namespace, batch: int) -> dict[str, Any]:
    import torch

    step, state = _static_cache(o, batch)
    device = "cuda" if o.cuda else "cpu"
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    token, place = (
        torch.zeros(batch, 1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )

    def advance() -> None:
        token.copy_(compiled(token, place, *state)[:, None])
        place.add_(1)

    def captured() -> Callable[[], None]:
        """Return `advance` as a CUDA graph."""
        if not o.cuda:
            return advance
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                advance()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            advance()
        return graph.replay

    def run(count: int) -> Iterator[int]:
        ids = torch.randint(0, 100, (batch, o.context), device=device)
        token.copy_(step(ids, torch.arange(o.context, device=device), *state)[:, None])
        place.fill_(o.context)
        yield int(token[-1])
        for number in range(1, count):
            replay()
            if not o.cuda or number % RING == 0:  # as ours reads tokens
                for _ in range(RING if o.cuda else 1):
                    yield int(token[-1])

    with torch.inference_mode():
        replay = captured()
        list(run(9))
        return _measured(run(o.tokens), time.perf_counter())


def _static_cache(o: argparse.Namespace, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a pass over new tokens of a model of the config's sizes, and its weights and cache."""
    import torch
    import torch.nn.functional as F

    model = _model(o)
    c, llama = model.config, type(model).__name__ != "GPT2"
    dtype, device = getattr(torch, DTYPES[o.precision].torch), "cuda" if o.cuda else "cpu"
    heads, length = c.heads, o.context + o.tokens
    kv, d = (c.kv_heads, c.head_dim) if llama else (heads, c.embed // heads)

    def weight(*shape: int) -> Any:
        return (0.02 * torch.randn(*shape, device=device)).to(dtype)

    up = 2 * c.ffn if llama else c.ffn
    layers = [
        (weight((heads + 2 * kv) * d, c.embed), weight(c.embed, heads * d), weight(up, c.embed), weight(c.embed, c.ffn),
         weight(c.embed), weight(c.embed))
        for _ in range(c.layers)
    ]  # fmt: skip
    table, norm = weight(c.vocab, c.embed), weight(c.embed)
    head = table if c.tie_embeddings else weight(c.vocab, c.embed)
    places = weight(length, c.embed)
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, d, 2) / d))
    rope = torch.cat([angles.cos(), angles.sin()], 1).to(device, dtype)
    caches = [torch.zeros(2, batch, kv, length, d, dtype=dtype, device=device) for _ in range(c.layers)]

    def normed(x: Any, w: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], w) if llama else F.layer_norm(x, x.shape[-1:], w)

    def turned(x: Any, place: Any) -> Any:
        if not llama:
            return x
        cos, sin = rope[place].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step(ids: Any, place: Any, layers: Any, caches: Any) -> Any:
        x = table[ids]
        x = x if llama else x + places[place]
        mask = torch.arange(length, device=device)[None, :] <= place[:, None]
        for (qkv, out, fc, down, n1, n2), cache in zip(layers, caches, strict=True):
            y = F.linear(normed(x, n1), qkv).view(batch, -1, heads + 2 * kv, d).transpose(1, 2)
            q, k, v = y.split([heads, kv, kv], 1)
            cache[0][:, :, place], cache[1][:, :, place] = turned(k, place), v
            a = F.scaled_dot_product_attention(turned(q, place), cache[0], cache[1], mask, enable_gqa=kv < heads)
            x = x + F.linear(a.transpose(1, 2).flatten(2), out)
            y = F.linear(normed(x, n2), fc)
            y = F.silu(y[..., : c.ffn]) * y[..., c.ffn :] if llama else F.gelu(y, approximate="tanh")
            x = x + F.linear(y, down)
        return F.linear(normed(x[:, -1], norm), head).argmax(-1)

    return step, (layers, caches)


def _transformers(o: argparse.Namespace, batch: int) -> dict[str, Any]:
    import torch

    model = _model(o).to_hf().eval()
    model = model.to("cuda" if o.cuda else "cpu", getattr(torch, DTYPES[o.precision].torch))
    ids = torch.randint(0, 100, (batch, o.context), device=model.device)
    options = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0, "eos_token_id": None}

    class Clock:
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    clock = Clock()
    each = {"streamer": clock} if batch == 1 else {}
    for count in (5, o.tokens):
        clock.times, start = [], time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options, **each)
        total = time.perf_counter() - start
    if batch > 1:  # a streamer takes one text
        return {"first": math.nan, "steps": [1e3 * total / o.tokens]}
    times = clock.times[1:]  # the first entry is the prompt
    return _steps(times, start)


def _memory(o: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return the GB/s of a copy on the GPU (read and written), or of a sum of a large array on all CPU cores."""
    import torch

    size = 1 << 30 if o.cuda else 1 << 29
    x = torch.ones(size // 4, device="cuda" if o.cuda else "cpu")
    y = torch.empty_like(x) if o.cuda else None
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        if o.cuda:
            y.copy_(x)  # type: ignore[union-attr]
            torch.cuda.synchronize()
        else:
            x.sum()
        best = min(best, time.perf_counter() - start)
    return {"gb_s": size * (2 if o.cuda else 1) / best / 1e9}


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "ours": _ours, "torch": _torch, "transformers": _transformers, "memory": _memory,
}  # fmt: skip


if __name__ == "__main__":
    main()
