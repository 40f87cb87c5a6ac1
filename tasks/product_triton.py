"""Products with an activation, or its derivative, as their epilogue on CUDA, where cuBLASLt has none. Tiles as in
contract_cuda.cpp, which is one of the ways to compute them: the fastest is measured by C++.

The activation is computed from the sum in fp32, not from what is kept of it in bf16 or fp16.
"""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import is_low
from nntile_py.tiles.tasklist import Task

from .activation import ACTIVATIONS
from .activation_triton import activate, derivative
from .attention_segments_triton import INTERPRETED
from .contract import ContractArgs, PlanArgs
from .launch import Launch, Launches, Parameter, ceil_div, launch, launches, shape, tile
from .live import Live

# -- the epilogue


@triton.jit
def _reciprocal(x):
    if INTERPRETED:
        y = 1 / x
    else:  # one instruction, off by 1e-7
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _power_of_two(x):
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def normal_tail(x):
    """|x|, the standard normal distribution at -|x|, and exp(-x^2 / 2).

    The first over the second is a polynomial in 1 / (1 + 0.36 |x|), fitted to 2e-5 of its value: bf16 keeps 4e-3. Half
    of erf's instructions, and the exponential is what the derivative of x Phi(x) needs, too."""
    far = tl.abs(x)
    e, t = _power_of_two(x * x * -0.7213475204444817), _reciprocal(1 + 0.36 * far)
    tail = t * (0.14209608 + t * (0.1609567 + t * (0.04957307 + t * (0.24151073 - t * 0.09412782)))) * e
    return far, tail, e


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == 1:
        far, tail, _ = normal_tail(x)
        y = tl.maximum(x, 0.0) - far * tail
    else:
        y = activate(x, KIND)
    return y


@triton.jit
def _times_derivative(y, x, KIND: tl.constexpr):
    if KIND == 1:
        far, tail, e = normal_tail(x)
        below = tail - far * e * 0.3989422804014327  # the derivative at -|x|
        y *= tl.where(x < 0, below, 1 - below)
    else:
        y *= derivative(x, KIND)
    return y


# -- the product


@triton.jit
def _block_of(number, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The first row and column of a block; neighbours in time share operands: GROUP blocks of rows go side by side."""
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    first = number // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    within = number % (GROUP * across)
    return (first + within % size) * ROWS, within // size * COLUMNS


@triton.jit
def _sum(
    A, B, row, col, m, n, k, B_BY_K: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of a b from row and col on. EVEN: only rows have an end within a block."""
    # Rows beyond the last are the last: what is computed there is not stored.
    rows, depth = tl.minimum(row + tl.arange(0, ROWS), m - 1).to(tl.int64), tl.arange(0, DEPTH)
    cols = col + tl.arange(0, COLUMNS)
    a_at = A + rows[:, None] * k + depth[None, :]
    if B_BY_K:
        b_at = B + tl.minimum(cols, n - 1).to(tl.int64)[None, :] * k + depth[:, None]
    else:
        b_at = B + depth.to(tl.int64)[:, None] * n + cols[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, k, DEPTH, num_stages=STAGES):
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            there = (at + depth < k)[:, None]
            a = tl.load(a_at, (at + depth < k)[None, :], 0.0)
            b = tl.load(b_at, there if B_BY_K else there & (cols < n)[None, :], 0.0)
        if INTERPRETED:  # whose numpy has no bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        a_at += DEPTH
        b_at += DEPTH if B_BY_K else DEPTH * n
    return total


@triton.jit
def _product(
    OUT, PRE, A, B, BIAS, AUX, m, n, k, scale,
    B_BY_K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, KEEPS: tl.constexpr, GRADIENT: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """out = act(scale a b + bias), or GRADIENT: scale a b act'(aux). a [m, k], b [k, n], or B_BY_K: its transpose.

    HALVES: of a block's columns are finished in turns, which takes fewer registers."""
    row, col = _block_of(tl.program_id(0), m, n, ROWS, COLUMNS, GROUP)
    total = _sum(A, B, row, col, m, n, k, B_BY_K, EVEN, ROWS, COLUMNS, DEPTH, STAGES)
    if HALVES:
        WIDTH: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, WIDTH)), (0, 2, 1)))
        _finish(OUT, PRE, BIAS, AUX, left, row, col, m, n, scale, KIND, BIASED, KEEPS, GRADIENT)
        _finish(OUT, PRE, BIAS, AUX, right, row, col + WIDTH, m, n, scale, KIND, BIASED, KEEPS, GRADIENT)
    else:
        _finish(OUT, PRE, BIAS, AUX, total, row, col, m, n, scale, KIND, BIASED, KEEPS, GRADIENT)


@triton.jit
def _finish(
    OUT, PRE, BIAS, AUX, total, row, col, m, n, scale,
    KIND: tl.constexpr, BIASED: tl.constexpr, KEEPS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    rows, cols = row + tl.arange(0, total.shape[0]), col + tl.arange(0, total.shape[1])
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + cols[None, :]
    y = total * scale
    if BIASED:
        y += tl.load(BIAS + cols, cols < n, 0.0).to(tl.float32)[None, :]
    if GRADIENT:
        y = _times_derivative(y, tl.load(AUX + at, inside, 0.0).to(tl.float32), KIND)
    else:
        if KEEPS:
            tl.store(PRE + at, y.to(PRE.dtype.element_ty), inside)
        y = _activated(y, KIND)
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), inside)


# -- tasks

OWN = tuple(ACTIVATIONS.index(name) for name in ("relu", "gelu", "tanh", "silu"))  # cuBLASLt has gelu_new's


class Way(NamedTuple):
    """How a product is cut into blocks, and computed."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    halves: bool = False

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}x{self.stages}x{self.warps}" + " halves" * self.halves


# Those that were fastest on an H200 with 64 to 256 rows, and with 640 and 2048.
FEW = [Way(64, 32, 128, 4, 4), Way(64, 64, 128, 3, 4), Way(64, 64, 64, 5, 4), Way(64, 32, 128, 3, 4)]
SOME = [Way(128, 128, 64, 3, 8, halves=True), Way(128, 64, 64, 4, 4), Way(64, 128, 64, 3, 4, halves=True)]


def ways_of(m: int) -> list[Way]:
    """None for many rows: cuBLASLt with a kernel behind it is faster there (57 us to 63 with 4915 rows)."""
    return FEW if m <= 256 else SOME if m <= 2048 else []


class Sizes(NamedTuple):
    m: int
    n: int
    k: int
    b_by_k: bool


def sizes_of(task: Task, plan: PlanArgs) -> Sizes | None:
    """Of a product whose operands and result lie as matrices, a's rows first; None: not of such."""
    m, n, k = plan.m, plan.n, plan.k
    a_order, b_order, out_order = plan.orders[: m + k], plan.orders[m + k : m + 2 * k + n], plan.orders[m + 2 * k + n :]
    by_row, by_k = tuple(range(k + n)), (*range(n, n + k), *range(n))
    plain = a_order == tuple(range(m + k)) and out_order == tuple(range(m + n)) and b_order in (by_row, by_k)
    if plan.swap or plan.batch or not plain:
        return None
    a, out = shape(task, 1), shape(task, 0)
    made = Sizes(math.prod(a[:m]), math.prod(out[m:]), math.prod(a[m:]), b_order != by_row)
    fixed = not any(isinstance(size, Live) for size in (*a[m:], *shape(task, 2)))
    return made if fixed and made.n % 8 == made.k % 8 == 0 else None  # rows of 16 bytes, as wide loads want


def served(task: Task, a: ContractArgs) -> Sizes | None:
    """The product's sizes, if the kernels compute what the task asks for: to measure is to compute several times."""
    e, dtypes = a.epilogue, {access.tile.dtype for access in task.accesses}
    alone = not e.residual and e.colsum < 0 and not any(access.accumulate for access in task.accesses)
    whole = e.bias_axes in (-1, ((1 << a.plan.n) - 1) << a.plan.m)
    if e.activation not in OWN or not alone or not whole or len(dtypes) > 1 or not is_low(*dtypes):
        return None
    return sizes_of(task, a.plan)


@launches("contract")
def _describe(task: Task) -> Launches:
    a = ContractArgs.of(task)
    sizes, e = served(task, a), a.epilogue
    if not sizes or not (ways := ways_of(sizes.m)):
        return Launches(())
    m, n, k, b_by_k = sizes
    biased, last = e.bias_axes >= 0, len(task.accesses) - 1
    pre, bias, aux = tile(task, 0), tile(task, 3 if biased else 0), tile(task, last)
    out = tile(task, last if e.keep_pre else 0)
    args: list[Parameter] = [out, pre, tile(task, 1), tile(task, 2), bias, aux, m, n, k, a.scale]
    what = {"B_BY_K": b_by_k, "KIND": e.activation, "BIASED": biased, "KEEPS": e.keep_pre, "GRADIENT": e.aux}

    def way(w: Way) -> tuple[Launch, ...]:
        options: dict[str, Any] = {
            "ROWS": w.rows, "COLUMNS": w.columns, "DEPTH": w.depth, "STAGES": w.stages, "GROUP": 8, "HALVES": w.halves,
            "EVEN": k % w.depth == 0 and (b_by_k or n % w.columns == 0), **what,
        }  # fmt: skip
        blocks = ceil_div(m, w.rows) * ceil_div(n, w.columns)
        return (launch(_product, blocks, *args, **options, warps=w.warps),)

    kind = f"{ACTIVATIONS[e.activation]}{' gradient' if e.aux else ' kept' if e.keep_pre else ''}"
    names, dtype = ", ".join(w.name for w in ways), tile(task, 0).dtype
    key = f"product {kind} {dtype} {int(m)} {n} {k} {int(b_by_k)} {int(biased)} of {names}"
    first, *others = map(way, ways)
    return Launches(first, others=tuple(others), key=key)
