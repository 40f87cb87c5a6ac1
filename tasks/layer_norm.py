"""LayerNorm over the embed axis, which may be cut into tiles, with an optional residual addition, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, Access, R, TaskArgs, Tile, W

from .elementwise import Dropout, DropoutArgs
from .norm import Norm, NormGrad
from .op import Array, GraphLike, Index, Lowering, Tensor, accumulation_dtype
from .scalar.expression import Expression, mean, sqrt


class LayerNormArgs(TaskArgs):
    eps: float
    dropout: DropoutArgs | None  # dropout of x before the residual is added; None: no dropout


class LayerNormStatisticsArgs(TaskArgs):
    eps: float


class LayerNorm(Norm):
    """y = (s - mean) / sqrt(var + eps) * gamma + beta over the last axis, embed, with s = x (+ residual).

    Source: Ba, Kiros, Hinton 2016. The variance is the sum of squared deviations divided by n, not by n - 1. The
    statistics of a row are its mean and 1/sqrt(var + eps). If embed is cut into several tiles, tasks merge the state
    (count, mean, M2) of a row's parts; M2 is the sum of squared deviations from the mean.
    """

    colours: ClassVar = {"forward": "#56b4e9"}
    kernel, weights, operations = "layer_norm", 2, 8.0
    state: ClassVar = ("moments", 3, "moments")
    takes_dropout = True

    def __init__(
        self, x: Tensor, gamma: Tensor, beta: Tensor, y: Tensor, statistics: Tensor, eps: float,
        residual: Tensor | None = None, total: Tensor | None = None, dropout: Dropout | None = None,
    ) -> None:  # fmt: skip
        super().__init__(x, [gamma, beta], y, statistics, eps, residual, total, dropout)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        return self.add_gradient(g, LayerNormGrad, grads[0])

    def row_args(self, lowering: Lowering, at: Index) -> TaskArgs:
        return LayerNormArgs(self.eps, self.dropout.args(lowering, at) if self.dropout else None)

    def statistics_args(self) -> TaskArgs:
        return LayerNormStatisticsArgs(self.eps)

    @staticmethod
    def of_row(
        s: Expression, weights: Sequence[Expression], eps: float, axis: str
    ) -> tuple[Expression, list[Expression]]:
        middle = mean(s, axis)
        d = s - middle
        rstd = 1 / sqrt(mean(d * d, axis) + eps)
        return d * rstd * weights[0] + weights[1], [middle, rstd]

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        x = self.dropout.reference(inputs[0], seed=seed)[0] if self.dropout else inputs[0]
        s = x + inputs[3] if self.residual else x
        mean, rstd = s.mean(-1, keepdims=True), 1 / np.sqrt(s.var(-1, keepdims=True) + self.eps)
        y = (s - mean) * rstd * inputs[1] + inputs[2]
        return (y, np.concatenate([mean, rstd], -1), *([s] if self.total else []))


class LayerNormGradArgs(TaskArgs):
    # Positions of optional tiles among the task's tiles; 0: the tile is absent.
    add: int
    dbias: int
    sums: int
    dropped: int
    embed: int  # size of embed in the whole tensor
    dropout: DropoutArgs | None  # dropout of dx; None: no dropout


class LayerNormGrad(NormGrad):
    """Gradient of LayerNorm: dx, dgamma, dbeta. Formulas and options: see NormGrad."""

    colours: ClassVar = {"backward": "#d55e00"}
    kernel, weights, operations = "layer_norm_grad", 2, 14.0

    def __init__(
        self, dy: Tensor, x: Tensor, statistics: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor, dbeta: Tensor,
        add: Tensor | None = None, dbias: Tensor | None = None, dropout: Dropout | None = None,
    ) -> None:  # fmt: skip
        super().__init__([dy, x, statistics, gamma], [dx, dgamma, dbeta], add, dbias, dropout)

    def emit(self, lowering: Lowering, at: Index, statistics: Tile, sums: Tile | None) -> None:
        dx, dgamma, dbeta = (lowering.tile(t, at) for t in self.outputs[:3])
        dy, x, gamma = (lowering.tile(self.inputs[k], at) for k in (0, 1, 3))
        accesses = [W(dx), ACC(dgamma), ACC(dbeta), R(dy), R(x), R(statistics), R(gamma)]

        def place(access: Access | None) -> int:
            accesses.extend([access] if access else [])
            return len(accesses) - 1 if access else 0

        args = LayerNormGradArgs(
            add=place(R(lowering.tile(self.extra, at)) if self.extra else None),
            dbias=place(ACC(lowering.tile(self.bias, at)) if self.bias else None),
            sums=place(R(sums) if sums else None),
            dropped=place(W(lowering.tile(self.dropout.output, at)) if self.dropout else None),
            embed=self.inputs[1].shape[-1],
            dropout=self.dropout.args(lowering, at) if self.dropout else None,
        )
        numbers = self.dropout.numbers(lowering, at) if self.dropout else []
        lowering.emit(self.kernel, [*accesses, *numbers], args)

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        dy, x, statistics, gamma = inputs[:4]
        rows = tuple(range(x.ndim - 1))
        xhat = (x - statistics[..., :1]) * statistics[..., 1:]
        w = dy * gamma
        dx = statistics[..., 1:] * (w - w.mean(-1, keepdims=True) - xhat * (w * xhat).mean(-1, keepdims=True))
        if self.extra:
            dx = dx + inputs[4]
        dropped = self.dropout.reference(dx, seed=seed) if self.dropout else ()
        dbias = [(*dropped, dx)[0].sum(rows)] if self.bias else []
        return dx, (dy * xhat).sum(rows), dy.sum(rows), *dbias, *dropped


def layer_norm(g: GraphLike, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Add a LayerNorm to the graph; return (x - mean) / sqrt(var + eps) * gamma + beta over the last axis, embed."""
    y = g.temp("layer_norm", x.axes, x.shape, x.dtype)
    statistics = g.temp("stat", [*x.axes[:-1], "stat"], [*x.shape[:-1], 2], accumulation_dtype(x.dtype))
    return g.add(LayerNorm(x, gamma, beta, y, statistics, eps)).output
