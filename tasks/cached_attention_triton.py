"""Attention to keys and values in the pages of a cache, on CUDA. cached_attention.cpp lists the tiles of each task.

A program computes a block of queries of all query heads that share a key head. If there are few blocks, the cached
positions are divided among several programs, and a second kernel combines their results (flash-decoding,
Dao et al. 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .attention_segments_triton import LOG2E, extents, layout, places, product
from .cached_attention import COUNT, PAGES, CachedAttentionArgs, TokenPlacesArgs
from .elementwise_triton import strides_of
from .launch import Launches, Scratch, ceil_div, launch, launches, power_of_two, shape, tile
from .pdl_triton import wait_here

FIRST, NEW = tl.constexpr(PAGES), tl.constexpr(COUNT)  # entries of a page table's row
PROGRAMS = 264  # two for each multiprocessor of an H100; results are correct on other GPUs too
QUERIES = 64  # largest number of rows of a block; a row is one query of one head
NEW_KEYS = 32  # new keys that an iteration reads
MOST_KEYS, BLOCK = 128, 8192  # largest number of cached keys that an iteration reads, and of the numbers of these keys
LEAST_KEYS = 64  # cached keys of a program of `_attend_token`, if the cache is full


@triton.jit
def _place(X, row, head, position, AT: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers to rows [position, head_dim] of q, k, v or out; row: row of the batch; AT: Layout of X."""
    X += AT[0] + row.to(tl.int64) * AT[4]
    return X + head[:, None] * AT[2] + position.to(tl.int64)[:, None] * AT[1] + tl.arange(0, BLOCK_D)[None, :] * AT[3]


@triton.jit
def _online(q, k, v, kept, top, total, out, by, PRECISION: tl.constexpr):
    """Add a block of keys and values to the state of an online softmax (Dao et al. 2022)."""
    s = tl.where(kept, product(q, tl.trans(k), PRECISION), -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1) * by)
    shift = tl.where(higher > -float("inf"), higher, 0.0)
    p, less = tl.exp2(s * by - shift[:, None]), tl.exp2(top - shift)
    return higher, total * less + tl.sum(p, 1), out * less[:, None] + product(p.to(v.dtype), v, PRECISION)


@triton.jit
def _rotated(X, TABLE, row, head, position, inside, seq, AT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
             ROTARY: tl.constexpr):  # fmt: skip
    """Load rows [position, head_dim] of q or k; ROTARY: rotated by angles TABLE [row, position, D], see rotary.py."""
    x = tl.load(_place(X, row, head, position, AT, BLOCK_D), inside, 0.0)
    if ROTARY:
        half: tl.constexpr = D // 2
        d = tl.arange(0, BLOCK_D)
        sign, other = tl.where(d < half, -1.0, 1.0), tl.where(d < half, d + half, d - half)
        at = X + AT[0] + row.to(tl.int64) * AT[4] + head[:, None] * AT[2] + position.to(tl.int64)[:, None] * AT[1]
        y = tl.load(at + other[None, :] * AT[3], inside, 0.0).to(tl.float32)
        angle = TABLE + (row.to(tl.int64) * seq + position)[:, None] * D + (d % half)[None, :]
        cos, sin = tl.load(angle, inside, 0.0), tl.load(angle + half, inside, 0.0)
        x = (x.to(tl.float32) * cos + y * sin * sign[None, :]).to(X.dtype.element_ty)
    return x


@triton.jit
def _cached(
    KEYS, VALUES, TABLE, head, key, past, HEADS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load cached keys and values [key, head_dim] of one head, zeros from position `past` on."""
    d = tl.arange(0, BLOCK_D)
    page = tl.load(TABLE + FIRST + key // SLOTS, key < past, 0)
    at = ((page * HEADS + head) * SLOTS * D + key % SLOTS * D)[:, None] + d[None, :]
    valid = (key < past)[:, None] & (d < D)[None, :]
    return tl.load(KEYS + at, valid, 0.0), tl.load(VALUES + at, valid, 0.0)


@triton.jit
def _store(
    OUT, PARTS, top, total, out, row, head, split, first, seq, count, OUT_AT: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the result of a block of queries; if SPLITS > 1, the state of the online softmax in PARTS, for _combine."""
    m, d = tl.arange(0, ROWS * SHARE), tl.arange(0, BLOCK_D)
    query, member = first + m // SHARE, m % SHARE
    if SPLITS > 1:
        PARTS += (tl.program_id(0).to(tl.int64) * SPLITS + split) * (ROWS * SHARE) * (BLOCK_D + 2)
        tl.store(PARTS + m[:, None] * (BLOCK_D + 2) + d[None, :], out)
        tl.store(PARTS + m * (BLOCK_D + 2) + BLOCK_D, top)
        tl.store(PARTS + m * (BLOCK_D + 2) + BLOCK_D + 1, total)
    else:
        y = out / tl.where(total > 0, total, 1.0)[:, None]
        y = tl.where((query < count)[:, None], y, 0.0)
        stored = ((query < seq) & (member < GROUP))[:, None] & (d < D)[None, :]
        tl.store(_place(OUT, row, head * GROUP + member, query, OUT_AT, BLOCK_D), y.to(OUT.dtype.element_ty), stored)


@triton.jit
def _attend_token(
    OUT, KEYS, VALUES, TABLE, Q, K, V, ANGLES, PARTS, seq, entries, scale,
    OUT_AT: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_K: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what `_attend` computes, for one new token of each row.

    The previous kernels of a pass write neither page tables nor keys and values of earlier tokens. A program thus loads
    its first keys and values before it waits for these kernels.
    """
    head, row, split = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1)
    TABLE += row.to(tl.int64) * entries
    past, count = tl.load(TABLE).to(tl.int32), tl.minimum(tl.load(TABLE + NEW).to(tl.int32), 1)
    begin = 0
    if WINDOW:
        begin = tl.maximum(past - WINDOW + 1, 0) // BLOCK_K * BLOCK_K
    each = tl.cdiv(past + 1 - begin, SPLITS * BLOCK_K) * BLOCK_K
    begin += split * each
    end = tl.minimum(begin + each, past + 1) * count
    key = begin + tl.arange(0, BLOCK_K)
    k, v = _cached(KEYS, VALUES, TABLE, head, key, past, HEADS, SLOTS, D, BLOCK_D)
    page = tl.load(TABLE + FIRST + past // SLOTS, count > 0, 0)
    wait_here()
    m, d, new = tl.arange(0, ROWS * SHARE), tl.arange(0, BLOCK_D), tl.arange(0, 1)
    exists, mine = (m < GROUP * count)[:, None] & (d < D)[None, :], (new < count)[:, None] & (d < D)[None, :]
    q = _rotated(Q, ANGLES, row, head * GROUP + m, m * 0, exists, seq, Q_AT, D, BLOCK_D, ROTARY)
    new_k = _rotated(K, ANGLES, row, head + new, new, mine, seq, K_AT, D, BLOCK_D, ROTARY)
    new_v = tl.load(_place(V, row, head + new, new, V_AT, BLOCK_D), mine, 0.0)
    if split == 0:  # the new key and value go to their page
        to = (page * HEADS + head) * SLOTS * D + past % SLOTS * D + d[None, :]
        tl.store(KEYS + to, new_k, mine)
        tl.store(VALUES + to, new_v, mine)
    top, by = tl.full([ROWS * SHARE], -float("inf"), tl.float32), scale * LOG2E
    total, out = tl.zeros([ROWS * SHARE], tl.float32), tl.zeros([ROWS * SHARE, BLOCK_D], tl.float32)
    k, v, kept = _with_new(k, v, new_k, new_v, key, past, end, WINDOW)
    top, total, out = _online(q, k, v, kept, top, total, out, by, PRECISION)
    for first in tl.range(begin + BLOCK_K, end, BLOCK_K, num_stages=3):
        key = first + tl.arange(0, BLOCK_K)
        k, v = _cached(KEYS, VALUES, TABLE, head, key, past, HEADS, SLOTS, D, BLOCK_D)
        k, v, kept = _with_new(k, v, new_k, new_v, key, past, end, WINDOW)
        top, total, out = _online(q, k, v, kept, top, total, out, by, PRECISION)
    _store(OUT, PARTS, top, total, out, row, head, split, 0, seq, count, OUT_AT, GROUP, SHARE, ROWS, SPLITS, D, BLOCK_D)


@triton.jit
def _with_new(k, v, new_k, new_v, key, past, end, WINDOW: tl.constexpr):
    """Return keys and values with those of the new token at its position, and which keys the new token attends to."""
    kept, is_new = key < end, (key == past)[:, None]
    if WINDOW:
        kept = kept & (past - key < WINDOW)
    return tl.where(is_new, new_k, k), tl.where(is_new, new_v, v), kept[None, :]


@triton.jit
def _attend(
    OUT, KEYS, VALUES, TABLE, Q, K, V, ANGLES, PARTS, seq, entries, scale,
    OUT_AT: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_K: tl.constexpr, NEW_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of ROWS queries of the GROUP query heads that share a head of keys.

    SHARE: GROUP rounded up to a power of two. Row m of the block is head m % SHARE of query m // SHARE. If SPLITS > 1,
    a program stores the state of its online softmax in PARTS [row, block, head, split, m, BLOCK_D + 2].
    """
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS % BLOCKS
    row, split = tl.program_id(0) // HEADS // BLOCKS, tl.program_id(1)
    TABLE += row.to(tl.int64) * entries
    past, count = tl.load(TABLE).to(tl.int32), tl.minimum(tl.load(TABLE + NEW).to(tl.int32), seq)
    m, d = tl.arange(0, ROWS * SHARE), tl.arange(0, BLOCK_D)
    first = block * ROWS
    query, member = first + m // SHARE, m % SHARE
    exists = (query < seq) & (member < GROUP)
    inside = (exists & (query < count))[:, None] & (d < D)[None, :]
    top = tl.full([ROWS * SHARE], -float("inf"), tl.float32)
    total, out = tl.zeros([ROWS * SHARE], tl.float32), tl.zeros([ROWS * SHARE, BLOCK_D], tl.float32)
    q = _rotated(Q, ANGLES, row, head * GROUP + member, query, inside, seq, Q_AT, D, BLOCK_D, ROTARY)
    by, at_head = scale * LOG2E, head.to(tl.int64) * SLOTS * D
    if first < count:
        if split == 0:  # the new keys and values of the block's positions go to their pages
            new = first + tl.arange(0, ROWS)
            page = tl.load(TABLE + FIRST + (past + new) // SLOTS, new < count, 0)
            to = (page * HEADS * SLOTS * D + at_head + (past + new) % SLOTS * D)[:, None] + d[None, :]
            mine = (new < count)[:, None] & (d < D)[None, :]
            heads = head + tl.zeros([ROWS], tl.int32)
            k = _rotated(K, ANGLES, row, heads, new, mine, seq, K_AT, D, BLOCK_D, ROTARY)
            tl.store(KEYS + to, k, mine)
            tl.store(VALUES + to, tl.load(_place(V, row, heads, new, V_AT, BLOCK_D), mine, 0.0), mine)
        # New keys come before cached keys, because loads of new keys do not wait for page numbers.
        if split == SPLITS - 1:
            start = 0
            if WINDOW:
                start = tl.maximum(first - WINDOW + 1, 0) // NEW_KEYS * NEW_KEYS
            for at in range(start, tl.minimum(first + ROWS, count), NEW_KEYS):
                key = at + tl.arange(0, NEW_KEYS)
                valid = (key < count)[:, None] & (d < D)[None, :]
                heads = head + tl.zeros([NEW_KEYS], tl.int32)
                k = _rotated(K, ANGLES, row, heads, key, valid, seq, K_AT, D, BLOCK_D, ROTARY)
                v = tl.load(_place(V, row, heads, key, V_AT, BLOCK_D), valid, 0.0)
                kept = (key[None, :] <= query[:, None]) & (key < count)[None, :]
                if WINDOW:
                    kept = kept & (query[:, None] - key[None, :] < WINDOW)
                top, total, out = _online(q, k, v, kept, top, total, out, by, PRECISION)
        begin = 0
        if WINDOW:
            begin = tl.maximum(past + first - WINDOW + 1, 0) // BLOCK_K * BLOCK_K
        each = tl.cdiv(tl.maximum(past - begin, 0), SPLITS * BLOCK_K) * BLOCK_K
        begin += split * each
        for block in tl.range(begin, tl.minimum(begin + each, past), BLOCK_K, num_stages=3):
            key = block + tl.arange(0, BLOCK_K)
            k, v = _cached(KEYS, VALUES, TABLE, head, key, past, HEADS, SLOTS, D, BLOCK_D)
            kept = (key < past)[None, :] & (query < count)[:, None]
            if WINDOW:
                kept = kept & (past + query[:, None] - key[None, :] < WINDOW)
            top, total, out = _online(q, k, v, kept, top, total, out, by, PRECISION)
    _store(
        OUT, PARTS, top, total, out, row, head, split, first, seq, count, OUT_AT, GROUP, SHARE, ROWS, SPLITS, D, BLOCK_D
    )  # fmt: skip


@triton.jit
def _combine(
    OUT, TABLE, PARTS, seq, entries, OUT_AT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the output of one query of one head from the states that the splits of `_attend` stored."""
    head, block, row = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS % BLOCKS, tl.program_id(0) // HEADS // BLOCKS
    query, member = block * ROWS + tl.program_id(1) // GROUP, tl.program_id(1) % GROUP
    if query < seq:
        count = tl.load(TABLE + row.to(tl.int64) * entries + NEW).to(tl.int32)
        split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
        m = tl.program_id(1) // GROUP * SHARE + member
        at = ((tl.program_id(0).to(tl.int64) * SPLITS + split) * (ROWS * SHARE) + m) * (BLOCK_D + 2)
        top, total = tl.load(PARTS + at + BLOCK_D), tl.load(PARTS + at + BLOCK_D + 1)
        highest = tl.max(top, 0)
        weight = tl.exp2(top - tl.where(highest > -float("inf"), highest, 0.0))
        parts = tl.load(PARTS + at[:, None] + d[None, :])
        whole = tl.sum(weight * total, 0)
        y = tl.sum(parts * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
        y = tl.where(query < count, y, 0.0)
        to = OUT + OUT_AT[0] + row.to(tl.int64) * OUT_AT[4] + (head * GROUP + member) * OUT_AT[2]
        tl.store(to + query.to(tl.int64) * OUT_AT[1] + d * OUT_AT[3], y.to(OUT.dtype.element_ty), d < D)


@launches("cached_attention")
def _describe(task: Task) -> Launches:
    a, table = CachedAttentionArgs.of(task), shape(task, 3)
    tiles, layouts, _ = places(task, a.qkv, 4, packed=False)
    batch, heads, seq, head_dim = extents(task, a.qkv, 4 + a.qkv.q[0], a.qkv.q[1])
    of_keys, slots = shape(task, 1)[1:3]
    if a.heads[0]:  # one tile holds q, k, v: k begins after the heads of q, v after those of k
        heads, starts = a.heads[0], (0, a.heads[0], sum(a.heads))
        layouts = [(at[0] + start * at[2], *at[1:]) for at, start in zip(layouts, starts, strict=True)]
    group = heads // of_keys
    share = power_of_two(group)
    rows = max(16 // share, 1) if seq == 1 else max(min(power_of_two(seq), QUERIES) // share, 16 // share, 1)
    blocks = ceil_div(seq, rows)
    block_d = max(power_of_two(head_dim), 16)
    wanted, positions = PROGRAMS // (batch * of_keys * blocks), (table[1] - PAGES) * slots
    early = seq == 1 and wanted > 1  # with many programs, `_attend` is faster
    most = positions // (LEAST_KEYS if early else slots)
    splits = 1 if wanted < 2 else min(power_of_two(wanted), power_of_two(most))
    block_k = max(min(power_of_two(ceil_div(positions, splits)), MOST_KEYS, BLOCK // block_d), 16)
    at: dict[str, Any] = dict(zip(("Q_AT", "K_AT", "V_AT"), layouts, strict=True))
    out_at = layout(strides_of(shape(task, 0)), a.out, packed=False)
    scratch = Scratch()
    many = batch * of_keys * blocks
    parts = scratch.take(many * splits * rows * share * (block_d + 2) * (splits > 1) or 1, "fp32")
    cut: dict[str, Any] = {
        "OUT_AT": out_at, "HEADS": of_keys, "GROUP": group, "SHARE": share, "ROWS": rows, "SPLITS": splits,
        "D": head_dim, "BLOCK_D": block_d,
    }  # fmt: skip
    of_blocks = {} if early else {"BLOCKS": blocks, "NEW_KEYS": NEW_KEYS if seq > 1 else 16}
    dtype = task.accesses[1].tile.dtype
    tiles = [*(tile(task, number) for number in range(4)), *tiles, tile(task, len(task.accesses) - 1)]
    first = launch(
        _attend_token if early else _attend, (many, splits), *tiles, parts, seq, table[1], a.scale, ROTARY=a.rotary,
        SLOTS=slots, BLOCK_K=block_k, WINDOW=a.window, PRECISION="ieee" if dtype == "fp32" else "tf32", **of_blocks,
        **at, **cut,
    )  # fmt: skip
    first = replace(first, early=early)
    if splits == 1:
        return Launches((first,), scratch.bytes)
    queries = rows * group if seq > 1 else group
    last = launch(
        _combine, (many, queries), tile(task, 0), tile(task, 3), parts, seq, table[1], warps=2, BLOCKS=blocks, **cut
    )  # fmt: skip
    return Launches((first, last), scratch.bytes)


@triton.jit
def _token_places(POSITIONS, LAST, TABLE, seq, entries, below, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    past, count = tl.load(TABLE + row * entries), tl.load(TABLE + row * entries + NEW)
    s = tl.arange(0, BLOCK)
    place = past + tl.minimum(s, tl.maximum(count - 1, 0))
    tl.store(POSITIONS + row * seq + s, tl.minimum(place, below - 1), s < seq)
    tl.store(LAST + row, tl.where(count > 0, count - 1, -1))


@launches("token_places")
def _describe_places(task: Task) -> Launches:
    (batch, seq), entries = shape(task, 0), shape(task, 2)[1]
    args = (tile(task, 0), tile(task, 1), tile(task, 2), seq, entries, TokenPlacesArgs.of(task).below)
    return Launches((launch(_token_places, batch, *args, BLOCK=power_of_two(seq), warps=1),))
