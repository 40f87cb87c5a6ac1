"""Embedding and its gradient on CUDA. Each task has the same tiles and arguments as on the CPU (embedding.cpp).

The gradient sums the rows of an id in the order of positions, without atomic additions. A counting sort sorts the
positions by id. Then one program sums the rows of each id. If an id has many positions, programs first sum its parts.

An id outside the table gives a row of NaN, because a CUDA kernel cannot raise an error. On the CPU, such an id is an
error.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .embedding import EmbeddingArgs, EmbeddingGradArgs
from .launch import Int, Launches, Parameter, Scratch, ceil_div, launch, launches, numel, power_of_two, shape, tile

RUN = 1024  # positions of a run; each position is compared with every other position of its run
SHARE = 32  # positions of a run that a program compares
PART = 128  # sorted positions of a program; one id may have nearly all positions: its parts are summed first


@triton.jit
def _embedding(
    OUT, IDS, TABLE, count, width, first, rows, last,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = k < count
    id = tl.load(IDS + k, there, 0)
    wrong, mine = (id < 0) | (id >= last), (id >= first) & (id < first + rows)
    inside = there[:, None] & (col < width)[None, :]
    x = tl.load(TABLE + (id - first)[:, None] * width + col[None, :], inside & mine[:, None], 0.0).to(tl.float32)
    x = tl.where(wrong[:, None], float("nan"), x)
    if ACC:
        inside = inside & (mine | wrong)[:, None]
    tl.store(OUT + k[:, None] * width + col[None, :], x, inside)


@triton.jit
def _zero(X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.zeros([BLOCK], tl.int32), at < n)


@triton.jit
def _rank(RANK, COUNTS, IDS, count, first, rows, padding, RUN: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    """Count equal ids within each run of RUN positions.

    RANK: for each position, the number of earlier positions in the run with the same id. COUNTS: for each run and id,
    the number of positions.
    """
    run = tl.program_id(0)
    mine = run * RUN + tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    row = tl.load(IDS + mine, mine < count, -1) - first
    before, total = tl.zeros([SHARE], tl.int32), tl.zeros([SHARE], tl.int32)
    for start in range(0, RUN, BLOCK):
        other = run * RUN + start + tl.arange(0, BLOCK)
        same = row[:, None] == (tl.load(IDS + other, other < count, -2) - first)[None, :]
        before += tl.sum((same & (other[None, :] < mine[:, None])).to(tl.int32), 1)
        total += tl.sum(same.to(tl.int32), 1)
    tl.store(RANK + mine, before, mine < count)
    opens = (mine < count) & (row >= 0) & (row < rows) & (row + first != padding) & (before == 0)
    tl.store(COUNTS + run.to(tl.int64) * rows + row, total, opens)


@triton.jit
def _add_runs(COUNTS, TOTALS, rows, runs, BLOCK: tl.constexpr):
    """Replace each run's COUNTS by the sums of the counts of all earlier runs. TOTALS: the sums over all runs."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for run in range(0, runs):
        at = COUNTS + run * rows.to(tl.int64) + row
        here = tl.load(at, row < rows, 0)
        tl.store(at, total, row < rows)
        total += here
    tl.store(TOTALS + row, total, row < rows)


@triton.jit
def _starts(STARTS, TOTALS, rows, BLOCK: tl.constexpr):
    """Compute where each id begins in the sorted order. Only one program runs."""
    before = 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total = tl.load(TOTALS + row, row < rows, 0)
        tl.store(STARTS + row, before + tl.cumsum(total, 0) - total, row < rows)
        before += tl.sum(total, 0)


@triton.jit
def _scatter(ORDER, RANK, COUNTS, STARTS, IDS, count, first, rows, padding, RUN: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(IDS + k, k < count, -1) - first
    mine = (k < count) & (row >= 0) & (row < rows) & (row + first != padding)
    before = tl.load(COUNTS + (k // RUN).to(tl.int64) * rows + row, mine, 0)
    at = tl.load(STARTS + row, mine, 0) + before + tl.load(RANK + k, mine, 0)
    tl.store(ORDER + at, k, mine)


@triton.jit
def _sum_of(DY, ORDER, start, end, col, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the rows of DY at sorted positions from start to end."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        k = first + tl.arange(0, ROWS)
        position = tl.load(ORDER + k, k < end, 0).to(tl.int64)
        inside = (k < end)[:, None] & (col < width)[None, :]
        total += tl.load(DY + position[:, None] * width + col[None, :], inside, 0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _sum_parts(
    PARTS, DY, IDS, ORDER, STARTS, TOTALS, width, first, rows,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store partial sums of ids with more than PART positions, for each part of PART sorted positions.

    PARTS: two rows for each part: the sum of the part's first id, and the sum of the part's last id.
    """
    part, last = tl.program_id(0), tl.program_id(2)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(STARTS + rows - 1) + tl.load(TOTALS + rows - 1)
    start, end = part * PART, tl.minimum((part + 1) * PART, there)
    if start < end:
        head = (tl.load(IDS + tl.load(ORDER + start)) - first).to(tl.int32)
        row = head if last == 0 else (tl.load(IDS + tl.load(ORDER + end - 1)) - first).to(tl.int32)
        count, begin = tl.load(TOTALS + row), tl.load(STARTS + row)
        if (count > PART) & ((last == 0) | (row != head)):
            value = _sum_of(
                DY, ORDER, tl.maximum(start, begin), tl.minimum(end, begin + count), col, width, ROWS, BLOCK
            )
            tl.store(PARTS + (part * 2 + last).to(tl.int64) * width + col, value, col < width)


@triton.jit
def _sum_rows(
    OUT, DY, ORDER, STARTS, TOTALS, PARTS, width,
    ACC: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(TOTALS + row)
    out = OUT + row.to(tl.int64) * width + col
    if count > 0:
        start = tl.load(STARTS + row)
        if count <= PART:
            value = _sum_of(DY, ORDER, start, start + count, col, width, ROWS, BLOCK)
        else:
            total, parts = tl.zeros([ROWS, BLOCK], tl.float32), (start + count - 1) // PART + 1
            for one in range(start // PART, parts, ROWS):
                part = one + tl.arange(0, ROWS)
                at = part * 2 + (part * PART < start).to(tl.int32)
                inside = (part < parts)[:, None] & (col < width)[None, :]
                total += tl.load(PARTS + at.to(tl.int64)[:, None] * width + col[None, :], inside, 0.0)
            value = tl.sum(total, 0)
        if ACC:
            value += tl.load(out, col < width).to(tl.float32)
        tl.store(out, value, col < width)
    elif not ACC:
        tl.store(out, tl.zeros([BLOCK], tl.float32), col < width)


@launches("embedding")
def _describe(task: Task) -> Launches:
    count, (rows, width), arguments = numel(task, 1), shape(task, 2), EmbeddingArgs.of(task)
    block = min(power_of_two(width), 1024)
    lines = max(1, 1024 // block)
    args: list[Parameter] = [*(tile(task, k) for k in range(3)), count, width, arguments.first, rows, arguments.rows]
    grid = (ceil_div(count, lines), ceil_div(width, block))
    return Launches(
        (launch(_embedding, grid, *args, ACC=task.accesses[0].accumulate, ROWS=lines, BLOCK=block, warps=2),)
    )


@launches("embedding_grad")
def _describe_grad(task: Task) -> Launches:
    out, ids, dy = (tile(task, k) for k in range(3))
    count, (rows, width), arguments = numel(task, 1), shape(task, 0), EmbeddingGradArgs.of(task)
    run = min(RUN, max(SHARE, power_of_two(count)))
    runs, scratch = ceil_div(count, run), Scratch()
    assert runs * rows < 2**31, task.op
    counts = scratch.take(runs * rows, "int32")
    totals, starts = scratch.take(rows, "int32"), scratch.take(rows, "int32")
    rank, order = scratch.take(count, "int32"), scratch.take(count, "int32")
    parts, block = ceil_div(count, PART), min(power_of_two(width), 1024)
    sums, blocks = scratch.take(2 * int(parts) * width, "fp32"), ceil_div(width, block)
    first, padding = Int(arguments.first), Int(*(arguments.padding or (-1,)))
    size, sizes = (count, first, rows, padding), {"PART": PART, "ROWS": 8, "BLOCK": block}
    return Launches(
        (
            launch(_zero, ceil_div(runs * rows, 4096), counts, runs * rows, BLOCK=4096, warps=8),
            launch(_rank, (runs, run // SHARE), rank, counts, ids, *size, RUN=run, SHARE=SHARE, BLOCK=min(run, 128)),
            launch(_add_runs, ceil_div(rows, 256), counts, totals, rows, runs, BLOCK=256, warps=2),
            launch(_starts, 1, starts, totals, rows, BLOCK=4096, warps=8),
            launch(_scatter, ceil_div(count, 256), order, rank, counts, starts, ids, *size, RUN=run, BLOCK=256),
            launch(_sum_parts, (parts, blocks, 2), sums, dy, ids, order, starts, totals, width, *size[1:3], **sizes),
            launch(
                _sum_rows, (rows, blocks), out, dy, order, starts, totals, sums, width,
                ACC=task.accesses[0].accumulate, **sizes,
            ),
        ),
        scratch.bytes,
    )  # fmt: skip
