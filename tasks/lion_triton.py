"""Lion on CUDA. A task has the tiles of lion.cpp, then the tile of master weights or of their low bits, if any."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .launch import Launches, Parameter, Scratch, launch, launches_together, numbered, numel, slot, tile
from .lion import LionArgs
from .optimizer_triton import address_of, load_param, master_bits, numel_of, row_of, store_param, table_of, type_of


@triton.jit
def _lion(
    TABLE, CLIP, lr, keep1, new1, keep2, new2, decay,
    TYPE: tl.constexpr, STATE: tl.constexpr, GRAD: tl.constexpr, MASTER_BITS: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = row_of(TABLE, ROWS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    clip = tl.load(CLIP).to(tl.float32)
    inside = (at < numel_of(row, ROWS, ALIGNED)) & (tl.full([BLOCK], clip, tl.float32) >= 0)
    PARAM, M = address_of(row, 2, TYPE, ROWS), address_of(row, 3, STATE, ROWS)
    if MASTER_BITS == 0:
        MASTER = PARAM
    elif MASTER_BITS == 16:
        MASTER = address_of(row, 5, tl.int16, ROWS)
    else:
        MASTER = address_of(row, 5, tl.float32, ROWS)
    g = tl.load(address_of(row, 4, GRAD, ROWS) + at, inside).to(tl.float32) * clip
    m = tl.load(M + at, inside).to(tl.float32)
    # Explicit fma: otherwise the compiler rounds differently for aligned and for other sizes (see _adamw).
    u = tl.fma(keep1, m, new1 * g)
    tl.store(M + at, tl.fma(keep2, m, new2 * g), inside)
    sign = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, u))  # the sign of NaN is NaN
    p = load_param(PARAM, MASTER, at, inside, MASTER_BITS)
    p = tl.fma(-lr * decay, p, p)
    store_param(PARAM, MASTER, at, tl.fma(-lr, sign, p), inside, MASTER_BITS)


# tiles: param, m, grad, clip (, master)
@launches_together("lion")
def _describe_lion(tasks: Sequence[Task]) -> Launches:
    first, block = tasks[0], 1024
    assert len({task.accesses[3].tile for task in tasks}) == 1, "one clip for all"
    table = table_of([numel(task, 0) for task in tasks], [a[:3] + a[4:] for a in numbered(tasks)], block)
    scratch = Scratch()
    at = scratch.take(len(table.entries), "int64")
    types = {name: type_of(tile(first, k)) for name, k in (("TYPE", 0), ("STATE", 1), ("GRAD", 2))}
    a = LionArgs.of(first)
    b1, b2 = float(a.beta1), float(a.beta2)
    floats: list[Parameter] = [slot(first, a.lr), b1, 1 - b1, b2, 1 - b2, float(a.weight_decay)]
    constants = {**table.constants, **types, "MASTER_BITS": master_bits(first, 4), "BLOCK": block}
    update = launch(_lion, table.programs, at, tile(first, 3), *floats, **constants)
    return Launches((update,), scratch.bytes, table.entries)
