"""CUDA kernels that combine two partial results: sums, softmax states or moments. CPU kernels: accumulate.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import MONOIDS, BusyArgs, CombineArgs, Task

from .launch import Launches, ceil_div, elementwise, launch, launches, numel, power_of_two, shape, tile


@triton.jit
def combine_softmax(top_a, sum_a, top_b, sum_b):
    """Combine two softmax states (max, sumexp). A state with sumexp 0 is empty.

    Return in fp32: max, sumexp, and the factors by which to multiply the values of the first and of the second state.
    """
    top_a, sum_a, top_b, sum_b = top_a.to(tl.float32), sum_a.to(tl.float32), top_b.to(tl.float32), sum_b.to(tl.float32)
    top = tl.where(sum_a == 0, top_b, tl.where(sum_b == 0, top_a, tl.maximum(top_a, top_b)))
    keep_a = tl.where(sum_a == 0, 0.0, tl.exp(top_a - top))
    keep_b = tl.where(sum_b == 0, 0.0, tl.exp(top_b - top))
    return top, sum_a * keep_a + sum_b * keep_b, keep_a, keep_b


@triton.jit
def combine_moments(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    """Combine two states (count, mean, M2: sum of squared deviations from the mean); Chan, Golub and LeVeque (1979)."""
    count, delta = n_a + n_b, mean_b - mean_a
    share = n_b / tl.maximum(count, 1.0)
    return count, mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share


@triton.jit
def _add_to(A, B, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    accumulator = tl.float64 if A.dtype.element_ty == tl.float64 else tl.float32  # losses are fp64
    value = tl.load(A + at, at < n).to(accumulator) + tl.load(B + at, at < n).to(accumulator)
    tl.store(A + at, value, at < n)


@triton.jit
def _combine_softmax(A, B, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept, first = row < rows, row * width
    top_a, sum_a = tl.load(A + first, kept, 0.0), tl.load(A + first + 1, kept, 0.0)
    top_b, sum_b = tl.load(B + first, kept, 0.0), tl.load(B + first + 1, kept, 0.0)
    top, total, keep_a, keep_b = combine_softmax(top_a, sum_a, top_b, sum_b)
    for start in range(2, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        at, inside = first[:, None] + col[None, :], kept[:, None] & (col < width)[None, :]
        value = tl.load(A + at, inside) * keep_a[:, None] + tl.load(B + at, inside) * keep_b[:, None]
        tl.store(A + at, value, inside)
    tl.store(A + first, top, kept)
    tl.store(A + first + 1, total, kept)


@triton.jit
def _combine_moments(A, B, rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept, a, b = row < rows, A + row * 3, B + row * 3
    count, mean, m2 = combine_moments(
        tl.load(a, kept, 0.0), tl.load(a + 1, kept, 0.0), tl.load(a + 2, kept, 0.0),
        tl.load(b, kept, 0.0), tl.load(b + 1, kept, 0.0), tl.load(b + 2, kept, 0.0),
    )  # fmt: skip
    tl.store(a, count, kept)
    tl.store(a + 1, mean, kept)
    tl.store(a + 2, m2, kept)


# tiles: into, part
@launches("combine")
def _combine(task: Task) -> Launches:
    a, b, monoid = tile(task, 0), tile(task, 1), MONOIDS[CombineArgs.of(task).monoid]
    if monoid == "sum":
        return elementwise(_add_to, task)
    width = shape(task, 0)[-1]
    rows = numel(task, 0) // width
    if monoid == "moments":
        return Launches((launch(_combine_moments, ceil_div(rows, 128), a, b, rows, ROWS=128),))
    block = min(power_of_two(max(width - 2, 1)), 128)
    lines = 1024 // block
    grid = ceil_div(rows, lines)
    return Launches((launch(_combine_softmax, grid, a, b, rows, width, ROWS=lines, BLOCK=block),))


@triton.jit
def _busy(X, n):
    x = tl.load(X)
    for _ in range(n):
        x = x * 0.5 + 0.5
    tl.store(X, x)


@launches("busy")
def _busy_alone(task: Task) -> Launches:
    return Launches((launch(_busy, 1, tile(task, 0), BusyArgs.of(task).count, warps=1),))


@launches("empty")
def _empty(task: Task) -> Launches:
    return Launches(())
