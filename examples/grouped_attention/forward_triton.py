"""Forward pass of attention as grouped products: the long form of ByteTransformer (Zhai et al. 2023, section III.E.2).

The attention of one sequence and one head is a problem. The tiles of all problems are divided evenly among two programs
per multiprocessor. Programs compute on the device where a tile lies, so nothing waits for the host and CUDA graphs can
capture the launches. There are three launches:

1. The number of tiles before each sequence.
2. Scores: a tile of q k^T. Its epilogue stores the maximum and the sum of exponentials of each row of the tile.
3. Values: the reduction of these maxima and sums to the log-sum-exp, then p v. The main loop of p v applies the softmax
   and the dropout. The paper reduces in a launch of its own. Here a program has whole rows of the output, so no row is
   reduced twice.

The second launch stores exp(s - maximum of the tile) for a score s, the paper stores s. The epilogue needs this
exponential for the sum anyway, so each element has one exponential instead of two. bf16 would round a score of 16 by up
to 1/16, which is 6 % of exp(s).
"""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from nntile_py.errors import ConfigError
from nntile_py.tasks.attention import AttentionArgs
from nntile_py.tasks.attention_segments_triton import (
    LN2,
    LOG2E,
    SegmentArguments,
    clear,
    factors_of,
    first_draw,
    kept_keys,
    keys_of,
    layout,
    layout_of_rows,
    load_rows,
    places,
    product,
    scores_of,
    sequence_of,
    shared,
    store_rows,
)
from nntile_py.tasks.elementwise_triton import strides_of
from nntile_py.tasks.launch import (
    Launch,
    Launches,
    Parameter,
    Scratch,
    ScratchAddress,
    ceil_div,
    launch,
    numel,
    shape,
    tile,
)
from nntile_py.tasks.product_triton import MULTIPROCESSORS
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.tasklist import Task

PROGRAMS = 2 * MULTIPROCESSORS
AHEAD = 128  # sequences that a program looks at at once for its next tile
MOST = 2**30  # bytes of scratch


@triton.jit
def problem_sizes(DATA, number, offsets, tokens, keys, PACKED: tl.constexpr, WIDTH: tl.constexpr):
    """As `sequence_of`, but no more than scratch has room for, if a segment is longer than its mask promised."""
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    if PACKED:
        n, m = tl.minimum(n, WIDTH), tl.minimum(m, WIDTH)
    return start, n, m


@triton.jit
def _in_row(columns, KEYS: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr):
    """The most tiles that a window reaches from a row of tiles."""
    return tl.minimum(columns, 1 + (WINDOW + KEYS - 2) // KEYS * (2 if TWO_SIDED else 1))


@triton.jit
def pairs_of(n, m, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
             TWO_SIDED: tl.constexpr):  # fmt: skip
    """The number of tiles of scores of n queries and m keys; where a window is, some of them lie outside of it."""
    rows, columns = tl.cdiv(n, ROWS), tl.cdiv(m, KEYS)
    if WINDOW and (CAUSAL or TWO_SIDED):
        return rows * _in_row(columns, KEYS, WINDOW, TWO_SIDED)
    elif CAUSAL:
        return rows * (rows + 1) // 2
    else:
        return rows * columns


@triton.jit
def pair_at(number, n, m, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
            TWO_SIDED: tl.constexpr):  # fmt: skip
    """The first query and the first key of tile `number` of those."""
    rows, columns = tl.cdiv(n, ROWS), tl.cdiv(m, KEYS)
    if WINDOW and (CAUSAL or TWO_SIDED):
        across = _in_row(columns, KEYS, WINDOW, TWO_SIDED)
        first = number // across * ROWS
        begin, _ = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        return first, begin + number % across * KEYS
    elif CAUSAL:  # a short row and a long one have together as many tiles as any other such two
        across = rows // 2 * 2 + 1
        row, column = number // across, number % across
        short = row + 1 - rows % 2
        first = tl.where(column < short, short - 1, rows - 1 - row) * ROWS
        return first, tl.where(column < short, column, column - short) * KEYS
    else:
        return number // columns * ROWS, number % columns * KEYS


@triton.jit
def problem_of(BEFORE, number, turn, count, HEADS: tl.constexpr, AHEAD: tl.constexpr):
    """Of tile `turn` of all: its sequence, its head, and its number among the tiles of these two.

    BEFORE: the tiles of a head before each of `count` sequences. number: the sequence of an earlier tile, from where
    AHEAD are looked at at once, as a warp does in the paper's visitor of problems."""
    passed = number * 0 + AHEAD
    while passed == AHEAD:
        ahead = number + 1 + tl.arange(0, AHEAD)
        passed = tl.sum((tl.load(BEFORE + ahead, ahead <= count, 2**31 - 1) <= turn // HEADS).to(tl.int32))
        number += passed
    before = tl.load(BEFORE + number)
    tiles, inside = tl.load(BEFORE + number + 1) - before, turn - before * HEADS
    return number, inside // tiles, inside % tiles


@triton.jit
def _add_tiles(BEFORE, before, tiles, number, count):
    tl.store(BEFORE + number + 1, before + tl.cumsum(tiles), number < count)
    return before + tl.sum(tiles)


@triton.jit
def _grouped_tiles(
    PAIRS, QUERIES, OF_KEYS, DATA, tokens, keys, offsets,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The tiles before each sequence, for a head: of scores, of queries, of keys. One program."""
    count = offsets - (1 if PACKED else 0)
    pairs, queries, of_keys = count * 0, count * 0, count * 0
    tl.store(PAIRS, pairs)
    tl.store(QUERIES, queries)
    tl.store(OF_KEYS, of_keys)
    for first in range(0, count, AHEAD):
        number = first + tl.arange(0, AHEAD)
        _, n, m = problem_sizes(DATA, tl.minimum(number, offsets - 1), offsets, tokens, keys, PACKED, WIDTH)
        n, m = tl.where(number < count, n, 0), tl.where(number < count, m, 0)
        pairs = _add_tiles(
            PAIRS, pairs, pairs_of(n, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED), number, count
        )  # fmt: skip
        queries = _add_tiles(QUERIES, queries, tl.cdiv(n, ROWS), number, count)
        of_keys = _add_tiles(OF_KEYS, of_keys, tl.cdiv(m, KEYS), number, count)


@triton.jit
def line_of(start, head, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr):
    """Where scratch has a problem's first row: in which block of `tokens` rows, and where in that."""
    if PACKED:
        return head.to(tl.int64), start.to(tl.int64)
    else:
        return start.to(tl.int64) * HEADS + head, start * 0


@triton.jit
def scores_at(X, start, head, row, key, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr):
    """Where scratch has a problem's scores, [rows, keys], in lines of WIDTH."""
    block, first = line_of(start, head, tokens, HEADS, PACKED)
    return X + (block * tokens + first) * WIDTH + row[:, None] * WIDTH + key[None, :]


@triton.jit
def _statistics_at(start, head, row, at, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                   KEYS: tl.constexpr):  # fmt: skip
    """The places of what the epilogue leaves of rows in the tile of key `at`: neighbours for neighbouring rows."""
    block, first = line_of(start, head, tokens, HEADS, PACKED)
    return (block * (WIDTH // KEYS) + at // KEYS) * tokens + first + row


@triton.jit
def _grouped_scores(
    E, TOPS, TOTALS, PAIRS, Q, K, DATA, tokens, keys, offsets, scale,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """exp(s - the maximum of the row in the tile), that maximum, to base 2, and the row's sum in the tile."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS * tl.load(PAIRS + count), PROGRAMS):
        number, head, pair = problem_of(PAIRS, number, turn, count, HEADS, AHEAD)
        start, n, m = problem_sizes(DATA, number, offsets, tokens, keys, PACKED, WIDTH)
        first, at = pair_at(pair, n, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        _, end = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        if at < end:
            row, key = first + tl.arange(0, ROWS), at + tl.arange(0, KEYS)
            q = load_rows(Q, start, head, row, n, Q_AT, D, BLOCK_D)
            k = load_rows(K, start, head // GROUP, key, m, K_AT, D, BLOCK_D)
            kept = kept_keys(DATA, start, key, m, PADDED)
            s = scores_of(q, k, row, key, kept, CAUSAL, WINDOW, TWO_SIDED, PRECISION)
            top = tl.max(s, 1) * (scale * LOG2E)
            shift = tl.where(top > -float("inf"), top, 0.0)
            e = tl.exp2(s * (scale * LOG2E) - shift[:, None])
            of_rows = _statistics_at(start, head, row, at, tokens, HEADS, PACKED, WIDTH, KEYS)
            tl.store(TOPS + of_rows, top, row < n)
            tl.store(TOTALS + of_rows, tl.sum(e, 1), row < n)
            place = scores_at(E, start, head, row, key, tokens, HEADS, PACKED, WIDTH)
            tl.store(place, e.to(E.dtype.element_ty), (row < n)[:, None])


@triton.jit
def _log_sums(TOPS, TOTALS, start, head, row, n, begin, end, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr,
              WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Log-sum-exp of rows, to base 2, of what the tiles of keys from `begin` to `end` left; 0 where nothing is kept."""
    top, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for at in range(begin, end, KEYS):
        of_rows = _statistics_at(start, head, row, at, tokens, HEADS, PACKED, WIDTH, KEYS)
        other = tl.load(TOPS + of_rows, row < n, -float("inf"))
        higher = tl.maximum(top, other)
        shift = tl.where(higher > -float("inf"), higher, 0.0)
        part = tl.load(TOTALS + of_rows, row < n, 0.0)
        total = total * tl.exp2(top - shift) + part * tl.exp2(other - shift)
        top = higher
    return tl.where(top > -float("inf"), top, 0.0) + tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit
def _grouped_values(
    OUT, LSE, E, TOPS, TOTALS, QUERIES, V, DATA, tokens, keys, offsets, scale,
    DRAWS, mask_first, seed, mix, limit, kept_scale,
    OUT_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The output of ROWS queries, and their log-sum-exp; keys come DEPTH at a time."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS * tl.load(QUERIES + count), PROGRAMS):
        number, head, block = problem_of(QUERIES, number, turn, count, HEADS, AHEAD)
        start, n, m = problem_sizes(DATA, number, offsets, tokens, keys, PACKED, WIDTH)
        row = block * ROWS + tl.arange(0, ROWS)
        begin, end = keys_of(block * ROWS, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        lse = _log_sums(TOPS, TOTALS, start, head, row, n, begin, end, tokens, HEADS, PACKED, WIDTH, ROWS, KEYS)
        store_rows(LSE, (lse * LN2)[:, None], start, head, row, n, LSE_AT, 1, 1)
        drawn, out = first_draw(DRAWS, start, mask_first, STEPS, PACKED), tl.zeros([ROWS, BLOCK_D], tl.float32)
        for at in range(begin, end, DEPTH):
            key = at + tl.arange(0, DEPTH)
            e = tl.load(scores_at(E, start, head, row, key, tokens, HEADS, PACKED, WIDTH), (row < n)[:, None], 0.0)
            v = load_rows(V, start, head // GROUP, key, m, V_AT, D, BLOCK_D)
            of_rows = _statistics_at(start, head, row, at, tokens, HEADS, PACKED, WIDTH, KEYS)
            top = tl.load(TOPS + of_rows, row < n, -float("inf"))
            if len(STEPS) > 0:
                factors = factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS, DEPTH)
                e = (e.to(tl.float32) * factors).to(v.dtype)
            out += product(e, v, PRECISION) * tl.exp2(top - lse)[:, None]
        store_rows(OUT, out.to(OUT.dtype.element_ty), start, head, row, n, OUT_AT, D, BLOCK_D)
    clear_heads(OUT, DATA, offsets, tokens, keys, OUT_AT, PACKED, HEADS, D, BLOCK_D, ROWS, PROGRAMS)
    clear_heads(LSE, DATA, offsets, tokens, keys, LSE_AT, PACKED, HEADS, 1, 1, ROWS, PROGRAMS)


@triton.jit
def clear_heads(
    X, DATA, offsets, tokens, keys, AT: tl.constexpr, PACKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Zeros of all heads where there is no segment."""
    if PACKED:
        start, n, _ = sequence_of(DATA, offsets - 1, offsets, tokens, keys, PACKED)
        program = tl.program_id(0)
        for head in range(0, HEADS):
            clear(X, DATA, start, n, program * 0 + head, program, AT, D, PROGRAMS, ROWS, BLOCK_D)


# -- tasks


class Grouped:
    """Lays out the scratch of a task's launches and makes these, with the constants that all have in common.

    Tiles are of 128 x 128, as the paper's; fp32, whose products take no tensor cores, would spill registers with these,
    and longer rows of heads would not find room in shared memory. As many queries as keys: `pair_at` wants that.
    """

    def __init__(self, common: SegmentArguments, dtype: str, lines: int) -> None:
        """lines: rows of scores."""
        self.common, self.dtype, self.lines, self.scratch = common, dtype, int(lines), Scratch()
        self.side = 32 if dtype == "fp32" else 128 if common.constants["BLOCK_D"] <= 128 else 64
        self.width = ceil_div(common.longest[1], self.side) * self.side  # of a row of scores
        self.pairs, self.queries, self.of_keys = (self._before() for _ in range(3))

    def _before(self) -> ScratchAddress:
        """Of the tiles before each sequence, and after the last."""
        return self.scratch.take(int(self.common.sequences) + 1, "int32")

    def scores(self, count: int) -> list[ScratchAddress]:
        """Places for all scores, `count` times. ConfigError: they are too large."""
        size = count * self.lines * self.width * DTYPES[self.dtype].bytes
        if size > MOST:
            raise ConfigError(
                f"attention as grouped products: the scores of a task, {count} x {self.lines} rows of {self.width}"
                f" {self.dtype}, take {size / 2**30:.2f} GiB; allowed: {MOST / 2**30:.0f} GiB; use the kernels of"
                " nntile_py, or a smaller tiles.batch or tiles.heads"
            )
        return [self.scratch.take(self.lines * self.width, self.dtype) for _ in range(count)]

    def statistics(self) -> list[ScratchAddress]:
        """Places for the maximum and the sum of each row in each tile."""
        return [self.scratch.take(self.lines * (self.width // self.side), "fp32") for _ in range(2)]

    def count_tiles(self) -> Launch:
        before = self.pairs, self.queries, self.of_keys
        return self.walk(_grouped_tiles, *before, *self.common.args[:4], programs=1)

    def walk(self, kernel: Any, *args: Parameter, programs: int = 0, **constexprs: Any) -> Launch:
        """A launch of a kernel, with those of the constants that it takes."""
        programs = programs or PROGRAMS
        known = {**self.common.constants, "HEADS": self.common.sizes[0], "WIDTH": self.width, "AHEAD": AHEAD}
        known |= {"ROWS": self.side, "KEYS": self.side, "DEPTH": 64 if self.side == 128 else 32}
        known |= {"PROGRAMS": programs, **constexprs}
        taken = {name: value for name, value in known.items() if name in kernel.arg_names}
        return launch(kernel, programs, *args, warps=4 if self.side == 32 else 8, **taken)


def forward(task: Task) -> Launches:
    """Describe the launches of a task attention_segments."""
    a = AttentionArgs.of(task)
    assert a.limits
    packed = a.limits.segments
    (q, k, v), (q_at, k_at, v_at), data = places(task, a.qkv, 2, packed=packed)
    common = shared(task, a.qkv, 2, a.scale, a.limits, diagonal=a.diagonal, data=data)
    g = Grouped(common, task.accesses[2].tile.dtype, numel(task, 1))
    made = [*g.scores(1), *g.statistics()]
    out_at, lse_at = layout(strides_of(shape(task, 0)), a.out, packed=packed), layout_of_rows(task, 1, packed=packed)
    way = (
        g.count_tiles(),
        g.walk(_grouped_scores, *made, g.pairs, q, k, *common.args[:5], Q_AT=q_at, K_AT=k_at),
        g.walk(_grouped_values, tile(task, 0), tile(task, 1), *made, g.queries, v, *common.args,
               OUT_AT=out_at, V_AT=v_at, LSE_AT=lse_at),
    )  # fmt: skip
    return Launches(way, g.scratch.bytes)
