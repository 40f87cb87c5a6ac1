"""Product of a matrix and one row on CUDA, see Gemv in gemv.py: reads the matrix once. gemv.cpp lists the tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from dataclasses import replace
from typing import NamedTuple

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import Task

from .activation_triton import activate
from .gemv import GemvArgs
from .launch import Launch, Launches, ceil_div, launch, launches, numel, tile
from .pdl_triton import wait_here

LAYER = tl.constexpr(1)  # position of layer_norm in NORMS of gemv.py


@triton.jit
def _gemv(
    Y, X, W, GAMMA, BETA, BIAS, RESIDUAL, FACTOR, n, k, eps, scale,
    NORM: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr, LOOPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute ROWS elements of y = act(scale w norm(x) + bias + residual) * factor, for x [k] and w [n, k].

    The programs normalise x without a kernel of its own. An RMSNorm's division by the root of the mean square follows
    the sum. A LayerNorm's mean and deviation are computed first: a difference of large sums would be inexact.

    A program loads PARTS * DEPTH columns of w at once, into registers. A thread loads VECTOR neighbours, and adds their
    terms alone. EVEN: PARTS * DEPTH divides k. LOOPS: it is less than k. EARLY: the previous kernel writes no weights,
    so the program loads its first columns of w while that kernel still computes x.
    """
    dtype = tl.float64 if X.dtype.element_ty == tl.float64 else tl.float32
    rows, depth = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    at = W + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * k + depth[None, :]
    if not EARLY:
        wait_here()
    w = _columns(at, depth, k, EVEN, PARTS, DEPTH)
    gamma = _blocks(GAMMA + depth, depth, k, EVEN, PARTS, DEPTH) if NORM >= 0 else w
    inside = rows < n
    bias = tl.load(BIAS + rows, inside, 0.0) if BIASED else rows
    beta = _blocks(BETA + depth, depth, k, EVEN, PARTS, DEPTH) if NORM == LAYER else gamma
    if EARLY:
        wait_here()
    # Loaded after the sums, the residual and the factor would take another latency of the memory.
    residual = tl.load(RESIDUAL + rows, inside, 0.0) if ADDED else rows
    factor = tl.load(FACTOR + rows, inside, 0.0) if GATED else rows
    x = _blocks(X + depth, depth, k, EVEN, PARTS, DEPTH)
    middle, rstd = 0.0, 1.0
    if NORM == LAYER:
        middle, rstd = _statistics(X, x, depth, k, eps, EVEN, LOOPS, PARTS, DEPTH)
    sums = (tl.zeros([ROWS, DEPTH // VECTOR], dtype), tl.zeros([DEPTH // VECTOR], dtype))
    for part in tl.static_range(PARTS):
        sums = _add(sums, w[part], x[part].to(dtype), gamma[part], beta[part], middle, rstd, NORM, VECTOR)
    if LOOPS:
        for first in range(PARTS * DEPTH, k, PARTS * DEPTH):
            more = _columns(at + first, first + depth, k, EVEN, PARTS, DEPTH)
            for part in tl.static_range(PARTS):
                at_k = first + part * DEPTH + depth
                one = _part(X, at_k, k, EVEN, dtype)
                g = _part(GAMMA, at_k, k, EVEN, dtype) if NORM >= 0 else one
                b = _part(BETA, at_k, k, EVEN, dtype) if NORM == LAYER else one
                sums = _add(sums, more[part], one, g, b, middle, rstd, NORM, VECTOR)
    total, squares = sums
    if NORM >= 0 and NORM != LAYER:
        squares = tl.broadcast_to(squares[None, :], total.shape)
        total, squares = tl.reduce((total, squares), 1, _added)  # threads of a program synchronise once, not twice
        y = total / tl.sqrt(squares / k + eps)
    else:
        y = tl.sum(total, 1)
    y *= scale
    if BIASED:
        y += bias.to(dtype)
    if ADDED:
        y += residual.to(dtype)
    if KIND >= 0:
        y = activate(y, KIND)
    if GATED:
        y *= factor.to(dtype)
    tl.store(Y + rows, y.to(Y.dtype.element_ty), inside)


@triton.jit
def _columns(at, depth, k, EVEN: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """Load PARTS blocks [ROWS, DEPTH] of w, which no other program reads."""
    w = ()
    for part in tl.static_range(PARTS):
        there = None if EVEN else (part * DEPTH + depth < k)[None, :]
        one = tl.load(at + part * DEPTH, there, None if EVEN else 0.0, eviction_policy="evict_first")
        w = w + (one,)  # type: ignore[assignment]  # noqa: RUF005, as Triton compiles no starred expression
    return w


@triton.jit
def _blocks(at, depth, k, EVEN: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """Load PARTS blocks [DEPTH] of a norm's weight."""
    blocks = ()
    for part in tl.static_range(PARTS):
        there = None if EVEN else part * DEPTH + depth < k
        one = tl.load(at + part * DEPTH, there, None if EVEN else 0.0)
        blocks = blocks + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def _part(X, depth, k, EVEN: tl.constexpr, dtype: tl.constexpr):
    return tl.load(X + depth, None if EVEN else depth < k, None if EVEN else 0.0).to(dtype)


@triton.jit
def _statistics(
    X, x, depth, k, eps, EVEN: tl.constexpr, LOOPS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr
):
    """Return the mean of x and the reciprocal of its standard deviation; x: its first PARTS blocks."""
    dtype = tl.float64 if X.dtype.element_ty == tl.float64 else tl.float32
    row = tl.zeros([DEPTH], dtype)
    for part in tl.static_range(PARTS):
        row += x[part].to(dtype)
    if LOOPS:
        for first in range(PARTS * DEPTH, k, DEPTH):
            row += _part(X, first + depth, k, EVEN, dtype)
    middle = tl.sum(row, 0) / k
    row = tl.zeros([DEPTH], dtype)
    for part in tl.static_range(PARTS):
        row += _squares(x[part].to(dtype), middle, part * DEPTH + depth, k, EVEN)
    if LOOPS:
        for first in range(PARTS * DEPTH, k, DEPTH):
            row += _squares(_part(X, first + depth, k, EVEN, dtype), middle, first + depth, k, EVEN)
    return middle, 1 / tl.sqrt(tl.sum(row, 0) / k + eps)


@triton.jit
def _squares(x, middle, depth, k, EVEN: tl.constexpr):
    difference = x - middle if EVEN else tl.where(depth < k, x - middle, 0.0)
    return difference * difference


@triton.jit
def _add(sums, w, x, gamma, beta, middle, rstd, NORM: tl.constexpr, VECTOR: tl.constexpr):
    """Add the terms of a block of columns to the sums of each thread: of the product, and of the squares of x."""
    total, squares = sums
    if NORM == LAYER:
        x = (x - middle) * rstd * gamma.to(x.dtype) + beta.to(x.dtype)
    elif NORM >= 0:
        squares += tl.sum(tl.reshape(x * x, [x.shape[0] // VECTOR, VECTOR]), 1)
        x *= gamma.to(x.dtype)
    terms = w.to(x.dtype) * x[None, :]
    return total + tl.sum(tl.reshape(terms, [terms.shape[0], terms.shape[1] // VECTOR, VECTOR]), 2), squares


@triton.jit
def _added(a, b, c, d):
    return a + c, b + d


# -- tasks


MOST_PARTS = 8  # blocks of columns that a program loads at once
# Candidates: numbers of a program's warps, and largest numbers of 16-byte loads of a thread at once.
WARPS, LOADS = (1, 2, 4), (8, 16)


class GemvBlock(NamedTuple):
    """How a program computes a part of the product: rows of w, blocks of columns that it loads at once, warps."""

    rows: int
    parts: int
    warps: int


def columns_of(warps: int, dtype: str) -> int:
    """Return the number of columns of a block: each thread loads 16 bytes of a row."""
    return 32 * warps * 16 // DTYPES[dtype].bytes


def blocks_of(k: int, dtype: str) -> list[GemvBlock]:
    """Return the candidates for rows of k elements.

    With more loads at once, a program takes so many registers that few programs share a multiprocessor.
    """
    made = []
    for warps in WARPS:
        parts = min(-(-k // columns_of(warps, dtype)), MOST_PARTS)
        rows = [loads // parts for loads in LOADS if loads >= parts]
        made += [GemvBlock(1 << count.bit_length() - 1, parts, warps) for count in rows]
    return list(dict.fromkeys(made))


@launches("gemv")
def _describe(task: Task) -> Launches:
    a, dtype = GemvArgs.of(task), task.accesses[0].tile.dtype
    assert a.inputs == 1 and a.residuals <= 1, "partial sums are for CPU workers"
    n, k = numel(task, 0), numel(task, 1)
    blocks = blocks_of(k, dtype)
    first, *others = ((_launch_of(block, task, a, n, k),) for block in blocks)
    what = " ".join(str(int(one)) for one in (a.norm, a.bias, a.residuals, a.activation, a.factor, n, k))
    ways = ", ".join("x".join(map(str, block)) for block in blocks)
    return Launches(first, others=tuple(others), key=f"gemv {what} {dtype} of {ways}")


def _launch_of(block: GemvBlock, task: Task, a: GemvArgs, n: int, k: int) -> Launch:
    numbers = iter(range(3, len(task.accesses)))
    beside = [tile(task, next(numbers) if there else 0)
              for there in (a.norm >= 0, a.norm == LAYER.value, a.bias, a.residuals, a.factor)]  # fmt: skip
    weights = [access.tile for access in task.accesses[2 : 3 + (a.norm >= 0) + (a.norm == LAYER.value) + a.bias]]
    early = all(one.kind == "param" for one in weights)  # see Launch
    columns = columns_of(block.warps, task.accesses[2].tile.dtype)
    at_once = block.parts * columns
    made = launch(
        _gemv, ceil_div(n, block.rows), *(tile(task, number) for number in range(3)), *beside, n, k, a.eps, a.scale,
        warps=block.warps, NORM=a.norm, KIND=a.activation, BIASED=a.bias, ADDED=bool(a.residuals), GATED=a.factor,
        EVEN=k % at_once == 0, EARLY=early, LOOPS=at_once < k, ROWS=block.rows, DEPTH=columns, PARTS=block.parts,
        VECTOR=columns // 32 // block.warps,
    )  # fmt: skip
    return replace(made, early=early)
