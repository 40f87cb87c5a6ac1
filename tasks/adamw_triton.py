"""AdamW on CUDA. A task has the tiles of adamw.cpp, then the tile of master weights or of their low bits, if any."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .adamw import AdamWArgs
from .launch import Launches, launches_together, slot
from .optimizer_triton import address_of, launch_updates, load_param, master_of, numel_of, row_of, store_param


@triton.jit
def _adamw(
    TABLE, CLIP, lr, correction1, correction2, keep1, new1, keep2, new2, eps, decay,
    TYPE: tl.constexpr, STATE: tl.constexpr, GRAD: tl.constexpr, MASTER_BITS: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = row_of(TABLE, ROWS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    clip = tl.load(CLIP).to(tl.float32)
    inside = (at < numel_of(row, ROWS, ALIGNED)) & (tl.full([BLOCK], clip, tl.float32) >= 0)
    PARAM, M, V = address_of(row, 2, TYPE, ROWS), address_of(row, 3, STATE, ROWS), address_of(row, 4, STATE, ROWS)
    MASTER = master_of(row, 6, PARAM, MASTER_BITS, ROWS)
    g = tl.load(address_of(row, 5, GRAD, ROWS) + at, inside).to(tl.float32) * clip
    # Explicit fma: otherwise the compiler chooses which product of a sum to fuse, and chooses differently for aligned
    # tables. Bits would then depend on which tiles are updated together, and so on the number of GPUs.
    m = tl.fma(keep1, tl.load(M + at, inside).to(tl.float32), new1 * g)
    v = tl.fma(keep2, tl.load(V + at, inside).to(tl.float32), new2 * g * g)
    tl.store(M + at, m, inside)
    tl.store(V + at, v, inside)
    p = load_param(PARAM, MASTER, at, inside, MASTER_BITS)
    # p - lr decay p, not (1 - lr decay) p: the factor would lose most digits of lr decay.
    p = tl.fma(-lr * decay, p, p)
    p -= (lr / correction1) * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    store_param(PARAM, MASTER, at, p, inside, MASTER_BITS)


# tiles: param, m, v, grad, clip (, master)
@launches_together("adamw")
def _describe_adamw(tasks: Sequence[Task]) -> Launches:
    a = AdamWArgs.of(tasks[0])
    slots = (slot(tasks[0], s) for s in (a.lr, a.beta1_correction, a.beta2_correction))
    b1, b2 = float(a.beta1), float(a.beta2)
    return launch_updates(_adamw, tasks, 2, [*slots, b1, 1 - b1, b2, 1 - b2, float(a.eps), float(a.weight_decay)])
