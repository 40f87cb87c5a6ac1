"""Attention of new tokens to the earlier tokens of their sequences, whose keys and values are in pages of a cache.

Source: paged attention (Kwon et al. 2023, section 4). Axes: page, slot (position in a page), entry (of a page table).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import RW, R, TaskArgs, Tiling, W

from .attention_operands import Operands, OperandsArgs, from_bhsd, order_of
from .attention_repeat import fit_groups, tile_of_group
from .op import CONTRACTION, Array, GraphLike, Lowering, Op, Tensor, require

PAST, COUNT, PAGES = 0, 1, 2  # entries of a page table's row: cached positions, new tokens, then the pages' numbers


class CachedAttentionArgs(TaskArgs):
    out: tuple[int, int, int, int]  # order of the output's axes
    scale: float
    window: int  # a query attends to this many positions, its own included; 0: to all
    qkv: OperandsArgs


class CachedAttention(Op):
    """o = softmax(scale q [cached keys, k]^T, causal) [cached values, v]; k and v then belong to the cache.

    Row b of the page table says that sequence b has `past` cached positions and `count` new tokens, the first of the
    axis seq. Position p is in slot p % slots of the page with the number in entry PAGES + p // slots. The outputs of
    positions behind the new tokens are zero. No sequence has page 0, so unused entries are 0.

    Args:
        operands: q, k, v with the axes batch, heads (or kv_heads), seq, head_dim in one order.
        table: int64 [batch, entry].
        pools: cached keys and cached values, each [page, heads or kv_heads, slot, head_dim]. The operator changes them.
        out: as q.
    """

    category = CONTRACTION
    colours: ClassVar = {"forward": "#117733"}
    picks = "qkv", "kv_heads"
    lse: Tensor | None = None

    def __init__(
        self, operands: Operands, table: Tensor, pools: Sequence[Tensor], out: Tensor, after: Sequence[Tensor],
        scale: float | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        rule = "cached attention: the pools need the axes page, the heads of k, slot, head_dim"
        k = operands.parts[1][0]
        heads = "kv_heads" if "kv_heads" in k.axes else "heads"
        fits = all(one.axes == ("page", heads, "slot", "head_dim") for one in pools)
        require(fits and all(one.size(heads) == k.size(heads) for one in pools), rule, k, *pools)
        self.operands, self.data = operands, [table, *pools]
        super().__init__([*operands.tensors, *self.data], [out, *after])
        self.scale = 1 / math.sqrt(out.size("head_dim")) if scale is None else scale
        self.window = window or 0

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors that hold q, k and v."""
        self.operands = self.operands.on(tensors)
        self.inputs = [*tensors, *self.data]

    @property
    def group(self) -> int:
        """Number of query heads per head of k and v."""
        k = self.operands.parts[1][0]
        return self.output.size("heads") // k.size("kv_heads") if "kv_heads" in k.axes else 1

    @property
    def positions(self) -> int:
        """Largest number of positions of a sequence."""
        return (self.data[0].size("entry") - PAGES) * self.data[1].size("slot")

    def flop(self) -> float:
        """Return the flop for sequences that fill the cache."""
        return 4.0 * self.output.numel * self.positions

    def elements(self) -> int:
        table, *pools = self.data
        cached = sum(one.numel // one.size("page") for one in pools) * (table.size("entry") - PAGES) * table.shape[0]
        return sum(t.numel for t in (*self.operands.tensors, table, self.output)) + cached

    def fit(self, tiling: Tiling) -> None:
        if tiling.cut("seq", self.output.size("seq")):
            need = f"at least {self.output.size('seq')}, the new tokens of a pass"
            raise ConfigError(f"tiles.seq: got {tiling.tiles['seq']}; allowed with a cache of keys and values: {need}")
        if self.group > 1:
            fit_groups(self.operands.parts[1][0], self.output, tiling)

    def lower(self, lowering: Lowering) -> None:
        table, *pools = self.data
        k = self.operands.parts[1][0]
        for at in lowering.indices(self.output):
            heads = tile_of_group(lowering, k, self.output, at["heads"]) if "kv_heads" in k.axes else 0
            key = at | {"kv_heads": heads, "key": at["seq"], "page": 0, "slot": 0, "entry": 0}
            tiles, qkv = self.operands.tiles(lowering, at, key)
            cached = [RW(lowering.tile(pool, key)) for pool in pools]
            accesses = [W(lowering.tile(self.output, at)), *cached, R(lowering.tile(table, key)), *map(R, tiles)]
            args = CachedAttentionArgs(order_of(self.output.axes), self.scale, self.window, qkv)
            share = math.prod(lowering.shape(self.output, at)) / self.output.numel
            lowering.emit("cached_attention", accesses, args, flop=self.flop() * share)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        q, k, v = self.operands.split(*inputs[: len(self.operands.tensors)])
        table, keys, values = inputs[-3].astype(int), inputs[-2].copy(), inputs[-1].copy()
        out, slots = np.zeros(q.shape), keys.shape[2]
        for b, (past, count, *pages) in enumerate(table.tolist()):
            at = [(pages[p // slots], p % slots) for p in range(past + count)]
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
    g: GraphLike, operands: Operands, table: Tensor, pools: Sequence[Tensor], scale: float | None, window: int | None
) -> Tensor:
    """Return attention to the cached and the new positions, with q's axes; see CachedAttention."""
    x = operands.parts[0][0]
    axes = [axis for axis in x.axes if axis != "qkv"]
    out = g.temp("attention", axes, [x.size(a) for a in axes], x.dtype)
    after = [g.temp("cache", p.axes, p.shape, p.dtype, storage=p) for p in pools]
    return g.add(CachedAttention(operands, table, pools, out, after, scale, window)).output


class TokenPlacesArgs(TaskArgs):
    below: int  # number of positions of the model


class TokenPlaces(Op):
    """The positions of the new tokens of a page table's rows, int64 [batch, seq], and the place of each row's last one.

    Places behind the new tokens get the position of the last new token, so that each is a row of a table of positions.
    The place of the last new token is int64 [batch, last] with one entry, -1 for a row without new tokens.
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
