"""Problems of grouped attention: their tiles, the tile of each program, and the scratch of the launches.

The attention of one sequence and one head is a problem. The tiles of all problems are divided evenly among two programs
per multiprocessor. Programs compute on the device where a tile lies, so nothing waits for the host and CUDA graphs can
capture the launches.
"""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from nntile_py.errors import ConfigError
from nntile_py.tasks.attention_segments_triton import SegmentArguments, clear, keys_of, sequence_of
from nntile_py.tasks.launch import Launch, Parameter, Scratch, ScratchAddress, ceil_div, launch
from nntile_py.tasks.product_triton import MULTIPROCESSORS
from nntile_py.tiles.dtypes import DTYPES

PROGRAMS = 2 * MULTIPROCESSORS
AHEAD = 128  # sequences that a program examines together to find its next tile
MOST = 2**30  # largest number of bytes for the scores in the scratch


@triton.jit
def problem_sizes(DATA, number, offsets, tokens, keys, PACKED: tl.constexpr, WIDTH: tl.constexpr):
    """Return a sequence's start, number of queries and number of keys, as `sequence_of`.

    A segment longer than its mask allows is cut to WIDTH, the width of the scratch."""
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    if PACKED:
        n, m = tl.minimum(n, WIDTH), tl.minimum(m, WIDTH)
    return start, n, m


@triton.jit
def _in_row(columns, KEYS: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr):
    """Return the largest number of tiles that a window can touch in a row of tiles."""
    return tl.minimum(columns, 1 + (WINDOW + KEYS - 2) // KEYS * (2 if TWO_SIDED else 1))


@triton.jit
def pairs_of(n, m, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
             TWO_SIDED: tl.constexpr):  # fmt: skip
    """Return the number of tiles into which the scores of n queries and m keys are cut, for one head.

    Some of these tiles may lie outside the mask's window."""
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
    """Return the first query and the first key of a tile, from the tile's number among the tiles of `pairs_of`."""
    rows, columns = tl.cdiv(n, ROWS), tl.cdiv(m, KEYS)
    if WINDOW and (CAUSAL or TWO_SIDED):
        across = _in_row(columns, KEYS, WINDOW, TWO_SIDED)
        first = number // across * ROWS
        begin, _ = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        return first, begin + number % across * KEYS
    elif CAUSAL:  # the shortest and the longest row together have as many tiles as the next two, and so on
        across = rows // 2 * 2 + 1
        row, column = number // across, number % across
        short = row + 1 - rows % 2
        first = tl.where(column < short, short - 1, rows - 1 - row) * ROWS
        return first, tl.where(column < short, column, column - short) * KEYS
    else:
        return number // columns * ROWS, number % columns * KEYS


@triton.jit
def problem_of(BEFORE, number, turn, count, HEADS: tl.constexpr, AHEAD: tl.constexpr):
    """Return the sequence and the head of tile `turn` of all problems, and the tile's number within its problem.

    BEFORE: the number of a head's tiles before each of `count` sequences. number: the sequence of an earlier tile. The
    search starts there and examines AHEAD sequences at a time, as a warp does in the paper's problem visitor."""
    passed = number * 0 + AHEAD
    while passed == AHEAD:
        ahead = number + 1 + tl.arange(0, AHEAD)
        passed = tl.sum((tl.load(BEFORE + ahead, ahead <= count, 2**31 - 1) <= turn // HEADS).to(tl.int32))
        number += passed
    before = tl.load(BEFORE + number)
    tiles, inside = tl.load(BEFORE + number + 1) - before, turn - before * HEADS
    return number, inside // tiles, inside % tiles


@triton.jit
def problem_at(BEFORE, DATA, number, turn, count, offsets, tokens, keys, HEADS: tl.constexpr, PACKED: tl.constexpr,
               WIDTH: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Return sequence, head and tile from `problem_of`, then the sequence's start, queries, keys (`problem_sizes`)."""
    number, head, block = problem_of(BEFORE, number, turn, count, HEADS, AHEAD)
    start, n, m = problem_sizes(DATA, number, offsets, tokens, keys, PACKED, WIDTH)
    return number, head, block, start, n, m


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
    """Store how many tiles of scores, queries and keys a head has before each sequence. Runs as one program."""
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
    """Return where a problem's first row is in the scratch: number of a block of `tokens` rows, row in this block."""
    if PACKED:
        return head.to(tl.int64), start.to(tl.int64)
    else:
        return start.to(tl.int64) * HEADS + head, start * 0


@triton.jit
def scores_at(X, start, head, row, key, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the addresses of a problem's scores [rows, keys] in the scratch, whose lines have WIDTH elements."""
    block, first = line_of(start, head, tokens, HEADS, PACKED)
    return X + (block * tokens + first) * WIDTH + row[:, None] * WIDTH + key[None, :]


@triton.jit
def statistics_at(start, head, row, at, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                   KEYS: tl.constexpr):  # fmt: skip
    """Return the indices in the scratch of the rows' maxima and sums, for the tile of key `at`; rows are contiguous."""
    block, first = line_of(start, head, tokens, HEADS, PACKED)
    return (block * (WIDTH // KEYS) + at // KEYS) * tokens + first + row


@triton.jit
def clear_heads(
    X, DATA, offsets, tokens, keys, AT: tl.constexpr, PACKED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Store zeros in X, for all heads, in the rows of tokens that belong to no segment."""
    if PACKED:
        start, n, _ = sequence_of(DATA, offsets - 1, offsets, tokens, keys, PACKED)
        program = tl.program_id(0)
        for head in range(0, HEADS):
            clear(X, DATA, start, n, program * 0 + head, program, AT, D, PROGRAMS, ROWS, BLOCK_D)


class Grouped:
    """The scratch memory of a task, and the task's launches with their common constants.

    Tiles have 128 x 128 scores, as in the paper, with two exceptions. In fp32, which does not use tensor cores, they
    have 32 x 32, since larger tiles spill registers. With a head_dim above 128 they have 64 x 64, since larger tiles do
    not fit into shared memory. `pair_at` requires as many queries as keys in a tile.
    """

    def __init__(self, common: SegmentArguments, dtype: str, lines: int) -> None:
        """Reserve the counts of tiles in the scratch. lines: number of rows of scores, over all heads."""
        self.common, self.dtype, self.lines, self.scratch = common, dtype, int(lines), Scratch()
        self.side = 32 if dtype == "fp32" else 128 if common.constants["BLOCK_D"] <= 128 else 64
        self.width = ceil_div(common.longest[1], self.side) * self.side  # of a row of scores
        self.pairs, self.queries, self.of_keys = (self._before() for _ in range(3))

    def _before(self) -> ScratchAddress:
        """Reserve scratch for the number of tiles before each sequence, and for the number of all tiles."""
        return self.scratch.take(int(self.common.sequences) + 1, "int32")

    def scores(self, count: int) -> list[ScratchAddress]:
        """Reserve scratch for `count` arrays of all scores. Raises ConfigError if they take more than MOST bytes."""
        size = count * self.lines * self.width * DTYPES[self.dtype].bytes
        if size > MOST:
            raise ConfigError(
                f"attention as grouped products: the scores of a task, {count} x {self.lines} rows of {self.width}"
                f" {self.dtype}, take {size / 2**30:.2f} GiB; allowed: {MOST / 2**30:.0f} GiB; use the kernels of"
                " nntile_py, or a smaller tiles.batch or tiles.heads"
            )
        return [self.scratch.take(self.lines * self.width, self.dtype) for _ in range(count)]

    def statistics(self) -> list[ScratchAddress]:
        """Reserve scratch for the maximum and the sum of each row in each tile of scores."""
        return [self.scratch.take(self.lines * (self.width // self.side), "fp32") for _ in range(2)]

    def count_tiles(self) -> Launch:
        before = self.pairs, self.queries, self.of_keys
        return self.walk(_grouped_tiles, *before, *self.common.args[:4], programs=1)

    def walk(self, kernel: Any, *args: Parameter, programs: int = 0, **constexprs: Any) -> Launch:
        """Return a launch of a kernel. Of the task's constants, the launch passes those that the kernel takes."""
        programs = programs or PROGRAMS
        known = {**self.common.constants, "HEADS": self.common.sizes[0], "WIDTH": self.width, "AHEAD": AHEAD}
        known |= {"ROWS": self.side, "KEYS": self.side, "DEPTH": 64 if self.side == 128 else 32}
        known |= {"PROGRAMS": programs, **constexprs}
        taken = {name: value for name, value in known.items() if name in kernel.arg_names}
        return launch(kernel, programs, *args, warps=4 if self.side == 32 else 8, **taken)
