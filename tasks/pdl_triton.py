"""Instructions of kernels before they wait for the previous kernel; see pdl.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .interpreted_triton import INTERPRETED

LINE = tl.constexpr(64)  # 2-byte elements of a cache line


@triton.jit
def wait_here():
    """Wait for the previous kernel; before, a kernel must neither read nor write. No effect without overlap."""
    if not INTERPRETED:  # a dummy instruction as in tl.extra.cuda.gdc_wait; pdl.waiting replaces it
        tl.inline_asm_elementwise("// nntile: wait here $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bring(X, row, first, last, rows, columns, ROWS: tl.constexpr, LINES: tl.constexpr):
    """Prefetch columns first to last of ROWS rows of x [rows, columns], 2-byte elements, into the L2 cache.

    Each iteration prefetches ROWS * LINES cache lines.
    """
    if not INTERPRETED:
        at = X + tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None] * columns
        for column in range(first, last, LINE * LINES):
            line = at + tl.minimum(column + tl.arange(0, LINES) * LINE, columns - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
            )
