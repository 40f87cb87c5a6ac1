"""Gradients of the attention in attention_segments_triton.py, on CUDA. attention.cpp lists the tiles of each task.

Short sequences: a program computes dq, dk and dv of a whole sequence in one pass, for all query heads that share a head
of keys. Longer sequences: one pass computes dq, a second pass dk and dv. There are no atomic additions, so every run
gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .attention_segments_triton import (
    LOG2E,
    WHOLE,
    beside_cudnn,
    clear,
    factors_of,
    first_draw,
    kept_keys,
    keys_of,
    layout,
    layout_of_rows,
    load_rows,
    names_of,
    permuted_keys,
    places,
    product,
    scores_of,
    sequence_of,
    served,
    shared,
    store_rows,
    transposed_factors_of,
)
from .attention_tasks import AttentionGradArgs
from .elementwise_triton import strides_of
from .launch import Launch, Launches, Parameter, Scratch, ceil_div, launch, launches, numel, power_of_two, shape, tile


@triton.jit
def queries_of(first, n, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                TWO_SIDED: tl.constexpr):  # fmt: skip
    """Return begin and end of the queries that attend to the KEYS keys from `first` on; begin is a multiple of ROWS."""
    begin, end = first * 0, n
    if CAUSAL:
        begin = first // ROWS * ROWS
    if WINDOW:
        end = tl.minimum(end, first + KEYS + WINDOW - 1)
    if TWO_SIDED:
        begin = tl.maximum(first - WINDOW + 1, 0) // ROWS * ROWS
    return begin, end


@triton.jit
def of_pairs(
    q, k, v, d_out, lse, delta, row, at_key, key, kept, scale, drawn, head, seed, mix, limit, kept_scale,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Return the weights of the values, and the gradient of the scaled scores, for a block of (query, key) pairs.

    lse: from `load_queries`. TRANSPOSED: both results are [keys, rows], with keys in the order of `permuted_keys`. The
    products over rows, which give dk and dv, then read both results from registers.
    """
    if TRANSPOSED:
        s = scores_of(k, q, row, key, kept, CAUSAL, WINDOW, TWO_SIDED, PRECISION, True)
    else:
        s = scores_of(q, k, row, key, kept, CAUSAL, WINDOW, TWO_SIDED, PRECISION)
    p = tl.exp2(s * (scale * LOG2E) - _along(lse, TRANSPOSED))
    if TRANSPOSED:
        dp, weights = product(v, tl.trans(d_out), PRECISION), p
    else:
        dp, weights = product(d_out, tl.trans(v), PRECISION), p
    if len(STEPS) > 0:
        if TRANSPOSED:
            factors = transposed_factors_of(row, at_key, drawn, head, seed, mix, limit, kept_scale, STEPS, key.shape[0])
        else:
            factors = factors_of(row, at_key, drawn, head, seed, mix, limit, kept_scale, STEPS, key.shape[0])
        weights, dp = p * factors, dp * factors
    return weights.to(q.dtype), (p * (dp - _along(delta, TRANSPOSED))).to(q.dtype)


@triton.jit
def _along(rows, TRANSPOSED: tl.constexpr):
    """Return one number per row in the shape that broadcasts over pairs: [1, rows] if TRANSPOSED, else [rows, 1]."""
    return rows[None, :] if TRANSPOSED else rows[:, None]


@triton.jit
def load_queries(Q, D_OUT, LSE, start, head, row, n, Q_AT: tl.constexpr, D_OUT_AT: tl.constexpr, LSE_AT: tl.constexpr,
                 D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Return rows of q, rows of the output's gradient, and lse to base 2 of these rows.

    Rows beyond the last get an infinite lse, so that their weights are 0.
    """
    q = load_rows(Q, start, head, row, n, Q_AT, D, BLOCK_D)
    d_out = load_rows(D_OUT, start, head, row, n, D_OUT_AT, D, BLOCK_D)
    lse = tl.sum(load_rows(LSE, start, head, row, n, LSE_AT, 1, 1), 1) * LOG2E
    return q, d_out, tl.where(row < n, lse, float("inf"))


@triton.jit
def delta_of(OUT, d_out, start, head, row, n, OUT_AT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return for each row the sum over head_dim of the output times the output's gradient."""
    out = load_rows(OUT, start, head, row, n, OUT_AT, D, BLOCK_D)
    return tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)


@triton.jit
def _clear_keys(DK, DV, DATA, start, n, head, block, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D: tl.constexpr,
                BLOCKS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Set dk and dv of tokens without a segment to zero, unless the kernel adds to dk and dv (ACC)."""
    if not ACC:
        clear(DK, DATA, start, n, head, block, DK_AT, D, BLOCKS, KEYS, BLOCK_D)
        clear(DV, DATA, start, n, head, block, DV_AT, D, BLOCKS, KEYS, BLOCK_D)


@triton.jit
def store_keys(DK, DV, dk, dv, start, head, key, n, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D: tl.constexpr,
               BLOCK_D: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    if ACC:
        dk += load_rows(DK, start, head, key, n, DK_AT, D, BLOCK_D).to(tl.float32)
        dv += load_rows(DV, start, head, key, n, DV_AT, D, BLOCK_D).to(tl.float32)
    store_rows(DK, dk.to(DK.dtype.element_ty), start, head, key, n, DK_AT, D, BLOCK_D)
    store_rows(DV, dv.to(DV.dtype.element_ty), start, head, key, n, DV_AT, D, BLOCK_D)


@triton.jit
def _grad_whole(
    DQ, DK, DV, D_OUT, OUT, LSE, DELTA, Q, K, V, DATA,
    tokens, keys, offsets, scale, DRAWS, mask_first, seed, mix, limit, kept_scale,
    DQ_AT: tl.constexpr, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D_OUT_AT: tl.constexpr, OUT_AT: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a sequence of at most KEYS keys, for the query heads that share a head of keys."""
    number, head = tl.program_id(0), tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    if PACKED and number + 1 == offsets:
        for member in range(0, GROUP):
            clear(DQ, DATA, start, n, head * GROUP + member, 0, DQ_AT, D, 1, ROWS, BLOCK_D)
        _clear_keys(DK, DV, DATA, start, n, head, 0, DK_AT, DV_AT, D, 1, ROWS, BLOCK_D, ACC)
    elif n > 0:
        key = permuted_keys(KEYS)
        kept, drawn = kept_keys(DATA, start, key, m, PADDED), first_draw(DRAWS, start, mask_first, STEPS, PACKED)
        k = load_rows(K, start, head, key, m, K_AT, D, BLOCK_D)
        v = load_rows(V, start, head, key, m, V_AT, D, BLOCK_D)
        dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
        for member in range(0, GROUP):
            of = head * GROUP + member
            for first in range(0, n, ROWS):
                row = first + tl.arange(0, ROWS)
                q, d_out, lse = load_queries(Q, D_OUT, LSE, start, of, row, n, Q_AT, D_OUT_AT, LSE_AT, D, BLOCK_D)
                delta = delta_of(OUT, d_out, start, of, row, n, OUT_AT, D, BLOCK_D)
                weights, ds = of_pairs(
                    q, k, v, d_out, lse, delta, row, 0, key, kept, scale, drawn, of, seed, mix, limit,
                    kept_scale, STEPS, CAUSAL, WINDOW, TWO_SIDED, PRECISION, True,
                )  # fmt: skip
                dv += product(weights, d_out, PRECISION)
                dk += product(ds, q, PRECISION)
                dq = product(tl.trans(ds), k, PRECISION) * scale
                store_rows(DQ, dq.to(DQ.dtype.element_ty), start, of, row, n, DQ_AT, D, BLOCK_D)
        store_keys(DK, DV, dk * scale, dv, start, head, key, m, DK_AT, DV_AT, D, BLOCK_D, ACC)


@triton.jit
def _grad_queries(
    DQ, DK, DV, D_OUT, OUT, LSE, DELTA, Q, K, V, DATA,
    tokens, keys, offsets, scale, DRAWS, mask_first, seed, mix, limit, kept_scale,
    DQ_AT: tl.constexpr, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D_OUT_AT: tl.constexpr, OUT_AT: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of ROWS queries. Store `delta_of` the queries for `_grad_keys`, in the layout of lse."""
    number, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    first = block * ROWS
    if PACKED and number + 1 == offsets:
        clear(DQ, DATA, start, n, head, block, DQ_AT, D, BLOCKS, ROWS, BLOCK_D)
    elif first < n:
        row, drawn = first + tl.arange(0, ROWS), first_draw(DRAWS, start, mask_first, STEPS, PACKED)
        q, d_out, lse = load_queries(Q, D_OUT, LSE, start, head, row, n, Q_AT, D_OUT_AT, LSE_AT, D, BLOCK_D)
        delta = delta_of(OUT, d_out, start, head, row, n, OUT_AT, D, BLOCK_D)
        store_rows(DELTA, delta[:, None], start, head, row, n, LSE_AT, 1, 1)
        dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
        begin, end = keys_of(first, m, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        for at in range(begin, end, KEYS):
            key = at + tl.arange(0, KEYS)
            kept = kept_keys(DATA, start, key, m, PADDED)
            k = load_rows(K, start, head // GROUP, key, m, K_AT, D, BLOCK_D)
            v = load_rows(V, start, head // GROUP, key, m, V_AT, D, BLOCK_D)
            _, ds = of_pairs(
                q, k, v, d_out, lse, delta, row, at, key, kept, scale, drawn, head, seed, mix, limit,
                kept_scale, STEPS, CAUSAL, WINDOW, TWO_SIDED, PRECISION,
            )  # fmt: skip
            dq += product(ds, k, PRECISION)
        store_rows(DQ, (dq * scale).to(DQ.dtype.element_ty), start, head, row, n, DQ_AT, D, BLOCK_D)


@triton.jit
def _grad_keys(
    DQ, DK, DV, D_OUT, OUT, LSE, DELTA, Q, K, V, DATA,
    tokens, keys, offsets, scale, DRAWS, mask_first, seed, mix, limit, kept_scale,
    DQ_AT: tl.constexpr, DK_AT: tl.constexpr, DV_AT: tl.constexpr, D_OUT_AT: tl.constexpr, OUT_AT: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of KEYS keys, from all query heads that share these keys."""
    number, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    first = block * KEYS
    if PACKED and number + 1 == offsets:
        _clear_keys(DK, DV, DATA, start, n, head, block, DK_AT, DV_AT, D, BLOCKS, KEYS, BLOCK_D, ACC)
    elif first < m:
        key = first + permuted_keys(KEYS)
        # Keys beyond the last need no mask: their dk and dv are not stored.
        kept = kept_keys(DATA, start, key, m, PADDED, ENDS=False)
        drawn = first_draw(DRAWS, start, mask_first, STEPS, PACKED)
        k = load_rows(K, start, head, key, m, K_AT, D, BLOCK_D)
        v = load_rows(V, start, head, key, m, V_AT, D, BLOCK_D)
        dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
        begin, end = queries_of(first, n, ROWS, KEYS, CAUSAL, WINDOW, TWO_SIDED)
        for member in range(0, GROUP):
            of = head * GROUP + member
            for at in range(begin, end, ROWS):
                row = at + tl.arange(0, ROWS)
                q, d_out, lse = load_queries(Q, D_OUT, LSE, start, of, row, n, Q_AT, D_OUT_AT, LSE_AT, D, BLOCK_D)
                delta = tl.sum(load_rows(DELTA, start, of, row, n, LSE_AT, 1, 1), 1)
                weights, ds = of_pairs(
                    q, k, v, d_out, lse, delta, row, first, key, kept, scale, drawn, of, seed, mix, limit,
                    kept_scale, STEPS, CAUSAL, WINDOW, TWO_SIDED, PRECISION, True,
                )  # fmt: skip
                dv += product(weights, d_out, PRECISION)
                dk += product(ds, q, PRECISION)
        store_keys(DK, DV, dk * scale, dv, start, head, key, m, DK_AT, DV_AT, D, BLOCK_D, ACC)


@launches("attention_grad")
def _describe_vendor(task: Task) -> Launches:
    return beside_cudnn(_describe(task)) if served(task, AttentionGradArgs.of(task).limits) else Launches(())


@launches("attention_segments_grad")
def _describe(task: Task) -> Launches:
    a = AttentionGradArgs.of(task)
    assert a.limits
    packed, scratch = a.limits.segments, Scratch()
    tiles, of_qkv, next_tile = places(task, a.qkv, 3, packed=packed)
    grads, of_grads, data = places(task, a.grads, next_tile, packed=packed)
    common = shared(task, a.qkv, 3, a.scale, a.limits, diagonal=a.diagonal, data=data)
    heads, of_keys, _ = common.sizes
    delta, lse = scratch.take(numel(task, 2), "fp32"), layout_of_rows(task, 2, packed=packed)
    of_outs = [layout(strides_of(shape(task, k)), by, packed=packed) for k, by in ((0, a.d_out), (1, a.out))]
    names = ("DQ_AT", "DK_AT", "DV_AT", "D_OUT_AT", "OUT_AT", "Q_AT", "K_AT", "V_AT", "LSE_AT")
    at = dict(zip(names, [*of_grads, *of_outs, *of_qkv, lse], strict=True))
    args: list[Parameter] = [*grads, *(tile(task, k) for k in range(3)), delta, *tiles, *common.args]
    adds = task.accesses[next_tile + a.grads.k[0]].accumulate
    constants = {**at, **common.constants, "ACC": adds}

    def whole(rows: int, keys: int, warps: int) -> tuple[Launch, ...]:
        options = {"ROWS": rows, "KEYS": keys, "warps": warps}
        return (launch(_grad_whole, common.grid(1, of_keys), *args, **constants, **options),)

    def two(for_queries: tuple[int, int], for_keys: tuple[int, int], warps: int) -> tuple[Launch, ...]:
        """Return the launches of both passes. for_queries, for_keys: (ROWS, KEYS) of the first and the second pass."""
        launched, (queries, of_one) = [], common.longest
        passes = (_grad_queries, heads, queries, for_queries, 0), (_grad_keys, of_keys, of_one, for_keys, 1)
        for kernel, of, positions, sizes, own in passes:
            blocks = ceil_div(positions, sizes[own])
            options = {"BLOCKS": blocks, "ROWS": sizes[0], "KEYS": sizes[1], "warps": warps}
            launched.append(launch(kernel, common.grid(blocks, of), *args, **constants, **options))
        return tuple(launched)

    most = max(power_of_two(common.longest[1]), 16)
    if common.constants["PRECISION"] == "ieee":
        ways = [two((32, 32), (32, 32), 4), *([whole(min(most, 32), most, 4)] if most <= 64 else [])]
    else:
        ways = [two((64, 64), (64, 64), 4)] if most > 64 else []
        ways += [two((64, 128), (64, 128), 8)] if most > 128 else []
        if most > 64 and not packed:  # longer blocks, as all sequences have the same length
            ways += [two((128, 64), (32, 128), 8)]
            ways += [two((128, 32), (32, 128), 4), two((64, 32), (32, 64), 4)] if most > 128 else []
        ways += [whole(min(most, 64), most, 4 if most <= 64 else 8)] if most <= WHOLE else []
        ways += [whole(32, most, 8)] if 64 < most <= WHOLE else []
        ways += [whole(32, 128, 4)] if most == 128 else []
    if adds:  # no candidates: each timing of a candidate would add to dk and dv again
        ways = ways[:1]
    key = f"turned gradient {common.key} of {names_of(ways)}"
    return Launches(ways[0], scratch.bytes, others=tuple(ways[1:]), key=key)
