"""Time attention with relative positions over packed sequences on a GPU: each candidate kernel of nntile_py.

    experiments/relative_segments.py [--table 64x128,32x512] [--heads 12] [--head-dim 64] [--alpha 0.6] [--buckets 256]

A row of the table is SEQUENCESxLONGEST; lengths are distributed uniformly about alpha times the longest. Times are
microseconds of a call in a CUDA graph, so without launch overhead. Errors are |difference| / |value| against fp32
attention of each sequence with stored scores. The last line of a row has the time of that attention and its gradient.
--buckets 0: each distance has its own embedding.

--instructions needs no GPU: it compiles the kernels for compute capability 9.0, and prints the instructions of their
innermost loops divided by the number of scores that a loop computes. A loop has instructions for two kinds of blocks,
with and without distances that share a bucket. For each block, it runs the instructions of one kind.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from segments import SLOTS, error_of, lengths_of, loop_of, table_of, timed

from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.models.deberta_parts import distance_rows
from nntile_py.tasks import interpret as interpreter
from nntile_py.tasks import launch, launch_binary
from nntile_py.tasks.attention_relative import relative_attention
from nntile_py.tasks.attention_segments_triton import names_of
from nntile_py.tasks.mask import Mask
from nntile_py.tiles import Tile, Tiling
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import Task

INPUTS = ("q", "k", "v", "queries", "keys", "do")


class Relative:
    """Attention with relative positions and its gradient as two tasks, on PyTorch's tensors of random values."""

    def __init__(self, bounds: Sequence[int], longest: int, o: Any, device: str) -> None:
        tokens = bounds[-1]
        rows, index = distance_rows(tokens, longest, o.buckets, longest)
        relative = len(rows) + -len(rows) % 8
        sizes = {"batch": 1, "seq": tokens, "heads": o.heads, "head_dim": o.head_dim, "relative": relative}
        g = Graph("bf16")

        def tensor(name: str) -> Any:
            axes = ["batch", "seq", "heads", "relative" if name in ("queries", "keys") else "head_dim"]
            named = g.named(name, axes, [sizes[axis] for axis in axes], "input")
            named.requires_grad = True
            return named

        q, k, v, queries, keys, do = map(tensor, INPUTS)
        mask = Mask(segments=g.named("segments", ["offset"], [len(bounds)], "input", "int64"), longest=longest)
        place = g.named("index", ["distance"], [len(index)], "input", "int64")
        out = relative_attention(g, q, k, v, mask, place, queries, keys)
        self.scale, op = o.head_dim**-0.5, g.ops[-1]
        grads = op.gradient(g, do, None)
        lowering = lower(g, Tiling({}))
        self.index, self.longest = torch.tensor(index, device=device), longest
        self.values = {name: torch.randn(g.tensors[name].shape, device=device).bfloat16() for name in INPUTS}
        inputs = self.values | {"index": self.index, "segments": torch.tensor(bounds, device=device)}
        self.tasks: list[Task] = lowering.tasks.tasks
        self.tiles: dict[Tile, torch.Tensor] = {}
        for tile in {access.tile for task in self.tasks for access in task.accesses}:
            empty = torch.empty(tile.shape, dtype=getattr(torch, DTYPES[tile.dtype].torch), device=device)
            self.tiles[tile] = inputs.get(tile.tensor, empty)
        of = dict(zip(op.inputs, grads, strict=True))
        results = [out, *(of[t] for t in (q, k, v, queries, keys))]
        self.results = [self.tiles[lowering.tile(t, dict.fromkeys(t.axes, 0))] for t in results if t]

    def run(self, task: Task, way: int) -> None:
        interpreter.interpret([task], [self.tiles[a.tile] for a in task.accesses], SLOTS, way=way)

    def stored(self, bounds: Sequence[int]) -> list[torch.Tensor]:
        """Return the output and the gradients in fp32, computed sequence by sequence with stored scores."""
        leaves = [self.values[name][0].float().requires_grad_() for name in INPUTS[:-1]]
        outs, origin = [], len(self.index) // 2
        for start, end in pairwise(bounds):
            q, k, v, queries, keys = (x[start:end].transpose(0, 1) for x in leaves)
            place = torch.arange(end - start, device=q.device)
            rows = self.index[origin + place[None, :] - place[:, None]].expand(len(q), -1, -1)
            s = q @ k.mT + queries.gather(2, rows) + keys.gather(2, rows.mT).mT
            outs.append((torch.softmax(self.scale * s, -1) @ v).transpose(0, 1))
        out = torch.cat(outs)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.values["do"][0].float())]


def measure(count: int, longest: int, o: Any) -> None:
    """Print the times and errors of all candidates for `count` sequences."""
    bounds = np.cumsum([0, *lengths_of(count, longest, o.alpha)]).tolist()
    ours = Relative(bounds, longest, o, "cuda")
    want = ours.stored(bounds)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    ours.stored(bounds)
    end.record()
    end.synchronize()
    for direction, task in enumerate(ours.tasks):
        cells = []
        for number, way in enumerate(launch.load()[task.kernel]([task]).ways):
            us = timed(lambda t=task, w=number: ours.run(t, w))  # type: ignore[misc]
            pairs = list(zip(ours.results, want, strict=True))[1:] if direction else [(ours.results[0], want[0])]
            wrong = " ".join(f"{error_of(got, value):.0e}" for got, value in pairs)
            cells.append(f"{names_of([way])} {us:.1f} (errors {wrong})")
        print(f"{count} x {longest}, {bounds[-1]} tokens, {'backward' if direction else 'forward'}: {', '.join(cells)}")
    us = start.elapsed_time(end) * 1e3
    print(f"stored scores in fp32, one sequence after the other, with gradients: {us:.0f}", flush=True)


def count_instructions(longest: int, o: Any) -> None:
    """Print, for each kernel, the instructions that its innermost loop takes for each score."""
    for task in Relative([0, longest], longest, o, "cpu").tasks:
        for one in (one for way in launch.load()[task.kernel]([task]).ways for one in way):
            sizes = dict(one.constexprs)
            length = loop_of(launch_binary.compile_launch(one, 90).cubin)
            each = length * 32 * one.warps / (sizes["ROWS"] * sizes["KEYS"])
            print(f"{longest} positions, {names_of([(one,)])}: {each:.1f} instructions for each score")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="64x128,64x256,32x512")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--buckets", type=int, default=256)
    parser.add_argument("--instructions", action="store_true")
    o = parser.parse_args()
    rows = table_of(parser, o)
    if o.instructions:
        for _, longest in rows:
            count_instructions(longest, o)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {o.heads} heads of {o.head_dim},"
          f" alpha {o.alpha}, {o.buckets} buckets; us")  # fmt: skip
    for count, longest in rows:
        measure(count, longest, o)


if __name__ == "__main__":
    main()
