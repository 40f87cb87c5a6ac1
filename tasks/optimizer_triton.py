"""Gradient norm and clipping on CUDA, and functions that the optimizers' kernels share.

The tasks have the same tiles as in optimizer.cpp.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import Task

from .launch import (
    ALIGNMENT,
    Int,
    Launches,
    Parameter,
    Scratch,
    TileAddress,
    ceil_div,
    launch,
    launches,
    launches_together,
    numbered,
    numel,
    power_of_two,
    slot,
    tile,
)
from .optimizer import FAN_IN, ClipArgs, ScaledClipArgs

BLOCK = 4096
SQUARES = 8 * BLOCK  # elements that one program sums; constant, so that sums have a fixed order


# One launch can compute several tasks: the kernel reads the tasks' tiles from a table in memory. The table has one row
# for each task, with these int64 columns: number of the first program that computes the task, number of elements, then
# the address of each tile of the task. The table is stored column by column. The number of rows, ROWS, is a power of
# two. In rows without a task, the number of the first program is the number of programs of the launch.


@triton.jit
def row_of(TABLE, ROWS: tl.constexpr):
    """Return the address of the table's row for this program's task, and the program's number among the task's."""
    begins = tl.load(TABLE + tl.arange(0, ROWS))
    row = tl.sum((begins <= tl.program_id(0)).to(tl.int32), 0) - 1
    return TABLE + row, tl.program_id(0) - tl.load(TABLE + row)


@triton.jit
def numel_of(ROW, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the number of elements in a row of the table; ALIGNED: this number is a multiple of 16."""
    n = tl.load(ROW + ROWS)
    return tl.multiple_of(n, 16) if ALIGNED else n


@triton.jit
def address_of(ROW, column: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr):
    """Return the address stored in a column of the table's row ROW, as a pointer to elements of dtype TYPE."""
    return tl.multiple_of(tl.load(ROW + column * ROWS).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def master_of(row, column: tl.constexpr, PARAM, MASTER_BITS: tl.constexpr, ROWS: tl.constexpr):
    """Return the address of the master (low bits or fp32), from a column of the table's row; PARAM without a master."""
    if MASTER_BITS == 0:
        return PARAM
    elif MASTER_BITS == 16:
        return address_of(row, column, tl.int16, ROWS)
    else:
        return address_of(row, column, tl.float32, ROWS)


@triton.jit
def _squares(
    TABLE, PART, TYPE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sum of squares of the program's BLOCKS * BLOCK elements of its task's gradient."""
    row, part = row_of(TABLE, ROWS)
    n, x = numel_of(row, ROWS, ALIGNED), address_of(row, 3, TYPE, ROWS)
    total, first = tl.zeros([BLOCK], tl.float32), part * BLOCKS * BLOCK
    for start in range(first, tl.minimum(n, first + BLOCKS * BLOCK), BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < n, 0.0).to(tl.float32)
        total += value * value
    tl.store(PART + tl.program_id(0), tl.sum(total.to(tl.float64), 0))


@triton.jit
def _total(TABLE, PART, ROWS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partial sums of one task and store the total. EACH: number of elements of a partial sum."""
    row = TABLE + tl.program_id(0)
    first, total = tl.load(row), tl.zeros([BLOCK], tl.float64)
    parts = tl.cdiv(tl.load(row + ROWS), EACH)
    for start in range(0, parts, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total += tl.load(PART + first + k, k < parts, 0.0)
    tl.store(address_of(row, 2, tl.float64, ROWS), tl.sum(total, 0))


@triton.jit
def _load_sum(A, B, C, D, E, F, G, H, COUNT: tl.constexpr):
    """Return the sum of the first COUNT of the eight scalars, added in order."""
    terms = A, B, C, D, E, F, G, H
    total = tl.load(A)
    for k in tl.static_range(1, COUNT):
        total += tl.load(terms[k])
    return total


@triton.jit
def _add_scalars(OUT, A, B, C, D, E, F, G, H, COUNT: tl.constexpr):
    tl.store(OUT, _load_sum(A, B, C, D, E, F, G, H, COUNT))


@triton.jit
def _clip(
    NORM, CLIP, A, B, C, D, E, F, G, H,
    limit, skip_above, inverse, COUNT: tl.constexpr, LIMITED: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Compute norm and clip (see GradNorm) from COUNT sums of squares."""
    norm = tl.sqrt(_load_sum(A, B, C, D, E, F, G, H, COUNT)) * inverse
    tl.store(NORM, norm)
    factor = tl.full((), 1.0, tl.float64)
    if LIMITED:
        factor = tl.minimum(factor, limit / (norm + 1e-6))
    factor *= inverse
    if SKIPS:
        factor = tl.where(norm <= skip_above, factor, -1.0)
    tl.store(CLIP, factor)


# The next two functions compute the same as `joined` and `split` of optimizer.py.


@triton.jit
def load_param(PARAM, MASTER, at, inside, MASTER_BITS: tl.constexpr):
    """Return elements of the parameter in fp32, from parameter and master. MASTER_BITS: 0 (no master), 16 or 32."""
    if MASTER_BITS == 32:
        return tl.load(MASTER + at, inside)
    p = tl.load(PARAM + at, inside)
    if MASTER_BITS == 16:
        bits = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return (bits + tl.load(MASTER + at, inside).to(tl.int32)).to(tl.float32, bitcast=True)
    return p.to(tl.float32)


@triton.jit
def store_param(PARAM, MASTER, at, p, inside, MASTER_BITS: tl.constexpr):
    """Store the fp32 values p as parameter and master. MASTER_BITS: 0 (no master), 16 or 32."""
    if MASTER_BITS == 16:
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)
        low_bits = bits.to(tl.int16)
        tl.store(PARAM + at, ((bits - low_bits.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(MASTER + at, low_bits, inside)
    else:
        tl.store(PARAM + at, p, inside)
        if MASTER_BITS == 32:
            tl.store(MASTER + at, p, inside)


@dataclass(frozen=True)
class _Table:
    """A table from which one launch reads the tiles of several tasks (described above `row_of`).

    Args:
        entries: int64 values of the table, column by column.
        programs: number of programs of the launch.
        constants: constexprs ROWS and ALIGNED of the kernel that reads the table.
    """

    entries: tuple[TileAddress | Int, ...]
    programs: int
    constants: dict[str, Any]


def table_of(counts: Sequence[int], addresses: Sequence[Sequence[TileAddress]], block: int) -> _Table:
    """Return the table for several tasks.

    Args:
        counts: for each task the number of elements.
        addresses: for each task the addresses of its tiles.
        block: elements that one program computes.
    """
    rows, programs = power_of_two(len(counts)), 0
    begins: list[Int] = []
    for n in counts:
        begins.append(Int(programs))
        programs += ceil_div(n, block)
    nothing = [Int(0)] * (rows - len(counts))
    columns: list[list[TileAddress | Int]] = [[*begins, *[Int(programs)] * len(nothing)], [*map(Int, counts), *nothing]]
    columns += [[*column, *nothing] for column in zip(*addresses, strict=True)]
    aligned = all(n % ALIGNMENT == 0 for n in counts)
    return _Table(tuple(one for column in columns for one in column), programs, {"ROWS": rows, "ALIGNED": aligned})


def launch_updates(kernel: Any, tasks: Sequence[Task], states: int, floats: Sequence[Parameter]) -> Launches:
    """Return one launch of a kernel that updates the parameters of several tasks.

    Args:
        kernel: its arguments are TABLE, CLIP, `floats`, and the constants TYPE, STATE, GRAD, MASTER_BITS, ROWS,
            ALIGNED, BLOCK.
        states: number of tiles of optimizer state. A task's tiles are: param, the states, grad, clip (, master).
    """
    first, grad, block, scratch = tasks[0], 1 + states, 1024, Scratch()
    clip = grad + 1
    assert len({task.accesses[clip].tile for task in tasks}) == 1, "one clip for all"
    addresses = [a[:clip] + a[clip + 1 :] for a in numbered(tasks)]
    table = table_of([numel(task, 0) for task in tasks], addresses, block)
    at = scratch.take(len(table.entries), "int64")
    types = {name: type_of(tile(first, k)) for name, k in (("TYPE", 0), ("STATE", 1), ("GRAD", grad))}
    constants = {**table.constants, **types, "MASTER_BITS": master_bits(first, clip + 1), "BLOCK": block}
    update = launch(kernel, table.programs, at, tile(first, clip), *floats, **constants)
    return Launches((update,), scratch.bytes, table.entries)


def type_of(address: TileAddress) -> Any:
    """Return Triton's dtype of a tile."""
    return getattr(tl, DTYPES[address.dtype].torch)


# tiles of a task: sum, x
@launches_together("sum_squares")
def _describe_squares(tasks: Sequence[Task]) -> Launches:
    table = table_of([numel(task, 1) for task in tasks], numbered(tasks), SQUARES)
    scratch = Scratch()
    at, part = scratch.take(len(table.entries), "int64"), scratch.take(table.programs, "fp64")
    constants = {**table.constants, "TYPE": type_of(tile(tasks[0], 1)), "BLOCK": BLOCK, "BLOCKS": SQUARES // BLOCK}
    total = launch(_total, len(tasks), at, part, ROWS=table.constants["ROWS"], EACH=SQUARES, BLOCK=1024)
    squares = launch(_squares, table.programs, at, part, **constants, warps=8)
    return Launches((squares, total), scratch.bytes, table.entries)


def _terms(task: Task, first: int) -> list[Any]:
    """Return exactly FAN_IN addresses: those of the task's tiles from `first` on, then the last address repeated."""
    count = len(task.accesses) - first
    assert 0 < count <= FAN_IN, task.kernel
    return [tile(task, first + min(k, count - 1)) for k in range(FAN_IN)]


@launches("add_scalars")
def _describe_add(task: Task) -> Launches:
    count = len(task.accesses) - 1
    return Launches((launch(_add_scalars, 1, tile(task, 0), *_terms(task, 1), COUNT=count, warps=1),))


@launches("clip")
def _describe_clip(task: Task) -> Launches:
    return _clipped(task, ClipArgs.of(task), 1.0)


@launches("clip_scaled")
def _describe_scaled_clip(task: Task) -> Launches:
    a = ScaledClipArgs.of(task)
    return _clipped(task, a.clip, slot(task, a.inverse))


def _clipped(task: Task, a: ClipArgs, inverse: Parameter) -> Launches:
    limits = float(a.max_norm), float(a.skip_above)
    args: list[Parameter] = [tile(task, 0), tile(task, 1), *_terms(task, 2), *limits, inverse]
    constants = {"COUNT": len(task.accesses) - 2, "LIMITED": a.max_norm > 0, "SKIPS": a.skip_above > 0}
    return Launches((launch(_clip, 1, *args, **constants, warps=1),))


def master_bits(task: Task, number: int) -> int:
    """Return the number of bits per element of the master, the task's tile `number`; 0 if there is no such tile."""
    return 8 * DTYPES[tile(task, number).dtype].bytes if number < len(task.accesses) else 0
