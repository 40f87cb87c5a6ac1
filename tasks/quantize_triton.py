"""Quantisation of tiles to 8 bits on CUDA. The tasks have the same tiles as in quantize.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import DTYPES, UNIT, is_low, scale_offset
from nntile_py.tiles.task import Task

from .dynamic_size import DynamicSize
from .launch import (
    Launch,
    Launches,
    Scratch,
    ScratchAddress,
    ceil_div,
    launch,
    launches,
    numel,
    power_of_two,
    shape,
    tile,
)
from .quantize import QuantizeArgs

PARTS = 1024  # programs that compute the maximum of a tile
BLOCK = 4096  # elements of a tile that such a program reads at once
MOST_AXES = 3  # largest number of axes, joined where possible, that form the rows or the columns of a matrix


@triton.jit
def _largest(X, TOPS, n, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Store the largest |x| of each part of a tile, as the bits of an fp32 number, which compare like integers.

    The kernel reads the n values of the tile backwards. The previous kernel may have left the tile's end in the L2
    cache. This kernel leaves the tile's beginning there, which _quantize reads first.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    last = (n - 1) // BLOCK * BLOCK  # beginning of the last block
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(first, n, PARTS * BLOCK):
        at = last - start + tl.arange(0, BLOCK)
        x = tl.load(X + at, at < n, 0.0).to(tl.float32)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(TOPS + tl.program_id(0), tl.max(top, 0))


@triton.jit
def _offset(at, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """Return the offsets in x of rows or columns `at`, which consist of three axes of x, the last axis fastest."""
    if SIZES[1] * SIZES[2] == 1:
        offset = at * STRIDES[0]
    elif SIZES[2] == 1:
        offset = at // SIZES[1] * STRIDES[0] + at % SIZES[1] * STRIDES[1]
    else:
        rest = at // SIZES[2]
        offset = rest // SIZES[1] * STRIDES[0] + rest % SIZES[1] * STRIDES[1] + at % SIZES[2] * STRIDES[2]
    return offset


@triton.jit
def _offsets(
    row, column,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, COLUMN_SIZES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Return the offsets in x of the elements in these rows and columns."""
    return _offset(row, SIZES, STRIDES)[:, None] + _offset(column, COLUMN_SIZES, COLUMN_STRIDES)[None, :]


@triton.jit
def _block(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows and the columns of this program's block, and a mask of the block's elements that exist."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _scales(top, SHIFT: tl.constexpr):
    """Return the scale of values of at most `top`, and its inverse; see quantize.cpp. top: bits of fp32 numbers."""
    exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - SHIFT, 1)
    exponent = tl.where(top == 0, 127, exponent)
    nan = tl.where(top >= 0x7F800000, 0x7FC00000, 0)
    return ((exponent << 23) | nan).to(tl.float32, bitcast=True), (((254 - exponent) << 23) | nan).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _quantize(
    Q, T, X, TOPS, rows, columns, padded_rows, padded_columns, row_stride, column_stride, scale_at,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, COLUMN_SIZES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    TWICE: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """q[row, column] = x / scale in 8 bits, and if TWICE also t[column, row]. Padding becomes zero.

    row_stride: distance between rows of q; column_stride: distance between rows of t.
    """
    scale, inverse = _scales(tl.max(tl.load(TOPS + tl.arange(0, PARTS)), 0), SHIFT)
    row, column, inside = _block(rows, columns, ROWS, COLUMNS)
    at = _offsets(row, column, SIZES, STRIDES, COLUMN_SIZES, COLUMN_STRIDES)
    q = (tl.load(X + at, inside, 0.0).to(tl.float32) * inverse).to(Q.dtype.element_ty, fp_downcast_rounding="rtne")
    stored = (row < padded_rows)[:, None] & (column < padded_columns)[None, :]
    tl.store(Q + row[:, None] * row_stride + column[None, :], q, stored)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store((Q + scale_at).to(tl.pointer_type(tl.float32)), scale, first)
    if TWICE:
        tl.store(T + column[None, :] * column_stride + row[:, None], q, stored)
        tl.store((T + scale_at).to(tl.pointer_type(tl.float32)), scale, first)


@triton.jit
def _clear(TOPS, n, BLOCK: tl.constexpr):
    """Set n integers to 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(TOPS + at, tl.zeros([BLOCK], tl.int32), at < n)


@triton.jit
def _largest_of_rows(
    X, ROW_TOPS, COLUMN_TOPS, rows, columns,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, COLUMN_SIZES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    TWICE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise ROW_TOPS to the largest |x| of each row, and if TWICE also COLUMN_TOPS to that of each column.

    The values are bits as in _largest. Their maximum does not depend on the order of the programs.
    """
    row, column, inside = _block(rows, columns, ROWS, COLUMNS)
    at = _offsets(row, column, SIZES, STRIDES, COLUMN_SIZES, COLUMN_STRIDES)
    bits = tl.load(X + at, inside, 0.0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(ROW_TOPS + row, tl.max(bits, 1), row < rows)
    if TWICE:
        tl.atomic_max(COLUMN_TOPS + column, tl.max(bits, 0), column < columns)


@triton.jit
def _quantize_rows(
    Q, T, X, ROW_TOPS, COLUMN_TOPS, rows, columns, padded_rows, padded_columns, row_stride, column_stride, scale_at,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, COLUMN_SIZES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    TWICE: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As _quantize, with a scale for each row of q, and a scale for each row of t."""
    row, column, inside = _block(rows, columns, ROWS, COLUMNS)
    stored = (row < padded_rows)[:, None] & (column < padded_columns)[None, :]
    at = _offsets(row, column, SIZES, STRIDES, COLUMN_SIZES, COLUMN_STRIDES)
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    scale, inverse = _scales(tl.load(ROW_TOPS + row, row < rows, 0), SHIFT)
    q = (x * inverse[:, None]).to(Q.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(Q + row[:, None] * row_stride + column[None, :], q, stored)
    tl.store((Q + scale_at).to(tl.pointer_type(tl.float32)) + row, scale, (row < rows) & (tl.program_id(0) == 0))
    if TWICE:
        scale, inverse = _scales(tl.load(COLUMN_TOPS + column, column < columns, 0), SHIFT)
        q = (x * inverse[None, :]).to(T.dtype.element_ty, fp_downcast_rounding="rtne")
        tl.store(T + column[None, :] * column_stride + row[:, None], q, stored)
        first = (column < columns) & (tl.program_id(1) == 0)
        tl.store((T + scale_at).to(tl.pointer_type(tl.float32)) + column, scale, first)


def _joined(axes: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return MOST_AXES sizes and strides for some axes of a contiguous tile.

    Neighbouring axes are joined where the memory allows it. None: more than MOST_AXES axes remain.
    """
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    joined: list[tuple[int, int]] = []
    for axis in (axis for axis in axes if sizes[axis] != 1):
        if joined and joined[-1][1] == sizes[axis] * strides[axis]:
            joined[-1] = joined[-1][0] * sizes[axis], strides[axis]
        else:
            joined.append((sizes[axis], strides[axis]))
    if len(joined) > MOST_AXES:
        return None
    joined += [(1, 0)] * (MOST_AXES - len(joined))
    return tuple(size for size, _ in joined), tuple(stride for _, stride in joined)


def _fills_first(axes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a step fills the first entries of these axes together: only the outermost may be filled in part.

    Axes of size 1 do not count.
    """
    inner = [sizes[axis] for axis in axes if sizes[axis] != 1][1:]
    return not any(isinstance(size, DynamicSize) for size in inner)


def _padded(size: int) -> int:
    """Return a number of rows or columns that a step fills, rounded up to a multiple of UNIT.

    cuBLASLt needs such a number of summed elements. A capacity that is no multiple of UNIT has no room for it, and
    products then run in bf16 (contract_cuda.cpp).
    """
    return ceil_div(size, UNIT) * UNIT if isinstance(size, DynamicSize) and size % UNIT == 0 else size


def _matrix(task: Task, output: int, transposed: int | None, rows: Sequence[int], columns: Sequence[int],
            tops: ScratchAddress | None, scratch: Scratch) -> list[Launch] | None:  # fmt: skip
    """Return the launches that write tile `output`, and tile `transposed` if there is one.

    None: too many axes, or the part of the rows or columns that a step fills is not contiguous.

    Args:
        tops: the largest values of parts of x; None: rows have scales of their own.
        rows, columns: the axes of x that form the rows and the columns of `output`.
    """
    x = len(task.accesses) - 1
    sizes = shape(task, x)
    row_axes, column_axes = _joined(rows, sizes), _joined(columns, sizes)
    if row_axes is None or column_axes is None or not (_fills_first(rows, sizes) and _fills_first(columns, sizes)):
        return None
    largest = DTYPES[tile(task, output).dtype].largest
    height, width = math.prod(sizes[axis] for axis in rows), math.prod(sizes[axis] for axis in columns)
    block = min(power_of_two(height), 64), min(power_of_two(width), 128)
    grid = ceil_div(width, block[1]), ceil_div(height, block[0])
    outputs = tile(task, output), tile(task, output if transposed is None else transposed)
    sizes_of_outputs = height, width, _padded(height), _padded(width), int(width), int(height)
    scale_at, shift = scale_offset(int(height) * int(width)), math.frexp(largest)[1] - 1
    order: dict[str, Any] = {
        "SIZES": row_axes[0], "STRIDES": row_axes[1], "COLUMN_SIZES": column_axes[0], "COLUMN_STRIDES": column_axes[1],
        "TWICE": transposed is not None, "ROWS": block[0], "COLUMNS": block[1], "warps": 8,
    }  # fmt: skip
    if tops:
        arguments = *outputs, tile(task, x), tops, *sizes_of_outputs, scale_at
        return [launch(_quantize, grid, *arguments, SHIFT=shift, PARTS=PARTS, **order)]
    of_rows, of_columns = (scratch.take(int(size), "int32") for size in (height, width))
    count = (scratch.bytes - of_rows.offset) // 4
    return [
        launch(_clear, ceil_div(count, BLOCK), of_rows, count, BLOCK=BLOCK),
        launch(_largest_of_rows, grid, tile(task, x), of_rows, of_columns, height, width, **order),
        launch(
            _quantize_rows, grid, *outputs, tile(task, x), of_rows, of_columns, *sizes_of_outputs, scale_at,
            SHIFT=shift, **order,
        ),
    ]  # fmt: skip


@launches("quantize")
def _describe(task: Task) -> Launches:
    x = len(task.accesses) - 1
    # A kernel that transposes exchanges values between threads. Triton 3.6 exchanges 8-bit values wrongly. With bf16
    # and fp16 input it exchanges the input, which is correct; with fp32 input, the 8-bit result. So ATen quantises
    # fp32 tiles.
    if not is_low(tile(task, x).dtype):
        return Launches(())
    layouts, axes = QuantizeArgs.of(task).layouts, len(shape(task, x))
    groups = []  # for each output: axes of its rows and of its columns, among the axes of x
    for k in range(x):
        count, *order = layouts[k * (axes + 1) : (k + 1) * (axes + 1)]
        groups.append((order[:count], order[count:]))
    scratch, made, tops = Scratch(), list[Launch](), None
    if all(access.tile.scales == 1 for access in task.accesses[:x]):
        tops = scratch.take(PARTS, "int32")
        made = [launch(_largest, PARTS, tile(task, x), tops, numel(task, x), BLOCK=BLOCK, PARTS=PARTS, warps=8)]
    left = [*range(x)]
    while left:
        output = left.pop(0)
        rows, columns = groups[output]
        alike = [k for k in left if groups[k] == (columns, rows) and tile(task, k).dtype == tile(task, output).dtype]
        transposed = alike[0] if alike else None
        left = [k for k in left if k != transposed]
        launched = _matrix(task, output, transposed, rows, columns, tops, scratch)
        if launched is None:  # ATen quantises the tile
            return Launches(())
        made += launched
    return Launches(tuple(made), scratch.bytes)
