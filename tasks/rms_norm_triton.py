"""RMSNorm on CUDA: a program holds whole rows in registers. Tiles as in rms_norm.cpp."""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .elementwise_triton import sum_of_parts
from .launch import Launches, Parameter, Scratch, ceil_div, launch, launches, numel, tile
from .layer_norm_triton import PROGRAMS, by_rows, row_blocks
from .rms_norm import RMSNormArgs, RMSNormGradArgs, RMSNormRstdArgs


@triton.jit
def _rms_norm(
    Y, RSTD, X, GAMMA, RESIDUAL, TOTAL, rows, n, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = (x + tl.load(RESIDUAL + at, inside, 0.0).to(tl.float32)).to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + at, total, inside)
        x = total.to(tl.float32)  # the stored value, which the gradient will read
    rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / n + eps)
    tl.store(RSTD + row, rstd, row < rows)
    gamma = tl.load(GAMMA + col, col < n).to(tl.float32)
    tl.store(Y + at, x * rstd[:, None] * gamma[None, :], inside)


@triton.jit
def _squares(SUMS, X, rows, n, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    x = tl.load(X + row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :], 0.0).to(tl.float32)
    squares = tl.sum(x * x, 1)
    if ACC:
        squares += tl.load(SUMS + row, row < rows, 0.0)
    tl.store(SUMS + row, squares, row < rows)


@triton.jit
def _stat(RSTD, SUMS, rows, whole, eps, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.load(SUMS + row, row < rows, 1.0)
    tl.store(RSTD + row, 1 / tl.sqrt(squares / whole + eps), row < rows)


@triton.jit
def _apply(Y, RSTD, X, GAMMA, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
    rstd, gamma = tl.load(RSTD + row, row < rows, 0.0), tl.load(GAMMA + col, col < n).to(tl.float32)
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    tl.store(Y + at, x * rstd[:, None] * gamma[None, :], inside)


@triton.jit
def _grad_sums(
    SUMS, RSTD, DY, X, GAMMA, rows, n,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
    gamma = tl.load(GAMMA + col, col < n, 0.0).to(tl.float32)
    w = tl.load(DY + at, inside, 0.0).to(tl.float32) * gamma[None, :]
    x = tl.load(X + at, inside, 0.0).to(tl.float32)
    sums = tl.sum(w * x, 1) * tl.load(RSTD + row, row < rows, 0.0)
    if ACC:
        sums += tl.load(SUMS + row, row < rows, 0.0)
    tl.store(SUMS + row, sums, row < rows)


@triton.jit
def _grad(
    DX, PART, DY, X, RSTD, GAMMA, SUMS, EXTRA, rows, n, whole,
    HAS_SUMS: tl.constexpr, HAS_EXTRA: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    gamma = tl.load(GAMMA + col, col < n, 0.0).to(tl.float32)
    dgamma = tl.zeros([ROWS, BLOCK], tl.float32)
    # num_stages: the next rows are loaded into shared memory while the current rows are computed.
    for first in tl.range(tl.program_id(0).to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at, inside = row[:, None] * n + col[None, :], (row < rows)[:, None] & (col < n)[None, :]
        dy = tl.load(DY + at, inside, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, row < rows, 0.0)
        xhat, w = tl.load(X + at, inside, 0.0).to(tl.float32) * rstd[:, None], dy * gamma[None, :]
        sums = tl.load(SUMS + row, row < rows, 0.0) if HAS_SUMS else tl.sum(w * xhat, 1)
        dx = rstd[:, None] * (w - xhat * (sums / whole)[:, None])
        if HAS_EXTRA:
            dx += tl.load(EXTRA + at, inside, 0.0).to(tl.float32)
        tl.store(DX + at, dx, inside)
        dgamma += dy * xhat  # dy is 0 in rows beyond the last
    tl.store(PART + tl.program_id(0).to(tl.int64) * n + col, tl.sum(dgamma, 0), col < n)


@launches("rms_norm")
def _describe(task: Task) -> Launches:
    rows, n, blocks = row_blocks(task, 2, 1024)
    has = len(task.accesses) > 4
    args: list[Parameter] = [tile(task, k) for k in ((0, 1, 2, 3, 4, 5) if has else (0, 1, 2, 3, 0, 0))]
    args += [rows, n, RMSNormArgs.of(task).eps]
    return Launches((launch(_rms_norm, ceil_div(rows, blocks["ROWS"]), *args, HAS_RESIDUAL=has, **blocks),))


@launches("rms_norm_squares")
def _describe_squares(task: Task) -> Launches:
    return by_rows(_squares, task, 1, ACC=task.accesses[0].accumulate)


@launches("rms_norm_stat")
def _describe_stat(task: Task) -> Launches:
    rows, arguments = numel(task, 0), RMSNormRstdArgs.of(task)
    args: list[Parameter] = [tile(task, 0), tile(task, 1), rows, arguments.embed, arguments.eps]
    return Launches((launch(_stat, ceil_div(rows, 128), *args, ROWS=128),))


@launches("rms_norm_apply")
def _describe_apply(task: Task) -> Launches:
    return by_rows(_apply, task, 2)


@launches("rms_norm_grad_sums")
def _describe_grad_sums(task: Task) -> Launches:
    return by_rows(_grad_sums, task, 2, ACC=task.accesses[0].accumulate)


@launches("rms_norm_grad")
def _describe_grad(task: Task) -> Launches:
    rows, n, blocks = row_blocks(task, 0, 4096)
    arguments = RMSNormGradArgs.of(task)
    sums_at, extra_at = (6, 7) if arguments.has_sums else (0, 6)
    extra_at = extra_at if len(task.accesses) > extra_at else 0
    parts, scratch = min(ceil_div(rows, blocks["ROWS"]), PROGRAMS), Scratch()
    part = scratch.take(parts * n, "fp32")
    dx, dgamma, *args = (tile(task, k) for k in (0, 1, 2, 3, 4, 5, sums_at, extra_at))
    blocks["STAGES"] = 3 if blocks["BLOCK"] <= 4096 else 1  # within shared memory
    has = {"HAS_SUMS": sums_at > 0, "HAS_EXTRA": extra_at > 0}
    return Launches(
        (
            launch(_grad, parts, dx, part, *args, rows, n, arguments.embed, **has, **blocks),
            sum_of_parts(dgamma, part, parts, n, acc=task.accesses[1].accumulate),
        ),
        scratch.bytes,
    )
