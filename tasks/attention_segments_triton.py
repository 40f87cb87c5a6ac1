"""Attention over packed sequences, or over rows of a batch with dropout, on CUDA.

attention.cpp lists the tiles of each task. A program computes a block of queries of one sequence and one head.

PACKED: the sequences are segments of one row of tokens. A program whose block begins beyond the end of its segment
returns at once. The tokens behind the last segment count as one more sequence: its programs set the results of all
tokens outside the segments to zero. Not PACKED: each row of the batch is a sequence. All rows
have the same number of queries and the same number of keys, and padding may mask keys.

Short sequences: all keys and values are on chip, without online softmax (the short form of ByteTransformer, Zhai et al.
2023). Longer sequences: one pass over the keys with online softmax (Dao et al. 2022). The C++ code times the candidate
block sizes and uses the fastest. For the backend `vendor`, ATen's and cuDNN's kernels are candidates too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .attention_operands import OperandsArgs
from .attention_tasks import AttentionArgs
from .dropout_rng_triton import drop_factors
from .elementwise_triton import mask_of, strides_of
from .interpreted_triton import INTERPRETED
from .launch import Int, Launch, Launches, Parameter, ceil_div, launch, launches, power_of_two, shape, tile
from .mask import Limits

Layout = tuple[int, int, int, int, int]  # offset of the first element; strides of tokens, heads, head_dim, `start`
WHOLE = 256  # longest sequence whose keys and values are all on chip
LOG2E, LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))


@triton.jit
def sequence_of(DATA, number, offsets, tokens, keys, PACKED: tl.constexpr):
    """Return start (first token of a segment, or row of the batch), number of queries and number of keys of a sequence.

    Segment number offsets - 1 stands for the tokens behind the last segment.
    """
    if PACKED:
        start = tl.minimum(tl.load(DATA + number), tokens)
        end = tl.minimum(tl.load(DATA + number + 1, number + 1 < offsets, tokens), tokens)
        n = (end - start).to(tl.int32)
        return start, n, n
    else:
        return number.to(tl.int64), tokens, keys


@triton.jit
def kept_keys(DATA, start, key, keys, PADDED: tl.constexpr, ENDS: tl.constexpr = True):
    """Return which keys are not masked by padding. ENDS or PADDED: keys beyond the sequence's end are masked too."""
    kept = key < keys if ENDS or PADDED else key == key
    if PADDED:
        kept = kept & (tl.load(DATA + start * keys + key, kept, 0) != 0)
    return kept


@triton.jit
def place_of(X, start, head, row, AT: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers to rows of one head, [rows, head_dim]; AT: the Layout of X."""
    X += AT[0] + start.to(tl.int64) * AT[4] + head.to(tl.int64) * AT[2]
    return X + row[:, None] * AT[1] + tl.arange(0, BLOCK_D)[None, :] * AT[3]


@triton.jit
def load_rows(X, start, head, row, n, AT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    inside = (row < n)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(place_of(X, start, head, row, AT, BLOCK_D), inside, 0.0)


@triton.jit
def store_rows(X, value, start, head, row, n, AT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    inside = (row < n)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(place_of(X, start, head, row, AT, BLOCK_D), value, inside)


@triton.jit
def clear(
    X, DATA, start, n, head, block,
    AT: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Set rows of X without a segment to zero: n rows from `start` on, and the rows before the first segment.

    A program clears every BLOCKS-th block of ROWS rows, from number `block` on.
    """
    row, zeros = tl.arange(0, ROWS), tl.zeros([ROWS, BLOCK_D], X.dtype.element_ty)
    for first in range(block * ROWS, n, BLOCKS * ROWS):
        store_rows(X, zeros, start, head, first + row, n, AT, D, BLOCK_D)
    before = tl.load(DATA).to(tl.int32)
    for first in range(block * ROWS, before, BLOCKS * ROWS):
        store_rows(X, zeros, start * 0, head, first + row, before, AT, D, BLOCK_D)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    if INTERPRETED:  # Triton's interpreter uses numpy, which has no bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def scores_of(
    a, b, row, key, kept,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Return the unscaled, masked scores of queries a and keys b. TRANSPOSED: [keys, queries], of keys a and queries b.

    The scores are unscaled, because the caller scales them and subtracts the row's maximum or lse in one instruction.
    """
    s = product(a, tl.trans(b), PRECISION)
    by_row: tl.constexpr = 0 if TRANSPOSED else 1
    row, key, good = tl.expand_dims(row, by_row), tl.expand_dims(key, 1 - by_row), tl.expand_dims(kept, 1 - by_row)
    if CAUSAL:
        good = good & (key <= row)
    if WINDOW:
        good = good & (row - key < WINDOW)
    if TWO_SIDED:
        good = good & (key - row < WINDOW)
    return tl.where(good, s, -float("inf"))


@triton.jit
def keys_of(first, n, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
             TWO_SIDED: tl.constexpr):  # fmt: skip
    """Return begin and end of the keys, among n, to which the ROWS queries from `first` on attend.

    begin is a multiple of KEYS.
    """
    begin, end = first * 0, n
    if CAUSAL:
        end = tl.minimum(end, first + ROWS)
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
    if TWO_SIDED:
        end = tl.minimum(end, first + ROWS + WINDOW - 1)
    return begin, end


@triton.jit
def first_draw(DRAWS, start, mask_first, STEPS: tl.constexpr, PACKED: tl.constexpr):
    """Return the dropout index of the sequence's first (query, key) pair in the task's first head.

    The dropout index is the position of a pair among all attention probabilities. Without dropout (empty STEPS), the
    result is not used.
    """
    if len(STEPS) == 0:
        return start
    elif PACKED:
        return mask_first + tl.load(DRAWS + start) * (STEPS[0] // STEPS[2])
    else:
        return mask_first + start * STEPS[0]


@triton.jit
def factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS: tl.constexpr, KEYS: tl.constexpr):
    """Return mask / (1 - rate) for the queries `row` of a head and KEYS keys from `at` on; drawn: from `first_draw`."""
    first = drawn + head.to(tl.int64) * STEPS[1]
    EVEN: tl.constexpr = (STEPS[0] | STEPS[1] | STEPS[2] | STEPS[0] // STEPS[2]) % 2 == 0
    SAME: tl.constexpr = STEPS[2] & (STEPS[2] - 1) == 0  # rows of a power of two never cross a multiple of 2**33
    return drop_factors(
        first, row[:, None], at, seed, mix, limit, kept_scale, STEPS[2], STEPS[1], KEYS, EVEN, SAME
    )  # fmt: skip


@triton.jit
def permuted_keys(KEYS: tl.constexpr):
    """Return an order of keys in which one thread holds both keys of a pair.

    A pair is two neighbouring keys: they share a hash of dropout. In a matrix product whose rows are the keys, a thread
    holds rows that are 8 apart.
    """
    at = tl.arange(0, KEYS)
    return at // 16 * 16 + at % 8 * 2 + at // 8 % 2


@triton.jit
def transposed_factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS: tl.constexpr, KEYS: tl.constexpr):
    """Return `factors_of` transposed: [keys, rows], with keys in the order of `permuted_keys`."""
    factors = tl.trans(factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS, KEYS))
    pairs = tl.permute(tl.reshape(factors, (KEYS // 16, 8, 2, row.shape[0])), (0, 2, 1, 3))
    return tl.reshape(pairs, (KEYS, row.shape[0]))


@triton.jit
def _forward(
    OUT, LSE, Q, K, V, DATA, tokens, keys, offsets, scale, DRAWS, mask_first, seed, mix, limit, kept_scale,
    OUT_AT: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr, ONLINE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the output and lse (log-sum-exp of the scores) of a block of ROWS queries.

    ONLINE: the program loops over blocks of KEYS keys. Otherwise it reads all keys, at most KEYS, at once.
    """
    number, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    first = block * ROWS
    if PACKED and number + 1 == offsets:
        clear(OUT, DATA, start, n, head, block, OUT_AT, D, BLOCKS, ROWS, BLOCK_D)
        clear(LSE, DATA, start, n, head, block, LSE_AT, 1, BLOCKS, ROWS, 1)
    elif first < n:
        row, key = first + tl.arange(0, ROWS), tl.arange(0, KEYS)
        drawn, by = first_draw(DRAWS, start, mask_first, STEPS, PACKED), scale * LOG2E
        q = load_rows(Q, start, head, row, n, Q_AT, D, BLOCK_D)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total, out = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)
        if ONLINE:
            begin, end = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
            for at in range(begin, end, KEYS):
                k = load_rows(K, start, head // GROUP, at + key, m, K_AT, D, BLOCK_D)
                kept_here = kept_keys(DATA, start, at + key, m, PADDED)
                s = scores_of(q, k, row, at + key, kept_here, CAUSAL, WINDOW, TWO_SIDED, PRECISION)
                higher = tl.maximum(top, tl.max(s, 1) * by)
                shift = tl.where(higher > -float("inf"), higher, 0.0)
                p, less = tl.exp2(s * by - shift[:, None]), tl.exp2(top - shift)
                total = total * less + tl.sum(p, 1)
                if len(STEPS) > 0:
                    p *= factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS, KEYS)
                v = load_rows(V, start, head // GROUP, at + key, m, V_AT, D, BLOCK_D)
                out = out * less[:, None] + product(p.to(v.dtype), v, PRECISION)
                top = higher
            top = tl.where(top > -float("inf"), top, 0.0)
        else:
            k = load_rows(K, start, head // GROUP, key, m, K_AT, D, BLOCK_D)
            v = load_rows(V, start, head // GROUP, key, m, V_AT, D, BLOCK_D)
            kept_here = kept_keys(DATA, start, key, m, PADDED)
            s = scores_of(q, k, row, key, kept_here, CAUSAL, WINDOW, TWO_SIDED, PRECISION)
            top = tl.max(s, 1) * by
            top = tl.where(top > -float("inf"), top, 0.0)
            p = tl.exp2(s * by - top[:, None])
            total = tl.sum(p, 1)
            if len(STEPS) > 0:
                p *= factors_of(row, 0, drawn, head, seed, mix, limit, kept_scale, STEPS, KEYS)
            out = product(p.to(v.dtype), v, PRECISION)
        total = tl.where(total > 0, total, 1.0)
        store_rows(OUT, (out / total[:, None]).to(OUT.dtype.element_ty), start, head, row, n, OUT_AT, D, BLOCK_D)
        lse = (top + tl.log2(total)) * LN2
        store_rows(LSE, lse[:, None], start, head, row, n, LSE_AT, 1, 1)


# -- tasks


def places(task: Task, args: OperandsArgs, first: int, *, packed: bool) -> tuple[list[Parameter], list[Layout], int]:
    """Return the tiles of q, k, v (or dq, dk, dv), their layouts, and the number of the task's next tile.

    first: number of the first of these tiles in the task.
    """
    tiles, layouts = [], []
    for number, index in (args.q, args.k, args.v):
        steps, base = strides_of(shape(task, first + number)), 0
        if index >= 0:
            base = index * steps.pop(args.axis)
        tiles.append(tile(task, first + number))
        layouts.append(layout(steps, args.order, base, packed=packed))
    return [*tiles], layouts, first + 1 + max(number for number, _ in (args.q, args.k, args.v))


def layout(steps: Sequence[int], order: Sequence[int], base: int = 0, *, packed: bool) -> Layout:
    """Return the Layout for `place_of`. order: positions of batch, heads, seq, head_dim in `steps`, the strides."""
    batch, heads, seq, head_dim = order
    start = steps[seq] if packed else steps[batch] if batch >= 0 else 0
    return base, steps[seq], steps[heads], steps[head_dim], start


def layout_of_rows(task: Task, number: int, *, packed: bool) -> Layout:
    """Return the Layout of the task's tile `number`, which is lse [batch, heads, seq]."""
    return layout([*strides_of(shape(task, number)), 1], (0, 1, 2, 3), packed=packed)


def extents(task: Task, args: OperandsArgs, number: int, index: int) -> tuple[int, int, int, int]:
    """Return the sizes of batch (1 without this axis), heads, seq and head_dim of an operand's tile."""
    sizes = list(shape(task, number))
    if index >= 0:
        sizes.pop(args.axis)
    batch, heads, seq, head_dim = args.order
    return sizes[batch] if batch >= 0 else 1, sizes[heads], sizes[seq], sizes[head_dim]


@dataclass(frozen=True)
class SegmentArguments:
    """Arguments that all launches of a task share."""

    sizes: tuple[int, int, int]  # query heads, key heads, head_dim
    sequences: int  # number of sequences; with segments, the tokens after the last segment count as a sequence
    longest: tuple[int, int]  # largest number of queries and of keys of a sequence
    args: list[Parameter]  # kernel arguments from the mask's data on
    constants: dict[str, Any]
    key: str  # describes the task; part of the key under which the fastest candidate is stored

    def grid(self, blocks: int, heads: int) -> tuple[int, int]:
        return self.sequences * blocks, heads


def shared(
    task: Task, qkv: OperandsArgs, first: int, scale: float, limits: Limits, *, diagonal: bool, data: int
) -> SegmentArguments:
    """Return the arguments that all launches of the task share.

    first: number of the first tile of q, k and v; data: number of the first tile of the mask's data.
    """
    batch, heads, tokens, head_dim = extents(task, qkv, first + qkv.q[0], qkv.q[1])
    _, of_keys, keys, _ = extents(task, qkv, first + qkv.k[0], qkv.k[1])
    packed, dtype, drop = limits.segments, task.accesses[first].tile.dtype, limits.dropout
    of_mask = tile(task, data if packed or limits.padding else first)
    mask = mask_of(task, drop) if drop else [of_mask, *[Int(0, 64)] * 4, 1.0]
    kind, sequences, longest = f"{dtype} {heads} {of_keys} {head_dim}", batch, (int(tokens), int(keys))
    if packed:
        sequences, longest = shape(task, data)[-1], (limits.longest, limits.longest)
        kind += f" longest {limits.longest} of {int(tokens)}"
    else:
        kind += f" rows {batch} of {tokens} {keys} padding {int(limits.padding)}"
    constants = {
        "PACKED": packed, "PADDED": limits.padding,
        "STEPS": drop.strides[:3] if drop else (), "CAUSAL": diagonal, "WINDOW": limits.window,
        "TWO_SIDED": limits.two_sided, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "GROUP": heads // of_keys, "D": head_dim, "BLOCK_D": max(power_of_two(head_dim), 16),
    }  # fmt: skip
    kind += f" mask {int(diagonal)} {limits.window} {int(limits.two_sided)} dropout {int(drop is not None)}"
    args = [of_mask, tokens, keys, sequences, scale, *mask]
    return SegmentArguments((heads, of_keys, head_dim), sequences, longest, args, constants, kind)


def names_of(ways: Sequence[tuple[Launch, ...]]) -> str:
    """Return a text with each candidate's kernels and their block sizes. Keys of stored choices contain this text."""
    return ", ".join(" + ".join(map(_name, way)) for way in ways)


def _name(one: Launch) -> str:
    cut = dict(one.constexprs)
    return f"{one.kernel.__name__[1:]}{' online' * cut.get('ONLINE', 0)} {cut['ROWS']}x{cut['KEYS']}x{one.warps}"


def served(task: Task, limits: Limits | None) -> bool:
    """Return whether these kernels support the task `attention`, or its gradient."""
    adds = any(access.accumulate for access in task.accesses)  # then each timing of a candidate would add again
    return limits is not None and limits.segments and not adds


def beside_cudnn(launches: Launches) -> Launches:
    """Return the launches with another key, so that choices stored before cuDNN was a candidate do not apply."""
    return replace(launches, key=f"beside cuDNN {launches.key}")


@launches("attention")
def _describe_vendor(task: Task) -> Launches:
    return beside_cudnn(_describe(task)) if served(task, AttentionArgs.of(task).limits) else Launches(())


@launches("attention_segments")
def _describe(task: Task) -> Launches:
    a = AttentionArgs.of(task)
    assert a.limits
    packed = a.limits.segments
    tiles, layouts, data = places(task, a.qkv, 2, packed=packed)
    common = shared(task, a.qkv, 2, a.scale, a.limits, diagonal=a.diagonal, data=data)
    names = ("OUT_AT", "Q_AT", "K_AT", "V_AT", "LSE_AT")
    out, lse = layout(strides_of(shape(task, 0)), a.out, packed=packed), layout_of_rows(task, 1, packed=packed)
    at: dict[str, Any] = dict(zip(names, [out, *layouts, lse], strict=True))
    args: list[Parameter] = [tile(task, 0), tile(task, 1), *tiles, *common.args]

    def way(online: bool, rows: int, keys: int, warps: int) -> tuple[Launch, ...]:
        blocks = ceil_div(common.longest[0], rows)
        options = {"BLOCKS": blocks, "ONLINE": online, "ROWS": rows, "KEYS": keys, "warps": warps}
        return (launch(_forward, common.grid(blocks, common.sizes[0]), *args, **at, **common.constants, **options),)

    whole = max(power_of_two(common.longest[1]), 16)
    if common.constants["PRECISION"] == "ieee":  # fp32 products need more registers and use no tensor cores
        ways = [way(True, 32, 32, 4), *([way(False, min(whole, 32), whole, 4)] if whole <= 64 else [])]
    else:
        ways = [way(True, 64, 64, 4)] if whole > 64 else []
        ways += [way(True, 128, 64, 8), way(True, 128, 128, 8)] if whole > 128 else []
        ways += [way(True, 128, 64, 4), way(True, 64, 128, 4)] if whole > 128 and not packed else []
        ways += [way(False, min(whole, 64), whole, 4 if whole <= 128 else 8)] if whole <= WHOLE else []
        ways += [way(False, 128, 128, 8)] if whole == 128 else []
    return Launches(ways[0], others=tuple(ways[1:]), key=f"forward {common.key} of {names_of(ways)}")
