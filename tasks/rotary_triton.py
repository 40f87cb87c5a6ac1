"""Rotary position embeddings on CUDA. The tasks have the same tiles as in rotary.cpp.

A program rotates a few positions of a few heads (or of other axes). It reads the cosines and sines of these positions
once for all its heads, because they have more bytes than the elements of one head in bf16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .elementwise_triton import offset_of, sizes_and_strides
from .launch import Launches, ceil_div, launch, launches, power_of_two, shape, tile
from .rotary import RotaryArgs


@triton.jit
def _rotary(
    Y, X, TABLE, others, seq,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, SEQ_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BATCH: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    OTHERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS positions of OTHERS heads (or combinations of other axes).

    BATCH: () if all rows of the batch share a table. If each row has a table: (number of combinations of other axes
    within a row, number of rows).
    """
    across = tl.cdiv(seq, ROWS)
    other = (tl.program_id(0) // across).to(tl.int64) * OTHERS + tl.arange(0, OTHERS)
    row, col = (tl.program_id(0) % across) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    kept = (row < seq)[:, None] & (col < HALF)[None, :]
    if len(BATCH) > 0:
        TABLE += (tl.program_id(0) // across * OTHERS // BATCH[0] % BATCH[1]).to(tl.int64) * seq * (2 * HALF)
    angle = row[:, None] * (2 * HALF) + col[None, :]
    cos, sin = tl.load(TABLE + angle, kept, 0.0)[None, :, :], tl.load(TABLE + HALF + angle, kept, 0.0)[None, :, :]
    if INVERSE:
        sin = -sin
    inner = row.to(tl.int64)[:, None] * SEQ_STRIDE + col[None, :] * HEAD_STRIDE
    at = offset_of(other, SIZES, STRIDES)[:, None, None] + inner[None, :, :]
    inside = (other < others)[:, None, None] & kept[None, :, :]
    a = tl.load(X + at, inside, 0.0).to(tl.float32)
    b = tl.load(X + at + HALF * HEAD_STRIDE, inside, 0.0).to(tl.float32)
    tl.store(Y + at, a * cos - b * sin, inside)
    tl.store(Y + at + HALF * HEAD_STRIDE, b * cos + a * sin, inside)


@launches("rotary")
def _describe(task: Task) -> Launches:
    sizes, args = shape(task, 1), RotaryArgs.of(task)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    seq, half = sizes[args.seq], sizes[args.head_dim] // 2
    rest = [axis for axis in range(len(sizes)) if axis not in (args.seq, args.head_dim)]
    others = math.prod(sizes[axis] for axis in rest)
    block = power_of_two(half)
    batch: tuple[int, ...] = ()
    together = min(power_of_two(others), 4)
    if args.batch >= 0:  # the heads of a program belong to one row of the batch
        inner = math.prod(sizes[axis] for axis in rest if axis > args.batch)
        batch, together = (inner, sizes[args.batch]), math.gcd(inner, together)
    rows = min(power_of_two(seq), max(1, 1024 // (block * together)))
    return Launches(
        (
            launch(
                _rotary, ceil_div(others, together) * ceil_div(seq, rows),
                tile(task, 0), tile(task, 1), tile(task, 2), others, seq,
                **sizes_and_strides([sizes[axis] for axis in rest], [strides[axis] for axis in rest]),
                SEQ_STRIDE=strides[args.seq], HEAD_STRIDE=strides[args.head_dim], BATCH=batch, HALF=half,
                INVERSE=args.inverse,
                OTHERS=together, ROWS=rows, BLOCK=block,
            ),
        )
    )  # fmt: skip
