"""Muon on CUDA. The tasks have the tiles of muon.cpp; muon_update may have a further tile, the master of the parameter.

The products between muon_gather and muon_update are tasks of Contract.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .launch import Launches, Parameter, Scratch, ceil_div, launch, launches, numel, shape, slot, tile
from .muon import MuonGatherArgs, MuonMomentumArgs, MuonUpdateArgs
from .optimizer_triton import load_param, master_bits, store_param

BLOCK = 1024
PART = 32  # blocks whose squares one program adds; constant, so that sums have a fixed order


@triton.jit
def _momentum(M, U, GRAD, CLIP, n, old, fresh, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    clip = tl.load(CLIP).to(tl.float32)
    kept = tl.full([BLOCK], clip, tl.float32) >= 0
    # Explicit fma: otherwise the compiler rounds differently for aligned and for other sizes (see _adamw).
    d = fresh * (tl.load(GRAD + at, (at < n) & kept, 0.0).to(tl.float32) * clip)
    m = tl.fma(old, tl.load(M + at, at < n, 0.0).to(tl.float32), d)
    tl.store(M + at, m, (at < n) & kept)
    u = tl.fma(old, m, d) if NESTEROV else m
    tl.store(U + at, tl.where(kept, u, 0.0), at < n)


@triton.jit
def _place(at, first, SIZES: tl.constexpr, STRIDES: tl.constexpr):
    """Return where elements `at` of a tile lie in the stack of matrices. SIZES, STRIDES: from `_merged`."""
    place, rest = first + tl.zeros_like(at), at
    for k in tl.static_range(len(SIZES)):
        place += (rest % SIZES[len(SIZES) - 1 - k]) * STRIDES[len(SIZES) - 1 - k]
        rest = rest // SIZES[len(SIZES) - 1 - k]
    return place


@triton.jit
def _copy(STACK, U, n, first, SIZES: tl.constexpr, STRIDES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(U + at, at < n)
    tl.store(STACK + _place(at, first, SIZES, STRIDES), value.to(STACK.dtype.element_ty), at < n)


@triton.jit
def _squares_of_matrix(STACK, SUMS, n, parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of squares of PART blocks of a matrix with n elements; program_id(1): the matrix."""
    matrix, total = tl.program_id(1).to(tl.int64), tl.zeros([BLOCK], tl.float32)
    for k in range(PART):
        at = (tl.program_id(0).to(tl.int64) * PART + k) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(STACK + matrix * n + at, at < n, 0.0).to(tl.float32)
        total += value * value
    tl.store(SUMS + matrix * parts + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _divide(STACK, SUMS, n, parts, eps, BLOCK: tl.constexpr):
    """Divide a block of a matrix by the matrix's Frobenius norm, or by eps if the norm is smaller."""
    matrix, total = tl.program_id(1).to(tl.int64), tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total += tl.load(SUMS + matrix * parts + k, k < parts, 0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(total, 0)), eps)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(STACK + matrix * n + at, at < n, 0.0).to(tl.float32)
    tl.store(STACK + matrix * n + at, (value / norm).to(STACK.dtype.element_ty), at < n)


@triton.jit
def _update(
    PARAM, STACK, CLIP, MASTER, n, lr, factor, decay, first,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, MASTER_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    clip = tl.load(CLIP).to(tl.float32)
    inside = (at < n) & (tl.full([BLOCK], clip, tl.float32) >= 0)
    x = tl.load(STACK + _place(at, first, SIZES, STRIDES), inside).to(tl.float32)
    p = load_param(PARAM, MASTER, at, inside, MASTER_BITS)
    p = tl.fma(-lr * decay, p, p)
    store_param(PARAM, MASTER, at, tl.fma(-lr * factor, x, p), inside, MASTER_BITS)


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> dict[str, Any]:
    """Return sizes and strides of a tile's axes in the stack of matrices. Axes that are contiguous there are merged."""
    pairs: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if pairs and pairs[-1][1] == stride * size:
            size *= pairs.pop()[0]
        pairs.append((size, stride))
    return {"SIZES": tuple(size for size, _ in pairs), "STRIDES": tuple(stride for _, stride in pairs)}


# tiles: m, u, grad, clip
@launches("muon_momentum")
def _describe_momentum(task: Task) -> Launches:
    n, a = numel(task, 0), MuonMomentumArgs.of(task)
    b = float(a.momentum)
    tiles: list[Parameter] = [tile(task, k) for k in range(4)]
    args = *tiles, n, b, 1 - b
    return Launches((launch(_momentum, ceil_div(n, BLOCK), *args, NESTEROV=a.nesterov, BLOCK=BLOCK),))


# tiles: stack of matrices, tiles of u
@launches("muon_gather")
def _describe_gather(task: Task) -> Launches:
    a, stack, axes = MuonGatherArgs.of(task), tile(task, 0), len(shape(task, 1))
    n, scratch = numel(task, 0) // a.matrices, Scratch()
    parts = ceil_div(n, PART * BLOCK)
    sums = scratch.take(parts * a.matrices, "fp32")
    copies = [
        launch(
            _copy, ceil_div(numel(task, k), BLOCK), stack, tile(task, k), numel(task, k), place, BLOCK=BLOCK,
            **_merged(shape(task, k), a.places[:axes]),
        )
        for k, place in enumerate(a.places[axes:], 1)
    ]  # fmt: skip
    squares = launch(_squares_of_matrix, (parts, a.matrices), stack, sums, n, parts, PART=PART, BLOCK=BLOCK)
    divide = launch(_divide, (ceil_div(n, BLOCK), a.matrices), stack, sums, n, parts, float(a.eps), BLOCK=BLOCK)
    return Launches((*copies, squares, divide), scratch.bytes)


# tiles: param, stack of matrices, clip (, master)
@launches("muon_update")
def _describe_update(task: Task) -> Launches:
    n, a, bits = numel(task, 0), MuonUpdateArgs.of(task), master_bits(task, 3)
    *strides, place = a.places
    tiles: list[Parameter] = [tile(task, k) for k in (0, 1, 2, 3 if bits else 0)]
    args = *tiles, n, slot(task, a.lr), float(a.factor), float(a.weight_decay), place
    constants = {**_merged(shape(task, 0), strides), "MASTER_BITS": bits, "BLOCK": BLOCK}
    return Launches((launch(_update, ceil_div(n, BLOCK), *args, **constants),))
