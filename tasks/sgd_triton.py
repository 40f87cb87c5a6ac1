"""SGD on CUDA. The tasks have the same tiles as in sgd.cpp, followed by the optional master of the parameter."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .launch import Launches, Parameter, ceil_div, launch, launches, numel, slot, tile
from .optimizer_triton import load_param, master_bits, store_param
from .sgd import SGDArgs


@triton.jit
def _sgd(
    PARAM, M, GRAD, CLIP, MASTER, n, lr, momentum, decay,
    HAS_MOMENTUM: tl.constexpr, MASTER_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of a parameter; see SGD in sgd.py. If clip is negative, nothing changes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    clip = tl.load(CLIP).to(tl.float32)
    inside = (at < n) & (tl.full([BLOCK], clip, tl.float32) >= 0)
    p = load_param(PARAM, MASTER, at, inside, MASTER_BITS)
    # Explicit fma: otherwise the compiler rounds differently for aligned and for other sizes (see _adamw).
    d = tl.fma(decay, p, tl.load(GRAD + at, inside).to(tl.float32) * clip)
    if HAS_MOMENTUM:
        d = tl.fma(momentum, tl.load(M + at, inside).to(tl.float32), d)
        tl.store(M + at, d, inside)
    p = tl.fma(-lr, d, p)
    store_param(PARAM, MASTER, at, p, inside, MASTER_BITS)


# tiles of a task: grad, clip, param (, m) (, master)
@launches("sgd")
def _describe_sgd(task: Task) -> Launches:
    n, a = numel(task, 0), SGDArgs.of(task)
    has_momentum = a.momentum > 0
    bits = master_bits(task, 3 + has_momentum)
    m, master = 3 if has_momentum else 2, 3 + has_momentum if bits else 2
    tiles: list[Parameter] = [tile(task, k) for k in (2, m, 0, 1, master)]
    floats: list[Parameter] = [slot(task, a.lr), float(a.momentum), float(a.weight_decay)]
    has = {"HAS_MOMENTUM": has_momentum, "MASTER_BITS": bits}
    return Launches((launch(_sgd, ceil_div(n, 1024), *tiles, n, *floats, **has, BLOCK=1024),))
