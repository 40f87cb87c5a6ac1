"""Matrix products with many rows, with bias and activation, on CUDA from compute capability 9.0 on.

Each program computes several blocks of the result, one after the other. The tensor memory accelerator moves blocks
between memories (CUDA C++ Programming Guide, TMA).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .interpreted_triton import INTERPRETED
from .product_epilogue_triton import activated, block_of, times_derivative


@triton.jit
def _finish(
    OUT, OTHER, BIAS, total, row, col, n, scale, WIDTH: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, KEEPS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue of `persistent` to the sum `total` of the block at (row, col), and store the result."""
    if total.shape[1] > WIDTH:  # compute the left half, then the right half
        half: tl.constexpr = total.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(total, (total.shape[0], 2, half)), (0, 2, 1)))
        _finish(OUT, OTHER, BIAS, left, row, col, n, scale, WIDTH, KIND, BIASED, KEEPS, GRADIENT)
        _finish(OUT, OTHER, BIAS, right, row, col + half, n, scale, WIDTH, KIND, BIASED, KEEPS, GRADIENT)
    else:
        cols = col + tl.arange(0, WIDTH)
        y = total * scale
        if BIASED:
            y += tl.load(BIAS + cols, cols < n, 0.0).to(tl.float32)[None, :]
        if GRADIENT:
            y = times_derivative(y, OTHER.load([row, col]).to(tl.float32), KIND)
        else:
            if KEEPS:
                OTHER.store([row, col], y.to(OTHER.dtype))
            y = activated(y, KIND)
        OUT.store([row, col], y.to(OUT.dtype))


@triton.jit
def persistent(
    OUT, OTHER, A, B, BIAS, m, n, k, scale,
    B_BY_K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, KEEPS: tl.constexpr, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    WIDTH: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute out = act(scale a b + bias), or with GRADIENT: out = (scale a b + bias) act'(other).

    a is [m, k]; b is [k, n], or [n, k] with B_BY_K. With KEEPS, the value before act is stored in other.

    The tensor descriptors mask elements beyond the ends of a matrix. The epilogue (bias and activation) of a block runs
    on WIDTH columns at a time, which needs fewer registers and less shared memory. With FLATTEN, the next block is
    loaded during the epilogue.
    """
    blocks = tl.cdiv(m, ROWS) * tl.cdiv(n, COLUMNS)
    for number in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=FLATTEN):
        row, col = block_of(number, m, n, ROWS, COLUMNS, GROUP)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in tl.range(0, k, DEPTH, num_stages=STAGES):
            a = A.load([row, at])
            b = B.load([col, at]).T if B_BY_K else B.load([at, col])
            if INTERPRETED:  # Triton's interpreter computes in numpy, which has no bf16
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total)
        _finish(OUT, OTHER, BIAS, total, row, col, n, scale, WIDTH, KIND, BIASED, KEEPS, GRADIENT)
