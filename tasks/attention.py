"""Attention that never stores the scores: by a vendor's fused kernel, two-pass flash, or one pass that merges states.

Axes: b batch, h heads, s seq, d head_dim, in any order that q, k and v share. k and v may have the axis key instead of
seq, with another length. They may have kv_heads instead of heads: then a group of query heads shares each kv_head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import ACC, Access, R, TileRange, Tiling, W

from .attention_dropout import ScoresDropout, steps_of
from .attention_naive import naive, scores_axes
from .attention_operands import BHSD, Operand, Operands, as_bhsd, checked, from_bhsd, order_of
from .attention_repeat import fit_groups, tile_of_group
from .attention_tasks import AttentionArgs, AttentionGradArgs, DeltaArgs, OutArgs, PairArgs, PairGradArgs
from .mask import Limits, Mask, masked_softmax
from .op import CONTRACTION, Array, GraphLike, Index, Lowering, Op, Tensor, accumulation_dtype

Backend = Literal["vendor", "merge", "flash", "naive", "segments", "varlen", "cudnn"]
BACKENDS: tuple[str, ...] = get_args(Backend)  # naive is in attention_naive.py, all others in Attention
NAMED: tuple[Backend, ...] = "segments", "varlen", "cudnn"  # like vendor, with own kernels for segments
WITH_DROPOUT: tuple[Backend, ...] = "naive", "segments"  # backends with dropout of the probabilities


class Attention(Op):
    """o = softmax(scale q k^T, masked) v; lse [b, h, s]: log-sum-exp of the scores.

    A query that attends to no key gets an output of zeros and an lse of 0. A pair of tiles that the mask hides wholly
    has no task.

    Args:
        backend: `vendor`: one fused task where seq and key are not cut, else as `merge`.
            `merge`: a task per (query tile, key tile) adds its (max, sumexp, weighted values) to the query tile's
            state.
            `flash`: two passes over the key tiles: flash_maxsumexp adds to the (max, sumexp) of each query, then
            flash_softmax_gemm adds weighted values to the output (Alg. 2 of the NNTile report).
            `segments`: as `vendor`, but a mask with segments, or dropout, uses the kernels of
            attention_segments_triton.py on CUDA.
            `varlen`, `cudnn`: as `vendor`, but a mask with segments uses ATen's variable-length flash attention or
            cuDNN's ragged kernel on CUDA. A task raises TaskError if the kernel does not support the case.
        dropout: dropout of the probabilities. Only `segments` supports dropout, and seq and key must not be cut.
        scale: factor of the scores q k^T; None: 1 / sqrt(head_dim).
    """

    category = CONTRACTION
    colours: ClassVar = {"forward": "#009e73"}
    picks: Sequence[str] = ("qkv", "kv_heads")

    def __init__(
        self, operands: Operands, out: Tensor, lse: Tensor, *, mask: Mask, backend: str,
        dropout: ScoresDropout | None = None, scale: float | None = None,
    ) -> None:  # fmt: skip
        if backend not in BACKENDS or backend == "naive":
            raise ValueError(f"attention: got {backend!r}; allowed: {', '.join(BACKENDS)}")
        self.operands, self.mask, self.backend, self.lse, self.dropout = operands, mask, backend, lse, dropout
        super().__init__([*operands.tensors, *self.data], [out, lse])
        self.scale = 1 / math.sqrt(out.size("head_dim")) if scale is None else scale

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors that hold q, k and v."""
        self.operands = self.operands.on(tensors)
        self.inputs = [*tensors, *self.data]

    @property
    def data(self) -> list[Tensor]:
        """Inputs besides q, k and v: tensors of the mask, and row numbers for dropout."""
        return [*self.mask.inputs, *([self.dropout.row_numbers] if self.dropout and self.dropout.row_numbers else [])]

    @property
    def title(self) -> str:
        return self.kind + " dropout" * (self.dropout is not None)

    @property
    def kernel(self) -> str:
        """Name of the kernel that computes uncut sequences in one task."""
        own = self.backend in NAMED and (self.mask.segments or self.dropout)
        return f"attention_{self.backend}" if own else "attention"

    @property
    def out_order(self) -> tuple[int, int, int, int]:
        return order_of(self.output.axes)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert grads[0] is not None
        douts = [g.temp("qkv_grad", t.axes, t.shape, t.dtype) for t in self.operands.tensors]
        g.add(AttentionGrad(self, grads[0], douts))
        return [*douts, *[None for _ in self.data]]

    def flop(self) -> float:
        (x, seq), (k, key) = self._queries, self._keys
        area = self.mask.band.area(TileRange(0, x.size(seq)), TileRange(0, k.size(key))) * self.mask.share(k.size(key))
        return 4.0 * math.prod(self.lse.shape[:2]) * self.output.size("head_dim") * area

    # -- lowering

    @property
    def _queries(self) -> tuple[Tensor, str]:
        return self.output, "seq"

    @property
    def _keys(self) -> tuple[Tensor, str]:
        """The tensor that holds k, and the name of its position axis: key or seq."""
        k = self.operands.parts[1][0]
        return k, "key" if "key" in k.axes else "seq"

    @property
    def group(self) -> int:
        """Number of query heads per head of k and v."""
        k = self.operands.parts[1][0]
        return self.output.size("heads") // k.size("kv_heads") if "kv_heads" in k.axes else 1

    def fit(self, tiling: Tiling) -> None:
        self.mask.fit(tiling)
        k, axis = self._keys
        if self.dropout and cut_positions(tiling, self.output.size("seq"), k.size(axis)):
            need = "none: this graph is for whole sequences, see Graph's cuts, or has packed ones"
            raise ConfigError(f"tiles.seq: got {tiling.tiles['seq']}; allowed with attention_dropout: {need}")
        if self.group > 1:
            fit_groups(self.operands.parts[1][0], self.output, tiling)

    def fused(self, lowering: Lowering) -> bool:
        return self.backend in ("vendor", *NAMED) and not lowering.cut(*self._queries) and not lowering.cut(*self._keys)

    def tiles_of_queries(self, lowering: Lowering) -> list[Index]:
        return [index | {"head_dim": 0} for index in lowering.indices(self.lse)]

    def pairs(self, lowering: Lowering, at: Index) -> list[Index]:
        """Return the indices of the key tiles to which the query tile `at` attends."""
        k, axis = self._keys
        seq = lowering.part(self.output, "seq", at)
        numbers = [j for j, part in enumerate(lowering.parts(k, axis)) if not self.mask.band.empty(seq, part)]
        heads = tile_of_group(lowering, k, self.output, at["heads"]) if "kv_heads" in k.axes else 0
        return [at | {"seq": j, "key": j, "kv_heads": heads} for j in numbers]

    def shared(self, lowering: Lowering) -> bool:
        """Return whether query tiles of different heads read the same tile of k."""
        return (
            self.group > 1
            and lowering.parts(self.output, "heads")[0].size < self.group
            and lowering.cut(self.output, "heads")
        )

    def parts(self, lowering: Lowering, at: Index, key: Index) -> tuple[TileRange, TileRange]:
        k, axis = self._keys
        return lowering.part(self.output, "seq", at), lowering.part(k, axis, key)

    def masked(self, lowering: Lowering, at: Index, key: Index) -> tuple[bool, Limits | None, list[Access]]:
        """Return how the query tile `at` and the key tile `key` are masked.

        Returns:
            Whether the causal diagonal crosses the pair of tiles; arguments of the other masks and of dropout; accesses
            to the tiles that masks and dropout read.
        """
        seq, keys = self.parts(lowering, at, key)
        accesses, dropout = self.mask.accesses(lowering, key), None
        if self.dropout:
            dropout = self.dropout.args(*(lowering.part(self.lse, axis, at).offset for axis in ("batch", "heads")))
            accesses += [R(lowering.tile(self.dropout.row_numbers, at))] if self.dropout.row_numbers else []
        return self.mask.band.cuts_causal(seq, keys), self.mask.limits(seq, keys, dropout), accesses

    def pair_flop(self, lowering: Lowering, at: Index, key: Index) -> float:
        rows = math.prod(lowering.part(self.lse, axis, at).size for axis in ("batch", "heads"))
        area = self.mask.band.area(*self.parts(lowering, at, key)) * self.mask.share(self._keys[0].size(self._keys[1]))
        return 4.0 * rows * self.output.size("head_dim") * area

    def lower(self, lowering: Lowering) -> None:
        for at in self.tiles_of_queries(lowering):
            if self.fused(lowering):
                (key,) = self.pairs(lowering, at)
                self._lower_pair(lowering, self.kernel, [W(lowering.tile(self.lse, at))], at, key)
            else:
                self._lower_tiled(lowering, at)

    def _lower_pair(self, lowering: Lowering, kernel: str, first: list[Access], at: Index, key: Index) -> None:
        """Emit a task that writes the output tile or adds to it. Tiles of the task: out, lse, then the inputs."""
        tiles, qkv = self.operands.tiles(lowering, at, key)
        diagonal, limits, more = self.masked(lowering, at, key)
        out = lowering.tile(self.output, at)
        accesses = [W(out) if kernel == self.kernel else ACC(out), *first, *map(R, tiles), *more]
        args = AttentionArgs(self.out_order, diagonal, qkv, self.scale, limits)
        lowering.emit(kernel, accesses, args, flop=self.pair_flop(lowering, at, key))

    def _lower_tiled(self, lowering: Lowering, at: Index) -> None:
        out, lse = lowering.tile(self.output, at), lowering.tile(self.lse, at)
        flash, keys = self.backend == "flash", self.pairs(lowering, at)
        state_shape = (*lse.shape, 2 if flash else self.output.size("head_dim") + 2)
        rows = {axis: at[axis] for axis in BHSD[:3]}
        state = lowering.scratch(f"{self.name}.state", rows, state_shape, lse.dtype, "softmax")
        for key in keys:
            tiles, qkv = self.operands.tiles(lowering, at, key, values=not flash)
            diagonal, limits, more = self.masked(lowering, at, key)
            args = PairArgs(diagonal, qkv, self.scale, limits)
            flop = self.pair_flop(lowering, at, key) / (2 if flash else 1)
            kernel = "flash_maxsumexp" if flash else "attention_partial"
            lowering.emit(kernel, [ACC(state), *map(R, tiles), *more], args, flop=flop)
        if not flash:
            lowering.emit("attention_normalise", [W(out), W(lse), R(state)], OutArgs(self.out_order))
            return
        lowering.emit("attention_lse", [W(lse), R(state)])
        for key in keys:
            self._lower_pair(lowering, "flash_softmax_gemm", [R(lse)], at, key)

    # -- reference

    def factors(self, data: Sequence[Array], seed: int) -> Array | float:
        """Return dropout's factors for the probabilities: mask / (1 - rate), or 1 without dropout."""
        keys, axis = self._keys
        return self.dropout.factors([*self.lse.shape, keys.size(axis)], data, seed) if self.dropout else 1.0

    def probabilities(self, q: Array, k: Array, data: Sequence[Array]) -> tuple[Array, Array]:
        axes = [*BHSD[:3], "key"]
        allowed = self.mask.allowed({"seq": q.shape[2], "key": k.shape[2]}, axes, data)
        p, lse = masked_softmax(self.scale * q @ k.swapaxes(-1, -2), allowed)
        return p, lse[..., 0]

    def arrays(self, *inputs: Array) -> tuple[Array, Array, Array, Sequence[Array]]:
        """Return q, k, v, and the inputs `data`. Heads of k and v are repeated, so that there are as many as in q."""
        count = len(self.operands.tensors)
        q, k, v = self.operands.split(*inputs[:count])
        return q, k.repeat(self.group, 1), v.repeat(self.group, 1), inputs[count : count + len(self.data)]

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        q, k, v, data = self.arrays(*inputs)
        p, lse = self.probabilities(q, k, data)
        return from_bhsd(p * self.factors(data, seed) @ v, self.out_order), lse


class AttentionGrad(Op):
    """Gradient of attention (Dao et al. 2022, Alg. 4).

    With delta = rowsum(do o), p = exp(scale q k^T - lse), dp = do v^T, ds = scale p (dp - delta):
    dq = sum over keys ds k, dk = sum over queries ds^T q, dv = sum over queries p^T do.
    Dropout multiplies dp by mask / (1 - rate), and also p in the formula of dv.
    """

    category = CONTRACTION
    colours: ClassVar = {"backward": "#cc79a7"}

    def __init__(self, forward: Attention, do: Tensor, outs: Sequence[Tensor]) -> None:
        super().__init__([*forward.inputs, forward.output, forward.lse, do], outs)
        self.forward, self.do = forward, do
        self.write(outs)

    def write(self, outs: Sequence[Tensor]) -> None:
        """Replace the tensors that receive the gradients of q, k and v."""
        self.outputs, self.grads = list(outs), self.forward.operands.on(outs)

    @property
    def title(self) -> str:
        return self.kind + " dropout" * (self.forward.dropout is not None)

    def flop(self) -> float:
        return 2.5 * self.forward.flop()

    def lower(self, lowering: Lowering) -> None:
        fwd, do_order = self.forward, order_of(self.do.axes)
        for at in fwd.tiles_of_queries(lowering):
            out, lse, do = (lowering.tile(t, at) for t in (fwd.output, fwd.lse, self.do))
            fused = fwd.fused(lowering)
            rows = {axis: at[axis] for axis in BHSD[:3]}
            delta = lowering.scratch(f"{self.name}.delta", rows, lse.shape, lse.dtype)
            if not fused:
                lowering.emit("attention_delta", [W(delta), R(do), R(out)], DeltaArgs(do_order, fwd.out_order))
            for key in fwd.pairs(lowering, at):
                tiles, qkv = fwd.operands.tiles(lowering, at, key)
                outs, grads = self.grads.tiles(lowering, at, key)
                diagonal, limits, more = fwd.masked(lowering, at, key)
                flop = 2.5 * fwd.pair_flop(lowering, at, key)
                if fused:
                    of_keys = map(ACC if fwd.shared(lowering) else W, outs[1:])
                    accesses = [R(do), R(out), R(lse), *map(R, tiles), W(outs[0]), *of_keys, *more]
                    args = AttentionGradArgs(do_order, fwd.out_order, diagonal, qkv, grads, fwd.scale, limits)
                    lowering.emit(f"{fwd.kernel}_grad", accesses, args, flop=flop)
                else:
                    accesses = [R(do), R(lse), R(delta), *map(R, tiles), *map(ACC, outs), *more]
                    pair = PairGradArgs(do_order, diagonal, qkv, grads, fwd.scale, limits)
                    lowering.emit("attention_grad_pair", accesses, pair, flop=flop)

    def score_gradient(self, inputs: Sequence[Array], seed: int) -> tuple[Array, Array]:
        """Return the gradient of the unscaled scores, and the weights of the values after dropout; [b, h, seq, key]."""
        fwd = self.forward
        q, k, v, data = fwd.arrays(*inputs[:-3])
        o, do = as_bhsd(inputs[-3], fwd.out_order), as_bhsd(inputs[-1], order_of(self.do.axes))
        p, _ = fwd.probabilities(q, k, data)
        factors = fwd.factors(data, seed)
        ds = fwd.scale * p * (factors * (do @ v.swapaxes(-1, -2)) - (do * o).sum(-1, keepdims=True))
        return ds, p * factors

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        fwd = self.forward
        q, k, *_ = fwd.arrays(*inputs[:-3])
        ds, weights = self.score_gradient(inputs, seed)
        do = as_bhsd(inputs[-1], order_of(self.do.axes))

        def of_group(x: Array) -> Array:
            return np.asarray(x.reshape(x.shape[0], -1, fwd.group, *x.shape[2:]).sum(2))

        dk, dv = of_group(ds.swapaxes(-1, -2) @ q), of_group(weights.swapaxes(-1, -2) @ do)
        return tuple(self.grads.join(ds @ k, dk, dv))


def attention(
    g: GraphLike, q: Operand, k: Operand, v: Operand, mask: Mask, backend: str = "vendor", dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(scale q k^T, masked) v, with q's axes.

    Args:
        q: axes batch, heads, seq, head_dim in any order; batch may be missing. q, k or v may also be a pair
            (tensor, index): a slice of a tensor with an additional axis qkv.
        k: as q, but with kv_heads instead of heads if k and v have fewer heads, and with key instead of seq if the keys
            have other positions than the queries.
        v: as k.
        backend: a backend of Attention; or naive, which stores the scores in memory.
        dropout: probability of a zero among the attention probabilities; requires the backend naive or segments. If
            g.cuts cuts seq or key, and the mask has no segments, the backend naive is used instead.
        scale: factor of the scores; None: 1 / sqrt(head_dim).

    Raises:
        ValueError: the combination is not supported.
    """
    if all(isinstance(part, Tensor) for part in (q, k, v)):
        g.projections.append([q, k, v])  # type: ignore[list-item]
    dropout *= g.training
    if dropout and backend not in WITH_DROPOUT:
        need = " or ".join(WITH_DROPOUT)
        raise ValueError(f"attention_dropout: got {dropout}; allowed: 0, or one of the attention backends {need}")
    if dropout and g.row_numbers and backend == "naive":
        need = "0, or model.attention: segments"
        raise ValueError(f"model.attention_dropout: got {dropout}; allowed with packed sequences: {need}")
    check_row_numbers(g, dropout, mask, backend)
    operands = checked(g, q, k, v, mask)
    if g.cache:
        return g.cache.attend(operands, mask, scale)
    x, keys = operands.parts[0][0], operands.parts[1][0]
    sizes = {"batch": 1, "key": x.size("seq")} | keys.sizes | x.sizes
    if dropout and not mask.segments and cut_positions(g.cuts, sizes["seq"], sizes["key"]):
        backend = "naive"
    if backend == "naive":
        return naive(g, operands, mask, dropout, scale)
    axes = [axis for axis in x.axes if axis != "qkv"]
    out = g.temp("attention", axes, [x.size(a) for a in axes], x.dtype)
    lse = g.temp("lse", BHSD[:3], [sizes[a] for a in BHSD[:3]], accumulation_dtype(x.dtype))
    drops = scores_dropout(g, dropout, axes, sizes, mask) if dropout else None
    return g.add(Attention(operands, out, lse, mask=mask, backend=backend, dropout=drops, scale=scale)).output


def check_row_numbers(g: GraphLike, dropout: float, mask: Mask, backend: str) -> None:
    """Raise ValueError if dropout over segments lacks the positions of the tokens in the padded batch."""
    if dropout and mask.segments and backend == "segments" and "seq" not in g.row_numbers:
        raise ValueError(f"attention_dropout: got {dropout}; allowed without row numbers of the tokens: 0")


def scores_dropout(g: GraphLike, rate: float, axes: Sequence[str], sizes: dict[str, int], mask: Mask) -> ScoresDropout:
    """Return the dropout of the attention probabilities, for attention in one task; axes: axes of the queries."""
    if not mask.segments:
        return ScoresDropout(rate, g.dropout_key(), steps_of(scores_axes(axes), sizes))
    padded = sizes | dict.fromkeys(("seq", "key"), mask.longest or sizes["seq"])
    return ScoresDropout(rate, g.dropout_key(), steps_of([*BHSD[:3], "key"], padded), g.row_numbers["seq"])


def cut_positions(tiling: Tiling, seq: int, key: int) -> bool:
    """Return whether the tiling cuts `seq` queries or `key` keys into several tiles."""
    return tiling.cut("seq", seq) or tiling.cut("key", key)
