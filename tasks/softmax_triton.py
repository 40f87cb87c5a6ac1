"""Softmax over the last axis of tiles [..., seq, key] on CUDA. The tasks have the same tiles as in softmax.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .accumulate_triton import combine_softmax
from .generated_triton import WIDEST, axes_of, by_formula
from .launch import Launches, Parameter, ceil_div, launch, launches, numel, power_of_two, shape, tile
from .relative_triton import first_of
from .scalar.expression import Element, Output
from .softmax import SoftmaxArgs


@triton.jit
def _rows(rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the indices and masks of this program's block.

    Returns:
        Row numbers; True for rows that exist; column numbers; offsets of the elements in the tile; True for elements
        that exist.
    """
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    return row, row < rows, col, row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]


@triton.jit
def _kept(
    kept, row, col, PADDING, SEGMENTS, n, seq, shift, key, window, rows_each, batch, sequences,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PADDED: tl.constexpr, SEGMENTED: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Return `kept` restricted to the scores of the block that the masks allow.

    Args:
        key: position of the tile's first key.
        shift: position of the tile's first query minus `key`.
        rows_each: rows of the tile per sequence of the batch.
    """
    position = row % seq + shift
    if CAUSAL:
        kept = kept & (col[None, :] <= position[:, None])
    if WINDOW:
        kept = kept & (col[None, :] > position[:, None] - window)
    if TWO_SIDED:
        kept = kept & (col[None, :] < position[:, None] + window)
    if PADDED:
        at = (row // rows_each % batch)[:, None] * n + col[None, :]
        kept = kept & (tl.load(PADDING + at, kept, 0) != 0)
    if SEGMENTED:
        number = first_of(SEGMENTS, position + key + 1, sequences + 1, STEPS) - 1  # the query's sequence
        mine = (number >= 0) & (number < sequences)
        first, end = tl.load(SEGMENTS + number, mine, 0) - key, tl.load(SEGMENTS + number + 1, mine, 0) - key
        kept = kept & (col[None, :] >= first[:, None]) & (col[None, :] < end[:, None])
    return kept


@triton.jit
def _maxsumexp(
    STATE, X, PADDING, SEGMENTS, rows, n, seq, shift, key, window, rows_each, batch, sequences,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PADDED: tl.constexpr, SEGMENTED: tl.constexpr,
    STEPS: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the state (max, sumexp) of each row of scores; ACC: merge this state into the stored one."""
    row, valid, col, at, inside = _rows(rows, n, ROWS, BLOCK)
    kept = _kept(
        inside, row, col, PADDING, SEGMENTS, n, seq, shift, key, window, rows_each, batch, sequences,
        CAUSAL, WINDOW, TWO_SIDED, PADDED, SEGMENTED, STEPS,
    )  # fmt: skip
    x = tl.where(kept, tl.load(X + at, inside, 0.0).to(tl.float32), float("-inf"))
    top = tl.max(x, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total, s = tl.sum(tl.exp(x - top[:, None]), 1), STATE + row * 2
    if ACC:
        top, total, _a, _b = combine_softmax(tl.load(s, valid, 0.0), tl.load(s + 1, valid, 0.0), top, total)
    tl.store(s, top, valid)
    tl.store(s + 1, total, valid)


@triton.jit
def _softmax(
    P, X, STATE, PADDING, SEGMENTS, rows, n, seq, shift, key, window, rows_each, batch, sequences,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PADDED: tl.constexpr, SEGMENTED: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute exp(score - max) / sumexp, or 0 for masked scores, from the state of each row."""
    row, valid, col, at, inside = _rows(rows, n, ROWS, BLOCK)
    kept = _kept(
        inside, row, col, PADDING, SEGMENTS, n, seq, shift, key, window, rows_each, batch, sequences,
        CAUSAL, WINDOW, TWO_SIDED, PADDED, SEGMENTED, STEPS,
    )  # fmt: skip
    top, total = tl.load(STATE + row * 2, valid, 0.0), tl.load(STATE + row * 2 + 1, valid, 1.0)
    total = tl.where(total == 0.0, 1.0, total)  # no division by 0 in a fully masked row
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    p = tl.where(kept, tl.exp(x - top[:, None]) / total[:, None], 0.0)
    tl.store(P + at, p, inside)


def _blocks(task: Task, number: int) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """Return number of programs, (rows, columns) of tile `number`, and {ROWS, BLOCK, warps} of one program."""
    n = shape(task, number)[-1]
    if n > WIDEST:
        raise ValueError(f"{task.op}: got rows of {n} on CUDA; allowed: tiles of seq of at most {WIDEST}")
    block = power_of_two(n)
    lines = max(1, 1024 // block)
    rows = numel(task, number) // n
    return ceil_div(rows, lines), (rows, n), {"ROWS": lines, "BLOCK": block, "warps": min(16, max(1, block // 1024))}


def _masked(task: Task, count: int, size: tuple[int, int]) -> tuple[list[Parameter], dict[str, int]]:
    """Return the arguments of _maxsumexp and _softmax from PADDING on: positional arguments, then constexprs.

    If the mask has no padding or no segments, the first tile stands in the place of their tile and is not read.

    Args:
        count: number of the task's tiles before padding and segments.
        size: rows and columns of a tile of scores.
    """
    args = SoftmaxArgs.of(task)
    limits = args.masked.limits if args.masked else None
    padded, segmented = bool(limits and limits.padding), bool(limits and limits.segments)
    batch = shape(task, count)[0] if padded else 1
    sequences = numel(task, count + padded) - 1 if segmented else 0
    addresses = [tile(task, count if padded else 0), tile(task, count + padded if segmented else 0)]
    key, window = (limits.key, limits.window) if limits else (0, 0)
    numbers = [args.shift, key, window, args.masked.rows if args.masked else 1, batch, sequences]
    two_sided = bool(limits and limits.two_sided)
    flags = {
        "CAUSAL": args.diagonal, "WINDOW": window > 0, "TWO_SIDED": two_sided, "PADDED": padded,
        "SEGMENTED": segmented, "STEPS": (sequences + 1).bit_length(),
    }  # fmt: skip
    return [*addresses, *size, shape(task, 1)[-2], *numbers], flags


@launches("maxsumexp")
def _describe_maxsumexp(task: Task) -> Launches:
    grid, size, blocks = _blocks(task, 1)
    args, flags = _masked(task, 2, size)
    how = {**flags, "ACC": task.accesses[0].accumulate, **blocks}
    return Launches((launch(_maxsumexp, grid, tile(task, 0), tile(task, 1), *args, **how),))


@launches("softmax")
def _describe(task: Task) -> Launches:
    grid, size, blocks = _blocks(task, 1)
    args, flags = _masked(task, 3, size)
    return Launches((launch(_softmax, grid, *(tile(task, k) for k in range(3)), *args, **flags, **blocks),))


@launches("softmax_grad_sums")
def _describe_grad_sums(task: Task) -> Launches:
    axes = axes_of(task, 1)
    products = Element(0, axes) * Element(1, axes)
    return by_formula(task, axes, [Output(0, axes[:-1], products, total=True)], [0, 1, 2])


@launches("softmax_grad")
def _describe_grad(task: Task) -> Launches:
    axes = axes_of(task, 0)
    scores = Element(0, axes) * (Element(1, axes) - Element(2, axes[:-1]))
    return by_formula(task, axes, [Output(0, axes, scores)], [0, 1, 2, 3])
