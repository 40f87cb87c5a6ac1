"""Functions for kernels that prefetch while the previous kernel still runs; see pdl.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .interpreted_triton import INTERPRETED

LINE = tl.constexpr(64)  # 2-byte elements of a cache line


@triton.jit
def wait_here():
    """Wait until the previous kernel has ended.

    Before this call, a kernel may only prefetch, neither read nor write. A launch with `early` may also read.

    Without programmatic dependent launch (see pdl.py), this function does nothing.
    """
    if not INTERPRETED:  # as in tl.extra.cuda.gdc_wait; pdl.waiting inserts the wait after this dummy instruction
        tl.inline_asm_elementwise("// nntile: wait here $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bring(X, row, first, last, rows, columns, ROWS: tl.constexpr, LINES: tl.constexpr):
    """Prefetch a part of the matrix x [rows, columns] of 2-byte elements into the L2 cache.

    The part has ROWS rows from `row` on, and the columns from `first` to before `last`. Each iteration prefetches
    ROWS * LINES cache lines.
    """
    if not INTERPRETED:
        at = X + tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None] * columns
        for column in range(first, last, LINE * LINES):
            line = at + tl.minimum(column + tl.arange(0, LINES) * LINE, columns - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
            )
