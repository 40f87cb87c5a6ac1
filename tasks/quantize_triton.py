"""Quantisation of tiles to 8 bits on CUDA. The tasks have the same tiles as in quantize.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math
from collections.abc import Sequence

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import DTYPES, is_low, scale_offset
from nntile_py.tiles.task import Task

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
MOST_AXES = 3  # of the rows or of the columns of a matrix, after axes that are contiguous have been joined


@triton.jit
def _largest(X, TOPS, n, last, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Store the largest |x| of each part of a tile, as the bits of an fp32 number; these order as integers.

    The kernel reads the tile from its end (the block that begins at `last`): the end is what the kernel before may have
    left in the L2 cache, and the beginning is what _quantize reads first.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(first, n, PARTS * BLOCK):
        at = last - start + tl.arange(0, BLOCK)
        x = tl.load(X + at, at < n, 0.0).to(tl.float32)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(TOPS + tl.program_id(0), tl.max(top, 0))


@triton.jit
def _offset(at, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """Return the offset in x of the rows or columns `at`, which have three axes of these sizes, the last fastest."""
    if SIZES[1] * SIZES[2] == 1:
        offset = at * STRIDES[0]
    elif SIZES[2] == 1:
        offset = at // SIZES[1] * STRIDES[0] + at % SIZES[1] * STRIDES[1]
    else:
        rest = at // SIZES[2]
        offset = rest // SIZES[1] * STRIDES[0] + rest % SIZES[1] * STRIDES[1] + at % SIZES[2] * STRIDES[2]
    return offset


@triton.jit
def _scales(TOPS, SHIFT: tl.constexpr, PARTS: tl.constexpr):
    """Return the scale of a tile and its inverse; see quantize.cpp."""
    top = tl.max(tl.load(TOPS + tl.arange(0, PARTS)), 0)
    exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - SHIFT, 1)
    exponent = tl.where(top == 0, 127, exponent)
    nan = tl.where(top >= 0x7F800000, 0x7FC00000, 0)
    return ((exponent << 23) | nan).to(tl.float32, bitcast=True), (((254 - exponent) << 23) | nan).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _quantize(
    Q, T, X, TOPS, rows, columns, scale_at,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, COLUMN_SIZES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    TWICE: tl.constexpr, SHIFT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """q[row, column] = x / scale in 8 bits, and if TWICE also t[column, row]."""
    scale, inverse = _scales(TOPS, SHIFT, PARTS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = _offset(row, SIZES, STRIDES)[:, None] + _offset(column, COLUMN_SIZES, COLUMN_STRIDES)[None, :]
    q = (tl.load(X + at, inside, 0.0).to(tl.float32) * inverse).to(Q.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(Q + row[:, None] * columns + column[None, :], q, inside)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store((Q + scale_at).to(tl.pointer_type(tl.float32)), scale, first)
    if TWICE:
        tl.store(T + column[None, :] * rows + row[:, None], q, inside)
        tl.store((T + scale_at).to(tl.pointer_type(tl.float32)), scale, first)


def _joined(axes: Sequence[int], sizes: Sequence[int]) -> dict[str, tuple[int, ...]] | None:
    """Return sizes and strides of some axes of a contiguous tile, joined where possible; None: too many axes."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    found: list[tuple[int, int]] = []
    for axis in axes:
        if sizes[axis] == 1:
            continue
        if found and found[-1][1] == sizes[axis] * strides[axis]:
            found[-1] = found[-1][0] * sizes[axis], strides[axis]
        else:
            found.append((sizes[axis], strides[axis]))
    if len(found) > MOST_AXES:
        return None
    found += [(1, 0)] * (MOST_AXES - len(found))
    return {"SIZES": tuple(size for size, _ in found), "STRIDES": tuple(stride for _, stride in found)}


def _matrix(task: Task, number: int, twin: int | None, rows: Sequence[int], columns: Sequence[int],
            tops: ScratchAddress) -> Launch:  # fmt: skip
    """Return the launch that writes output `number`, and its transpose `twin` if there is one."""
    x = len(task.accesses) - 1
    sizes = shape(task, x)
    by_row, by_column = _joined(rows, sizes), _joined(columns, sizes)
    assert by_row and by_column, f"a tile has more than {MOST_AXES} axes that are apart"
    dtype = DTYPES[tile(task, number).dtype]
    high, wide = math.prod(sizes[axis] for axis in rows), math.prod(sizes[axis] for axis in columns)
    block = min(power_of_two(high), 64), min(power_of_two(wide), 128)
    return launch(
        _quantize,
        (ceil_div(wide, block[1]), ceil_div(high, block[0])),
        tile(task, number), tile(task, number if twin is None else twin), tile(task, x), tops,
        high, wide, scale_offset(high * wide),
        warps=8,
        SIZES=by_row["SIZES"], STRIDES=by_row["STRIDES"],
        COLUMN_SIZES=by_column["SIZES"], COLUMN_STRIDES=by_column["STRIDES"],
        TWICE=twin is not None, SHIFT=math.frexp(dtype.largest)[1] - 1, PARTS=PARTS, ROWS=block[0], COLUMNS=block[1],
    )  # fmt: skip


@launches("quantize")
def _describe(task: Task) -> Launches:
    # Where one kernel reads by rows and writes by columns, threads exchange values. Triton 3.6 exchanges the narrowest
    # values, and exchanges 8-bit values wrongly. It exchanges bf16 and fp16 values before it computes fp32 values from
    # them, but fp32 values only after it has rounded them. So ATen quantises fp32 tiles.
    if not is_low(tile(task, len(task.accesses) - 1).dtype):
        return Launches(())
    outputs, x = len(task.accesses) - 1, len(task.accesses) - 1
    layouts, axes = QuantizeArgs.of(task).layouts, len(shape(task, x))
    groups = []  # for each output: axes of its rows and of its columns, among the axes of x
    for k in range(outputs):
        count, *order = layouts[k * (axes + 1) : (k + 1) * (axes + 1)]
        groups.append((order[:count], order[count:]))
    scratch = Scratch()
    tops = scratch.take(PARTS, "int32")
    n = numel(task, x)
    last = (ceil_div(n, BLOCK) - 1) * BLOCK
    result = [launch(_largest, PARTS, tile(task, x), tops, n, last, BLOCK=BLOCK, PARTS=PARTS, warps=8)]
    done: set[int] = set()
    for k, (rows, columns) in enumerate(groups):
        if k in done:
            continue
        alike = [n for n in range(k + 1, outputs) if tile(task, n).dtype == tile(task, k).dtype and n not in done]
        twin = next((n for n in alike if groups[n] == (columns, rows)), None)
        done |= {k} if twin is None else {k, twin}
        result.append(_matrix(task, k, twin, rows, columns, tops))
    return Launches(tuple(result), scratch.bytes)
