"""Product of one row and a matrix on CUDA, as in passes that generate tokens of one text. Reads the matrix once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .pdl_triton import bring, wait_here
from .product_epilogue_triton import activated, times_derivative


@triton.jit
def one_row(
    OUT, PRE, A, B, BIAS, RESIDUAL, AUX, n, k, scale,
    KIND: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, KEEPS: tl.constexpr, GRADIENT: tl.constexpr,
    EVEN: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS elements of out = act(scale a b + bias + residual) for a [k] and b stored as [n, k].

    The epilogue is the same as in `_product` of product_triton.py. While the previous kernel still computes a, the
    program prefetches its part of b. EVEN: DEPTH divides k.
    """
    col = tl.program_id(0) * COLUMNS
    bring(B, col, 0, k, n, k, COLUMNS, 256 // COLUMNS)
    wait_here()
    cols, depth = col + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    at = B + tl.minimum(cols, n - 1).to(tl.int64)[:, None] * k + depth[None, :]
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in tl.range(0, k, DEPTH, num_stages=STAGES):
        if EVEN:
            a, b = tl.load(A + first + depth), tl.load(at)
        else:
            there = first + depth < k
            a, b = tl.load(A + first + depth, there, 0.0), tl.load(at, there[None, :], 0.0)
        total += a.to(tl.float32)[None, :] * b.to(tl.float32)
        at += DEPTH
    y, inside = tl.sum(total, 1) * scale, cols < n
    if BIASED:
        y += tl.load(BIAS + cols, inside, 0.0).to(tl.float32)
    if ADDED:
        y += tl.load(RESIDUAL + cols, inside, 0.0).to(tl.float32)
    if GRADIENT:
        y = times_derivative(y, tl.load(AUX + cols, inside, 0.0).to(tl.float32), KIND)
    else:
        if KEEPS:
            tl.store(PRE + cols, y.to(PRE.dtype.element_ty), inside)
        y = activated(y, KIND)
    tl.store(OUT + cols, y.to(OUT.dtype.element_ty), inside)
