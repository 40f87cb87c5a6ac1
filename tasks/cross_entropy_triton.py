"""Cross-entropy on tiles of logits [rows, classes] on CUDA: one program per row, in 16-byte vectors.

cross_entropy.cpp lists the tiles of each task. No row is copied to fp32 in memory. A label outside the classes makes
the loss NaN, because a CUDA kernel cannot raise an error. On the CPU, such a label is an error.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.dtypes import is_low
from nntile_py.tiles.task import Task

from .accumulate_triton import combine_softmax
from .cross_entropy import CrossEntropyArgs, CrossEntropyGradArgs, CrossEntropyLossArgs, CrossEntropyStateArgs
from .launch import (
    Launches,
    Parameter,
    Scratch,
    ceil_div,
    launch,
    launches,
    numel,
    power_of_two,
    shape,
    slot,
    tile,
)

LOG2E = tl.constexpr(1.4426950408889634)  # exp2(x LOG2E - y) is two instructions, exp(x - z) three

# A row of 50257 elements may begin at an address that is not a multiple of 16 bytes. A program reads the row in three
# parts: the few elements before the first multiple of 16 bytes, whole blocks without a mask (with 16-byte accesses),
# and the remaining elements.


@triton.jit
def _parts(n, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return for this program's row: offset, first aligned offset, number of whole blocks, offsets within a block."""
    start = tl.program_id(0).to(tl.int64) * n
    first = start if ALIGNED else (start + VECTOR - 1) // VECTOR * VECTOR
    blocks = tl.maximum(start + n - first, 0) // (LANES * VECTOR)
    inner = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    return start, first, blocks, inner


@triton.jit
def _more(top, total, x):
    """Return each lane's running (max * LOG2E, sumexp), updated with the elements of x.

    The maximum is updated once for all of a lane's new elements, so an element needs one exponential instead of two.
    """
    x = x.to(tl.float32) * LOG2E
    new = tl.maximum(top, tl.max(x, 1))
    known = tl.where(new == float("-inf"), 0.0, new)  # no element so far
    return new, total * tl.exp2(top - known) + tl.sum(tl.exp2(x - known[:, None]), 1)


@triton.jit
def _row_state(X, n, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return (max, sum of exp(x - max)) of this program's row."""
    start, first, blocks, inner = _parts(n, LANES, VECTOR, ALIGNED)
    top, total = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    for k in range(0, blocks):
        top, total = _more(top, total, tl.load(X + first + k * LANES * VECTOR + inner))
    at = first + blocks * LANES * VECTOR + inner
    top, total = _more(top, total, tl.load(X + at, at < start + n, float("-inf")))
    best = tl.max(top, 0)
    if ALIGNED:
        result = tl.sum(total * tl.exp2(top - best), 0)
    else:
        at = start + tl.arange(0, VECTOR)
        x = tl.load(X + at, (at < first) & (at < start + n), float("-inf")).to(tl.float32) * LOG2E
        best = tl.maximum(best, tl.max(x, 0))
        result = tl.sum(total * tl.exp2(top - best), 0) + tl.sum(tl.exp2(x - best), 0)
    return best / LOG2E, result


@triton.jit
def _gradient(x, lse, scale, at, chosen):
    return (tl.exp2(x.to(tl.float32) * LOG2E - lse) - tl.where(at == chosen, 1.0, 0.0)) * scale


@triton.jit
def _row_gradient(
    X, n, lse, label, first_word, scale, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr
):
    """x <- (exp(x - lse) - onehot(label - first_word)) scale, in place; 0 where the label is negative.

    first_word: number of the tile's first class. The loop begins at the end of the row, whose elements were read last
    and are most likely still in the cache.
    """
    lse *= LOG2E
    start, first, blocks, inner = _parts(n, LANES, VECTOR, ALIGNED)
    scale = tl.where(label < 0, 0.0, scale)
    here = label - first_word
    chosen = tl.where((label >= 0) & (here >= 0) & (here < n), start + here, -1)
    at = first + blocks * LANES * VECTOR + inner
    x = tl.load(X + at, at < start + n, 0.0, eviction_policy="evict_first")
    tl.store(X + at, _gradient(x, lse, scale, at, chosen), at < start + n, eviction_policy="evict_first")
    for k in range(0, blocks):
        at = first + (blocks - 1 - k) * LANES * VECTOR + inner
        x = tl.load(X + at, eviction_policy="evict_first")
        tl.store(X + at, _gradient(x, lse, scale, at, chosen), eviction_policy="evict_first")
    if not ALIGNED:
        at = start + tl.arange(0, VECTOR)
        inside = (at < first) & (at < start + n)
        tl.store(X + at, _gradient(tl.load(X + at, inside, 0.0), lse, scale, at, chosen), inside)


@triton.jit
def _pick(X, n, label, first_word, vocab):
    """Return the label's logit if the label is a class of this tile, else 0; NaN if the label is `vocab` or more."""
    here = label - first_word
    mine = (label >= 0) & (here >= 0) & (here < n)
    value = tl.load(X + tl.program_id(0).to(tl.int64) * n + tl.where(mine, here, 0), mine, 0.0).to(tl.float32)
    return tl.where(label >= vocab, float("nan"), value)


@triton.jit
def _cross_entropy(
    X, LABEL, LSE, LOSS, n, scale,
    GRADIENT: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    label = tl.load(LABEL + row)
    picked = _pick(X, n, label, 0, n)
    top, total = _row_state(X, n, LANES, VECTOR, ALIGNED)
    lse = top + tl.log(total)
    tl.store(LSE + row, lse)
    tl.store(LOSS + row, tl.where(label < 0, 0.0, lse - picked))
    if GRADIENT:
        tl.debug_barrier()  # all warps have read `picked` before one warp overwrites it
        _row_gradient(X, n, lse, label, 0, scale, LANES, VECTOR, ALIGNED)


@triton.jit
def scaled_total(LOSS, ROWS, rows, scale, ACC: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(ROWS + row, row < rows, 0.0).to(tl.float64) * scale  # before the sum: see cross_entropy.cpp
    loss = tl.sum(total, 0)
    if ACC:
        loss += tl.load(LOSS)
    tl.store(LOSS, loss)


@triton.jit
def _state(
    STATE, PICKED, X, LABEL, n, first_word, vocab, ACC: tl.constexpr, ACC_PICKED: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    picked = _pick(X, n, tl.load(LABEL + row), first_word, vocab)
    if ACC_PICKED:
        picked += tl.load(PICKED + row)
    tl.store(PICKED + row, picked)
    top, total = _row_state(X, n, LANES, VECTOR, ALIGNED)
    s = STATE + row.to(tl.int64) * 2
    if ACC:
        top, total, _a, _b = combine_softmax(tl.load(s), tl.load(s + 1), top, total)
    tl.store(s, top)
    tl.store(s + 1, total)


@triton.jit
def _loss(LSE, LOSS, STATE, PICKED, LABEL, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    lse = tl.load(STATE + row * 2, there, 0.0) + tl.log(tl.load(STATE + row * 2 + 1, there, 1.0))
    tl.store(LSE + row, lse, there)
    kept = tl.load(LABEL + row, there, -1) >= 0
    tl.store(LOSS + row, tl.where(kept, lse - tl.load(PICKED + row, there, 0.0), 0.0), there)


@triton.jit
def _cross_entropy_grad(
    X, LABEL, LSE, n, first_word, scale, LANES: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr
):
    row = tl.program_id(0)
    _row_gradient(X, n, tl.load(LSE + row), tl.load(LABEL + row), first_word, scale, LANES, VECTOR, ALIGNED)


def _blocks(task: Task, number: int) -> tuple[int, int, dict[str, Any]]:
    """Return the rows and the columns of the task's tile `number`, the logits, and the constants of a kernel."""
    n = shape(task, number)[-1]
    vector = 8 if is_low(tile(task, number).dtype) else 4
    lanes = min(512, power_of_two(ceil_div(n, vector)))
    blocks = {"LANES": lanes, "VECTOR": vector, "ALIGNED": n % vector == 0, "warps": max(1, lanes // 64)}
    return numel(task, number) // n, n, blocks


@launches("cross_entropy")
def _describe(task: Task) -> Launches:
    rows, n, blocks = _blocks(task, 0)
    logits, labels, lse, loss = (tile(task, k) for k in range(4))
    scratch, acc, arguments = Scratch(), task.accesses[3].accumulate, CrossEntropyArgs.of(task)
    losses, scale = scratch.take(rows, "fp32"), slot(task, arguments.scale)
    return Launches(
        (
            launch(
                _cross_entropy, rows, logits, labels, lse, losses, n, scale, GRADIENT=arguments.gradient, **blocks,
            ),
            launch(scaled_total, 1, loss, losses, rows, scale, ACC=acc, BLOCK=4096, warps=8),
        ),
        scratch.bytes,
    )  # fmt: skip


@launches("cross_entropy_state")
def _describe_state(task: Task) -> Launches:
    (rows, n, blocks), arguments = _blocks(task, 2), CrossEntropyStateArgs.of(task)
    acc = {"ACC": task.accesses[0].accumulate, "ACC_PICKED": task.accesses[1].accumulate}
    tiles = [tile(task, k) for k in range(4)]
    return Launches((launch(_state, rows, *tiles, n, arguments.first, arguments.classes, **acc, **blocks),))


@launches("cross_entropy_loss")
def _describe_loss(task: Task) -> Launches:
    lse, loss, state, picked, labels = (tile(task, k) for k in range(5))
    rows, scratch = numel(task, 0), Scratch()
    losses, acc = scratch.take(rows, "fp32"), task.accesses[1].accumulate
    scale = slot(task, CrossEntropyLossArgs.of(task).scale)
    return Launches(
        (
            launch(_loss, ceil_div(rows, 256), lse, losses, state, picked, labels, rows, BLOCK=256),
            launch(scaled_total, 1, loss, losses, rows, scale, ACC=acc, BLOCK=4096, warps=8),
        ),
        scratch.bytes,
    )


@launches("cross_entropy_grad")
def _describe_grad(task: Task) -> Launches:
    rows, n, blocks = _blocks(task, 0)
    arguments = CrossEntropyGradArgs.of(task)
    args: list[Parameter] = [*(tile(task, k) for k in range(3)), n, arguments.first, slot(task, arguments.scale)]
    return Launches((launch(_cross_entropy_grad, rows, *args, **blocks),))
