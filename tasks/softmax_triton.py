"""Softmax over the last axis of tiles [..., seq, key] on CUDA. Tiles and ints as in softmax.cpp."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .accumulate_triton import combine_softmax
from .launch import Launches, Parameter, ceil_div, launch, launches, power_of_two, shape, tile, words

WIDEST = 16384  # elements of a row in registers


@triton.jit
def _rows(rows, n, seq, shift, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the program's block: rows, their mask, offsets, mask of the block, mask of what is attended to."""
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < n)[None, :]
    kept = inside
    if CAUSAL:
        kept = inside & (col[None, :] <= (row % seq + shift)[:, None])
    return row, row < rows, row[:, None] * n + col[None, :], inside, kept


@triton.jit
def _maxsumexp(
    STATE, X, rows, n, seq, shift, CAUSAL: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, there, at, inside, kept = _rows(rows, n, seq, shift, CAUSAL, ROWS, BLOCK)
    x = tl.where(kept, tl.load(X + at, inside, 0.0).to(tl.float32), float("-inf"))
    top = tl.max(x, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total, s = tl.sum(tl.exp(x - top[:, None]), 1), STATE + row * 2
    if ACC:
        top, total, _a, _b = combine_softmax(tl.load(s, there, 0.0), tl.load(s + 1, there, 0.0), top, total)
    tl.store(s, top, there)
    tl.store(s + 1, total, there)


@triton.jit
def _softmax(P, X, STATE, rows, n, seq, shift, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, there, at, inside, kept = _rows(rows, n, seq, shift, CAUSAL, ROWS, BLOCK)
    top, total = tl.load(STATE + row * 2, there, 0.0), tl.load(STATE + row * 2 + 1, there, 1.0)
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    p = tl.where(kept, tl.exp(x - top[:, None]) / total[:, None], 0.0)
    tl.store(P + at, p, inside)


@triton.jit
def _grad_sums(SUMS, P, DP, rows, n, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, there, at, inside, _kept = _rows(rows, n, 1, 0, False, ROWS, BLOCK)
    total = tl.sum(tl.load(P + at, inside, 0.0).to(tl.float32) * tl.load(DP + at, inside, 0.0).to(tl.float32), 1)
    if ACC:
        total += tl.load(SUMS + row, there, 0.0)
    tl.store(SUMS + row, total, there)


@triton.jit
def _grad(OUT, P, DP, SUMS, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, there, at, inside, _kept = _rows(rows, n, 1, 0, False, ROWS, BLOCK)
    p, dp = tl.load(P + at, inside, 0.0).to(tl.float32), tl.load(DP + at, inside, 0.0).to(tl.float32)
    tl.store(OUT + at, p * (dp - tl.load(SUMS + row, there, 0.0)[:, None]), inside)


def _blocks(task: Task, number: int) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """Programs; rows and columns of a tile; rows, columns and warps of a program."""
    n = shape(task, number)[-1]
    if n > WIDEST:
        raise ValueError(f"{task.op}: rows of {n} are not allowed on CUDA; cut seq into tiles of at most {WIDEST}")
    block = power_of_two(n)
    lines = max(1, 1024 // block)
    rows = words(task, number) // n
    return ceil_div(rows, lines), (rows, n), {"ROWS": lines, "BLOCK": block, "warps": min(16, max(1, block // 1024))}


@launches("maxsumexp")
def _describe_maxsumexp(task: Task) -> Launches:
    grid, size, blocks = _blocks(task, 1)
    args: list[Parameter] = [tile(task, 0), tile(task, 1), *size, shape(task, 1)[-2], task.ints[1]]
    how = {"CAUSAL": bool(task.ints[0]), "ACC": task.accesses[0].accumulate, **blocks}
    return Launches((launch(_maxsumexp, grid, *args, **how),))


@launches("softmax")
def _describe(task: Task) -> Launches:
    grid, size, blocks = _blocks(task, 1)
    args: list[Parameter] = [*(tile(task, k) for k in range(3)), *size, shape(task, 1)[-2], task.ints[1]]
    return Launches((launch(_softmax, grid, *args, CAUSAL=bool(task.ints[0]), **blocks),))


@launches("softmax_grad_sums")
def _describe_grad_sums(task: Task) -> Launches:
    grid, size, blocks = _blocks(task, 1)
    args: list[Parameter] = [*(tile(task, k) for k in range(3)), *size]
    return Launches((launch(_grad_sums, grid, *args, ACC=task.accesses[0].accumulate, **blocks),))


@launches("softmax_grad")
def _describe_grad(task: Task) -> Launches:
    grid, size, blocks = _blocks(task, 1)
    args: list[Parameter] = [*(tile(task, k) for k in range(4)), *size]
    return Launches((launch(_grad, grid, *args, **blocks),))
