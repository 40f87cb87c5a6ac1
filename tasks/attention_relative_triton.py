"""Attention with relative positions on CUDA (attention_relative.py). attention_relative.cpp lists a task's tiles.

A program computes a block of queries of one sequence and one head, with online softmax (Dao et al. 2022). Sequences
are segments of one row of tokens (PACKED), or rows of the batch, as in attention_segments_triton.py. For each block of
keys, the program reads the products of its queries and of these keys with embeddings of distances. Neighbouring keys
use neighbouring products of a query, and neighbouring queries use neighbouring products of a key. So a block of the
keys' products is read with keys as its rows, and then transposed. The index is read only for blocks in which several
distances have the same position along `relative`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .attention_relative import RelativeAttentionArgs
from .attention_segments_triton import (
    LN2,
    LOG2E,
    Layout,
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
from .interpreted_triton import INTERPRETED
from .launch import Launch, Launches, Parameter, ceil_div, launch, launches, power_of_two, shape, tile
from .mask import Limits

NO_LIMITS = Limits(0, 0, 0, False, False, False, 0, None)
CLEARED = 4096  # most elements that `clear` writes at a time


@triton.jit
def block_of(INDEX, origin, first_row, first_key, n, m, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return (low, value, straight) for a block of pairs: how its distances lie along `relative`.

    low: the place in the index just before the block's first entry, unless the sequence begins there. value: the entry
    at `low`. straight: whether the entries increase by one each, from `low` to the place just after the block's last
    entry. The block has the queries from first_row on and the keys from first_key on, of a sequence with n queries and
    m keys. origin: the place of distance 0.
    """
    longest = tl.maximum(n, m) - 1
    low = origin + tl.maximum(first_key - first_row - ROWS, -longest)
    high = origin + tl.minimum(first_key - first_row + KEYS, longest)
    value = tl.load(INDEX + low).to(tl.int32)
    return low, value, tl.load(INDEX + high).to(tl.int32) - value == high - low


@triton.jit
def rows_of(X, start, head, own, AT: tl.constexpr):
    """Return pointers to the first product, or gradient of a product, of each position `own` of a head, [own, 1]."""
    return X + AT[0] + start.to(tl.int64) * AT[4] + head.to(tl.int64) * AT[2] + own[:, None] * AT[1]


@triton.jit
def terms_of(
    X, INDEX, origin, low, value, straight, start, head, own, n, other, m, AT: tl.constexpr, SIGN: tl.constexpr
):  # fmt: skip
    """Return the products of the positions `own` for all pairs of positions, [own, other].

    X: products of queries (SIGN 1: own are queries, other keys) or of keys (SIGN -1: own are keys, other queries).
    n, m: number of own and of other positions in the sequence. low, value, straight: from `block_of`.
    """
    inside = (own < n)[:, None] & (other < m)[None, :]
    if straight:  # no index, and simple addresses
        at = rows_of(X + (origin - low + value), start, head, own, AT) - own[:, None] * SIGN + other[None, :] * SIGN
        terms = tl.load(at, inside, 0.0)
    else:
        entry = origin + (other[None, :] - own[:, None]) * SIGN
        at = rows_of(X, start, head, own, AT) + tl.load(INDEX + entry, inside, 0).to(tl.int32)
        terms = tl.load(at, inside, 0.0)
    return terms


@triton.jit
def relative_scores_of(
    q, k, INDEX, QUERIES, KEYS_OF, origin, low, value, straight, start, head, row, n, key, m, kept,
    QUERIES_AT: tl.constexpr, KEYS_AT: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Return the unscaled, masked scores with the terms of the distances, [rows, keys]. TRANSPOSED: [keys, rows].

    An empty layout QUERIES_AT or KEYS_AT means that these products are missing.
    """
    own, other = k if TRANSPOSED else q, q if TRANSPOSED else k
    s = tl.zeros([own.shape[0], other.shape[0]], tl.float32)
    if len(QUERIES_AT) > 0:
        terms = terms_of(QUERIES, INDEX, origin, low, value, straight, start, head, row, n, key, m, QUERIES_AT, 1)
        s += (tl.trans(terms) if TRANSPOSED else terms).to(tl.float32)
    if len(KEYS_AT) > 0:
        terms = terms_of(KEYS_OF, INDEX, origin, low, value, straight, start, head, key, m, row, n, KEYS_AT, -1)
        s += (terms if TRANSPOSED else tl.trans(terms)).to(tl.float32)
    s = _added(s, own, tl.trans(other), PRECISION)
    return tl.where(tl.expand_dims(kept, 1 if TRANSPOSED else 0), s, -float("inf"))


@triton.jit
def _added(c, a, b, PRECISION: tl.constexpr):
    """Return c + a b. A product that starts from c has the registers of a product, which are best for row maxima."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _relative_forward(
    OUT, LSE, Q, K, V, INDEX, QUERIES, KEYS_OF, origin, DATA, tokens, keys, offsets, scale, DRAWS, mask_first, seed,
    mix, limit, kept_scale,
    OUT_AT: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, LSE_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr, KEYS_AT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the output and lse (log-sum-exp of the scores) of a block of ROWS queries."""
    number, block, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    start, n, m = sequence_of(DATA, number, offsets, tokens, keys, PACKED)
    first = block * ROWS
    if PACKED and number + 1 == offsets:
        clear(OUT, DATA, start, n, head, block, OUT_AT, D, BLOCKS, ROWS, BLOCK_D)
        clear(LSE, DATA, start, n, head, block, LSE_AT, 1, BLOCKS, ROWS, 1)
    elif first < n:
        row = first + tl.arange(0, ROWS)
        drawn, by = first_draw(DRAWS, start, mask_first, STEPS, PACKED), scale * LOG2E
        q = load_rows(Q, start, head, row, n, Q_AT, D, BLOCK_D)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total, out = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)
        for at in range(0, m, KEYS):
            key = at + tl.arange(0, KEYS)
            k = load_rows(K, start, head, key, m, K_AT, D, BLOCK_D)
            low, value, straight = block_of(INDEX, origin, first, at, n, m, ROWS, KEYS)
            s = relative_scores_of(
                q, k, INDEX, QUERIES, KEYS_OF, origin, low, value, straight, start, head, row, n, key, m,
                kept_keys(DATA, start, key, m, PADDED), QUERIES_AT, KEYS_AT, PRECISION,
            )  # fmt: skip
            higher = tl.maximum(top, tl.max(s, 1) * by)
            shift = tl.where(higher > -float("inf"), higher, 0.0)
            p, less = tl.exp2(s * by - shift[:, None]), tl.exp2(top - shift)
            total = total * less + tl.sum(p, 1)
            if len(STEPS) > 0:
                p *= factors_of(row, at, drawn, head, seed, mix, limit, kept_scale, STEPS, KEYS)
            v = load_rows(V, start, head, key, m, V_AT, D, BLOCK_D)
            out = out * less[:, None] + product(p.to(v.dtype), v, PRECISION)
            top = higher
        top, total = tl.where(top > -float("inf"), top, 0.0), tl.where(total > 0, total, 1.0)
        store_rows(OUT, (out / total[:, None]).to(OUT.dtype.element_ty), start, head, row, n, OUT_AT, D, BLOCK_D)
        lse = (top + tl.log2(total)) * LN2
        store_rows(LSE, lse[:, None], start, head, row, n, LSE_AT, 1, 1)


# -- tasks


def of_products(task: Task, first: int, *which: bool, order: tuple[int, ...], packed: bool) -> tuple[Any, ...]:
    """Return the tiles of the products of queries and of keys from tile number `first` on, and their layouts.

    Missing products have an empty layout. The kernel gets the tile `first` in their place, but does not read it.
    """
    tiles: list[Parameter] = []
    layouts: list[Layout | tuple[()]] = []
    number = first
    for there in which:
        tiles.append(tile(task, number if there else first))
        layouts.append(layout(strides_of(shape(task, number)), order, packed=packed) if there else ())
        number += there
    return tiles, layouts


@launches("attention_relative")
def _describe(task: Task) -> Launches:
    args = RelativeAttentionArgs.of(task)
    a = args.attention
    limits = a.limits or NO_LIMITS
    packed = limits.segments
    tiles, layouts, index = places(task, a.qkv, 2, packed=packed)
    which = args.queries, args.keys
    products, of_terms = of_products(task, index + 1, *which, order=args.order, packed=packed)
    common = shared(task, a.qkv, 2, a.scale, limits, diagonal=False, data=index + 1 + sum(which))
    heads, _, _ = common.sizes
    names = ("OUT_AT", "Q_AT", "K_AT", "V_AT", "LSE_AT", "QUERIES_AT", "KEYS_AT")
    out, lse = layout(strides_of(shape(task, 0)), a.out, packed=packed), layout_of_rows(task, 1, packed=packed)
    at: dict[str, Any] = dict(zip(names, [out, *layouts, lse, *of_terms], strict=True))
    terms = [tile(task, index), *products, shape(task, index)[0] // 2]
    parameters: list[Parameter] = [tile(task, 0), tile(task, 1), *tiles, *terms, *common.args]
    constants = {key: common.constants[key] for key in ("PACKED", "PADDED", "STEPS", "PRECISION", "D", "BLOCK_D")}

    def way(rows: int, keys: int, warps: int) -> tuple[Launch, ...]:
        blocks = ceil_div(common.longest[0], rows)
        options = {"BLOCKS": blocks, "ROWS": rows, "KEYS": keys, "warps": warps}
        return (launch(_relative_forward, common.grid(blocks, heads), *parameters, **at, **constants, **options),)

    most = max(power_of_two(common.longest[1]), 16)
    if constants["PRECISION"] == "ieee":  # fp32 products need more registers and use no tensor cores
        ways = [way(32, 32, 4)]
    else:
        ways = [way(64, 32, 4)] if most > 32 else [way(most, most, 4)]
        ways += [way(64, 64, 8), way(128, 32, 8), way(64, 32, 8)] if most > 32 else []
    key = f"relative {key_of_terms(which, shape(task, index + 1)[-1])} forward {common.key} of {names_of(ways)}"
    return Launches(ways[0], others=tuple(ways[1:]), key=key)


def key_of_terms(which: tuple[bool, bool], relative: int) -> str:
    """Return the part of a Launches key that names the products and the size of `relative`."""
    return f"{int(which[0])}{int(which[1])} {relative}"
