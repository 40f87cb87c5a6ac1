"""LayerNorm on CUDA: a program holds whole rows in registers. Tiles as in layer_norm.cpp."""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .accumulate_triton import combine_moments
from .dropout_rng_triton import dropped
from .elementwise import DropoutArgs
from .elementwise_triton import mask_of, row_in_whole, rows_in_whole
from .launch import (
    Int,
    Launches,
    Parameter,
    Scratch,
    ceil_div,
    launch,
    launches,
    numel,
    power_of_two,
    shape,
    tile,
)  # fmt: skip
from .layer_norm import LayerNormArgs, LayerNormGradArgs, LayerNormStatisticsArgs

WIDEST = 16384  # elements of a row in registers
MANY = 1024  # from this number of rows on, several block sizes are measured
PROGRAMS = 264  # programs of the gradient: two per SM of an H200; constant, so that sums have a fixed order


@triton.jit
def _normalise(x, mean, rstd, GAMMA, BETA, col, n):
    gamma, beta = tl.load(GAMMA + col, col < n).to(tl.float32), tl.load(BETA + col, col < n).to(tl.float32)
    return (x - mean[:, None]) * rstd[:, None] * gamma[None, :] + beta[None, :]


@triton.jit
def _summed(
    X, RESIDUAL, TOTAL, row, col, rows, n, DRAWS, mask_first, seed, key, limit, scale,
    HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, SIZES: tl.constexpr, STRIDES: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Return these columns of the input, [rows, columns]; a sum with the residual is stored."""
    at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    if DROPOUT:
        index = mask_first + row_in_whole(row, row < rows, DRAWS, SIZES, STRIDES, DRAWN)[:, None] + col[None, :]
        x = dropped(x, index, seed, key, limit, scale)
    if HAS_RESIDUAL:
        x += tl.load(RESIDUAL + at, inside, 0.0).to(tl.float32)
        total = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + at, total, inside)
        x = total.to(tl.float32)  # the stored value, which the gradient will read
    return x


@triton.jit
def _squares(x, mean, col, n):
    d = tl.where((col < n)[None, :], x - mean[:, None], 0.0)
    return tl.sum(d * d, 1)


@triton.jit
def _layer_norm(
    Y, STATISTICS, X, GAMMA, BETA, RESIDUAL, TOTAL,
    rows, n, eps, DRAWS, mask_first, seed, key, limit, scale,
    HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, SIZES: tl.constexpr, STRIDES: tl.constexpr, DRAWN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    x = _summed(
        X, RESIDUAL, TOTAL, row, col, rows, n, DRAWS, mask_first, seed, key, limit, scale,
        HAS_RESIDUAL, DROPOUT, SIZES, STRIDES, DRAWN,
    )  # fmt: skip
    total = tl.sum(x, 1)
    if REST:
        col_of_rest = BLOCK + tl.arange(0, REST)
        rest = _summed(
            X, RESIDUAL, TOTAL, row, col_of_rest, rows, n, DRAWS, mask_first, seed, key, limit, scale,
            HAS_RESIDUAL, DROPOUT, SIZES, STRIDES, DRAWN,
        )  # fmt: skip
        total += tl.sum(rest, 1)
    mean = total / n
    squares = _squares(x, mean, col, n)
    if REST:
        squares += _squares(rest, mean, col_of_rest, n)
    rstd = 1 / tl.sqrt(squares / n + eps)
    tl.store(STATISTICS + row * 2, mean, row < rows)
    tl.store(STATISTICS + row * 2 + 1, rstd, row < rows)
    kept, y = (row < rows)[:, None], _normalise(x, mean, rstd, GAMMA, BETA, col, n)
    tl.store(Y + row[:, None] * n + col[None, :], y, kept & (col < n)[None, :])
    if REST:
        y = _normalise(rest, mean, rstd, GAMMA, BETA, col_of_rest, n)
        tl.store(Y + row[:, None] * n + col_of_rest[None, :], y, kept & (col_of_rest < n)[None, :])


@triton.jit
def _moments(STATE, X, rows, n, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, kept = row[:, None] * n + col[None, :], row < rows
    inside = kept[:, None] & (col < n)[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    mean = tl.sum(x, 1) / n
    d = tl.where(inside, x - mean[:, None], 0.0)
    m2, count, s = tl.sum(d * d, 1), mean * 0.0 + n, STATE + row * 3
    if ACC:
        count, mean, m2 = combine_moments(
            tl.load(s, kept, 0.0), tl.load(s + 1, kept, 0.0), tl.load(s + 2, kept, 0.0), count, mean, m2
        )
    tl.store(s, count, kept)
    tl.store(s + 1, mean, kept)
    tl.store(s + 2, m2, kept)


@triton.jit
def _stat(STATISTICS, STATE, rows, eps, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept = row < rows
    count, m2 = tl.load(STATE + row * 3, kept, 1.0), tl.load(STATE + row * 3 + 2, kept, 1.0)
    tl.store(STATISTICS + row * 2, tl.load(STATE + row * 3 + 1, kept), kept)
    tl.store(STATISTICS + row * 2 + 1, 1 / tl.sqrt(m2 / count + eps), kept)


@triton.jit
def _apply(
    Y, STATISTICS, X, GAMMA, BETA, rows, n,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    mean, rstd = tl.load(STATISTICS + row * 2, row < rows, 0.0), tl.load(STATISTICS + row * 2 + 1, row < rows, 0.0)
    tl.store(Y + at, _normalise(x, mean, rstd, GAMMA, BETA, col, n), inside)


@triton.jit
def _grad_sums(
    SUMS, STATISTICS, DY, X, GAMMA, rows, n,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    kept = row < rows
    at, inside = row[:, None] * n + col[None, :], kept[:, None] & (col < n)[None, :]
    gamma = tl.load(GAMMA + col, col < n, 0.0).to(tl.float32)
    w = tl.load(DY + at, inside, 0.0).to(tl.float32) * gamma[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    mean, rstd = tl.load(STATISTICS + row * 2, kept, 0.0), tl.load(STATISTICS + row * 2 + 1, kept, 0.0)
    first, second = tl.sum(w, 1), tl.sum(w * (x - mean[:, None]) * rstd[:, None], 1)
    s = SUMS + row * 2
    if ACC:
        first += tl.load(s, kept, 0.0)
        second += tl.load(s + 1, kept, 0.0)
    tl.store(s, first, kept)
    tl.store(s + 1, second, kept)


@triton.jit
def _read_grad(DY, X, gamma, row, kept, col, n, mean, rstd):
    """Return these columns of dy, of the normalised x, and of dy * gamma."""
    at, inside = row[:, None] * n + col[None, :], kept[:, None] & (col < n)[None, :]
    dy = tl.load(DY + at, inside, 0.0).to(tl.float32)
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    return dy, (x - mean[:, None]) * rstd[:, None], dy * gamma[None, :]


@triton.jit
def _write_grad(
    DX, EXTRA, DROPPED, w, xhat, m1, m2, rstd, row, kept, col, n, DRAWS, mask_first, seed, key, limit, scale,
    HAS_EXTRA: tl.constexpr, DROPOUT: tl.constexpr, SIZES: tl.constexpr, STRIDES: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Store these columns of dx and of its dropout; return the last stored value."""
    at, inside = row[:, None] * n + col[None, :], kept[:, None] & (col < n)[None, :]
    dx = rstd[:, None] * (w - m1[:, None] - xhat * m2[:, None])
    if HAS_EXTRA:
        dx += tl.load(EXTRA + at, inside, 0.0).to(tl.float32)
    tl.store(DX + at, dx, inside)
    if DROPOUT:
        index = mask_first + row_in_whole(row, kept, DRAWS, SIZES, STRIDES, DRAWN)[:, None] + col[None, :]
        dx = dropped(dx, index, seed, key, limit, scale)
        tl.store(DROPPED + at, dx, inside)
    return tl.where(inside, dx, 0.0).to(DX.dtype.element_ty).to(tl.float32)


@triton.jit
def _grad(
    DX, PART, DY, X, STATISTICS, GAMMA, EXTRA, SUMS, DROPPED,
    rows, n, width, DRAWS, mask_first, seed, key, limit, scale,
    HAS_EXTRA: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SUMS: tl.constexpr,
    DROPOUT: tl.constexpr, SIZES: tl.constexpr, STRIDES: tl.constexpr, DRAWN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    gamma = tl.load(GAMMA + col, col < n, 0.0).to(tl.float32)
    zeros = tl.zeros([BLOCK], tl.float32)
    dgamma, dbeta, dbias = zeros, zeros, zeros
    # num_stages: the next rows are loaded into shared memory while the current rows are computed.
    for first in tl.range(tl.program_id(0).to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        kept = row < rows
        mean, rstd = tl.load(STATISTICS + row * 2, kept, 0.0), tl.load(STATISTICS + row * 2 + 1, kept, 0.0)
        dy, xhat, w = _read_grad(DY, X, gamma, row, kept, col, n, mean, rstd)
        if HAS_SUMS:
            m1, m2 = tl.load(SUMS + row * 2, kept, 0.0) / width, tl.load(SUMS + row * 2 + 1, kept, 0.0) / width
        else:
            m1, m2 = tl.sum(w, 1) / width, tl.sum(w * xhat, 1) / width
        dx = _write_grad(
            DX, EXTRA, DROPPED, w, xhat, m1, m2, rstd, row, kept, col, n, DRAWS, mask_first, seed, key, limit, scale,
            HAS_EXTRA, DROPOUT, SIZES, STRIDES, DRAWN,
        )  # fmt: skip
        dgamma += tl.sum(dy * xhat, 0)  # dy is 0 in rows beyond the last
        dbeta += tl.sum(dy, 0)
        if HAS_BIAS:
            dbias += tl.sum(dx, 0)
    part = PART + tl.program_id(0).to(tl.int64) * (3 if HAS_BIAS else 2) * n + col
    tl.store(part, dgamma, col < n)
    tl.store(part + n, dbeta, col < n)
    if HAS_BIAS:
        tl.store(part + 2 * n, dbias, col < n)


@triton.jit
def _grad_reduce(
    DGAMMA, DBETA, DBIAS, PART, parts, n,
    ACC_GAMMA: tl.constexpr, ACC_BETA: tl.constexpr, ACC_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the programs' partial sums in the order of programs."""
    col, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    gamma, beta = tl.zeros([PARTS, BLOCK], tl.float32), tl.zeros([PARTS, BLOCK], tl.float32)
    bias = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = PART + (first + k)[:, None] * (3 if HAS_BIAS else 2) * n + col[None, :]
        inside = (first + k < parts)[:, None] & (col < n)[None, :]
        gamma += tl.load(part, inside, 0.0)
        beta += tl.load(part + n, inside, 0.0)
        if HAS_BIAS:
            bias += tl.load(part + 2 * n, inside, 0.0)
    dgamma, dbeta = tl.sum(gamma, 0), tl.sum(beta, 0)
    if ACC_GAMMA:
        dgamma += tl.load(DGAMMA + col, col < n).to(tl.float32)
    if ACC_BETA:
        dbeta += tl.load(DBETA + col, col < n).to(tl.float32)
    tl.store(DGAMMA + col, dgamma, col < n)
    tl.store(DBETA + col, dbeta, col < n)
    if HAS_BIAS:
        dbias = tl.sum(bias, 0)
        if ACC_BIAS:
            dbias += tl.load(DBIAS + col, col < n).to(tl.float32)
        tl.store(DBIAS + col, dbias, col < n)


def row_blocks(task: Task, number: int, elements: int) -> tuple[int, int, dict[str, int]]:
    """Return rows and columns of a tile; rows, columns and warps of a program with about `elements` elements."""
    n = shape(task, number)[-1]
    if n > WIDEST:
        raise ValueError(f"{task.op}: rows of {n} are not allowed on CUDA; cut embed into tiles of at most {WIDEST}")
    block = power_of_two(n)
    rows = max(1, elements // block)
    warps = min(16, max(1, rows * block // 1024))  # 32 elements a thread
    return numel(task, number) // n, n, {"ROWS": rows, "BLOCK": block, "warps": warps}


def by_rows(kernel: Any, task: Task, number: int, **constexprs: bool) -> Launches:
    """Launch a kernel on all tiles of the task, with the sizes of tile `number`, in blocks of rows."""
    rows, n, blocks = row_blocks(task, number, 1024)
    tiles = [tile(task, k) for k in range(len(task.accesses))]
    return Launches((launch(kernel, ceil_div(rows, blocks["ROWS"]), *tiles, rows, n, **constexprs, **blocks),))


def _in_two(n: int, blocks: dict[str, int]) -> None:
    """Split a row of 768 into columns of 512 and 256, so that no thread is idle."""
    block = blocks["BLOCK"]
    rest = power_of_two(n - block // 2) if n > 1 else block
    two = block // 2 + rest < block and block >= 32
    blocks.update({"BLOCK": block // 2, "REST": rest} if two else {"REST": 0})


def _dropout(task: Task, dropout: DropoutArgs | None, number: int) -> tuple[list[Parameter], dict[str, Any]]:
    """Return parameters and constants of the dropout of tile `number`, or of no dropout."""
    if not dropout:
        return [tile(task, 0), *[Int(0, 64)] * 4, 0.0], {"DROPOUT": False, "SIZES": (), "STRIDES": (), "DRAWN": False}
    constants = rows_in_whole(shape(task, number), dropout)
    return mask_of(task, dropout), {"DROPOUT": True, **constants}


@launches("layer_norm")
def _describe(task: Task) -> Launches:
    rows, n, blocks = row_blocks(task, 2, 1024)
    if n == blocks["BLOCK"]:
        blocks["warps"] = min(16, 2 * blocks["warps"])  # elements per thread: 16, but 32 for a partial block
    _in_two(n, blocks)
    has = len(task.accesses) > 5  # residual and total; dropout requires both
    args: list[Parameter] = [tile(task, k) for k in ((0, 1, 2, 3, 4, 5, 6) if has else (0, 1, 2, 3, 4, 0, 0))]
    arguments = LayerNormArgs.of(task)
    mask, constants = _dropout(task, arguments.dropout, 2)
    args += [rows, n, float(arguments.eps), *mask]
    # Fewer rows per program cost more starts of programs; more rows per program leave too few programs.
    more = (1, 2, 4) if rows >= MANY else (1,)
    cuts = [blocks | {name: times * blocks[name] for name in ("ROWS", "warps")} for times in more]
    ways = [
        (launch(_layer_norm, ceil_div(rows, cut["ROWS"]), *args, HAS_RESIDUAL=has, **constants, **cut),) for cut in cuts
    ]
    names = ", ".join(f"{cut['ROWS']}x{cut['warps']}" for cut in cuts)
    key = f"layer_norm {int(rows)} {n} {tile(task, 2).dtype} {int(has)} {int(arguments.dropout is not None)} of {names}"
    return Launches(ways[0], others=tuple(ways[1:]), key=key if len(ways) > 1 else "")


@launches("layer_norm_moments")
def _describe_moments(task: Task) -> Launches:
    return by_rows(_moments, task, 1, ACC=task.accesses[0].accumulate)


@launches("layer_norm_stat")
def _describe_stat(task: Task) -> Launches:
    rows = numel(task, 0) // 2
    args: list[Parameter] = [tile(task, 0), tile(task, 1), rows, float(LayerNormStatisticsArgs.of(task).eps)]
    return Launches((launch(_stat, ceil_div(rows, 128), *args, ROWS=128),))


@launches("layer_norm_apply")
def _describe_apply(task: Task) -> Launches:
    return by_rows(_apply, task, 2)


@launches("layer_norm_grad_sums")
def _describe_grad_sums(task: Task) -> Launches:
    return by_rows(_grad_sums, task, 2, ACC=task.accesses[0].accumulate)


@launches("layer_norm_grad")
def _describe_grad(task: Task) -> Launches:
    rows, n, blocks = row_blocks(task, 0, 4096)
    a = LayerNormGradArgs.of(task)
    dx, dgamma, dbeta, dy, x, statistics, gamma = (tile(task, k) for k in range(7))
    extra, dbias, sums, dropout = (tile(task, k) for k in (a.add, a.dbias, a.sums, a.dropped))
    mask, constants = _dropout(task, a.dropout, 0)
    parts, scratch = min(ceil_div(rows, blocks["ROWS"]), PROGRAMS), Scratch()
    part = scratch.take(parts * (3 if a.dbias else 2) * n, "fp32")
    args: list[Parameter] = [dx, part, dy, x, statistics, gamma, extra, sums, dropout, rows, n, a.embed, *mask]
    blocks["STAGES"] = 3 if blocks["BLOCK"] <= 4096 else 1  # within shared memory
    has = {"HAS_EXTRA": a.add > 0, "HAS_BIAS": a.dbias > 0, "HAS_SUMS": a.sums > 0}
    acc = {f"ACC_{name}": task.accesses[k].accumulate for name, k in (("GAMMA", 1), ("BETA", 2), ("BIAS", a.dbias))}
    rest = {"HAS_BIAS": a.dbias > 0, **acc, "PARTS": 64, "BLOCK": 16}
    return Launches(
        (
            launch(_grad, parts, *args, **has, **constants, **blocks),
            launch(_grad_reduce, ceil_div(n, 16), dgamma, dbeta, dbias, part, parts, n, **rest),
        ),
        scratch.bytes,
    )
