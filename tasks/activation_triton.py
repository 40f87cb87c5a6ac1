"""Activations on CUDA. Kinds as in activation.py: 0 relu, 1 gelu (erf), 2 gelu_new (tanh)."""

from __future__ import annotations

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .elementwise_triton import PROGRAMS, sum_of_rows
from .launch import Launches, Parameter, Scratch, ceil_div, launch, launches, power_of_two, shape, tile, words


@triton.jit
def _gelu_new_gate(x):
    """(1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as a logistic function of 2u."""
    return tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == 0:
        y = tl.maximum(x, 0.0)
    elif KIND == 1:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * _gelu_new_gate(x)
    return y


@triton.jit
def derivative(x, KIND: tl.constexpr):
    if KIND == 0:
        y = tl.where(x > 0, 1.0, 0.0)
    elif KIND == 1:
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        gate = _gelu_new_gate(x)
        y = gate + x * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x) * gate * (1 - gate)
    return y


@triton.jit
def _activation(Y, X, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, activate(tl.load(X + at, at < n).to(tl.float32), KIND), at < n)


@triton.jit
def _activation_grad(DX, DY, X, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(DY + at, at < n).to(tl.float32), tl.load(X + at, at < n).to(tl.float32)
    tl.store(DX + at, dy * derivative(x, KIND), at < n)


@launches("activation")
def _describe(task: Task) -> Launches:
    n = words(task, 0)
    args: list[Parameter] = [tile(task, 0), tile(task, 1), n]
    return Launches((launch(_activation, ceil_div(n, 1024), *args, KIND=task.ints[0], BLOCK=1024),))


@triton.jit
def _activation_grad_sums(
    DX, PART, DY, X, rows, n,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same, and PART[program_id(1), :] = the sum over every num_programs(1)-th block of ROWS rows."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    # Staged: rows are on their way into shared memory while those before them are worked on.
    for first in tl.range(tl.program_id(1).to(tl.int64) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
        dy, x = tl.load(DY + at, inside, 0.0).to(tl.float32), tl.load(X + at, inside, 0.0).to(tl.float32)
        dx = dy * derivative(x, KIND)  # beyond the last row dy = 0
        tl.store(DX + at, dx, inside)
        sums += dx
    tl.store(PART + tl.program_id(1).to(tl.int64) * n + col, tl.sum(sums, 0), col < n)


@launches("activation_grad")
def _describe_grad(task: Task) -> Launches:
    tiles, kind = [tile(task, k) for k in range(3)], task.ints[0]
    if len(task.accesses) == 3:
        n = words(task, 0)
        return Launches((launch(_activation_grad, ceil_div(n, 1024), *tiles, n, KIND=kind, BLOCK=1024),))
    n = shape(task, 0)[-1]
    rows, block, scratch = words(task, 0) // n, min(power_of_two(n), 256), Scratch()
    lines = max(1, 4096 // block)
    splits = min(max(PROGRAMS // ceil_div(n, block), 1), ceil_div(rows, lines))
    part = scratch.take(splits * n, "fp32")
    args: list[Parameter] = [tiles[0], part, *tiles[1:], rows, n]
    grid = (ceil_div(n, block), splits)
    first = launch(_activation_grad_sums, grid, *args, KIND=kind, ROWS=lines, BLOCK=block, STAGES=3)
    return Launches((first, sum_of_rows(tile(task, 3), part, splits, n, task.accesses[3].accumulate)), scratch.bytes)
