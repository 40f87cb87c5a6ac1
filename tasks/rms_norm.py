"""RMSNorm over the embed axis, which may be cut into tiles, with an optional residual addition, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, R, TaskArgs, Tile, W

from .norm import Norm, NormGrad
from .op import Array, GraphLike, Index, Lowering, Tensor, accumulation_dtype
from .scalar.expression import Expression, mean, sqrt


class RMSNormArgs(TaskArgs):
    eps: float


class RMSNormRstdArgs(TaskArgs):
    embed: int  # size of embed in the whole tensor
    eps: float


class RMSNormGradArgs(TaskArgs):
    embed: int  # size of embed in the whole tensor
    has_sums: bool  # True: the task has a tile with the sums over whole rows, because embed is cut into several tiles


class RMSNorm(Norm):
    """y = gamma s / sqrt(mean(s^2) + eps) over the last axis, embed, with s = x (+ residual).

    Source: Zhang and Sennrich 2019, eq. 4, with eps as in transformers' LlamaRMSNorm. The statistics of a row are
    rstd = 1 / sqrt(mean(s^2) + eps). If embed is cut into several tiles, the state of a row is its sum of squares.
    """

    kernel, weights, operations = "rms_norm", 1, 4.0
    state: ClassVar = ("squares", 1, "sum")

    def __init__(
        self, x: Tensor, gamma: Tensor, y: Tensor, rstd: Tensor, eps: float,
        residual: Tensor | None = None, total: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(x, [gamma], y, rstd, eps, residual, total)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        return self.add_gradient(g, RMSNormGrad, grads[0])

    def row_args(self, lowering: Lowering, at: Index) -> TaskArgs:
        return RMSNormArgs(self.eps)

    def statistics_args(self) -> TaskArgs:
        return RMSNormRstdArgs(self.inputs[0].shape[-1], self.eps)

    @staticmethod
    def of_row(
        s: Expression, weights: Sequence[Expression], eps: float, axis: str
    ) -> tuple[Expression, list[Expression]]:
        rstd = 1 / sqrt(mean(s * s, axis) + eps)
        return s * rstd * weights[0], [rstd]

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        s = inputs[0] + inputs[2] if self.residual else inputs[0]
        rstd = 1 / np.sqrt((s * s).mean(-1, keepdims=True) + self.eps)
        return (s * rstd * inputs[1], rstd, *([s] if self.total else []))


class RMSNormGrad(NormGrad):
    """Gradient of RMSNorm: dx, dgamma. Formulas and options: see NormGrad."""

    kernel, weights, operations = "rms_norm_grad", 1, 9.0

    def __init__(
        self, dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor, add: Tensor | None = None
    ) -> None:
        super().__init__([dy, x, rstd, gamma], [dx, dgamma], add)

    def emit(self, lowering: Lowering, at: Index, statistics: Tile, sums: Tile | None) -> None:
        dy, x, gamma = (lowering.tile(self.inputs[k], at) for k in (0, 1, 3))
        tiles = [dy, x, statistics, gamma, *([sums] if sums else [])]
        tiles += [lowering.tile(self.extra, at)] if self.extra else []
        dx, dgamma = (lowering.tile(t, at) for t in self.outputs)
        args = RMSNormGradArgs(self.inputs[1].shape[-1], sums is not None)
        lowering.emit(self.kernel, [W(dx), ACC(dgamma), *map(R, tiles)], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        dy, x, rstd, gamma = inputs[:4]
        xhat, w = x * rstd, dy * gamma
        dx = rstd * (w - xhat * (w * xhat).mean(-1, keepdims=True))
        dgamma = (dy * xhat).sum(tuple(range(x.ndim - 1)))
        return dx + inputs[4] if self.extra else dx, dgamma


def rms_norm(g: GraphLike, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Add an RMSNorm to the graph; return gamma x / sqrt(mean(x^2) + eps) over the last axis of x."""
    y = g.temp("rms_norm", x.axes, x.shape, x.dtype)
    rstd = g.temp("stat", [*x.axes[:-1], "stat"], [*x.shape[:-1], 1], accumulation_dtype(x.dtype))
    return g.add(RMSNorm(x, gamma, y, rstd, eps)).output
