"""Element-wise operators, sums and transposes on CUDA. Each task has the same tiles as on the CPU (elementwise.cpp).

Axes that are contiguous in every tensor of a task become one axis. The remaining sizes and strides are constants of the
compiled kernel, so that indices need no divisions by variables and accesses are as wide as the strides allow.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .dropout_rng_triton import dropped
from .elementwise import BiasAddArgs, DropoutArgs, PackArgs, SumArgs, TransposeArgs
from .launch import (
    Argument,
    Int,
    Launch,
    Launches,
    Parameter,
    Scratch,
    ceil_div,
    elementwise,
    launch,
    launches,
    power_of_two,
    shape,
    slot,
    tile,
)  # fmt: skip

PROGRAMS = 1056  # intended number of programs of a sum; constant, so that sums have a fixed order


@triton.jit
def offset_of(index, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """Return the offset of element number `index`. SIZES, STRIDES: of the axes, the last axis first."""
    offset = index * 0
    for axis in tl.static_range(len(SIZES)):
        if axis + 1 < len(SIZES):
            offset += index % SIZES[axis] * STRIDES[axis]
            index = index // SIZES[axis]
        else:
            offset += index * STRIDES[axis]
    return offset


@triton.jit
def _block(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row numbers and column numbers of the program's block, and which elements are inside the tile."""
    across = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    return row, col, (row < rows)[:, None] & (col < columns)[None, :]


@triton.jit
def _add(Y, A, B, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(A + at, at < n).to(tl.float32) + tl.load(B + at, at < n).to(tl.float32), at < n)


@triton.jit
def _multiply(Y, A, B, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(A + at, at < n).to(tl.float32) * tl.load(B + at, at < n).to(tl.float32), at < n)


@triton.jit
def _bias_add(
    Y, X, BIAS, rows, columns,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col, inside = _block(rows, columns, ROWS, BLOCK)
    at = row[:, None] * columns + col[None, :]
    bias = tl.load(BIAS + offset_of(row, SIZES, STRIDES)[:, None] + col[None, :] * STEP, inside).to(tl.float32)
    tl.store(Y + at, tl.load(X + at, inside).to(tl.float32) + bias, inside)


@triton.jit
def _copy(
    Y, X, y_first, x_first, rows, columns,
    SIZES: tl.constexpr, Y_STRIDES: tl.constexpr, X_STRIDES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows that are contiguous in both tensors."""
    row, col, inside = _block(rows, columns, ROWS, BLOCK)
    x = tl.load(X + x_first + offset_of(row, SIZES, X_STRIDES)[:, None] + col[None, :], inside)
    tl.store(Y + y_first + offset_of(row, SIZES, Y_STRIDES)[:, None] + col[None, :], x, inside)


@triton.jit
def _swap(
    Y, X, p_size, q_size,
    P_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr,
    SIZES: tl.constexpr, Y_STRIDES: tl.constexpr, X_STRIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy X to Y with a transpose of two axes.

    Axis p is contiguous in Y and has stride P_STRIDE in X. Axis q is contiguous in X and has stride Q_STRIDE in Y.
    """
    blocks = tl.cdiv(p_size, BLOCK)
    rest = tl.program_id(0).to(tl.int64) // blocks
    p = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    q = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (p < p_size)[:, None] & (q < q_size)[None, :]
    p, q = p.to(tl.int64)[:, None], q.to(tl.int64)[None, :]
    x = tl.load(X + offset_of(rest, SIZES, X_STRIDES) + p * P_STRIDE + q, inside)
    tl.store(Y + offset_of(rest, SIZES, Y_STRIDES) + p + q * Q_STRIDE, x, inside)


@triton.jit
def _sum(
    OUT, X, kept, summed,
    KEPT_SIZES: tl.constexpr, KEPT_STRIDES: tl.constexpr, SUM_SIZES: tl.constexpr, SUM_STRIDES: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store in OUT[program_id(1), :] the sum over every num_programs(1)-th block of ROWS summed elements.

    ACC: add the sum to OUT instead.
    """
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(tl.program_id(1).to(tl.int64), tl.cdiv(summed, ROWS), tl.num_programs(1)):
        r = block * ROWS + tl.arange(0, ROWS)
        at = offset_of(r, SUM_SIZES, SUM_STRIDES)[:, None] + offset_of(k, KEPT_SIZES, KEPT_STRIDES)[None, :]
        total += tl.load(X + at, (r < summed)[:, None] & (k < kept)[None, :], 0.0).to(tl.float32)
    value, out = tl.sum(total, 0), OUT + tl.program_id(1).to(tl.int64) * kept + k
    if ACC:
        value += tl.load(out, k < kept).to(tl.float32)
    tl.store(out, value, k < kept)


@triton.jit
def _dropout(
    Y, X, rows, columns, DRAWS, first, seed, key, limit, scale,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, STEP: tl.constexpr, DRAWN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col, inside = _block(rows, columns, ROWS, BLOCK)
    index = tl.load(DRAWS + row, row < rows, 0) * STRIDES[0] if DRAWN else offset_of(row, SIZES, STRIDES)
    index = first + index[:, None] + col[None, :] * STEP  # index in the whole tensor
    at = row[:, None] * columns + col[None, :]
    x = tl.load(X + at, inside).to(tl.float32)
    tl.store(Y + at, dropped(x, index, seed, key, limit, scale), inside)


# -- axes


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _merged(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides with axes merged that are contiguous in every tensor, and without axes of size 1.

    At least one axis remains.
    """
    axes: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(sizes):
        steps = [s[axis] for s in strides]
        if size == 1:
            continue
        if axes and axes[-1][1] == [size * step for step in steps]:
            axes[-1] = (axes[-1][0] * size, steps)
        else:
            axes.append((size, steps))
    axes = axes or [(1, [1] * len(strides))]
    return [size for size, _ in axes], [[steps[k] for _, steps in axes] for k in range(len(strides))]


def _last_first(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(reversed(values))


def _plane(sizes: Sequence[int]) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Return the number of programs, (rows, columns) of a tensor, and the rows and columns of a program's block.

    The columns are the last axis; the rows are all other axes together.
    """
    rows, columns = math.prod(sizes[:-1]), sizes[-1]
    block = min(power_of_two(columns), 1024)
    lines = min(1024 // block, power_of_two(rows))
    return ceil_div(rows, lines) * ceil_div(columns, block), (rows, columns), {"ROWS": lines, "BLOCK": block}


def _copies(y: Argument, x: Argument, sizes: Sequence[int], y_strides: Sequence[int], x_strides: Sequence[int],
            y_first: int = 0, x_first: int = 0) -> Launch:  # fmt: skip
    """Return the launch that copies x to y over axes of any strides. Each tensor has a contiguous axis.

    y_first, x_first: offsets at which the copy starts.
    """
    sizes, (y_strides, x_strides) = _merged(sizes, y_strides, x_strides)
    if y_strides[-1] == x_strides[-1] == 1:
        grid, size, blocks = _plane(sizes)
        axes = {"SIZES": sizes, "Y_STRIDES": y_strides, "X_STRIDES": x_strides}
        outer: dict[str, Any] = {name: _last_first(values[:-1]) for name, values in axes.items()}
        return launch(_copy, grid, y, x, Int(y_first, 64), Int(x_first, 64), *size, **outer, **blocks)
    assert y_first == x_first == 0
    p, q = len(sizes) - 1, x_strides.index(1)
    rest = [axis for axis in range(len(sizes)) if axis not in (p, q)]
    block = min(64, max(16, power_of_two(min(sizes[p], sizes[q]))))
    axes = {"SIZES": sizes, "Y_STRIDES": y_strides, "X_STRIDES": x_strides}
    outer = {name: _last_first([values[axis] for axis in rest]) for name, values in axes.items()}
    programs = (math.prod(sizes[axis] for axis in rest) * ceil_div(sizes[p], block), ceil_div(sizes[q], block))
    steps = {"P_STRIDE": x_strides[p], "Q_STRIDE": y_strides[q]}
    return launch(_swap, programs, y, x, sizes[p], sizes[q], **steps, **outer, BLOCK=block)


# -- tasks


@launches("add")
def _describe_add(task: Task) -> Launches:
    return elementwise(_add, task)


@launches("multiply")
def _describe_multiply(task: Task) -> Launches:
    return elementwise(_multiply, task)


@launches("bias_add")
def _describe_bias_add(task: Task) -> Launches:
    full, bias = shape(task, 0), BiasAddArgs.of(task).shape
    steps = [0 if size == 1 else step for size, step in zip(bias, strides_of(bias), strict=True)]
    sizes, (_, steps) = _merged(full, strides_of(full), steps)
    grid, size, blocks = _plane(sizes)
    args: list[Parameter] = [*(tile(task, k) for k in range(3)), *size]
    outer: dict[str, Any] = {"SIZES": _last_first(sizes[:-1]), "STRIDES": _last_first(steps[:-1])}
    return Launches((launch(_bias_add, grid, *args, **outer, STEP=steps[-1], **blocks),))


@launches("sum")
def _describe_sum(task: Task) -> Launches:
    full = shape(task, 1)
    strides, axes_over = strides_of(full), SumArgs.of(task).axes
    kept, kept_strides = _chosen(full, strides, [axis for axis in range(len(full)) if axis not in axes_over])
    over, over_strides = _chosen(full, strides, axes_over)
    n, summed = math.prod(kept), math.prod(over)
    if kept_strides[-1] == 1:
        block = min(power_of_two(n), 64)
        rows = min(power_of_two(summed), 4096 // block)
    else:
        rows = min(power_of_two(summed), 1024)
        block = min(power_of_two(n), 2048 // rows)
    columns, acc = ceil_div(n, block), task.accesses[0].accumulate
    splits = min(max(PROGRAMS // columns, 1), ceil_div(summed, rows))
    scratch = Scratch()
    part = tile(task, 0) if splits == 1 else scratch.take(splits * n, "fp32")
    axes: dict[str, Any] = {
        "KEPT_SIZES": _last_first(kept), "KEPT_STRIDES": _last_first(kept_strides),
        "SUM_SIZES": _last_first(over), "SUM_STRIDES": _last_first(over_strides),
    }  # fmt: skip
    first = launch(
        _sum, (columns, splits), part, tile(task, 1), n, summed,
        **axes, ACC=acc and splits == 1, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    if splits == 1:
        return Launches((first,))
    axes = {"KEPT_SIZES": (n,), "KEPT_STRIDES": (1,), "SUM_SIZES": (splits,), "SUM_STRIDES": (n,)}
    args = tile(task, 0), part, n, splits
    total = launch(_sum, (ceil_div(n, 32), 1), *args, **axes, ACC=acc, ROWS=32, BLOCK=32)  # adds the parts in order
    return Launches((first, total), scratch.bytes)


def _chosen(sizes: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> tuple[list[int], list[int]]:
    merged, (steps,) = _merged([sizes[axis] for axis in axes], [strides[axis] for axis in axes])
    return merged, steps


@launches("transpose")
def _describe_transpose(task: Task) -> Launches:
    order, steps = TransposeArgs.of(task).order, strides_of(shape(task, 1))
    out = shape(task, 0)
    return Launches((_copies(tile(task, 0), tile(task, 1), out, strides_of(out), [steps[axis] for axis in order]),))


def _slices(task: Task, packed: Argument, sizes: Sequence[int], pack: bool) -> Launches:
    """Return launches that copy between the packed tile and tiles 1, 2, ..., one for each index of the packed axis."""
    axis = PackArgs.of(task).axis
    inner, outer, count = math.prod(sizes[axis + 1 :]), math.prod(sizes[:axis]), sizes[axis]
    result = []
    for k in range(1, len(task.accesses)):
        whole, one = (count * inner, 1), (inner, 1)
        if pack:
            result.append(_copies(packed, tile(task, k), (outer, inner), whole, one, (k - 1) * inner, 0))
        else:
            result.append(_copies(tile(task, k), packed, (outer, inner), one, whole, 0, (k - 1) * inner))
    return Launches(tuple(result))


@launches("unpack")
def _describe_unpack(task: Task) -> Launches:
    return _slices(task, tile(task, 0), shape(task, 0), pack=False)


@launches("pack")
def _describe_pack(task: Task) -> Launches:
    return _slices(task, tile(task, 0), shape(task, 0), pack=True)


def mixed_key(key: int) -> int:
    """Return a dropout's key as `kept` in dropout_rng_triton.py needs it: times a constant, as a signed int64."""
    return (key * 0xD1B54A32D192ED03 + 2**63) % 2**64 - 2**63


def mask_of(task: Task, dropout: DropoutArgs) -> list[Parameter]:
    """Return kernel arguments for a dropout: row numbers, the tile's first index, seed, key, limit and scale.

    Seed, key, limit and scale are the last arguments of `dropped`. Without row numbers, the first tile stands in their
    place and is not read.
    """
    row_numbers = tile(task, len(task.accesses) - 1 if dropout.row_numbers else 0)
    mixed = mixed_key(dropout.key)
    limit, scale = Int(int(dropout.p * 2**32), 64), 1 / (1 - dropout.p)
    return [row_numbers, Int(dropout.first, 64), slot(task, dropout.seed, "int64"), Int(mixed, 64), limit, scale]


def sizes_and_strides(sizes: Sequence[int], strides: Sequence[int]) -> dict[str, Any]:
    """Return the constants SIZES and STRIDES of `offset_of` for axes with these sizes and strides."""
    merged, (steps,) = _merged(sizes, strides)
    return {"SIZES": _last_first(merged), "STRIDES": _last_first(steps)}


@launches("dropout")
def _describe_dropout(task: Task) -> Launches:
    full, args_of = shape(task, 0), DropoutArgs.of(task)
    sizes, (_, steps) = _merged(full, strides_of(full), args_of.strides)
    outer: dict[str, Any] = {"SIZES": _last_first(sizes[:-1]), "STRIDES": _last_first(steps[:-1]), "DRAWN": False}
    if args_of.row_numbers:
        sizes, steps = [math.prod(full[:-1]), full[-1]], [1]
        outer = {"SIZES": (sizes[0],), "STRIDES": (args_of.strides[-2],), "DRAWN": True}
    grid, size, blocks = _plane(sizes)
    args: list[Parameter] = [tile(task, 0), tile(task, 1), *size, *mask_of(task, args_of)]
    return Launches((launch(_dropout, grid, *args, **outer, STEP=steps[-1], **blocks),))
