"""Time generation with nntile_py, PyTorch, transformers and llama.cpp, and measure the memory's rate.

    python experiments/generation.py experiments/gpt2_124m.yaml --batch 1 8 --context 128 --tokens 64
    python experiments/generation.py experiments/llama_1b.yaml --cuda 1 --precision bf16 --batch 1 64 --context 1024

Each contestant runs in processes of its own, alternating with the others. Weights are random. Columns:

first, p99: time from the call to the first token, median and 99th percentile of FIRST calls in each process.
step, p99: time between two tokens of a text, as means of four tokens.
tokens/s: of all texts together, from `step`.
of memory: rate at which a step reads its bytes (`step_bytes`), divided by the rate of a copy on the GPU, or of a read
    on all CPU cores. Each round measures this rate.
ratio: nntile_py's `step` divided by that of the contestant; in brackets the medians of the contestant's processes.

Contestants: ours; torch: a static cache, and steps by torch.compile, in a CUDA graph on a GPU, gpt-fast's recipe
(github.com/pytorch-labs/gpt-fast), the prompt without torch.compile; transformers: generate with a static cache;
llama.cpp: greedy decoding on CPUs, for GPT-2 and fp32 (packages llama-cpp-python and gguf). transformers and llama.cpp
are left out if their packages are missing.
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

CONTESTANTS = ("ours", "torch", "transformers", "llama.cpp", "memory")
NEEDS = {"transformers": ["transformers"], "llama.cpp": ["llama_cpp", "gguf"]}  # packages
FIRST = 20  # calls whose first token is timed


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
    names = [n for n in o.only if all(map(importlib.util.find_spec, NEEDS.get(n, [])))]
    print(f"{o.config}, {o.precision}, {o.context} + {o.tokens} tokens")
    names_of_columns = ("first ms", "p99 ms", "step ms", "p99 ms", "tokens/s", "of memory", "ratio")
    print(f"batch   contestant{''.join(f'{name:>10}' for name in names_of_columns)}", flush=True)
    for batch in o.batch:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(o.rounds):
            for name, rows in results.items():
                rows.append(_run(o, name, batch))
        _report(o, batch, results)


def _report(o: argparse.Namespace, batch: int, results: dict[str, list[dict[str, Any]]]) -> None:
    """Print a line for each contestant. results: {contestant: result of each round}."""
    rates = [row["gb_s"] for row in results.pop("memory", [])]
    if rates:
        print(f"{batch:5d} {'memory':>12} {_median(rates):.1f} GB/s ({min(rates):.1f} to {max(rates):.1f})")
    rate, need = _median(rates or [math.nan]), step_bytes(o, batch)
    for name, rows in results.items():
        if not (good := [row for row in rows if "steps" in row]):
            print(f"{batch:5d} {name:>13} {rows[0].get('error', 'no result')}")
            continue
        steps = [ms for row in good for ms in row["steps"]]
        step, first = _median(steps), [ms for row in good for ms in row["first"]] or [math.nan]
        ours = [_median(row["steps"]) for row in results.get("ours", []) if "steps" in row]
        ratio = f"{_median(ours) / step:.3f}" if ours else ""
        spread = f"{min(_median(r['steps']) for r in good):.3f} to {max(_median(r['steps']) for r in good):.3f}"
        row = [_median(first), _p99(first), step, _p99(steps), 1e3 * batch / step, need / step / 1e6 / rate]
        print(f"{batch:5d} {name:>12}{''.join(f'{one:10.3f}' for one in row)}{ratio:>10} ({spread})", flush=True)


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


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
    """Return the bytes that a step reads: weights, and keys and values of the prompt and of half of the new tokens."""
    model, width = _model(o), DTYPES[o.precision].bytes
    c = model.config
    weights = sum(value.size for value in model.weights.values())
    kv_heads, head_dim = getattr(c, "kv_heads", None) or c.heads, getattr(c, "head_dim", None) or c.embed // c.heads
    if not c.tie_embeddings:
        weights -= c.vocab * c.embed  # the embedding's table, of which a step reads a row
    if type(model).__name__ == "GPT2":
        weights -= c.positions * c.embed
    return float(width * (weights + batch * (o.context + o.tokens / 2) * 2 * c.layers * kv_heads * head_dim))


def _measured(run: Callable[[int], Iterator[Any]], tokens: int) -> dict[str, Any]:
    """Time the first tokens of FIRST calls of `run`, and the tokens of a long call.

    Args:
        run: `run(n)` generates n tokens, and yields once for each token. On a GPU, tokens arrive in groups of RING.
        tokens: Tokens of the long call.

    Returns:
        All times in ms: of first tokens, and between tokens as means of RING tokens in a row.
    """
    list(run(min(tokens, 9)))
    first = []
    for _ in range(FIRST):
        start = time.perf_counter()
        next(iter(run(1)))
        first.append(1e3 * (time.perf_counter() - start))
    return {"first": first, "steps": _steps([time.perf_counter() for _ in run(tokens)])}


def _steps(times: list[float]) -> list[float]:
    return [1e3 * (b - a) / RING for a, b in zip(times, times[RING:], strict=False)]


# -- contestants


def _ours(o: argparse.Namespace, batch: int) -> dict[str, Any]:
    import nntile_py as nt

    model = _model(o)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab, (batch, o.context)).tolist()
    tiles = {axis: int(size) for axis, size in (one.split("=") for one in o.tiles.split(",") if one)} or None
    options = {"batch": batch, "max_length": o.context + o.tokens, "precision": o.precision, "tiles": tiles}
    with nt.Runtime(cuda=o.cuda), nt.Generator(model, **options) as generator:

        def run(count: int) -> Iterator[int]:
            for part in generator(prompts, max_tokens=count, temperature=0, stream=True):
                if part.index == batch - 1:
                    yield part.token

        return _measured(run, o.tokens)


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
        """Return `advance` as a CUDA graph; on CPUs `advance` itself."""
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
            if not o.cuda or number % RING == 0:  # nntile_py also reads RING tokens together
                for _ in range(RING if o.cuda else 1):
                    yield int(token[-1])

    with torch.inference_mode():
        replay = captured()
        return _measured(run, o.tokens)


def _static_cache(o: argparse.Namespace, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that computes the next tokens by a model of the config's sizes, and its weights and caches."""
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

    def run(count: int, clock: Clock | None = None) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, streamer=clock, **options)
        return 1e3 * (time.perf_counter() - start)

    run(5)
    first, clock = [run(1) for _ in range(FIRST)], Clock()
    if batch > 1:  # a streamer takes one text only: return the mean time of all tokens after the first
        return {"first": first, "steps": [(run(o.tokens) - _median(first)) / (o.tokens - 1)]}
    run(o.tokens, clock)
    return {"first": first, "steps": _steps(clock.times[1:])}  # the first call of `put` gets the prompt


def _llama_cpp(o: argparse.Namespace, batch: int) -> dict[str, Any]:
    import os
    import tempfile

    import llama_cpp

    model = _model(o)
    if o.cuda or o.precision != "fp32" or type(model).__name__ != "GPT2":
        raise SystemExit("llama.cpp is timed for GPT-2 in fp32 on CPUs")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        _write_gguf(model, path)
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # a reference, as C keeps a pointer
        llama_cpp.llama_log_set(silent, None)
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_batch, params.n_ubatch = batch, batch * o.context, batch * o.context
        params.n_ctx = batch * (-(-(o.context + o.tokens) // 256) * 256)
        params.type_k = params.type_v = 0  # GGML_TYPE_F32
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        context = llama_cpp.llama_init_from_model(loaded, params)
    vocab = model.config.vocab
    prompts = np.random.default_rng(0).integers(0, vocab, (batch, o.context)).tolist()
    room = llama_cpp.llama_batch_init(batch * o.context, 0, 1)

    def decode(rows: list[list[int]], place: int) -> list[int]:
        """Return the most likely next token of each sequence."""
        room.n_tokens = 0
        for row, ids in enumerate(rows):
            for k, token in enumerate(ids):
                n = room.n_tokens
                room.token[n], room.pos[n], room.n_seq_id[n], room.seq_id[n][0] = token, place + k, 1, row
                room.logits[n] = k == len(ids) - 1
                room.n_tokens += 1
        if llama_cpp.llama_decode(context, room):
            raise SystemExit("llama_decode failed")
        ends = np.cumsum([len(ids) for ids in rows]) - 1
        logits = (llama_cpp.llama_get_logits_ith(context, int(end)) for end in ends)
        return [int(np.ctypeslib.as_array(one, (vocab,)).argmax()) for one in logits]

    def run(count: int) -> Iterator[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        new = decode(prompts, 0)
        yield new[-1]
        for number in range(1, count):
            new = decode([[token] for token in new], o.context + number - 1)
            yield new[-1]

    return _measured(run, o.tokens)


def _write_gguf(model: Any, path: str) -> None:
    """Write random weights with the sizes of a GPT-2 as a GGUF file without a vocabulary."""
    import gguf

    c = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(c.positions)
    writer.add_embedding_length(c.embed)
    writer.add_feed_forward_length(4 * c.embed)
    writer.add_block_count(c.layers)
    writer.add_head_count(c.heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(c.vocab)
    writer.add_tokenizer_model("no_vocab")
    random, e = np.random.default_rng(0), c.embed
    shapes = {"token_embd.weight": (c.vocab, e), "position_embd.weight": (c.positions, e)}
    products = ("attn_qkv", 3 * e, e), ("attn_output", e, e), ("ffn_up", 4 * e, e), ("ffn_down", e, 4 * e)
    for n in range(c.layers):
        for name, out, inner in products:
            shapes |= {f"blk.{n}.{name}.weight": (out, inner), f"blk.{n}.{name}.bias": (out,)}
        for name in ("attn_norm", "ffn_norm"):
            shapes |= {f"blk.{n}.{name}.weight": (e,), f"blk.{n}.{name}.bias": (e,)}
    shapes |= {"output_norm.weight": (e,), "output_norm.bias": (e,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, (0.02 * random.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    "ours": _ours, "torch": _torch, "transformers": _transformers, "llama.cpp": _llama_cpp,
    "memory": _memory,
}  # fmt: skip


if __name__ == "__main__":
    main()
