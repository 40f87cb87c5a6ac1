"""The mean squared error on CUDA. The tasks have the same tiles as in squared_error.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .cross_entropy_triton import scaled_total
from .launch import Launches, Scratch, ceil_div, elementwise, launch, launches, numel, slot, tile
from .squared_error import SquaredErrorArgs

PROGRAMS = 1024  # maximum number of programs of a sum; constant, so that sums have a fixed order


@triton.jit
def _squared_error(PARTS, X, TARGET, n, BLOCK: tl.constexpr):
    """Store the program's partial sum of (x - target)^2. The blocks are dealt out to the programs in turn."""
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.load(X + at, at < n, 0.0).to(tl.float32) - tl.load(TARGET + at, at < n, 0.0).to(tl.float32)
        total += d * d
    tl.store(PARTS + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _squared_error_grad(DX, X, TARGET, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(X + at, at < n).to(tl.float32) - tl.load(TARGET + at, at < n).to(tl.float32)
    tl.store(DX + at, 2 * scale * d, at < n)


@launches("squared_error")
def _describe(task: Task) -> Launches:
    loss, x, target = (tile(task, k) for k in range(3))
    n, scratch = numel(task, 1), Scratch()
    programs = min(ceil_div(n, 1024), PROGRAMS)
    parts, acc, scale = scratch.take(programs, "fp32"), task.accesses[0].accumulate, SquaredErrorArgs.of(task).scale
    return Launches(
        (
            launch(_squared_error, programs, parts, x, target, n, BLOCK=1024),
            launch(scaled_total, 1, loss, parts, programs, slot(task, scale), ACC=acc, BLOCK=1024),
        ),
        scratch.bytes,
    )


@launches("squared_error_grad")
def _describe_grad(task: Task) -> Launches:
    return elementwise(_squared_error_grad, task, slot(task, SquaredErrorArgs.of(task).scale))
