"""Selection of one position along an axis on CUDA. The tasks have the same tiles as in select.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .launch import Launches, ceil_div, elementwise, launch, launches, numel, shape, tile
from .select import SelectArgs


@triton.jit
def _select(Y, X, n, index, SIZE: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """y[k, i] = x[k, index, i]. x has SIZE positions along the axis and INNER contiguous elements per position."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + (at // INNER * SIZE + index) * INNER + at % INNER, at < n), at < n)


@triton.jit
def _select_grad(DX, DY, n, index, SIZE: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """dx[k, j, i] = dy[k, i] if j is the index, else 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = (at // INNER % SIZE == index) & (at < n)
    tl.store(DX + at, tl.load(DY + at // (INNER * SIZE) * INNER + at % INNER, chosen, 0.0), at < n)


def _axis(task: Task, number: int) -> dict[str, int]:
    """Return {SIZE, INNER}: positions along the axis in tile `number`, and contiguous elements per position."""
    sizes, axis = shape(task, number), SelectArgs.of(task).axis
    return {"SIZE": sizes[axis], "INNER": math.prod(sizes[axis + 1 :])}


@launches("select")
def _describe(task: Task) -> Launches:
    return elementwise(_select, task, SelectArgs.of(task).index, **_axis(task, 1))


@launches("select_grad")
def _describe_grad(task: Task) -> Launches:
    n = numel(task, 0)
    dy = tile(task, len(task.accesses) - 1)  # dx itself if the task has no dy; the kernel then loads nothing from it
    args = (tile(task, 0), dy, n, SelectArgs.of(task).index)
    return Launches((launch(_select_grad, ceil_div(n, 1024), *args, **_axis(task, 0), BLOCK=1024),))
