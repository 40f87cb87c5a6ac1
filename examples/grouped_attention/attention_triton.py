"""Attention and its gradient as grouped products: ByteTransformer's long form (Zhai et al. 2023, section III.E.2).

Forward has three launches:

1. The number of tiles before each sequence.
2. Scores: a tile of q k^T. Its epilogue stores the maximum and the sum of exponentials of each row of the tile.
3. Values: the reduction of these maxima and sums to the log-sum-exp, then p v. The main loop of p v applies the softmax
   and the dropout. The paper reduces in a separate launch. Here a program has complete rows of the output, so no row is
   reduced twice.

The second launch stores exp(s - maximum of the tile) for a score s, the paper stores s. The epilogue needs this
exponential for the sum anyway, so each element has one exponential instead of two. bf16 would round a score of 16 by up
to 1/16, which is 6 % of exp(s).

The gradient has four launches:

1. The number of tiles before each sequence.
2. Tiles of q k^T and of do v^T. The epilogue stores the weights of the values and the gradient of the scores.
3. dq, as a product with the gradient of the scores.
4. dk, as a product with the gradient of the scores, and dv, as a product with the weights of the values.

No sum uses atomic operations, so results have the same bits each time.
"""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from nntile_py.tasks.attention_segments_grad_triton import delta_of, load_queries, of_pairs, queries_of, store_keys
from nntile_py.tasks.attention_segments_triton import (
    LN2,
    LOG2E,
    factors_of,
    first_draw,
    kept_keys,
    keys_of,
    layout,
    layout_of_rows,
    load_rows,
    places,
    product,
    scores_of,
    shared,
    store_rows,
)
from nntile_py.tasks.attention_tasks import AttentionArgs, AttentionGradArgs
from nntile_py.tasks.elementwise_triton import strides_of
from nntile_py.tasks.launch import Launches, numel, shape, tile
from nntile_py.tiles.task import Task

from .problems_triton import Grouped, clear_heads, pair_at, problem_at, scores_at, statistics_at


@triton.jit
def _grouped_scores(
    E, TOPS, TOTALS, PAIRS, Q, K, DATA, tokens, keys, offsets, scale,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """For each tile of scores s store e = exp(s - m), the maximum m of each row, and the sum of each row of e.

    Maxima and sums are those of a row within the tile. The product of m with log2 e is stored."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS * tl.load(PAIRS + count), PROGRAMS):
        number, head, pair, start, n, m = problem_at(
            PAIRS, DATA, number, turn, count, offsets, tokens, keys, HEADS, PACKED, WIDTH, AHEAD
        )
        first, at = pair_at(pair, n, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        _, end = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        if at < end:
            row, key = first + tl.arange(0, ROWS), at + tl.arange(0, KEYS)
            q = load_rows(Q, start, head, row, n, Q_AT, D, BLOCK_D)
            k = load_rows(K, start, head // GROUP, key, m, K_AT, D, BLOCK_D)
            kept = kept_keys(DATA, start, key, m, PADDED)
            s = scores_of(q, k, row, key, kept, CAUSAL, WINDOW, TWO_SIDED, PRECISION)
            top = tl.max(s, 1) * (scale * LOG2E)
            shift = tl.where(top > -float("inf"), top, 0.0)
            e = tl.exp2(s * (scale * LOG2E) - shift[:, None])
            of_rows = statistics_at(start, head, row, at, tokens, HEADS, PACKED, WIDTH, KEYS)
            tl.store(TOPS + of_rows, top, row < n)
            tl.store(TOTALS + of_rows, tl.sum(e, 1), row < n)
            place = scores_at(E, start, head, row, key, tokens, HEADS, PACKED, WIDTH)
            tl.store(place, e.to(E.dtype.element_ty), (row < n)[:, None])


@triton.jit
def _log_sums(TOPS, TOTALS, start, head, row, n, begin, end, tokens, HEADS: tl.constexpr, PACKED: tl.constexpr,
              WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Return the log-sum-exp, to base 2, of rows over the keys `begin` to `end`; 0 for a row without keys."""
    top, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for at in range(begin, end, KEYS):
        of_rows = statistics_at(start, head, row, at, tokens, HEADS, PACKED, WIDTH, KEYS)
        other = tl.load(TOPS + of_rows, row < n, -float("inf"))
        higher = tl.maximum(top, other)
        shift = tl.where(higher > -float("inf"), higher, 0.0)
        part = tl.load(TOTALS + of_rows, row < n, 0.0)
        total = total * tl.exp2(top - shift) + part * tl.exp2(other - shift)
        top = higher
    return tl.where(top > -float("inf"), top, 0.0) + tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit
def _grouped_values(
    OUT, LSE, E, TOPS, TOTALS, QUERIES, V, DATA, tokens, keys, offsets, scale,
    DRAWS, mask_first, seed, mix, limit, kept_scale,
    OUT_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store attention's output for ROWS queries and their log-sum-exp; the loop reads DEPTH keys at a time."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS * tl.load(QUERIES + count), PROGRAMS):
        number, head, block, start, n, m = problem_at(
            QUERIES, DATA, number, turn, count, offsets, tokens, keys, HEADS, PACKED, WIDTH, AHEAD
        )
        row = block * ROWS + tl.arange(0, ROWS)
        begin, end = keys_of(block * ROWS, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        lse = _log_sums(TOPS, TOTALS, start, head, row, n, begin, end, tokens, HEADS, PACKED, WIDTH, ROWS, KEYS)
        store_rows(LSE, (lse * LN2)[:, None], start, head, row, n, LSE_AT, 1, 1)
        drawn, out = first_draw(DRAWS, start, mask_first, STEPS, PACKED), tl.zeros([ROWS, BLOCK_D], tl.float32)
        for at in range(begin, end, DEPTH):
            key = at + tl.arange(0, DEPTH)
            e = tl.load(scores_at(E, start, head, row, key, tokens, HEADS, PACKED, WIDTH), (row < n)[:, None], 0.0)
            v = load_rows(V, start, head // GROUP, key, m, V_AT, D, BLOCK_D)
            of_rows = statistics_at(start, head, row, at, tokens, HEADS, PACKED, WIDTH, KEYS)
            top = tl.load(TOPS + of_rows, row < n, -float("inf"))
            if len(STEPS) > 0:
                factors = factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS, DEPTH)
                e = (e.to(tl.float32) * factors).to(v.dtype)
            out += product(e, v, PRECISION) * tl.exp2(top - lse)[:, None]
        store_rows(OUT, out.to(OUT.dtype.element_ty), start, head, row, n, OUT_AT, D, BLOCK_D)
    clear_heads(OUT, DATA, offsets, tokens, keys, OUT_AT, PACKED, HEADS, D, BLOCK_D, ROWS, PROGRAMS)
    clear_heads(LSE, DATA, offsets, tokens, keys, LSE_AT, PACKED, HEADS, 1, 1, ROWS, PROGRAMS)


@triton.jit
def _grouped_grad_pairs(
    WEIGHTS, DS, PAIRS, D_OUT, OUT, LSE, Q, K, V, DATA, tokens, keys, offsets, scale,
    DRAWS, mask_first, seed, mix, limit, kept_scale,
    D_OUT_AT: tl.constexpr, OUT_AT: tl.constexpr, LSE_AT: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """For each tile of scores store the weights of the values, and the gradient of the scaled scores."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS * tl.load(PAIRS + count), PROGRAMS):
        number, head, pair, start, n, m = problem_at(
            PAIRS, DATA, number, turn, count, offsets, tokens, keys, HEADS, PACKED, WIDTH, AHEAD
        )
        first, at = pair_at(pair, n, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        _, end = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        if at < end:
            row, key = first + tl.arange(0, ROWS), at + tl.arange(0, KEYS)
            q, d_out, lse = load_queries(Q, D_OUT, LSE, start, head, row, n, Q_AT, D_OUT_AT, LSE_AT, D, BLOCK_D)
            delta = delta_of(OUT, d_out, start, head, row, n, OUT_AT, D, BLOCK_D)
            k = load_rows(K, start, head // GROUP, key, m, K_AT, D, BLOCK_D)
            v = load_rows(V, start, head // GROUP, key, m, V_AT, D, BLOCK_D)
            kept, drawn = kept_keys(DATA, start, key, m, PADDED), first_draw(DRAWS, start, mask_first, STEPS, PACKED)
            weights, ds = of_pairs(
                q, k, v, d_out, lse, delta, row, at, key, kept, scale, drawn, head, seed, mix, limit,
                kept_scale, STEPS, CAUSAL, WINDOW, TWO_SIDED, PRECISION,
            )  # fmt: skip
            inside = (row < n)[:, None]
            tl.store(scores_at(WEIGHTS, start, head, row, key, tokens, HEADS, PACKED, WIDTH), weights, inside)
            tl.store(scores_at(DS, start, head, row, key, tokens, HEADS, PACKED, WIDTH), ds, inside)


@triton.jit
def _grouped_grad_queries(
    DQ, DS, QUERIES, K, DATA, tokens, keys, offsets, scale,
    DQ_AT: tl.constexpr, K_AT: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store dq, the gradient of ROWS queries; the loop reads DEPTH keys at a time."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS * tl.load(QUERIES + count), PROGRAMS):
        number, head, block, start, n, m = problem_at(
            QUERIES, DATA, number, turn, count, offsets, tokens, keys, HEADS, PACKED, WIDTH, AHEAD
        )
        row, dq = block * ROWS + tl.arange(0, ROWS), tl.zeros([ROWS, BLOCK_D], tl.float32)
        begin, end = keys_of(block * ROWS, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        for at in range(begin, end, DEPTH):
            key = at + tl.arange(0, DEPTH)
            ds = tl.load(scores_at(DS, start, head, row, key, tokens, HEADS, PACKED, WIDTH), (row < n)[:, None], 0.0)
            dq += product(ds, load_rows(K, start, head // GROUP, key, m, K_AT, D, BLOCK_D), PRECISION)
        store_rows(DQ, (dq * scale).to(DQ.dtype.element_ty), start, head, row, n, DQ_AT, D, BLOCK_D)
    clear_heads(DQ, DATA, offsets, tokens, keys, DQ_AT, PACKED, HEADS, D, BLOCK_D, ROWS, PROGRAMS)


@triton.jit
def _grouped_grad_keys(
    DK, DV, WEIGHTS, DS, OF_KEYS, D_OUT, Q, DATA, tokens, keys, offsets, scale,
    DK_AT: tl.constexpr, DV_AT: tl.constexpr, D_OUT_AT: tl.constexpr, Q_AT: tl.constexpr, PACKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of KEYS keys, summed over the heads that share the keys. The loop reads DEPTH queries at once."""
    number, count = tl.program_id(0) * 0, offsets - (1 if PACKED else 0)
    for turn in range(tl.program_id(0), HEADS // GROUP * tl.load(OF_KEYS + count), PROGRAMS):
        number, of_keys, block, start, n, m = problem_at(
            OF_KEYS, DATA, number, turn, count, offsets, tokens, keys, HEADS // GROUP, PACKED, WIDTH, AHEAD
        )
        key = block * KEYS + tl.arange(0, KEYS)
        dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
        begin, end = queries_of(block * KEYS, n, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        for member in range(0, GROUP):
            head = of_keys * GROUP + member
            for at in range(begin, end, DEPTH):
                row = at + tl.arange(0, DEPTH)
                inside = (row < n)[:, None]
                weights = tl.load(scores_at(WEIGHTS, start, head, row, key, tokens, HEADS, PACKED, WIDTH), inside, 0.0)
                d_out = load_rows(D_OUT, start, head, row, n, D_OUT_AT, D, BLOCK_D)
                dv += product(tl.trans(weights), d_out, PRECISION)
                ds = tl.load(scores_at(DS, start, head, row, key, tokens, HEADS, PACKED, WIDTH), inside, 0.0)
                dk += product(tl.trans(ds), load_rows(Q, start, head, row, n, Q_AT, D, BLOCK_D), PRECISION)
        store_keys(DK, DV, dk * scale, dv, start, of_keys, key, m, DK_AT, DV_AT, D, BLOCK_D, ACC)
    if not ACC:
        clear_heads(DK, DATA, offsets, tokens, keys, DK_AT, PACKED, HEADS // GROUP, D, BLOCK_D, KEYS, PROGRAMS)
        clear_heads(DV, DATA, offsets, tokens, keys, DV_AT, PACKED, HEADS // GROUP, D, BLOCK_D, KEYS, PROGRAMS)


def forward(task: Task) -> Launches:
    """Return the launches of a task with the kernel `attention_segments`."""
    a = AttentionArgs.of(task)
    assert a.limits
    packed = a.limits.segments
    (q, k, v), (q_at, k_at, v_at), data = places(task, a.qkv, 2, packed=packed)
    common = shared(task, a.qkv, 2, a.scale, a.limits, diagonal=a.diagonal, data=data)
    g = Grouped(common, task.accesses[2].tile.dtype, numel(task, 1))
    made = [*g.scores(1), *g.statistics()]
    out_at, lse_at = layout(strides_of(shape(task, 0)), a.out, packed=packed), layout_of_rows(task, 1, packed=packed)
    way = (
        g.count_tiles(),
        g.walk(_grouped_scores, *made, g.pairs, q, k, *common.args[:5], Q_AT=q_at, K_AT=k_at),
        g.walk(_grouped_values, tile(task, 0), tile(task, 1), *made, g.queries, v, *common.args,
               OUT_AT=out_at, V_AT=v_at, LSE_AT=lse_at),
    )  # fmt: skip
    return Launches(way, g.scratch.bytes)


def gradient(task: Task) -> Launches:
    """Return the launches of a task with the kernel `attention_segments_grad`."""
    a = AttentionGradArgs.of(task)
    assert a.limits
    packed = a.limits.segments
    (q, k, v), (q_at, k_at, v_at), next_tile = places(task, a.qkv, 3, packed=packed)
    (dq, dk, dv), (dq_at, dk_at, dv_at), data = places(task, a.grads, next_tile, packed=packed)
    common = shared(task, a.qkv, 3, a.scale, a.limits, diagonal=a.diagonal, data=data)
    g = Grouped(common, task.accesses[3].tile.dtype, numel(task, 2))
    weights, ds = g.scores(2)
    d_out_at, out_at = (layout(strides_of(shape(task, n)), by, packed=packed) for n, by in ((0, a.d_out), (1, a.out)))
    d_out, out, lse, lse_at = *(tile(task, n) for n in range(3)), layout_of_rows(task, 2, packed=packed)
    adds, plain = task.accesses[next_tile + a.grads.k[0]].accumulate, common.args[:5]  # without arguments of dropout
    way = (
        g.count_tiles(),
        g.walk(_grouped_grad_pairs, weights, ds, g.pairs, d_out, out, lse, q, k, v, *common.args,
               D_OUT_AT=d_out_at, OUT_AT=out_at, LSE_AT=lse_at, Q_AT=q_at, K_AT=k_at, V_AT=v_at),
        g.walk(_grouped_grad_queries, dq, ds, g.queries, k, *plain, DQ_AT=dq_at, K_AT=k_at),
        g.walk(_grouped_grad_keys, dk, dv, weights, ds, g.of_keys, d_out, q, *plain,
               DK_AT=dk_at, DV_AT=dv_at, D_OUT_AT=d_out_at, Q_AT=q_at, ACC=adds),
    )  # fmt: skip
    return Launches(way, g.scratch.bytes)
