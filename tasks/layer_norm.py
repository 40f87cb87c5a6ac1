"""LayerNorm over the embed axis, cut or not, with an optional residual addition, and the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, Access, R, TaskArgs, Tile, W

from .elementwise import Dropout, DropoutArgs
from .norm import Norm, NormGrad
from .op import Array, GraphLike, Index, Lowering, Tensor, accumulation_dtype, require
from .scalar.expression import Definition, Element, Expression, Output, mean, sqrt

AXIS = "embed"


class LayerNormArgs(TaskArgs):
    eps: float
    dropout: DropoutArgs | None  # of x


class LayerNormStatisticsArgs(TaskArgs):
    eps: float


class LayerNorm(Norm):
    """y = (s - mean) / sqrt(var + eps) * gamma + beta over the last axis, embed, with s = x (+ residual).

    Ba, Kiros, Hinton 2016; the variance is without Bessel's correction. Where embed is not cut, each tile is one task.
    Where embed is cut, tasks compute (count, mean, M2) of each embed tile, combine these, then normalise.

    Outputs: y; statistics, fp32 or fp64 [..., 2]: mean and 1/sqrt(var + eps); with a residual also s, `total`.

    Args:
        dropout: a Dropout of x, so that s = dropout(x) + residual; requires that embed is not cut.
    """

    colours: ClassVar = {"forward": "#56b4e9"}

    takes_dropout = True

    def __init__(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        y: Tensor,
        statistics: Tensor,
        eps: float,
        residual: Tensor | None = None,
        total: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> None:
        require(x.axes[-1] == AXIS, "layer_norm: the last axis must be embed", x)
        for weight in (gamma, beta):
            require(list(weight.axes) == [AXIS], "layer_norm: the weights must have the axis embed alone", x, weight)
        assert residual or not dropout, x
        outputs = [y, statistics, *([total] if total else [])]
        super().__init__([x, gamma, beta, *([residual] if residual else [])], outputs)
        self.eps, self.residual, self.total, self.statistics, self.dropout = eps, residual, total, statistics, dropout

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, gamma, beta = self.inputs[:3]
        dy = grads[0]
        assert dy is not None and self.residual is None, "fusion comes after the gradients"
        dx = g.temp("layer_norm_grad", x.axes, x.shape, x.dtype)
        dgamma = g.temp("gamma_grad", gamma.axes, gamma.shape, accumulation_dtype(gamma.dtype))
        dbeta = g.temp("beta_grad", beta.axes, beta.shape, accumulation_dtype(beta.dtype))
        g.add(LayerNormGrad(dy, x, self.statistics, gamma, dx, dgamma, dbeta))
        return [dx, dgamma, dbeta]

    def flop(self) -> float:
        return (8.0 + len(self.fused)) * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        x, gamma, beta = self.inputs[:3]
        rows = [a for a in x.axes if a != AXIS]
        extra = [self.residual] if self.residual else []
        for index in lowering.indices(x, rows):
            statistics = lowering.tile(self.statistics, index | {"stat": 0})
            columns = [index | {AXIS: k} for k in range(len(lowering.parts(x, AXIS)))]
            if len(columns) == 1:
                at = columns[0]
                total = [W(lowering.tile(self.total, at))] if self.total else []
                tiles = [lowering.tile(t, at) for t in (x, gamma, beta, *extra)]
                args = LayerNormArgs(self.eps, self.dropout.args(lowering, at) if self.dropout else None)
                numbers = self.dropout.numbers(lowering, at) if self.dropout else []
                written = [W(lowering.tile(self.output, at)), W(statistics)]
                lowering.emit("layer_norm", [*written, *map(R, tiles), *total, *numbers], args)
                continue
            assert not self.dropout, "not fused where embed is cut"
            state = lowering.scratch(
                f"{self.name}.moments", index, (*statistics.shape[:-1], 3), statistics.dtype, "moments"
            )
            source = x
            for at in columns:
                if self.total:
                    source = self.total
                    tiles = [lowering.tile(t, at) for t in (x, *extra)]
                    lowering.emit("add", [W(lowering.tile(self.total, at)), *map(R, tiles)])
                lowering.emit("layer_norm_moments", [ACC(state), R(lowering.tile(source, at))])
            lowering.emit("layer_norm_stat", [W(statistics), R(state)], LayerNormStatisticsArgs(self.eps))
            for at in columns:
                tiles = [lowering.tile(t, at) for t in (source, gamma, beta)]
                lowering.emit("layer_norm_apply", [W(lowering.tile(self.output, at)), R(statistics), *map(R, tiles)])

    def scalar(self) -> Definition | None:
        axes, rows = self.output.axes, self.output.axes[:-1]
        s: Expression = Element(0, axes)
        if self.dropout:
            if self.dropout.row_numbers:  # the row numbers are not an input
                return None
            s = self.dropout.dropped(s)
        if self.residual:
            s = s + Element(3, axes)
        middle = mean(s, AXIS)
        d = s - middle
        rstd = 1 / sqrt(mean(d * d, AXIS) + self.eps)
        y = d * rstd * Element(1, (AXIS,)) + Element(2, (AXIS,))
        outputs = [Output(0, axes, y), Output(1, (*rows, 0), middle), Output(1, (*rows, 1), rstd)]
        outputs += [Output(2, axes, s)] if self.total else []
        return Definition(self.output.sizes, tuple(outputs))

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        x = self.dropout.reference(inputs[0], seed=seed)[0] if self.dropout else inputs[0]
        s = x + inputs[3] if self.residual else x
        mean, rstd = s.mean(-1, keepdims=True), 1 / np.sqrt(s.var(-1, keepdims=True) + self.eps)
        y = (s - mean) * rstd * inputs[1] + inputs[2]
        return (y, np.concatenate([mean, rstd], -1), *([s] if self.total else []))


class LayerNormGradArgs(TaskArgs):
    add: int  # position among the tiles; 0: absent
    dbias: int
    sums: int
    dropped: int
    embed: int  # size in the whole tensor
    dropout: DropoutArgs | None  # of dx


class LayerNormGrad(NormGrad):
    """Gradient of LayerNorm, with xhat = (x - mean) rstd and w = dy gamma:

    dx = rstd (w - mean(w) - xhat mean(w xhat)) (+ add), dgamma = sum dy xhat, dbeta = sum dy. Sums are over all rows,
    means over embed.

    Args:
        add: a tensor added to dx.
        dbias: [embed], a fourth output: the sum over all rows of dx, or of the dropout's output. It is the gradient of
            a bias in the sum x.
        dropout: a Dropout of dx; its output is the last output.
    """

    colours: ClassVar = {"backward": "#d55e00"}

    def __init__(
        self,
        dy: Tensor,
        x: Tensor,
        statistics: Tensor,
        gamma: Tensor,
        dx: Tensor,
        dgamma: Tensor,
        dbeta: Tensor,
        add: Tensor | None = None,
        dbias: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> None:
        outputs = [dx, dgamma, dbeta, *([dbias] if dbias else []), *([dropout.output] if dropout else [])]
        super().__init__([dy, x, statistics, gamma, *([add] if add else [])], outputs)
        self.extra, self.bias, self.dropout = add, dbias, dropout

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs[1:3]

    def flop(self) -> float:
        return (14.0 + len(self.fused)) * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        dy, x, statistics, gamma = self.inputs[:4]
        rows = [a for a in x.axes if a != AXIS]
        for index in lowering.indices(x, rows):
            columns = [index | {AXIS: k} for k in range(len(lowering.parts(x, AXIS)))]
            row_statistics, sums = lowering.tile(statistics, index | {"stat": 0}), None
            if len(columns) > 1:
                sums = lowering.scratch(f"{self.name}.sums", index, row_statistics.shape, row_statistics.dtype)
                for at in columns:
                    tiles = [lowering.tile(t, at) for t in (dy, x, gamma)]
                    lowering.emit("layer_norm_grad_sums", [ACC(sums), R(row_statistics), *map(R, tiles)])
            for at in columns:
                self._emit(lowering, at, row_statistics, sums)

    def _emit(self, lowering: Lowering, at: Index, statistics: Tile, sums: Tile | None) -> None:
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
            embed=self.inputs[1].size(AXIS),
            dropout=self.dropout.args(lowering, at) if self.dropout else None,
        )
        numbers = self.dropout.numbers(lowering, at) if self.dropout else []
        lowering.emit("layer_norm_grad", [*accesses, *numbers], args)

    def scalar(self) -> Definition | None:
        if self.dropout and self.dropout.row_numbers:  # the row numbers are not an input
            return None
        axes, rows = self.output.axes, self.output.axes[:-1]
        dy, x = Element(0, axes), Element(1, axes)
        middle, rstd = Element(2, (*rows, 0)), Element(2, (*rows, 1))
        xhat, w = (x - middle) * rstd, dy * Element(3, (AXIS,))
        dx = rstd * (w - mean(w, AXIS) - xhat * mean(w * xhat, AXIS))
        if self.extra:
            dx = dx + Element(4, axes)
        values = [dx, dy * xhat, dy]
        last = self.dropout.dropped(dx) if self.dropout else dx
        values += [last] if self.bias else []
        values += [last] if self.dropout else []
        outputs = (Output(k, self.outputs[k].axes, v, self.outputs[k].axes != axes) for k, v in enumerate(values))
        return Definition(self.output.sizes, tuple(outputs))

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
    """(x - mean) / sqrt(var + eps) * gamma + beta over the last axis, embed; see LayerNorm."""
    y = g.temp("layer_norm", x.axes, x.shape, x.dtype)
    statistics = g.temp("stat", [*x.axes[:-1], "stat"], [*x.shape[:-1], 2], accumulation_dtype(x.dtype))
    return g.add(LayerNorm(x, gamma, beta, y, statistics, eps)).output
