"""Time attention over packed sequences on a GPU: nntile_py's kernels, ATen's flash attention (varlen), cuDNN (ragged).

    experiments/segments.py [--table 64x64,64x512] [--heads 12] [--head-dim 64] [--alpha 0.6] [--dropout 0.1] [--causal]

A row of the table is SEQUENCESxLONGEST; lengths are distributed uniformly about alpha times the longest. Times are
microseconds of a call in a CUDA graph, so without launch overhead. Errors are |difference| / |value| against fp32
attention of each sequence. cuDNN's kernel runs as a task of nntile_py. The task's time includes the preparation of
offsets, of zeros for tokens without a sequence, and of the transposed log-sum-exp. --grouped times the kernels of
examples/grouped_attention instead of nntile_py's.

--instructions needs no GPU: it compiles the kernels for compute capability 9.0, disassembles them, and prints the
instructions of their innermost loops divided by the number of scores that a loop computes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import nntile_py as nt
from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.program import Store
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.graph.random_inputs import random_lengths
from nntile_py.tasks import interpret as interpreter
from nntile_py.tasks import launch, launch_binary
from nntile_py.tasks.attention import attention
from nntile_py.tasks.attention_segments_triton import names_of
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tiles import TaskList, Tile, Tiling
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import Task

CALLS, ROUNDS = 20, 5  # calls in a CUDA graph, measurements
FLIGHT = 10  # graphs in flight together
SLOTS = {"dropout_seed": 1234567.0}


def lengths_of(count: int, longest: int, alpha: float) -> list[int]:
    return [int(n) for n in random_lengths(np.random.default_rng(0), count, longest, alpha)]


def timed(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call on the GPU, the least of several measurements."""
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    measured = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end) * 1e3 / CALLS)
    return min(measured)


def lowered(
    backend: str, qkv: torch.Tensor, offsets: int, longest: int, o: Any
) -> tuple[Graph, Lowering, list[Tensor]]:
    """Return the graph and the tasks of attention and its gradient, and the result tensors, which outlive a program."""
    tokens, _, heads, head_dim = qkv.shape
    g = Graph("bf16")
    axes = ["batch", "seq", "qkv", "heads", "head_dim"]
    x = g.named("qkv", axes, [1, tokens, 3, heads, head_dim], "input")
    x.requires_grad = True
    segments = g.named("segments", ["offset"], [offsets], "input", "int64")
    if o.dropout:
        g.row_numbers["seq"] = g.named("draws", ["batch", "seq"], [1, tokens], "input", "int64")
    mask = Mask(o.causal, segments=segments, longest=longest)
    out = attention(g, (x, 0), (x, 1), (x, 2), mask, backend, o.dropout)
    op = g.ops[-1]
    (grad, *_) = op.gradient(g, g.named("do", out.axes, out.shape, "input"), None)
    assert grad is not None
    for tensor in (*op.outputs, grad):
        tensor.storage.kind = "scalar"
    return g, lower(g, Tiling({})), [out, grad]


class Ours:
    """nntile_py's forward and backward kernels of attention, run on PyTorch's tensors."""

    def __init__(
        self, qkv: torch.Tensor, offsets: torch.Tensor, d_out: torch.Tensor, longest: int, o: Any, backend: str
    ) -> None:
        _, lowering, results = lowered(backend, qkv, len(offsets), longest, o)
        rows = torch.arange(len(qkv), device=qkv.device)
        inputs = {"qkv": qkv, "segments": offsets, "do": d_out, "draws": rows}
        self.tasks, self.tiles = lowering.tasks.tasks, dict[Tile, torch.Tensor]()
        for tile in {access.tile for task in self.tasks for access in task.accesses}:
            empty = torch.empty(tile.shape, dtype=getattr(torch, DTYPES[tile.dtype].torch), device=qkv.device)
            self.tiles[tile] = inputs[tile.tensor].view(tile.shape) if tile.tensor in inputs else empty
        self.out, self.grad = (self.tiles[lowering.tile(t, dict.fromkeys(t.axes, 0))] for t in results)

    def run(self, task: Task, way: int) -> None:
        interpreter.interpret([task], [self.tiles[a.tile] for a in task.accesses], SLOTS, way=way)


def captured(
    backend: str, qkv: torch.Tensor, offsets: torch.Tensor, d_out: torch.Tensor, longest: int, o: Any
) -> list[tuple[float, np.ndarray[Any, Any]]]:
    """Return (microseconds, result) of a backend's forward and backward task, each run CALLS times in a CUDA graph."""
    g, lowering, results = lowered(backend, qkv, len(offsets), longest, o)
    inputs, store, timed_results = {"qkv": qkv, "segments": offsets, "do": d_out}, Store(), []
    for tensor in g.tensors.values():
        if (value := inputs.get(tensor.name)) is not None:
            value = value if tensor.dtype == "int64" else value.float()
            store.write(lowering, tensor, value.cpu().numpy().reshape(tensor.shape))
    for task, result in zip(lowering.tasks.tasks, results, strict=True):
        many = TaskList(lowering.tasks.policy, [access.tile for access in task.accesses if access.mode == "R"])
        many.tasks = [replace(task) for _ in range(CALLS)]
        program = Served(many, store, captured=torch.cuda.is_available())
        times = []
        for _ in range(ROUNDS):
            nt.Runtime.wait()
            start = time.perf_counter()
            for _ in range(FLIGHT):
                program.run({})
            nt.Runtime.wait()
            times.append((time.perf_counter() - start) * 1e6 / FLIGHT / CALLS)
        timed_results.append((min(times[1:]), store.read(lowering, result)))
    return timed_results


def expected(qkv: torch.Tensor, bounds: list[int], d_out: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    """Return attention's output and gradient in fp32, computed sequence by sequence."""
    outs, grads = [], []
    for start, end in pairwise(bounds):
        part = qkv[start:end].float().requires_grad_()
        q, k, v = part.permute(1, 2, 0, 3)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1)
        out.backward(d_out[start:end].float())
        assert part.grad is not None
        outs.append(out.detach())
        grads.append(part.grad)
    return [torch.cat(outs), torch.cat(grads)]


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| / |want|, with Euclidean norms."""
    return float((got.to(want).view(want.shape) - want).norm() / want.norm())


def measure(count: int, longest: int, o: Any) -> None:
    """Print the times of all kernels for `count` sequences."""
    lengths = lengths_of(count, longest, o.alpha)
    bounds = np.cumsum([0, *lengths]).tolist()
    tokens, device = bounds[-1], torch.device("cuda")
    qkv = torch.randn(tokens, 3, o.heads, o.head_dim, device=device).bfloat16()
    d_out = torch.randn(tokens, o.heads, o.head_dim, device=device).bfloat16()
    offsets = torch.tensor(bounds, device=device)
    ours = Ours(qkv, offsets, d_out, longest, o, "segments")
    want = expected(qkv, bounds, d_out, o.causal)
    q, k, v, cu = *qkv.unbind(1), offsets.int()
    sizes = (cu, cu, longest, longest, o.dropout, o.causal)
    flash = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, False)

    def aten(direction: int) -> Any:
        if direction == 0:
            return torch.ops.aten._flash_attention_forward(q, k, v, *sizes, False)
        return torch.ops.aten._flash_attention_backward(d_out, q, k, v, flash[0], flash[1], *sizes, flash[2], flash[3])

    ragged: list[tuple[float, np.ndarray[Any, Any]]] = []
    if not o.dropout:
        try:
            with nt.Runtime(cpus=0, cuda=1):
                ragged = captured("cudnn", qkv, offsets, d_out, longest, o)
        except nt.TaskError as error:
            print(error)
    for direction in range(2):
        rows = [("ATen varlen", timed(lambda d=direction: aten(d)), 0.0)]  # type: ignore[misc]
        for us, got in ragged[direction : direction + 1]:
            rows.append(("cuDNN ragged", us, error_of(torch.tensor(got), want[direction])))
        before = len(rows)
        task = ours.tasks[direction]
        for number, way in enumerate(launch.load()[task.kernel]([task]).ways):
            try:
                us = timed(lambda t=task, w=number: ours.run(t, w))  # type: ignore[misc]
            except Exception as error:  # any error of Triton: the kernel may need more than the GPU has
                print(f"{names_of([way])}: {type(error).__name__}: {str(error)[:100]}")
                continue
            rows.append((names_of([way]), us, error_of(ours.grad if direction else ours.out, want[direction])))
        base, best = rows[0][1], min(us for _, us, _ in rows[before:])
        cells = ", ".join(f"{name} {us:.1f}" + (f" (error {wrong:.0e})" if wrong else "") for name, us, wrong in rows)
        print(f"{count} x {longest}, {tokens} tokens, {'backward' if direction else 'forward'}: {cells};"
              f" ATen / fastest of nntile_py {base / best:.2f}", flush=True)  # fmt: skip


def loop_of(cubin: bytes) -> int:
    """Return the number of instructions in the shortest loop with matrix products; 0: no such loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        assembly = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    places = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", assembly, re.M)]
    loops = []
    for at, text in places:
        back = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        body = [line for place, line in places if back and int(back[1], 16) <= place <= at]
        loops += [len(body)] if any("MMA" in line for line in body) else []
    return min(loops, default=0)


def count_instructions(longest: int, o: Any) -> None:
    """Print, for each kernel with a loop, the instructions that its innermost loop takes for each score."""
    qkv = torch.zeros(longest, 3, o.heads, o.head_dim, dtype=torch.bfloat16)
    for task in Ours(qkv, torch.tensor([0, longest]), qkv[:, 0], longest, o, "segments").tasks:
        for one in (one for way in launch.load()[task.kernel]([task]).ways for one in way):
            sizes = dict(one.constexprs)
            length = loop_of(launch_binary.compile_launch(one, 90).cubin)
            each = length * 32 * one.warps / (sizes["ROWS"] * sizes["KEYS"])
            if length:
                print(f"{longest} positions, {names_of([(one,)])}: {each:.1f} instructions for each score")


def table_of(parser: argparse.ArgumentParser, o: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the rows (sequences, longest) of --table. Ends with an error if the options or the machine do not fit."""
    rows = [(int(row[1]), int(row[2])) for row in re.finditer(r"(?:^|,)([1-9]\d*)x([1-9]\d*)(?=,|$)", o.table)]
    if len(rows) != o.table.count(",") + 1:
        parser.error(f"--table: got {o.table!r}; allowed: SEQUENCESxLONGEST for each row, such as 64x64,64x512")
    if not 0 < o.alpha <= 1:
        parser.error(f"--alpha: got {o.alpha}; allowed: a number above 0 and at most 1")
    if not o.instructions and not torch.cuda.is_available():
        parser.error("no GPU here; --instructions needs none")
    torch.manual_seed(0)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="64x64,64x128,64x512,64x1024")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--grouped", action="store_true")
    o = parser.parse_args()
    if o.grouped:
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        import grouped_attention

        grouped_attention.register()
    rows = table_of(parser, o)
    if o.instructions:
        for _, longest in rows:
            count_instructions(longest, o)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {o.heads} heads of {o.head_dim},"
          f" alpha {o.alpha}, dropout {o.dropout}; us; errors with dropout are mostly of random masks")  # fmt: skip
    for count, longest in rows:
        measure(count, longest, o)


if __name__ == "__main__":
    main()
