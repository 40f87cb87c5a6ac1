"""Attention without materialised scores: the vendor's fused kernel, two-pass flash, one pass merged by log-sum-exp.

Axes: b batch, h heads, s seq, d head_dim, in any order; q, k and v are three tensors or one with an axis qkv of 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nntile_py.tiles import ACC, Access, R, Tile, W

from .contract import Contract, contract
from .elementwise import dropout as drop
from .elementwise import rename, unpack
from .op import Array, GraphLike, Index, Lowering, Op, Tensor, permutation, wide
from .softmax import Softmax, causal_mask

BHSD = ("batch", "heads", "seq", "head_dim")
FORMS = ("vendor", "merge", "flash")  # naive: see softmax.py and contract.py


class Operands:
    """Where the kernels find q, k and v: [tile among the task's, index on the qkv axis or -1] each, then the axes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.packed = len(self.tensors) == 1
        axes = self.tensors[0].axes
        self.qkv_axis = axes.index("qkv") if self.packed else -1
        self.order = permutation([a for a in axes if a != "qkv"], BHSD)

    def tiles(self, low: Lowering, at: Index, key: Index) -> tuple[list[Tile], list[tuple[int, int]]]:
        """The distinct tiles that hold q of `at` and k, v of `key`, and for q, k, v (tile, qkv index)."""
        if not self.packed:
            q, k, v = self.tensors
            return [low.tile(q, at), low.tile(k, key), low.tile(v, key)], [(0, -1), (1, -1), (2, -1)]
        x = self.tensors[0]
        mine, other = low.tile(x, at | {"qkv": 0}), low.tile(x, key | {"qkv": 0})
        if mine is other:
            return [mine], [(0, 0), (0, 1), (0, 2)]
        return [mine, other], [(0, 0), (1, 1), (1, 2)]

    def split(self, *arrays: Array) -> list[Array]:
        """q, k, v as [b, h, s, d] arrays."""
        if self.packed:
            arrays = tuple(arrays[0].take(i, axis=self.qkv_axis) for i in range(3))
        return [a.transpose(self.order) for a in arrays]

    def join(self, *arrays: Array) -> list[Array]:
        inverse = np.argsort(self.order)
        parts = [a.transpose(inverse) for a in arrays]
        return [np.stack(parts, axis=self.qkv_axis)] if self.packed else parts


class Attention(Op):
    """o = softmax(scale q k^T, causal or not) v with scale 1/sqrt(d); lse [b, h, s]: log-sum-exp of the scores.

    form `vendor`: one fused task where seq is not cut, else as `merge`. `merge`: a task per (query tile, key tile)
    adds its (max, sumexp, weighted values) to the query tile's state. `flash`: flash_maxsumexp over the key tiles,
    then flash_softmax_gemm (Alg. 2 of the NNTile report). Tile pairs above the diagonal are not submitted.
    """

    def __init__(self, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, *, causal: bool, form: str) -> None:
        if form not in FORMS:
            raise ValueError(f"attention: {form!r} is not allowed; use one of {', '.join((*FORMS, 'naive'))}")
        super().__init__(qkv, [out, lse])
        self.operands, self.causal, self.form, self.lse = Operands(qkv), causal, form, lse
        self.scale = 1 / math.sqrt(out.size("head_dim"))

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        douts = [g.temp("qkv_grad", t.axes, t.shape, t.dtype) for t in self.inputs]
        g.add(AttentionGrad(self, grads[0], douts))
        return list(douts)

    def flop(self) -> float:
        sizes = self.output.sizes
        full = 4.0 * math.prod(sizes.values()) * sizes["seq"]
        return full / 2 if self.causal else full

    # -- lowering

    def pairs(self, low: Lowering, at: Index) -> list[Index]:
        """The key tiles that the query tile `at` attends to."""
        count = len(low.parts(self.output, "seq"))
        return [at | {"seq": j} for j in range(count) if not (self.causal and j > at["seq"])]

    def ints(self, at: Index, key: Index, places: Sequence[tuple[int, int]]) -> list[int]:
        ops = self.operands
        diagonal = int(self.causal and at["seq"] == key["seq"])
        return [diagonal, ops.qkv_axis, *ops.order, *(x for place in places for x in place)]

    def out_ints(self) -> list[int]:
        return permutation(self.output.axes, BHSD)

    def pair_flop(self, low: Lowering, at: Index, key: Index) -> float:
        sizes = [low.part(self.output, axis, at).size for axis in BHSD]
        flop = 4.0 * math.prod(sizes) * low.part(self.output, "seq", key).size
        return flop / 2 if self.causal and at["seq"] == key["seq"] else flop

    def lower(self, low: Lowering) -> None:
        for index in low.indices(self.output, BHSD[:3]):
            at = index | {"head_dim": 0}
            out, lse = low.tile(self.output, at), low.tile(self.lse, at)
            keys = self.pairs(low, at)
            if self.form == "vendor" and not low.cut(self.output, "seq"):
                tiles, places = self.operands.tiles(low, at, at)
                ints = [*self.out_ints(), *self.ints(at, at, places)]
                flop = self.pair_flop(low, at, at)
                low.emit("attention", [W(out), W(lse), *map(R, tiles)], ints, [self.scale], flop=flop)
                continue
            width = self.output.size("head_dim")
            flash = self.form == "flash"
            state_shape = (*lse.shape, 2 if flash else width + 2)
            state = Tile(f"{self.name}.state", tuple(index.values()), state_shape, lse.dtype, "softmax")
            for key in keys:
                tiles, places = self.operands.tiles(low, at, key)
                kernel = "flash_maxsumexp" if flash else "attention_partial"
                flop = self.pair_flop(low, at, key) / (2 if flash else 1)
                low.emit(kernel, [ACC(state), *map(R, tiles)], self.ints(at, key, places), [self.scale], flop=flop)
            if not flash:
                low.emit("attention_normalise", [W(out), W(lse), R(state)], self.out_ints())
                continue
            low.emit("attention_lse", [W(lse), R(state)])
            for key in keys:
                tiles, places = self.operands.tiles(low, at, key)
                ints = [*self.out_ints(), *self.ints(at, key, places)]
                accesses = [ACC(out), R(lse), *map(R, tiles)]
                low.emit("flash_softmax_gemm", accesses, ints, [self.scale], flop=self.pair_flop(low, at, key))

    # -- reference

    def probabilities(self, q: Array, k: Array) -> tuple[Array, Array]:
        scores = self.scale * q @ k.swapaxes(-1, -2)
        if self.causal:
            scores = np.where(causal_mask(scores), scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        lse = np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top
        return np.exp(scores - lse), lse[..., 0]

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        q, k, v = self.operands.split(*inputs)
        p, lse = self.probabilities(q, k)
        return (p @ v).transpose(np.argsort(self.out_ints())), lse


class AttentionGrad(Op):
    """With delta = rowsum(do o), p = exp(scale q k^T - lse), dp = do v^T, ds = scale p (dp - delta):
    dq = sum over keys ds k, dk = sum over queries ds^T q, dv = sum over queries p^T do (Dao et al. 2022, Alg. 4).
    """

    def __init__(self, forward: Attention, do: Tensor, outs: Sequence[Tensor]) -> None:
        super().__init__([*forward.inputs, forward.output, forward.lse, do], outs)
        self.forward, self.do, self.grads = forward, do, Operands(outs)

    def flop(self) -> float:
        return 2.5 * self.forward.flop()

    def lower(self, low: Lowering) -> None:
        fwd = self.forward
        scale = [fwd.scale]
        for index in low.indices(fwd.output, BHSD[:3]):
            at = index | {"head_dim": 0}
            out, lse, do = (low.tile(t, at) for t in (fwd.output, fwd.lse, self.do))
            do_order = permutation(self.do.axes, BHSD)
            if fwd.form == "vendor" and not low.cut(fwd.output, "seq"):
                tiles, places = fwd.operands.tiles(low, at, at)
                outs, out_places = self.grads.tiles(low, at, at)
                ints = [*do_order, *fwd.out_ints(), *fwd.ints(at, at, places), *self._places(out_places)]
                accesses: list[Access] = [R(do), R(out), R(lse), *map(R, tiles), *map(W, outs)]
                low.emit("attention_grad", accesses, ints, scale, flop=2.5 * fwd.pair_flop(low, at, at))
                continue
            delta = Tile(f"{self.name}.delta", tuple(index.values()), lse.shape, lse.dtype)
            low.emit("attention_delta", [W(delta), R(do), R(out)], [*do_order, *fwd.out_ints()])
            for key in fwd.pairs(low, at):
                tiles, places = fwd.operands.tiles(low, at, key)
                outs, out_places = self.grads.tiles(low, at, key)
                ints = [*do_order, *fwd.ints(at, key, places), *self._places(out_places)]
                accesses = [R(do), R(lse), R(delta), *map(R, tiles), *map(ACC, outs)]
                low.emit("attention_grad_pair", accesses, ints, scale, flop=2.5 * fwd.pair_flop(low, at, key))

    def _places(self, places: Sequence[tuple[int, int]]) -> list[int]:
        return [self.grads.qkv_axis, *self.grads.order, *(x for place in places for x in place)]

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        fwd = self.forward
        q, k, v = fwd.operands.split(*inputs[:-3])
        o = inputs[-3].transpose(fwd.out_ints())
        do = inputs[-1].transpose(permutation(self.do.axes, BHSD))
        p, _ = fwd.probabilities(q, k)
        ds = fwd.scale * p * (do @ v.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True))
        return tuple(self.grads.join(ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do))


def attention(g: GraphLike, qkv: Sequence[Tensor], *, causal: bool, form: str, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(d)) v; qkv is [q, k, v] or [packed]. form: vendor, merge, flash or naive."""
    if len(qkv) == 3:
        g.projections.append(list(qkv))
    dropout *= g.training
    if form == "naive":
        return _naive(g, qkv, causal, dropout)
    if dropout:
        raise ValueError("attention_dropout: only attention: naive has it; the fused forms have none")
    x = qkv[0]
    axes = [axis for axis in x.axes if axis != "qkv"]
    out = g.temp("attention", axes, [x.size(a) for a in axes], x.dtype)
    lse = g.temp("lse", BHSD[:3], [x.size(a) for a in BHSD[:3]], wide(x.dtype))
    return g.add(Attention(qkv, out, lse, causal=causal, form=form)).output


def _naive(g: GraphLike, qkv: Sequence[Tensor], causal: bool, dropout: float) -> Tensor:
    """With scores and probabilities as tensors."""
    q, k, v = qkv if len(qkv) == 3 else unpack(g, qkv[0], "qkv")
    k, v = rename(g, k, seq="key"), rename(g, v, seq="key")
    axes = [*(a for a in q.axes if a not in ("seq", "head_dim")), "seq", "key"]
    sizes = {**q.sizes, **k.sizes}
    shape = [sizes[a] for a in axes]
    scores = g.temp("scores", axes, shape, q.dtype, causal=causal)
    g.add(Contract(q, k, scores, scale=q.size("head_dim") ** -0.5))
    p = g.add(Softmax(scores, g.temp("softmax", axes, shape, q.dtype, causal=causal))).output
    return contract(g, drop(g, p, dropout), v, q.axes)
