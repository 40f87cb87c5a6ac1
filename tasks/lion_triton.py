"""Lion on CUDA. A task has the tiles of lion.cpp, then the tile of master weights or of their low bits, if any."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .launch import Launches, launches_together, slot
from .lion import LionArgs
from .optimizer_triton import address_of, launch_updates, load_param, master_of, numel_of, row_of, store_param


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
    MASTER = master_of(row, 5, PARAM, MASTER_BITS, ROWS)
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
    a = LionArgs.of(tasks[0])
    b1, b2 = float(a.beta1), float(a.beta2)
    return launch_updates(_lion, tasks, 1, [slot(tasks[0], a.lr), b1, 1 - b1, b2, 1 - b2, float(a.weight_decay)])
