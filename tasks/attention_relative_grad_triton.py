"""Gradients of the attention in attention_relative_triton.py, on CUDA. attention_relative.cpp lists a task's tiles.

One pass computes dq and the gradients of the queries' products, a second pass dk, dv and the gradients of the keys'
products. A program owns the rows of its results, so there are no atomic additions and every run gives the same bits.

The gradient of a product is a sum over all pairs whose distance has the product's position along `relative`. The index
does not decrease, so these pairs are consecutive. A program sums them by a segmented scan of each block of pairs. A sum
that continues in the next block stays in registers. If each distance of a block has a position of its own, the program
stores the gradients of the scores without sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .attention_relative import RelativeAttentionGradArgs
from .attention_relative_triton import (
    CLEARED,
    NO_LIMITS,
    block_of,
    key_of_terms,
    of_products,
    relative_scores_of,
    rows_of,
)
from .attention_segments_grad_triton import delta_of, load_queries
from .attention_segments_triton import (
    LOG2E,
    clear,
    factors_of,
    first_draw,
    kept_keys,
    layout,
    layout_of_rows,
    load_rows,
    names_of,
    places,
    product,
    sequence_of,
    shared,
    store_rows,
)
from .elementwise_triton import strides_of
from .launch import Launch, Launches, Parameter, Scratch, ceil_div, launch, launches, numel, power_of_two, shape, tile

COLUMNS = 64  # positions along `relative` that are cleared at a time


@triton.jit
def _joined(begins, total, other_begins, other):
    """Join two neighbouring parts of a segmented sum. Return whether a sum begins in the result, and its last sum."""
    return begins | other_begins, tl.where(other_begins != 0, other, total + other)


@triton.jit
def store_sums(
    OUT, INDEX, origin, low, value, straight, values, carry, start, head, own, n, first_other, m,
    AT: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Store the sum over the pairs [own, other] with the same position along `relative`, for each such position.

    Return, for each own position, the sum that continues in the next block of other positions, or zero.

    carry: the sums that the call for the previous block returned. Other arguments: see `terms_of`.
    """
    OTHER: tl.constexpr = values.shape[1]
    column = tl.arange(0, OTHER)
    other = first_other + column
    inside = (own < n)[:, None] & (other < m)[None, :]
    if straight:
        to = rows_of(OUT + (origin - low + value), start, head, own, AT) - own[:, None] * SIGN + other[None, :] * SIGN
        tl.store(to, values.to(OUT.dtype.element_ty), inside)
        carry = carry * 0.0
    else:
        entry = INDEX + (origin + (other[None, :] - own[:, None]) * SIGN)
        position = tl.load(entry, inside, 0).to(tl.int32)
        before = tl.load(entry - SIGN, inside & (other > 0)[None, :], -1).to(tl.int32)
        after = tl.load(entry + SIGN, inside & (other + 1 < m)[None, :], -1).to(tl.int32)
        continued = (column == 0)[None, :] & (position == before)
        values = tl.where(inside, values, 0.0) + tl.where(continued, carry[:, None], 0.0)
        _, sums = tl.associative_scan(((position != before).to(tl.int32), values), 1, _joined)
        to = rows_of(OUT, start, head, own, AT) + position
        tl.store(to, sums.to(OUT.dtype.element_ty), inside & (position != after))
        carry = tl.sum(tl.where(inside & (column == OTHER - 1)[None, :] & (position == after), sums, 0.0), 1)
    return carry


@triton.jit
def clear_beside(
    OUT, INDEX, origin, start, head, own, n, m, RELATIVE: tl.constexpr, AT: tl.constexpr, SIGN: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Clear the gradients of `own` at positions along `relative` that no pair in the sequence has."""
    one = tl.load(INDEX + origin - own * SIGN, own < n, 0)
    last = tl.load(INDEX + origin + (m - 1 - own) * SIGN, own < n, 0)
    low, high = tl.minimum(one, last)[:, None], tl.maximum(one, last)[:, None]
    OUT += AT[0] + start.to(tl.int64) * AT[4] + head.to(tl.int64) * AT[2]
    for first in range(0, RELATIVE, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        outside = (own < n)[:, None] & (column < RELATIVE) & ((column < low) | (column > high))
        zeros = tl.zeros([own.shape[0], COLUMNS], OUT.dtype.element_ty)
        tl.store(OUT + own[:, None] * AT[1] + column, zeros, outside)


@triton.jit
def _grad_relative_queries(
    DQ, DK, DV, D_OUT, OUT, LSE, DELTA, Q, K, V, INDEX, QUERIES, KEYS_OF, D_QUERIES, D_KEYS, origin,
    DATA, tokens, keys, offsets, scale, DRAWS, mask_first, seed, mix, limit, kept_scale,
    DQ_AT: tl.constexpr, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D_OUT_AT: tl.constexpr, OUT_AT: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr, KEYS_AT: tl.constexpr, RELATIVE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CLEARED: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dq and the gradients of the products of a block of ROWS queries. Store `delta_of` the queries."""
    number, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    first = block * ROWS
    if PACKED and number + 1 == offsets:
        clear(DQ, DATA, start, n, head, block, DQ_AT, D, BLOCKS, ROWS, BLOCK_D)
        if len(QUERIES_AT) > 0:
            clear(D_QUERIES, DATA, start, n, head, block, QUERIES_AT, RELATIVE, BLOCKS, CLEARED, BLOCK_R)
    elif first < n:
        row, drawn = first + tl.arange(0, ROWS), first_draw(DRAWS, start, mask_first, STEPS, PACKED)
        q, d_out, lse = load_queries(Q, D_OUT, LSE, start, head, row, n, Q_AT, D_OUT_AT, LSE_AT, D, BLOCK_D)
        delta = delta_of(OUT, d_out, start, head, row, n, OUT_AT, D, BLOCK_D)
        store_rows(DELTA, delta[:, None], start, head, row, n, LSE_AT, 1, 1)
        dq, carry = tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS], tl.float32)
        for at in range(0, m, KEYS):
            key = at + tl.arange(0, KEYS)
            k = load_rows(K, start, head, key, m, K_AT, D, BLOCK_D)
            v = load_rows(V, start, head, key, m, V_AT, D, BLOCK_D)
            low, value, straight = block_of(INDEX, origin, first, at, n, m, ROWS, KEYS)
            s = relative_scores_of(
                q, k, INDEX, QUERIES, KEYS_OF, origin, low, value, straight, start, head, row, n, key, m,
                kept_keys(DATA, start, key, m, PADDED), QUERIES_AT, KEYS_AT, PRECISION,
            )  # fmt: skip
            p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
            dp = product(d_out, tl.trans(v), PRECISION)
            if len(STEPS) > 0:
                dp *= factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS, KEYS)
            ds = p * (dp - delta[:, None]) * scale
            dq += product(ds.to(k.dtype), k, PRECISION)
            if len(QUERIES_AT) > 0:
                carry = store_sums(
                    D_QUERIES, INDEX, origin, low, value, straight, ds, carry, start, head, row, n, at, m, QUERIES_AT, 1
                )  # fmt: skip
        store_rows(DQ, dq.to(DQ.dtype.element_ty), start, head, row, n, DQ_AT, D, BLOCK_D)
        if len(QUERIES_AT) > 0:
            clear_beside(D_QUERIES, INDEX, origin, start, head, row, n, m, RELATIVE, QUERIES_AT, 1, COLUMNS)


@triton.jit
def _grad_relative_keys(
    DQ, DK, DV, D_OUT, OUT, LSE, DELTA, Q, K, V, INDEX, QUERIES, KEYS_OF, D_QUERIES, D_KEYS, origin,
    DATA, tokens, keys, offsets, scale, DRAWS, mask_first, seed, mix, limit, kept_scale,
    DQ_AT: tl.constexpr, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D_OUT_AT: tl.constexpr, OUT_AT: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr, KEYS_AT: tl.constexpr, RELATIVE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CLEARED: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv and the gradients of the products of a block of KEYS keys."""
    number, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    first = block * KEYS
    if PACKED and number + 1 == offsets:
        clear(DK, DATA, start, n, head, block, DK_AT, D, BLOCKS, KEYS, BLOCK_D)
        clear(DV, DATA, start, n, head, block, DV_AT, D, BLOCKS, KEYS, BLOCK_D)
        if len(KEYS_AT) > 0:
            clear(D_KEYS, DATA, start, n, head, block, KEYS_AT, RELATIVE, BLOCKS, CLEARED, BLOCK_R)
    elif first < m:
        key = first + tl.arange(0, KEYS)
        # Keys beyond the last need no mask: their gradients are not stored.
        kept = kept_keys(DATA, start, key, m, PADDED, ENDS=False)
        drawn = first_draw(DRAWS, start, mask_first, STEPS, PACKED)
        k = load_rows(K, start, head, key, m, K_AT, D, BLOCK_D)
        v = load_rows(V, start, head, key, m, V_AT, D, BLOCK_D)
        dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
        carry = tl.zeros([KEYS], tl.float32)
        for at in range(0, n, ROWS):
            row = at + tl.arange(0, ROWS)
            q, d_out, lse = load_queries(Q, D_OUT, LSE, start, head, row, n, Q_AT, D_OUT_AT, LSE_AT, D, BLOCK_D)
            delta = tl.sum(load_rows(DELTA, start, head, row, n, LSE_AT, 1, 1), 1)
            low, value, straight = block_of(INDEX, origin, at, first, n, m, ROWS, KEYS)
            s = relative_scores_of(
                q, k, INDEX, QUERIES, KEYS_OF, origin, low, value, straight, start, head, row, n, key, m, kept,
                QUERIES_AT, KEYS_AT, PRECISION, True,
            )  # fmt: skip
            p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
            dp, weights = product(v, tl.trans(d_out), PRECISION), p
            if len(STEPS) > 0:
                factors = tl.trans(factors_of(row, first, drawn, head, seed, mix, limit, kept_scale, STEPS, KEYS))
                weights, dp = p * factors, dp * factors
            ds = p * (dp - delta[None, :]) * scale
            dv += product(weights.to(q.dtype), d_out, PRECISION)
            dk += product(ds.to(q.dtype), q, PRECISION)
            if len(KEYS_AT) > 0:
                carry = store_sums(
                    D_KEYS, INDEX, origin, low, value, straight, ds, carry, start, head, key, m, at, n, KEYS_AT, -1
                )  # fmt: skip
        store_rows(DK, dk.to(DK.dtype.element_ty), start, head, key, m, DK_AT, D, BLOCK_D)
        store_rows(DV, dv.to(DV.dtype.element_ty), start, head, key, m, DV_AT, D, BLOCK_D)
        if len(KEYS_AT) > 0:
            clear_beside(D_KEYS, INDEX, origin, start, head, key, m, n, RELATIVE, KEYS_AT, -1, COLUMNS)


@launches("attention_relative_grad")
def _describe(task: Task) -> Launches:
    args = RelativeAttentionGradArgs.of(task)
    a = args.attention
    limits = a.limits or NO_LIMITS
    packed, scratch = limits.segments, Scratch()
    tiles, of_qkv, next_tile = places(task, a.qkv, 3, packed=packed)
    grads, of_grads, index = places(task, a.grads, next_tile, packed=packed)
    which, order = (args.queries, args.keys), args.order
    products, of_terms = of_products(task, index + 1, *which, order=order, packed=packed)
    d_products, _ = of_products(task, index + 1 + sum(which), *which, order=order, packed=packed)
    common = shared(task, a.qkv, 3, a.scale, limits, diagonal=False, data=index + 1 + 2 * sum(which))
    delta, lse = scratch.take(numel(task, 2), "fp32"), layout_of_rows(task, 2, packed=packed)
    of_outs = [layout(strides_of(shape(task, k)), by, packed=packed) for k, by in ((0, a.d_out), (1, a.out))]
    names = ("DQ_AT", "DK_AT", "DV_AT", "D_OUT_AT", "OUT_AT", "Q_AT", "K_AT", "V_AT", "LSE_AT", "QUERIES_AT", "KEYS_AT")
    at = dict(zip(names, [*of_grads, *of_outs, *of_qkv, lse, *of_terms], strict=True))
    terms = [tile(task, index), *products, *d_products, shape(task, index)[0] // 2]
    parameters: list[Parameter] = [*grads, *(tile(task, k) for k in range(3)), delta, *tiles, *terms, *common.args]
    relative = shape(task, index + 1)[-1]
    block = power_of_two(relative)
    constants = {key: common.constants[key] for key in ("PACKED", "PADDED", "STEPS", "PRECISION", "D", "BLOCK_D")}
    constants |= {"RELATIVE": relative, "BLOCK_R": block, "CLEARED": max(CLEARED // block, 1)}
    constants["COLUMNS"] = min(block, COLUMNS)

    def two(for_queries: tuple[int, int], for_keys: tuple[int, int], warps: int) -> tuple[Launch, ...]:
        """Return the launches of both passes. for_queries, for_keys: (ROWS, KEYS) of the first and the second pass."""
        launched: list[Launch] = []
        passes = (_grad_relative_queries, for_queries, 0), (_grad_relative_keys, for_keys, 1)
        for kernel, sizes, own in passes:
            blocks = ceil_div(common.longest[own], sizes[own])
            options: dict[str, Any] = {"BLOCKS": blocks, "ROWS": sizes[0], "KEYS": sizes[1], "warps": warps}
            grid = common.grid(blocks, common.sizes[0])
            launched.append(launch(kernel, grid, *parameters, **at, **constants, **options))
        return tuple(launched)

    if constants["PRECISION"] == "ieee":
        ways = [two((32, 32), (32, 32), 4)]
    else:
        most = max(power_of_two(common.longest[1]), 16)
        ways = [two((64, 32), (32, 64), 4)] if most > 32 else [two((most, most), (most, most), 4)]
        ways += [two((32, 64), (32, 64), 4), two((64, 64), (64, 64), 8)] if most > 32 else []
        ways += [two((64, 32), (32, 64), 8)] if most > 32 else []
    key = f"relative {key_of_terms(which, relative)} gradient {common.key} of {names_of(ways)}"
    return Launches(ways[0], scratch.bytes, others=tuple(ways[1:]), key=key)
