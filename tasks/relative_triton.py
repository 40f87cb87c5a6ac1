"""Relative positions in attention on CUDA (see relative.py). The tasks have the same tiles as in relative.cpp.

Forward: a program adds the products to a block of scores [queries, keys].

Gradient: the index is non-decreasing, so all distances with the same position along `relative` are consecutive. A
program finds this interval by binary search and sums dy over it, in the order of distances. There are no atomic
additions, so results are the same to the bit each time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .launch import Launch, Launches, ceil_div, launch, launches, numel, power_of_two, shape, tile
from .relative import RelativeArgs

WIDE = 64  # maximum elements of a block along its second axis


@triton.jit
def _relative_scores(
    Y, INDEX, QUERIES, KEYS, seq, key, relative, first, lines,
    OF_QUERIES: tl.constexpr, OF_KEYS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the products to a block of scores; lines: rows of the tile, that is its queries times all other axes."""
    across = tl.cdiv(key, BLOCK)
    line = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    valid = (line < lines)[:, None] & (k < key)[None, :]
    row = tl.load(INDEX + (first - line % seq)[:, None] + k[None, :], valid, 0)
    at = Y + line[:, None] * key + k[None, :]
    y = tl.load(at, valid, 0.0).to(tl.float32)
    if OF_QUERIES:
        y += tl.load(QUERIES + line[:, None] * relative + row, valid, 0.0).to(tl.float32)
    if OF_KEYS:
        of_key = (line // seq * key)[:, None] + k[None, :]
        y += tl.load(KEYS + of_key * relative + row, valid, 0.0).to(tl.float32)
    tl.store(at, y, valid)


@triton.jit
def first_of(INDEX, row, distances, STEPS: tl.constexpr):
    """Return how many of the first `distances` entries of the index are less than `row`. The index is non-decreasing.

    STEPS: iterations of the binary search.
    """
    low, high = row * 0, row * 0 + distances
    for _ in range(STEPS):
        middle = (low + high) // 2
        live = low < high
        less = live & (tl.load(INDEX + middle, live, 0) < row)
        high = tl.where(live & (less == 0), middle, high)
        low = tl.where(less, middle + 1, low)
    return low


@triton.jit
def _relative_scores_grad(
    OUT, DY, INDEX, seq, key, relative, first, lines, distances,
    OF_KEYS: tl.constexpr, ACC: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a block of the gradient of content_to_position, or with OF_KEYS of position_to_content.

    Args:
        first: position in the index for query 0 and key 0 of the tile. For query s and key k it is first + k - s.
        lines: rows of OUT: queries, or with OF_KEYS keys, times all other axes of the tile.
    """
    across = tl.cdiv(relative, BLOCK)
    line = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    begin = first_of(INDEX, row, distances, STEPS)
    count = tl.where(row < relative, first_of(INDEX, row + 1, distances, STEPS) - begin, 0)
    valid = (line < lines)[:, None] & (row < relative)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for number in range(tl.max(count, 0)):
        place = (begin + number)[None, :]
        if OF_KEYS:
            k = (line % key)[:, None]
            s, limit = first + k - place, seq
            other, at = s, (line // key * seq)[:, None] * key + s * key + k
        else:
            other, limit = place - first + (line % seq)[:, None], key
            at = line[:, None] * key + other
        inside = valid & (number < count)[None, :] & (other >= 0) & (other < limit)
        total += tl.load(DY + at, inside, 0.0).to(tl.float32)
    to = OUT + line[:, None] * relative + row[None, :]
    if ACC:
        total += tl.load(to, valid, 0.0).to(tl.float32)
    tl.store(to, total, valid)


def _blocks(lines: int, columns: int) -> tuple[int, dict[str, int]]:
    """Return the number of programs, and {ROWS, BLOCK}: the lines and columns that one program computes."""
    block = min(power_of_two(columns), WIDE)
    rows = min(power_of_two(lines), max(1, 1024 // block))
    return ceil_div(lines, rows) * ceil_div(columns, block), {"ROWS": rows, "BLOCK": block}


@launches("relative_scores")
def _describe(task: Task) -> Launches:
    args, (seq, key), lines = RelativeArgs.of(task), shape(task, 0)[-2:], numel(task, 0) // shape(task, 0)[-1]
    grid, blocks = _blocks(lines, key)
    addresses = tile(task, 0), tile(task, 1), tile(task, 2), tile(task, 2 + (args.queries and args.keys))
    numbers = seq, key, shape(task, 2)[-1], args.first, lines
    flags = {"OF_QUERIES": args.queries, "OF_KEYS": args.keys}
    return Launches((launch(_relative_scores, grid, *addresses, *numbers, **flags, **blocks),))


@launches("relative_scores_grad")
def _describe_grad(task: Task) -> Launches:
    args = RelativeArgs.of(task)
    sums = args.queries + args.keys
    (seq, key), (distances,) = shape(task, sums)[-2:], shape(task, sums + 1)
    passes: list[Launch] = []
    for number in range(sums):
        relative = shape(task, number)[-1]
        lines = numel(task, number) // relative
        grid, blocks = _blocks(lines, relative)
        of_keys = number == 1 or not args.queries
        flags = {"OF_KEYS": of_keys, "ACC": task.accesses[number].accumulate, "STEPS": distances.bit_length()}
        numbers = seq, key, relative, args.first, lines, distances
        addresses = tile(task, number), tile(task, sums), tile(task, sums + 1)
        passes.append(launch(_relative_scores_grad, grid, *addresses, *numbers, **flags, **blocks))
    return Launches(tuple(passes))
