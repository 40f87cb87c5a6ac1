"""RMSNorm over the embed axis, cut or not, with an optional residual addition, and the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nntile_py.tiles import ACC, R, TaskArgs, W

from .norm import Norm, NormGrad
from .op import Array, GraphLike, Lowering, Tensor, accumulation_dtype, require
from .scalar.expression import Definition, Element, Expression, Output, mean, sqrt

AXIS = "embed"


class RMSNormArgs(TaskArgs):
    eps: float


class RMSNormRstdArgs(TaskArgs):
    embed: int  # size in the whole tensor
    eps: float


class RMSNormGradArgs(TaskArgs):
    embed: int  # size in the whole tensor
    has_sums: bool  # whether a tile has the sums of whole rows


class RMSNorm(Norm):
    """y = gamma s / sqrt(mean(s^2) + eps) over the last axis, embed, with s = x (+ residual).

    Zhang and Sennrich 2019, eq. 4; eps as in transformers' LlamaRMSNorm. Where embed is not cut, each tile is one task.
    Where embed is cut, tasks sum the squares of each embed tile, then scale each tile.

    Outputs: y; rstd, fp32 or fp64 [..., 1]: 1 / sqrt(mean(s^2) + eps); with a residual also s, `total`.
    """

    def __init__(
        self,
        x: Tensor,
        gamma: Tensor,
        y: Tensor,
        rstd: Tensor,
        eps: float,
        residual: Tensor | None = None,
        total: Tensor | None = None,
    ) -> None:
        require(x.axes[-1] == AXIS, "rms_norm: the last axis must be embed", x)
        require(list(gamma.axes) == [AXIS], "rms_norm: the weight must have the axis embed alone", x, gamma)
        assert (residual is None) == (total is None), x
        super().__init__([x, gamma, *([residual] if residual else [])], [y, rstd, *([total] if total else [])])
        self.eps, self.residual, self.total, self.statistics = eps, residual, total, rstd

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, gamma = self.inputs[:2]
        dy = grads[0]
        assert dy is not None and self.residual is None, "fusion comes after the gradients"
        dx = g.temp("rms_norm_grad", x.axes, x.shape, x.dtype)
        dgamma = g.temp("gamma_grad", gamma.axes, gamma.shape, accumulation_dtype(gamma.dtype))
        g.add(RMSNormGrad(dy, x, self.statistics, gamma, dx, dgamma))
        return [dx, dgamma]

    def flop(self) -> float:
        return (4.0 + len(self.fused)) * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        x, gamma = self.inputs[:2]
        extra = [self.residual] if self.residual else []
        for index in lowering.indices(x, x.axes[:-1]):
            rstd = lowering.tile(self.statistics, index | {"stat": 0})
            columns = [index | {AXIS: k} for k in range(len(lowering.parts(x, AXIS)))]
            if len(columns) == 1:
                at = columns[0]
                total = [W(lowering.tile(self.total, at))] if self.total else []
                tiles = [lowering.tile(t, at) for t in (x, gamma, *extra)]
                accesses = [W(lowering.tile(self.output, at)), W(rstd), *map(R, tiles), *total]
                lowering.emit("rms_norm", accesses, RMSNormArgs(self.eps))
                continue
            squares = lowering.scratch(f"{self.name}.squares", index, rstd.shape, rstd.dtype)
            source = self.total or x
            for at in columns:
                if self.total:
                    lowering.emit(
                        "add", [W(lowering.tile(self.total, at)), *(R(lowering.tile(t, at)) for t in (x, *extra))]
                    )
                lowering.emit("rms_norm_squares", [ACC(squares), R(lowering.tile(source, at))])
            lowering.emit("rms_norm_stat", [W(rstd), R(squares)], RMSNormRstdArgs(x.size(AXIS), self.eps))
            for at in columns:
                tiles = [lowering.tile(t, at) for t in (source, gamma)]
                lowering.emit("rms_norm_apply", [W(lowering.tile(self.output, at)), R(rstd), *map(R, tiles)])

    def scalar(self) -> Definition:
        axes, rows = self.output.axes, self.output.axes[:-1]
        s: Expression = Element(0, axes)
        if self.residual:
            s = s + Element(2, axes)
        rstd = 1 / sqrt(mean(s * s, AXIS) + self.eps)
        outputs = [Output(0, axes, s * rstd * Element(1, (AXIS,))), Output(1, (*rows, 0), rstd)]
        outputs += [Output(2, axes, s)] if self.total else []
        return Definition(self.output.sizes, tuple(outputs))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        s = inputs[0] + inputs[2] if self.residual else inputs[0]
        rstd = 1 / np.sqrt((s * s).mean(-1, keepdims=True) + self.eps)
        return (s * rstd * inputs[1], rstd, *([s] if self.total else []))


class RMSNormGrad(NormGrad):
    """Gradient of RMSNorm, with xhat = x rstd and w = dy gamma:

    dx = rstd (w - xhat mean(w xhat)) (+ add), dgamma = sum dy xhat. The sum is over all rows, the mean over embed.
    """

    def __init__(
        self, dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor, add: Tensor | None = None
    ) -> None:
        super().__init__([dy, x, rstd, gamma, *([add] if add else [])], [dx, dgamma])
        self.extra = add

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs[1:]

    def flop(self) -> float:
        return (9.0 + len(self.fused)) * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        dy, x, rstd, gamma = self.inputs[:4]
        dx, dgamma = self.outputs
        for index in lowering.indices(x, x.axes[:-1]):
            columns = [index | {AXIS: k} for k in range(len(lowering.parts(x, AXIS)))]
            row_rstd, sums = lowering.tile(rstd, index | {"stat": 0}), []
            if len(columns) > 1:
                sums = [lowering.scratch(f"{self.name}.sums", index, row_rstd.shape, row_rstd.dtype)]
                for at in columns:
                    tiles = [lowering.tile(t, at) for t in (dy, x, gamma)]
                    lowering.emit("rms_norm_grad_sums", [ACC(sums[0]), R(row_rstd), *map(R, tiles)])
            for at in columns:
                tiles = [lowering.tile(dy, at), lowering.tile(x, at), row_rstd, lowering.tile(gamma, at), *sums]
                tiles += [lowering.tile(self.extra, at)] if self.extra else []
                accesses = [W(lowering.tile(dx, at)), ACC(lowering.tile(dgamma, at)), *map(R, tiles)]
                lowering.emit("rms_norm_grad", accesses, RMSNormGradArgs(x.size(AXIS), bool(sums)))

    def scalar(self) -> Definition:
        axes, rows = self.output.axes, self.output.axes[:-1]
        dy, x, rstd = Element(0, axes), Element(1, axes), Element(2, (*rows, 0))
        xhat, w = x * rstd, dy * Element(3, (AXIS,))
        dx = rstd * (w - xhat * mean(w * xhat, AXIS))
        if self.extra:
            dx = dx + Element(4, axes)
        return Definition(self.output.sizes, (Output(0, axes, dx), Output(1, (AXIS,), dy * xhat, total=True)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        dy, x, rstd, gamma = inputs[:4]
        xhat, w = x * rstd, dy * gamma
        dx = rstd * (w - xhat * (w * xhat).mean(-1, keepdims=True))
        dgamma = (dy * xhat).sum(tuple(range(x.ndim - 1)))
        return dx + inputs[4] if self.extra else dx, dgamma


def rms_norm(g: GraphLike, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """gamma x / sqrt(mean(x^2) + eps) over embed, the last axis; see RMSNorm."""
    y = g.temp("rms_norm", x.axes, x.shape, x.dtype)
    rstd = g.temp("stat", [*x.axes[:-1], "stat"], [*x.shape[:-1], 1], accumulation_dtype(x.dtype))
    return g.add(RMSNorm(x, gamma, y, rstd, eps)).output
