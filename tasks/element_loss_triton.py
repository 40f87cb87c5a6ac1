"""Losses that are a sum over elements on CUDA. The tasks have the same tiles as in element_loss.cpp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from functools import partial

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .cross_entropy_triton import scaled_total
from .element_loss import ElementLossArgs
from .launch import Launches, Scratch, ceil_div, elementwise, launch, launches, numel, slot, tile

PROGRAMS = 1024  # maximum number of programs of a sum; constant, so that sums have a fixed order


@triton.jit
def _loss(x, target, BINARY: tl.constexpr):
    """Return each element's loss: the squared error or, with BINARY, the cross-entropy (0 where the target is -100)."""
    if BINARY:
        small = tl.exp(-tl.abs(x))
        total = 1.0 + small
        rest = tl.where(total == 1.0, 1.0, total - 1.0)
        log1p = tl.where(total == 1.0, small, tl.log(total) * small / rest)  # exact for small numbers too
        return tl.where(target == -100.0, 0.0, tl.maximum(x, 0.0) - x * target + log1p)
    return (x - target) * (x - target)


@triton.jit
def _derivative(x, target, BINARY: tl.constexpr):
    """Return the derivative of each element's loss."""
    if BINARY:
        return tl.where(target == -100.0, 0.0, 1.0 / (1.0 + tl.exp(-x)) - target)
    return 2.0 * (x - target)


@triton.jit
def _element_loss(PARTS, X, TARGET, n, BINARY: tl.constexpr, BLOCK: tl.constexpr):
    """Store the program's partial sum of the elements' losses. Each program sums every num_programs(0)-th block."""
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x, target = tl.load(X + at, at < n, 0.0).to(tl.float32), tl.load(TARGET + at, at < n, 0.0).to(tl.float32)
        total += tl.where(at < n, _loss(x, target, BINARY), 0.0)
    tl.store(PARTS + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _element_loss_grad(DX, X, TARGET, n, scale, BINARY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x, target = tl.load(X + at, at < n).to(tl.float32), tl.load(TARGET + at, at < n).to(tl.float32)
    tl.store(DX + at, scale * _derivative(x, target, BINARY), at < n)


def _describe(task: Task, binary: bool) -> Launches:
    loss, x, target = (tile(task, k) for k in range(3))
    n, scratch = numel(task, 1), Scratch()
    programs = min(ceil_div(n, 1024), PROGRAMS)
    parts, acc, scale = scratch.take(programs, "fp32"), task.accesses[0].accumulate, ElementLossArgs.of(task).scale
    return Launches(
        (
            launch(_element_loss, programs, parts, x, target, n, BINARY=binary, BLOCK=1024),
            launch(scaled_total, 1, loss, parts, programs, slot(task, scale), ACC=acc, BLOCK=1024),
        ),
        scratch.bytes,
    )


def _describe_grad(task: Task, binary: bool) -> Launches:
    return elementwise(_element_loss_grad, task, slot(task, ElementLossArgs.of(task).scale), BINARY=binary)


for _kernel, _binary in (("squared_error", False), ("binary_cross_entropy", True)):
    launches(_kernel)(partial(_describe, binary=_binary))
    launches(f"{_kernel}_grad")(partial(_describe_grad, binary=_binary))
