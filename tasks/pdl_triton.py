"""What kernels do before they wait for the kernel ahead of them; see pdl.py."""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .interpreted_triton import INTERPRETED

LINE = tl.constexpr(64)  # elements of 2 bytes of a line of the cache


@triton.jit
def wait_here():
    """Ahead of it a kernel reads nothing and writes nothing. Where it cannot overlap, this is nothing."""
    if not INTERPRETED:  # the dummy as tl.extra.cuda.gdc_wait has it; replaced by pdl.waiting
        tl.inline_asm_elementwise("// nntile: wait here $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bring(X, row, first, last, rows, columns, ROWS: tl.constexpr, LINES: tl.constexpr):
    """Asks for the columns from first to last of ROWS rows of x [rows, columns] to be in the L2 cache; 2-byte elements,
    ROWS * LINES lines at a time."""
    if not INTERPRETED:
        at = X + tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None] * columns
        for column in range(first, last, LINE * LINES):
            line = at + tl.minimum(column + tl.arange(0, LINES) * LINE, columns - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
            )
