"""Gather of rows on CUDA. gather.cpp lists the tiles of each task.

The place -1 gives a row of zeros. Any other place outside the positions gives a row of NaN, because a CUDA kernel
cannot raise an error. On the CPU, such a place is an error.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .gather import GatherArgs, GatherGradArgs
from .launch import Launches, Parameter, Scratch, ceil_div, launch, launches, numel, power_of_two, shape, tile


@triton.jit
def _gather(
    Y, X, PLACES, n, count, positions, width, first, last, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Y[k, :] = X[k // count, PLACES[k] - first, :] if X has this position; otherwise 0, or with ACC unchanged."""
    k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = k < n
    place = tl.load(PLACES + k, valid, -1)
    at = place - first
    wrong, mine = (place < -1) | (place >= last), (place >= 0) & (at >= 0) & (at < positions)
    inside = valid[:, None] & (col < width)[None, :]
    row = k // count * positions + at
    x = tl.load(X + row[:, None] * width + col[None, :], inside & mine[:, None], 0.0).to(tl.float32)
    x = tl.where(wrong[:, None], float("nan"), x)
    if ACC:
        inside = inside & (mine | wrong)[:, None]
    tl.store(Y + k[:, None] * width + col[None, :], x, inside)


@triton.jit
def _clear_ends(FIRST, LAST, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(FIRST + row, tl.full([BLOCK], 2147483647, tl.int32), row < rows)
    tl.store(LAST + row, tl.full([BLOCK], -1, tl.int32), row < rows)


@triton.jit
def _ends(FIRST, LAST, PLACES, n, count, positions, first, BLOCK: tl.constexpr):
    """Compute for each row of DX the first and the last k for which PLACES[k] is the row's position."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(PLACES + k, k < n, -1) - first
    mine = (k < n) & (at >= 0) & (at < positions)
    row = k // count * positions + at
    tl.atomic_min(FIRST + row, k, mine)
    tl.atomic_max(LAST + row, k, mine)


@triton.jit
def _gather_grad(
    DX, DY, PLACES, FIRST, LAST, positions, width, first, ACC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """DX[row, :] = the sum of DY[k, :] over all k for which PLACES[k] is the row's position, in order of k.

    ACC: add the sum to DX instead.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, out = tl.zeros([BLOCK], tl.float32), DX + row * width + col
    for k in range(tl.load(FIRST + row), tl.load(LAST + row) + 1):
        if tl.load(PLACES + k) == row % positions + first:
            # row * 0 + k has 64 bits, also in Triton's interpreter, where k is a Python number.
            total += tl.load(DY + (row * 0 + k) * width + col, col < width, 0.0).to(tl.float32)
    if ACC:
        total += tl.load(out, col < width, 0.0).to(tl.float32)
    tl.store(out, total, col < width)


def _sizes(task: Task, y: int, x: int, added: int) -> tuple[int, int, int]:
    """Return three sizes: positions gathered from a row of the batch, positions of a row, elements of a position.

    y, x: indices of y and x, or of dy and dx, among the task's tiles. Tile 2 lists the positions to gather.
    added: number of axes of tile 2 that x does not have.
    """
    at = shape(task, 2)
    lead, width = len(at) - added, shape(task, y)[len(at) :]
    positions = shape(task, x)[lead : len(shape(task, x)) - len(width)]
    return math.prod(at[lead:]), math.prod(positions), math.prod(width)


@launches("gather")
def _describe(task: Task) -> Launches:
    n, arguments = numel(task, 2), GatherArgs.of(task)
    count, positions, width = _sizes(task, 0, 1, arguments.added)
    block = min(power_of_two(width), 1024)
    rows = max(1, 1024 // block)
    args: list[Parameter] = [tile(task, k) for k in range(3)]
    args += [n, count, positions, width, arguments.first, arguments.positions]
    grid = (ceil_div(n, rows), ceil_div(width, block))
    acc = task.accesses[0].accumulate
    return Launches((launch(_gather, grid, *args, ACC=acc, ROWS=rows, BLOCK=block, warps=2),))


@launches("gather_grad")
def _describe_grad(task: Task) -> Launches:
    arguments = GatherGradArgs.of(task)
    count, positions, width = _sizes(task, 1, 0, arguments.added)
    rows, n, block, scratch = numel(task, 0) // width, numel(task, 2), min(power_of_two(width), 1024), Scratch()
    ends = [scratch.take(int(rows), "int32") for _ in range(2)]
    acc, dx, dy, places = task.accesses[0].accumulate, *(tile(task, k) for k in range(3))
    return Launches(
        (
            launch(_clear_ends, ceil_div(rows, 1024), *ends, rows, BLOCK=1024),
            launch(_ends, ceil_div(n, 256), *ends, places, n, count, positions, arguments.first, BLOCK=256, warps=2),
            launch(
                _gather_grad, (rows, ceil_div(width, block)), dx, dy, places, *ends, positions, width, arguments.first,
                ACC=acc, BLOCK=block, warps=2,
            ),
        ),
        scratch.bytes,
    )  # fmt: skip
