"""Gradient norm and optimizers on CUDA. Tiles, ints and floats as in optimizer.cpp."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .launch import (
    Launches,
    Parameter,
    Scratch,
    TaskFloat,
    ceil_div,
    constant,
    launch,
    launches,
    power_of_two,
    tile,
    words,
)

FAN_IN = 8  # tiles of scalars that one kernel takes: FAN_IN of optimizer.py
PROGRAMS = 1056  # fixed, so that the order of the sums is


@triton.jit
def _squares(PART, X, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + at, at < n, 0.0).to(tl.float32)
        total += x * x
    tl.store(PART + tl.program_id(0), tl.sum(total.to(tl.float64), 0))


@triton.jit
def _total(OUT, PART, parts, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(OUT, tl.sum(tl.load(PART + k, k < parts, 0.0), 0))


@triton.jit
def _load_sum(A, B, C, D, E, F, G, H, COUNT: tl.constexpr):
    total = tl.load(A)
    if COUNT > 1:
        total += tl.load(B)
    if COUNT > 2:
        total += tl.load(C)
    if COUNT > 3:
        total += tl.load(D)
    if COUNT > 4:
        total += tl.load(E)
    if COUNT > 5:
        total += tl.load(F)
    if COUNT > 6:
        total += tl.load(G)
    if COUNT > 7:
        total += tl.load(H)
    return total


@triton.jit
def _add_scalars(OUT, A, B, C, D, E, F, G, H, COUNT: tl.constexpr):
    tl.store(OUT, _load_sum(A, B, C, D, E, F, G, H, COUNT))


@triton.jit
def _clip(
    NORM, CLIP, A, B, C, D, E, F, G, H,
    limit, COUNT: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    norm = tl.sqrt(_load_sum(A, B, C, D, E, F, G, H, COUNT))
    tl.store(NORM, norm)
    factor = tl.full((), 1.0, tl.float64)
    if LIMITED:
        factor = tl.minimum(factor, limit / (norm + 1e-6))
    tl.store(CLIP, factor)


@triton.jit
def _adamw(
    PARAM, M, V, GRAD, CLIP, MASTER, n,
    lr, correction1, correction2,
    keep1, new1, keep2, new2, eps, decay,
    HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(GRAD + at, inside).to(tl.float32) * tl.load(CLIP).to(tl.float32)
    m = keep1 * tl.load(M + at, inside).to(tl.float32) + new1 * g
    v = keep2 * tl.load(V + at, inside).to(tl.float32) + new2 * g * g
    tl.store(M + at, m, inside)
    tl.store(V + at, v, inside)
    p = tl.load((MASTER if HAS_MASTER else PARAM) + at, inside).to(tl.float32)
    # p - lr decay p, not (1 - lr decay) p: the factor would lose most digits of lr decay.
    p -= lr * decay * p
    p -= (lr / correction1) * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    tl.store(PARAM + at, p, inside)
    if HAS_MASTER:
        tl.store(MASTER + at, p, inside)


@triton.jit
def _sgd(
    PARAM, M, GRAD, CLIP, MASTER, n, lr, momentum, decay,
    HAS_MOMENTUM: tl.constexpr, HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    p = tl.load((MASTER if HAS_MASTER else PARAM) + at, inside).to(tl.float32)
    d = tl.load(GRAD + at, inside).to(tl.float32) * tl.load(CLIP).to(tl.float32) + decay * p
    if HAS_MOMENTUM:
        d += momentum * tl.load(M + at, inside).to(tl.float32)
        tl.store(M + at, d, inside)
    p -= lr * d
    tl.store(PARAM + at, p, inside)
    if HAS_MASTER:
        tl.store(MASTER + at, p, inside)


@launches("sum_squares")
def _describe_squares(task: Task) -> Launches:
    n, scratch = words(task, 1), Scratch()
    parts = min(ceil_div(n, 4096), PROGRAMS)
    if parts == 1:
        return Launches((launch(_squares, 1, tile(task, 0), tile(task, 1), n, BLOCK=4096, warps=8),))
    part = scratch.take(parts, "fp64")
    return Launches(
        (
            launch(_squares, parts, part, tile(task, 1), n, BLOCK=4096, warps=8),
            launch(_total, 1, tile(task, 0), part, parts, BLOCK=power_of_two(PROGRAMS)),
        ),
        scratch.bytes,
    )


def _terms(task: Task, first: int) -> list[Any]:
    """The addresses of the tiles from `first`, filled up to FAN_IN."""
    count = len(task.accesses) - first
    assert 0 < count <= FAN_IN, task.kernel
    return [tile(task, first + min(k, count - 1)) for k in range(FAN_IN)]


@launches("add_scalars")
def _describe_add(task: Task) -> Launches:
    count = len(task.accesses) - 1
    return Launches((launch(_add_scalars, 1, tile(task, 0), *_terms(task, 1), COUNT=count, warps=1),))


@launches("clip")
def _describe_clip(task: Task) -> Launches:
    limit, count = constant(task, 0), len(task.accesses) - 2
    args: list[Parameter] = [tile(task, 0), tile(task, 1), *_terms(task, 2), limit]
    return Launches((launch(_clip, 1, *args, COUNT=count, LIMITED=limit > 0, warps=1),))


# tiles: param, m, v, grad, clip (, master)
@launches("adamw")
def _describe_adamw(task: Task) -> Launches:
    n, has_master = words(task, 0), len(task.accesses) > 5
    tiles: list[Parameter] = [tile(task, k) for k in (0, 1, 2, 3, 4, 5 if has_master else 0)]
    b1, b2, eps, decay = (constant(task, k) for k in range(3, 7))
    floats: list[Parameter] = [TaskFloat(0), TaskFloat(1), TaskFloat(2), b1, 1 - b1, b2, 1 - b2, eps, decay]
    return Launches((launch(_adamw, ceil_div(n, 1024), *tiles, n, *floats, HAS_MASTER=has_master, BLOCK=1024),))


# tiles: grad, clip, param (, m) (, master); ints: 1 if there is a master
@launches("sgd")
def _describe_sgd(task: Task) -> Launches:
    n, has_master = words(task, 0), bool(task.ints)
    has_momentum = len(task.accesses) - has_master > 3
    last = len(task.accesses) - 1
    tiles: list[Parameter] = [tile(task, k) for k in (2, 3 if has_momentum else 2, 0, 1, last if has_master else 2)]
    floats: list[Parameter] = [TaskFloat(0), constant(task, 1), constant(task, 2)]
    has = {"HAS_MOMENTUM": has_momentum, "HAS_MASTER": has_master}
    return Launches((launch(_sgd, ceil_div(n, 1024), *tiles, n, *floats, **has, BLOCK=1024),))
