"""Matrix products on CUDA: with activations that contract_cuda.cpp cannot fuse by cuBLASLt, or with few rows.

C++ measures for each size whether these kernels or cuBLASLt are faster. The tasks have the same tiles as in
contract_cuda.cpp. The activation is computed from the sum in fp32, not from the stored bf16 or fp16 value.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import is_low
from nntile_py.tiles.task import Task

from .activation import ACTIVATIONS
from .contract import ContractArgs, EpilogueArgs, PlanArgs
from .dynamic_size import DynamicSize
from .interpreted_triton import INTERPRETED
from .launch import (
    Launch,
    Launches,
    Matrix,
    Parameter,
    Scratch,
    ScratchAddress,
    ceil_div,
    launch,
    launches,
    shape,
    tile,
)
from .pdl_triton import bring, wait_here
from .product_epilogue_triton import activated, block_of, times_derivative
from .product_tma_triton import persistent


@triton.jit
def _sum(
    A, B, row, col, first, last, m, n, k, B_BY_K: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the block of the product a b that begins at (row, col), summed over k from `first` to before `last`.

    EVEN: loads need no mask, because DEPTH divides k and, unless B_BY_K, COLUMNS divides n.
    """
    # Rows beyond the last row of a, or columns beyond the last column of a transposed b, read the last row or column
    # instead. The resulting values are not stored.
    rows, depth = tl.minimum(row + tl.arange(0, ROWS), m - 1).to(tl.int64), first + tl.arange(0, DEPTH)
    cols = col + tl.arange(0, COLUMNS)
    a_at = A + rows[:, None] * k + depth[None, :]
    if B_BY_K:
        b_at = B + tl.minimum(cols, n - 1).to(tl.int64)[None, :] * k + depth[:, None]
    else:
        b_at = B + depth.to(tl.int64)[:, None] * n + cols[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in tl.range(first, last, DEPTH, num_stages=STAGES):
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            there = (depth < k)[:, None]
            a = tl.load(a_at, (depth < k)[None, :], 0.0)
            b = tl.load(b_at, there if B_BY_K else there & (cols < n)[None, :], 0.0)
            depth += DEPTH
        if INTERPRETED:  # Triton's interpreter computes in numpy, which has no bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        a_at += DEPTH
        b_at += DEPTH if B_BY_K else DEPTH * n
    return total


@triton.jit
def _bring(B, row, col, first, last, n, k, B_BY_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Prefetch the part of b that a block reads, then wait for the previous kernel, which computes a.

    In inference, b holds weights, which are not in the cache. Only the blocks of the first rows prefetch, because the
    blocks of the other rows read the same parts of b.
    """
    if row == 0:
        if B_BY_K:
            bring(B, col, first, last, n, k, COLUMNS, 256 // COLUMNS)
        else:
            lines: tl.constexpr = (COLUMNS + 63) // 64
            for at in range(first, last, 128):
                bring(B, at, col, col + 1, k, n, 128, lines)
    wait_here()


@triton.jit
def _product(
    OUT, PRE, A, B, BIAS, RESIDUAL, AUX, m, n, k, scale,
    B_BY_K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, KEEPS: tl.constexpr,
    GRADIENT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Compute out = act(scale a b + bias + residual), or with GRADIENT: out = (scale a b + bias + residual) act'(aux).

    a is [m, k]; b is [k, n], or [n, k] with B_BY_K. With KEEPS, the value before act is stored in pre. With HALVES, the
    epilogue (bias, residual, activation) runs on the left half of the columns, then on the right half, which needs
    fewer registers.
    """
    row, col = block_of(tl.program_id(0), m, n, ROWS, COLUMNS, GROUP)
    _bring(B, row, col, 0, k, n, k, B_BY_K, COLUMNS)
    total = _sum(A, B, row, col, 0, k, m, n, k, B_BY_K, EVEN, ROWS, COLUMNS, DEPTH, STAGES)
    if HALVES:
        half: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, half)), (0, 2, 1)))
        _finish(
            OUT, PRE, BIAS, RESIDUAL, AUX, left, row, col, m, n, scale, KIND, BIASED, ADDED, KEEPS, GRADIENT
        )  # fmt: skip
        _finish(
            OUT, PRE, BIAS, RESIDUAL, AUX, right, row, col + half, m, n, scale, KIND, BIASED, ADDED, KEEPS, GRADIENT
        )  # fmt: skip
    else:
        _finish(
            OUT, PRE, BIAS, RESIDUAL, AUX, total, row, col, m, n, scale, KIND, BIASED, ADDED, KEEPS, GRADIENT
        )  # fmt: skip


@triton.jit
def _finish(
    OUT, PRE, BIAS, RESIDUAL, AUX, total, row, col, m, n, scale, KIND: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, KEEPS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue of `_product` to the sum `total` of the block at (row, col), and store the result."""
    rows, cols = row + tl.arange(0, total.shape[0]), col + tl.arange(0, total.shape[1])
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + cols[None, :]
    y = total * scale
    if BIASED:
        y += tl.load(BIAS + cols, cols < n, 0.0).to(tl.float32)[None, :]
    if ADDED:
        y += tl.load(RESIDUAL + at, inside, 0.0).to(tl.float32)
    if GRADIENT:
        y = times_derivative(y, tl.load(AUX + at, inside, 0.0).to(tl.float32), KIND)
    else:
        if KEEPS:
            tl.store(PRE + at, y.to(PRE.dtype.element_ty), inside)
        y = activated(y, KIND)
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), inside)


@triton.jit
def _part(
    SUMS, A, B, m, n, k, B_BY_K: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute partial sums [PARTS, m, n] of the product a b, each over one part of k.

    This keeps more programs busy if the result has few blocks and k is large.
    """
    row, col = block_of(tl.program_id(0), m, n, ROWS, COLUMNS, GROUP)
    part, size = tl.program_id(1), tl.cdiv(k, DEPTH * PARTS) * DEPTH
    first = part * size
    last = tl.minimum(first + size, k)
    _bring(B, row, col, first, last, n, k, B_BY_K, COLUMNS)
    total = _sum(A, B, row, col, first, last, m, n, k, B_BY_K, EVEN, ROWS, COLUMNS, DEPTH, STAGES)
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLUMNS)
    at = (part * m + rows).to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(SUMS + at, total, (rows < m)[:, None] & (cols < n)[None, :])


@triton.jit
def _of_parts(
    OUT, PRE, SUMS, BIAS, RESIDUAL, AUX, m, n, scale, KIND: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    KEEPS: tl.constexpr, GRADIENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the same result as _product from the partial sums of _part, which are added in a fixed order."""
    row, col = block_of(tl.program_id(0), m, n, ROWS, COLUMNS, 1)
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLUMNS)
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(SUMS + (part * m + rows).to(tl.int64)[:, None] * n + cols[None, :], inside, 0.0)
    _finish(OUT, PRE, BIAS, RESIDUAL, AUX, total, row, col, m, n, scale, KIND, BIASED, ADDED, KEEPS, GRADIENT)


# -- tasks

OWN = tuple(number for number, name in enumerate(ACTIVATIONS) if name != "gelu_new")  # gelu_new: fused by cuBLASLt
FEW_ROWS = 128  # up to this number of rows, these kernels are candidates with gelu_new too


class Way(NamedTuple):
    """A way to compute a product: which kernel, with which block sizes.

    Args:
        rows: rows of a block of the result.
        columns: columns of a block of the result.
        depth: elements of k that an iteration adds.
        stages: stages of the pipeline that loads operands ahead (Triton's num_stages).
        warps: warps of a program.
        halves: HALVES of `_product`.
        parts: number of parts into which the sum is split, each with its own programs; 1: `_product` computes all.
        width: WIDTH of the kernel `persistent` (product_tma_triton.py); 0: another kernel.
        programs: programs of `persistent` on each multiprocessor.
        flatten: FLATTEN of `persistent`.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    halves: bool = False
    parts: int = 1
    width: int = 0
    programs: int = 1
    flatten: bool = True

    @property
    def name(self) -> str:
        """Name of the way in the key of a measurement."""
        cut = f"{self.rows}x{self.columns}x{self.depth}x{self.stages}x{self.warps}" + " halves" * self.halves
        if self.width:
            return f"{cut} persistent {self.width}x{self.programs}" + " flat" * self.flatten
        return cut + f" {self.parts} parts" * (self.parts > 1)


# Candidates for 17 to 256 rows (17 to 128 without an activation), except where DEEP applies. Some were the fastest on
# an H200 for 640 and 2048 rows too; SOME lists these again.
FEW = [
    Way(64, 32, 128, 4, 4), Way(64, 64, 128, 3, 4), Way(64, 64, 64, 5, 4), Way(64, 32, 256, 3, 4),
    Way(64, 16, 128, 5, 4), Way(32, 32, 128, 4, 4),
]  # fmt: skip
# SIXTEEN: for products with m up to 16.
SIXTEEN = [
    Way(16, 16, 256, 4, 4), Way(16, 32, 256, 3, 4), Way(16, 64, 128, 4, 4), Way(16, 16, 512, 3, 4),
    Way(16, 32, 256, 3, 4, parts=4), Way(16, 64, 128, 4, 4, parts=4),
]  # fmt: skip
# Candidates instead of FEW for large k and few columns. Large blocks would be so few that they use only a small part of
# the GPU. So blocks are smaller, or the sum is split into parts.
DEEP = [
    Way(64, 16, 128, 5, 4), Way(64, 16, 256, 4, 4), Way(32, 16, 256, 4, 4), Way(64, 32, 128, 4, 4, parts=4),
    Way(64, 64, 128, 3, 4, parts=6), Way(64, 64, 64, 5, 4),
]  # fmt: skip
# SOME: candidates for more rows than FEW is used for, up to 2048. PARTS: further candidates for large k and few
# columns. From both lists, `ways_of` keeps the candidates whose number of programs is in FILLED.
SOME = [
    Way(64, 16, 128, 5, 4), Way(64, 32, 128, 4, 4), Way(64, 64, 64, 5, 4), Way(64, 64, 128, 3, 4),
    Way(64, 128, 64, 4, 4), Way(64, 128, 64, 3, 4, halves=True), Way(128, 64, 64, 4, 4), Way(128, 128, 64, 4, 8),
    Way(128, 128, 64, 3, 8, halves=True),
]  # fmt: skip
PARTS = [
    Way(64, 64, 128, 3, 4, parts=2), Way(64, 64, 128, 3, 4, parts=4), Way(128, 64, 64, 4, 4, parts=2),
    Way(128, 128, 64, 4, 8, parts=2), Way(128, 128, 64, 4, 8, parts=4),
]  # fmt: skip
# Candidates for many rows: the fastest on an H200 for m from 640 to 19 712, n = 3072, k = 768. Blocks of 128 x 256 are
# slower for each of these m.
TWICE = Way(128, 128, 64, 3, 8, width=32, programs=2)
MANY = [TWICE, TWICE._replace(flatten=False)]
ONCE = Way(128, 128, 64, 4, 8, width=64)
MULTIPROCESSORS = 132  # of an H200; results are correct on other GPUs too
FILLED = range(MULTIPROCESSORS // 2, 3 * MULTIPROCESSORS)  # numbers of programs that fill the GPU well


class Sizes(NamedTuple):
    """Sizes of a product [m, k] x [k, n]; b_by_k: the second operand is stored as [n, k]."""

    m: int
    n: int
    k: int
    b_by_k: bool


def ways_of(sizes: Sizes, e: EpilogueArgs) -> list[Way]:
    """Return the ways to measure against cuBLASLt. Empty: use cuBLASLt, with a separate kernel for the activation."""
    deep = sizes.n <= 4096 <= 2 * sizes.k
    if sizes.m <= 16:
        return SIXTEEN
    if sizes.m <= (256 if e.activation >= 0 else 128):
        return DEEP if deep else FEW
    if sizes.m > 2048:
        return MANY if e.activation >= 0 and not e.residual else []
    some = [way for way in (*SOME, *(PARTS if deep else ())) if programs_of(way, sizes) in FILLED]
    return some if e.activation < 0 or e.residual or sizes.m < 512 else [*some, TWICE, ONCE]


def programs_of(way: Way, sizes: Sizes) -> int:
    """Return the number of blocks of the result, times the parts of the sum."""
    return int(ceil_div(sizes.m, way.rows)) * ceil_div(sizes.n, way.columns) * way.parts


def sizes_of(task: Task, plan: PlanArgs) -> Sizes | None:
    """Return the sizes of a product of plain matrices; None if these kernels do not support the product.

    Supported: a [m, k], b [k, n] or [n, k] and the result [m, n], with n and k multiples of 8. Only m may change
    between steps.
    """
    m, n, k = plan.m, plan.n, plan.k
    a_order, b_order, out_order = plan.orders[: m + k], plan.orders[m + k : m + 2 * k + n], plan.orders[m + 2 * k + n :]
    by_row, by_k = tuple(range(k + n)), (*range(n, n + k), *range(n))
    plain = a_order == tuple(range(m + k)) and out_order == tuple(range(m + n)) and b_order in (by_row, by_k)
    if plan.swap or plan.batch or not plain:
        return None
    a, out = shape(task, 1), shape(task, 0)
    sizes = Sizes(math.prod(a[:m]), math.prod(out[m:]), math.prod(a[m:]), b_order != by_row)
    fixed = not any(isinstance(size, DynamicSize) for size in (*a[m:], *shape(task, 2)))
    return sizes if fixed and sizes.n % 8 == sizes.k % 8 == 0 else None  # vector loads need rows of whole 16 bytes


def served(task: Task, a: ContractArgs) -> Sizes | None:
    """Return the product's sizes; None if these kernels do not support the task.

    Tasks that add to a tile are not supported, as the measurement runs a task several times.
    """
    e, dtypes = a.epilogue, {access.tile.dtype for access in task.accesses}
    alone = e.colsum < 0 and not any(access.accumulate for access in task.accesses)
    whole = e.bias_axes in (-1, ((1 << a.plan.n) - 1) << a.plan.m)
    if not alone or not whole or len(dtypes) > 1 or not is_low(*dtypes):
        return None
    sizes = sizes_of(task, a.plan)
    return sizes if sizes and (e.activation in (-1, *OWN) or sizes.m <= FEW_ROWS) else None


@launches("contract")
def _describe(task: Task) -> Launches:
    a = ContractArgs.of(task)
    sizes, e = served(task, a), a.epilogue
    if not sizes or not (ways := ways_of(sizes, e)):
        return Launches(())
    scratch = Scratch()
    sums = scratch.take(max(w.parts * (w.parts > 1) for w in ways) * int(sizes.m) * sizes.n, "fp32")
    first, *others = (_launches_of(w, task, a, sizes, sums) for w in ways)
    name = ACTIVATIONS[e.activation] if e.activation >= 0 else "sum"
    kind = f"{name}{' gradient' if e.aux else ' kept' if e.keep_pre else ''}{' residual' if e.residual else ''}"
    names, dtype = ", ".join(w.name for w in ways), tile(task, 0).dtype
    what = " ".join(str(int(size)) for size in (*sizes, e.bias_axes >= 0))
    key = f"product {kind} {dtype} {what} of {names}"
    return Launches(first, scratch.bytes, others=tuple(others), key=key)


def _launches_of(w: Way, task: Task, a: ContractArgs, sizes: Sizes, sums: ScratchAddress) -> tuple[Launch, ...]:
    """Return the launches that compute a task in one way; sums: scratch memory for partial sums."""
    m, n, k, b_by_k = sizes
    e, biased, last = a.epilogue, a.epilogue.bias_axes >= 0, len(task.accesses) - 1
    what = {"KIND": e.activation, "BIASED": biased, "ADDED": e.residual, "KEEPS": e.keep_pre, "GRADIENT": e.aux}
    cut: dict[str, Any] = {
        "ROWS": w.rows, "COLUMNS": w.columns, "DEPTH": w.depth, "STAGES": w.stages, "GROUP": 8, "B_BY_K": b_by_k,
        "EVEN": k % w.depth == 0 and (b_by_k or n % w.columns == 0),
    }  # fmt: skip
    results, operands = (tile(task, last if e.keep_pre else 0), tile(task, 0)), (tile(task, 1), tile(task, 2))
    rest = (tile(task, 3 if biased else 0), tile(task, 3 + biased if e.residual else 0), tile(task, last))
    blocks = ceil_div(m, w.rows) * ceil_div(n, w.columns)
    if w.width:
        return (_persistent_launch(w, task, a, sizes),)
    if w.parts == 1:
        args: tuple[Parameter, ...] = (*results, *operands, *rest, m, n, k, a.scale)
        return (launch(_product, blocks, *args, warps=w.warps, HALVES=w.halves, **what, **cut),)
    rows, columns = 2, 256  # block of the kernel that adds the partial sums
    return (
        launch(_part, (blocks, w.parts), sums, *operands, m, n, k, warps=w.warps, PARTS=w.parts, **cut),
        launch(
            _of_parts, ceil_div(m, rows) * ceil_div(n, columns), *results, sums, *rest, m, n, a.scale,
            PARTS=w.parts, ROWS=rows, COLUMNS=columns, **what,
        ),
    )  # fmt: skip


def _persistent_launch(w: Way, task: Task, a: ContractArgs, sizes: Sizes) -> Launch:
    """Return the launch of the kernel `persistent` for a task."""
    m, n, k, b_by_k = sizes
    e, last = a.epilogue, len(task.accesses) - 1
    out, other = last if e.keep_pre else 0, last if e.aux else 0
    block, rows_of_b = (w.rows, w.width), (n, k) if b_by_k else (k, n)
    return launch(
        persistent, min(programs_of(w, sizes), w.programs * MULTIPROCESSORS),
        Matrix(tile(task, out), m, n, block), Matrix(tile(task, other), m, n, block),
        Matrix(tile(task, 1), m, k, (w.rows, w.depth)),
        Matrix(tile(task, 2), *rows_of_b, (w.columns, w.depth) if b_by_k else (w.depth, w.columns)),
        tile(task, 3 if e.bias_axes >= 0 else 0), m, n, k, a.scale, warps=w.warps, ROWS=w.rows, COLUMNS=w.columns,
        DEPTH=w.depth, STAGES=w.stages, WIDTH=w.width, FLATTEN=w.flatten, GROUP=8, B_BY_K=b_by_k, KIND=e.activation,
        BIASED=e.bias_axes >= 0, KEEPS=e.keep_pre, GRADIENT=e.aux,
    )  # fmt: skip
