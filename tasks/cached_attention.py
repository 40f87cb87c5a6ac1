"""Attention of new tokens to the earlier tokens of their sequences, whose keys and values are in pages of a cache.

Source: paged attention (Kwon et al. 2023, section 4). Axes: page, slot (position in a page), entry (of a page table).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import RW, R, TaskArgs, Tiling, W

from .attention_operands import Operands, OperandsArgs, from_bhsd, order_of
from .attention_repeat import fit_groups, tile_of_group
from .op import CONTRACTION, Array, GraphLike, Lowering, Op, Tensor, require

PAST, COUNT, PAGES = 0, 1, 2  # columns of a page table: number of cached positions, of new tokens; the first page


@dataclass(frozen=True)
class PageParts:
    """How a cache is cut into parts: tiles of the axis page. A tile of the batch uses the pages of one part.

    Attributes:
        pages: Number of pages of a part. Page 0 of each part is unused.
        rows: Number of rows of the batch that use one part.
        first: Number of the part that the first row of the batch uses.
    """

    pages: int
    rows: int
    first: int = 0

    def of_row(self, row: int) -> int:
        """Return the number of the part that a row uses."""
        return self.first + row // self.rows


class CachedAttentionArgs(TaskArgs):
    out: tuple[int, int, int, int]  # order of the output's axes
    scale: float
    window: int  # a query attends to this many positions, its own included; 0: to all
    rotary: bool  # True: the last tile has cosines and sines by which q and k are rotated
    heads: tuple[int, int]  # numbers of heads of q and of k if one tile has q, then k, then v; else (0, 0)
    qkv: OperandsArgs


class CachedAttention(Op):
    """o = softmax(scale q [cached keys, k]^T, causal) [cached values, v]. The operator writes k and v into the cache.

    Row b of the page table says that sequence b has `past` cached positions and `count` new tokens, which come first on
    the axis seq. Position p is in slot p % slots of the page with the number in entry PAGES + p // slots. Outputs
    behind the new tokens are zero. No sequence uses page 0: unused entries of the page table are 0. If the axis page is
    cut into parts, an entry is the number of a page within the row's part.

    Args:
        operands: q, k, v with the axes batch, heads (or kv_heads), seq, head_dim in one order. With `heads`: one tensor
            with the axis all_heads, which has the heads of q, of k, then of v.
        table: int64 [batch, entry].
        pools: cached keys and cached values, each [page, heads or kv_heads, slot, head_dim]. The operator changes them.
        out: with the axes of q.
        after: two tensors that share the memory of `pools`: the cached keys and values after this operator.
        scale: factor of the products of queries and keys. None: 1 / sqrt(head_dim).
        window: a query attends to this many positions, its own included. None: to all earlier positions.
        rotary: a table [batch, seq, rotary] of angles. The operator rotates q and k by them, see Rotary.
        heads: numbers of heads of q and of k, if `operands` are one tensor with the axis all_heads; else None.
        parts: how the axis page is cut. None: the axis is not cut.
    """

    category = CONTRACTION
    colours: ClassVar = {"forward": "#117733"}
    picks = "qkv", "kv_heads", "all_heads"
    lse: Tensor | None = None

    def __init__(
        self, operands: Operands, table: Tensor, pools: Sequence[Tensor], out: Tensor, after: Sequence[Tensor],
        scale: float | None = None, window: int | None = None, rotary: Tensor | None = None,
        heads: tuple[int, int] | None = None, parts: PageParts | None = None,
    ) -> None:  # fmt: skip
        rule = "cached attention: the pools need the axes page, the heads of k, slot, head_dim"
        k, axis = operands.parts[1][0], pools[0].axes[1]
        fits = all(pool.axes == ("page", axis, "slot", "head_dim") for pool in pools) and axis in ("heads", "kv_heads")
        fits = fits and all(pool.size(axis) == (heads[1] if heads else k.size(axis)) for pool in pools)
        require(fits, rule, k, *pools)
        self.operands, self.table, self.pools, self.rotary, self.heads = operands, table, list(pools), rotary, heads
        super().__init__([*operands.tensors, *self.data], [out, *after])
        self.scale = 1 / math.sqrt(out.size("head_dim")) if scale is None else scale
        self.window, self.parts = window or 0, parts

    @property
    def data(self) -> list[Tensor]:
        """Inputs besides q, k and v."""
        return [self.table, *self.pools, *([self.rotary] if self.rotary else [])]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors that hold q, k and v."""
        self.operands = self.operands.on(tensors)
        self.inputs = [*tensors, *self.data]

    def read_parts(self, x: Tensor, heads: tuple[int, int]) -> None:
        """Read q, k and v as parts of one tensor with the axis all_heads; heads: numbers of heads of q and of k."""
        self.operands, self.heads = Operands(x, x, x), heads
        self.inputs = [x, *self.data]

    def rotate(self, table: Tensor) -> None:
        """Rotate q and k by the angles of a table."""
        self.rotary = table
        self.inputs = [*self.operands.tensors, *self.data]

    @property
    def group(self) -> int:
        """Number of query heads per head of k and v."""
        return self.output.size("heads") // self.pools[0].shape[1]

    @property
    def positions(self) -> int:
        """Largest number of positions of a sequence."""
        return (self.table.size("entry") - PAGES) * self.pools[0].size("slot")

    def flop(self) -> float:
        """Return the number of operations if all sequences have the largest number of positions."""
        return 4.0 * self.output.numel * self.positions

    def elements(self) -> int:
        pages = (self.table.size("entry") - PAGES) * self.table.shape[0]
        cached = sum(pool.numel // pool.size("page") for pool in self.pools) * pages
        return sum(t.numel for t in (*self.operands.tensors, self.table, self.output)) + cached

    def fit(self, tiling: Tiling) -> None:
        if tiling.cut("seq", self.output.size("seq")):
            need = f"at least {self.output.size('seq')}, the new tokens of a pass"
            raise ConfigError(f"tiles.seq: got {tiling.tiles['seq']}; allowed with a cache of keys and values: {need}")
        if self.parts:
            tiling.cut_into("page", self.parts.pages)
            rows = tiling.parts("batch", self.output.size("batch"))
            ends = {(self.parts.of_row(part.offset), self.parts.of_row(part.end - 1)) for part in rows}
            last = len(tiling.parts("page", self.pools[0].size("page"))) - 1
            assert all(first == end <= last for first, end in ends), "a tile of the batch needs pages of several parts"
        if self.pools[0].axes[1] == "kv_heads":
            fit_groups(self.pools[0], self.output, tiling)
        if self.heads and tiling.cut("heads", self.output.size("heads")):
            need = "none, as q, k and v are parts of one tensor"
            raise ConfigError(f"tiles.heads: got {tiling.tiles['heads']}; allowed: {need}")

    def lower(self, lowering: Lowering) -> None:
        grouped = self.pools[0].axes[1] == "kv_heads"
        for at in lowering.indices(self.output):
            heads = tile_of_group(lowering, self.pools[0], self.output, at["heads"]) if grouped else 0
            zeros = dict.fromkeys(("slot", "entry", "all_heads", "rotary"), 0)
            page = self.parts.of_row(lowering.part(self.output, "batch", at).offset) if self.parts else 0
            key = at | zeros | {"kv_heads": heads, "key": at["seq"], "page": page}
            tiles, qkv = self.operands.tiles(lowering, at | zeros, key)
            cached = [RW(lowering.tile(pool, key)) for pool in self.pools]
            accesses = [W(lowering.tile(self.output, at)), *cached, R(lowering.tile(self.table, key)), *map(R, tiles)]
            if self.rotary:
                accesses.append(R(lowering.tile(self.rotary, key)))
            order, counts = order_of(self.output.axes), self.heads or (0, 0)
            args = CachedAttentionArgs(order, self.scale, self.window, self.rotary is not None, counts, qkv)
            share = math.prod(lowering.shape(self.output, at)) / self.output.numel
            lowering.emit("cached_attention", accesses, args, flop=self.flop() * share)

    def split(self, *inputs: Array) -> list[Array]:
        """Return q, k and v as [batch, heads, seq, head_dim], rotated."""
        count = len(self.operands.tensors)
        q, k, v = self.operands.split(*inputs[:count])
        if self.heads:
            ends = self.heads[0], sum(self.heads)
            q, k, v = np.split(q, ends, 1)
        if self.rotary:
            cos, sin = np.split(inputs[-1][:, None], 2, -1)
            q, k = (np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
                    for a, b in (np.split(x, 2, -1) for x in (q, k)))  # fmt: skip
        return [q, k, v]

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        q, k, v = self.split(*inputs)
        count = len(self.operands.tensors)
        table, keys, values = inputs[count].astype(int), inputs[count + 1].copy(), inputs[count + 2].copy()
        out, slots = np.zeros(q.shape), keys.shape[2]
        for b, (past, count, *pages) in enumerate(table.tolist()):
            before = self.parts.of_row(b) * self.parts.pages if self.parts else 0
            at = [(before + pages[p // slots], p % slots) for p in range(past + count)]
            for s in range(count):
                page, slot = at[past + s]
                keys[page, :, slot], values[page, :, slot] = k[b, :, s], v[b, :, s]
            for s in range(count):
                kept = at[max(0, past + s + 1 - self.window) if self.window else 0 : past + s + 1]
                own_k, own_v = (
                    np.stack([x[page, :, slot] for page, slot in kept], 1).repeat(self.group, 0) for x in (keys, values)
                )
                scores = self.scale * np.einsum("hd,hnd->hn", q[b, :, s], own_k)
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[b, :, s] = np.einsum("hn,hnd->hd", p / p.sum(-1, keepdims=True), own_v)
        return from_bhsd(out, order_of(self.output.axes)), keys, values


def cached_attention(
    g: GraphLike, operands: Operands, table: Tensor, pools: Sequence[Tensor], scale: float | None, window: int | None,
    parts: PageParts | None = None,
) -> Tensor:  # fmt: skip
    """Return attention to the cached and the new positions, with q's axes; see CachedAttention."""
    x = operands.parts[0][0]
    axes = [axis for axis in x.axes if axis != "qkv"]
    out = g.temp("attention", axes, [x.size(a) for a in axes], x.dtype)
    after = [g.temp("cache", p.axes, p.shape, p.dtype, storage=p) for p in pools]
    return g.add(CachedAttention(operands, table, pools, out, after, scale, window, parts=parts)).output


class TokenPlacesArgs(TaskArgs):
    below: int  # number of positions of the model


class TokenPlaces(Op):
    """The positions of each row's new tokens, and the index of its last new token; see CachedAttention for the table.

    The positions are int64 [batch, seq]. Entries behind the new tokens repeat the position of the last new token, so
    that all entries are valid rows of a table of positions. No entry exceeds below - 1, the last row of this table. The
    index of the last new token on the axis seq is int64 [batch, last] with one entry, -1 for a row without new tokens.
    """

    independent = True

    def __init__(self, table: Tensor, positions: Tensor, last: Tensor, below: int) -> None:
        super().__init__([table], [positions, last])
        self.below = below

    def flop(self) -> float:
        return 0.0

    def lower(self, lowering: Lowering) -> None:
        for at in lowering.indices(self.inputs[0]):
            index = at | {"seq": 0, "last": 0}
            tiles = [W(lowering.tile(out, index)) for out in self.outputs]
            lowering.emit("token_places", [*tiles, R(lowering.tile(self.inputs[0], at))], TokenPlacesArgs(self.below))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        past, count = inputs[0][:, PAST : PAST + 1], inputs[0][:, COUNT : COUNT + 1]
        place = np.minimum(np.arange(self.outputs[0].size("seq"))[None], np.maximum(count - 1, 0))
        return np.minimum(past + place, self.below - 1), np.where(count > 0, count - 1, -1)
