"""Base classes of LayerNorm and RMSNorm and of their gradients: fused operations, lowering, scalar form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from nntile_py.tiles import ACC, R, TaskArgs, Tile, W

from .elementwise import Dropout, DropoutArgs, dropped
from .op import NORMALIZATION, GraphLike, Index, Lowering, Op, Tensor, accumulation_dtype, require
from .scalar.expression import Definition, Element, Expression, Output, mean


def normalised(x: Expression, statistics: Sequence[Expression]) -> Expression:
    """Return x * rstd if the statistics are (rstd,), or (x - mean) * rstd if they are (mean, rstd)."""
    *middle, rstd = statistics
    return (x - middle[0] if middle else x) * rstd


class _NormBase(Op):
    """Properties that a norm and its gradient share."""

    category = NORMALIZATION
    kernel: ClassVar[str]  # kernel for whole rows; kernels for rows cut into several tiles add a suffix to this name
    weights: ClassVar[int]  # number of weights: gamma, and beta for LayerNorm
    operations: ClassVar[float]  # flop per element without fused operations

    @property
    def fused(self) -> list[str]:
        """Names of the fused operations, each of which costs one flop per element."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        return " + ".join([self.kind, *self.fused])

    def flop(self) -> float:
        return (self.operations + len(self.fused)) * self.output.numel


class Norm(_NormBase):
    """A normalisation over the last axis (usually embed) of s, which is x, x + residual, or dropout(x) + residual.

    Inputs: x, the weights, and optionally the residual. Outputs: y; the statistics of each row, fp32 or fp64
    [..., stat]; with a residual also s, named `total`.

    If a tile holds whole rows, one task computes it. If embed is cut into several tiles, one task per tile adds to the
    state of the rows, one task turns the state into statistics, and one task per tile applies the statistics.

    Args:
        dropout: a Dropout of x. It requires a residual, an uncut embed, and a class with `takes_dropout`.
    """

    state: ClassVar[tuple[str, int, str]]  # state of a row cut into tiles: its name, number of values, monoid
    takes_dropout: ClassVar[bool] = False  # True: dropout of x can be fused

    def __init__(
        self, x: Tensor, weights: Sequence[Tensor], y: Tensor, statistics: Tensor, eps: float,
        residual: Tensor | None, total: Tensor | None, dropout: Dropout | None = None,
    ) -> None:  # fmt: skip
        for weight in weights:
            rule = f"{self.kernel}: a weight must have the last axis of x alone"
            require(weight.axes == x.axes[-1:], rule, x, weight)
        assert (residual is None) == (total is None) and (residual or not dropout), x
        super().__init__([x, *weights, *([residual] if residual else [])], [y, statistics, *([total] if total else [])])
        self.statistics, self.eps, self.residual, self.total, self.dropout = statistics, eps, residual, total, dropout

    @property
    def fused(self) -> list[str]:
        return ["residual"] * bool(self.residual) + ["dropout"] * bool(self.dropout)

    def onto(self, x: Tensor, residual: Tensor, total: Tensor, **dropout: Any) -> Norm:
        """Return a new norm like this one, applied to x + residual. The sum is stored in the tensor `total`."""
        assert not self.residual, self
        make: Any = type(self)
        fused: Norm = make(x, *self.inputs[1:], self.output, self.statistics, self.eps, residual, total, **dropout)
        return fused

    def add_gradient(self, g: GraphLike, grad: Any, dy: Tensor | None) -> list[Tensor | None]:
        """Add an operator of class `grad`, the gradient, to the graph. Return the gradients of x and of the weights."""
        x, *weights = self.inputs
        assert dy is not None and self.residual is None, "fusion comes after the gradients"
        outs = [g.temp(f"{self.kernel}_grad", x.axes, x.shape, x.dtype)]
        for name, weight in zip(("gamma_grad", "beta_grad"), weights, strict=False):
            outs.append(g.temp(name, weight.axes, weight.shape, accumulation_dtype(weight.dtype)))
        g.add(grad(dy, x, self.statistics, weights[0], *outs))
        return [*outs]

    # -- lowering

    def row_args(self, lowering: Lowering, at: Index) -> TaskArgs:
        """Return the arguments of the kernel for whole rows; at: indices of the tile."""
        raise NotImplementedError

    def statistics_args(self) -> TaskArgs:
        """Return the arguments of the kernel that computes statistics from the state of rows cut into tiles."""
        raise NotImplementedError

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        for index in lowering.indices(x, x.axes[:-1]):
            statistics = lowering.tile(self.statistics, index | {"stat": 0})
            columns = [index | {x.axes[-1]: k} for k in range(len(lowering.parts(x, x.axes[-1])))]
            if len(columns) > 1:
                self._lower_cut(lowering, index, columns, statistics)
                continue
            accesses = [W(lowering.tile(self.output, columns[0])), W(statistics)]
            accesses += [R(lowering.tile(t, columns[0])) for t in self.inputs]
            accesses += [W(lowering.tile(self.total, columns[0]))] if self.total else []
            accesses += self.dropout.numbers(lowering, columns[0]) if self.dropout else []
            lowering.emit(self.kernel, accesses, self.row_args(lowering, columns[0]))

    def _lower_cut(self, lowering: Lowering, index: Index, columns: list[Index], statistics: Tile) -> None:
        """Append the tasks for rows cut into several tiles; columns: indices of these tiles."""
        assert not self.dropout, "not fused where embed is cut"
        x, *weights = self.inputs[: 1 + self.weights]
        name, count, monoid = self.state
        shape = (*statistics.shape[:-1], count)
        state = lowering.scratch(f"{self.name}.{name}", index, shape, statistics.dtype, monoid)
        source = self.total or x
        for at in columns:
            if self.total:
                terms = [R(lowering.tile(t, at)) for t in (x, self.inputs[-1])]
                lowering.emit("add", [W(lowering.tile(self.total, at)), *terms])
            lowering.emit(f"{self.kernel}_{name}", [ACC(state), R(lowering.tile(source, at))])
        lowering.emit(f"{self.kernel}_stat", [W(statistics), R(state)], self.statistics_args())
        for at in columns:
            read = [R(lowering.tile(t, at)) for t in (source, *weights)]
            lowering.emit(f"{self.kernel}_apply", [W(lowering.tile(self.output, at)), R(statistics), *read])

    # -- scalar form

    @staticmethod
    def of_row(
        s: Expression, weights: Sequence[Expression], eps: float, axis: str
    ) -> tuple[Expression, list[Expression]]:
        """Return the expressions of y and of the statistics of one row; s: input of the norm, axis: the last axis."""
        raise NotImplementedError

    @classmethod
    def results(
        cls, axes: tuple[str, ...], eps: float, *, residual: bool, dropout: Dropout | DropoutArgs | None = None,
        row_numbers: Element | None = None,
    ) -> tuple[Output, ...]:  # fmt: skip
        """Return the formula of each output in terms of the inputs."""
        x = Element(0, axes)
        s: Expression = dropped(dropout, x, row_numbers) if dropout else x
        s = s + Element(1 + cls.weights, axes) if residual else s
        y, statistics = cls.of_row(s, [Element(1 + k, axes[-1:]) for k in range(cls.weights)], eps, axes[-1])
        outputs = [Output(0, axes, y), *(Output(1, (*axes[:-1], k), value) for k, value in enumerate(statistics))]
        return (*outputs, *([Output(2, axes, s)] if residual else []))

    def scalar(self) -> Definition | None:
        if self.dropout and self.dropout.row_numbers:  # the formula would need row numbers, but they are no input
            return None
        results = self.results(self.output.axes, self.eps, residual=bool(self.residual), dropout=self.dropout)
        return Definition(self.output.sizes, results)


class NormGrad(_NormBase):
    """Gradient of a normalisation, optionally with a tensor `add` added to dx.

    Let xhat be the normalised x and w = dy * gamma. Means are over the last axis, sums over all rows:

    - RMSNorm: dx = rstd (w - xhat mean(w xhat)) (+ add)
    - LayerNorm: dx = rstd (w - mean(w) - xhat mean(w xhat)) (+ add)
    - dgamma = sum(dy xhat); dbeta = sum(dy), only for LayerNorm

    Inputs: dy, x, statistics, gamma, and optionally `add`. Outputs: dx and the gradients of the weights. The
    constructor of a subclass takes (dy, x, statistics, gamma, *outputs, add).

    Args:
        dbias: a further output [embed]: the sum over all rows of dx, or of the dropout's output if there is a dropout.
            If x is a sum with a bias, this is the gradient of the bias.
        dropout: a Dropout of dx, whose output becomes the last output.
    """

    def __init__(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], add: Tensor | None, dbias: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> None:  # fmt: skip
        last = [t for t in (dbias, dropout.output if dropout else None) if t]
        super().__init__([*inputs, *([add] if add else [])], [*outputs, *last])
        self.extra, self.bias, self.dropout = add, dbias, dropout

    @property
    def fused(self) -> list[str]:
        parts = {"add": self.extra, "dropout": self.dropout, "bias gradient": self.bias}
        return [name for name, tensor in parts.items() if tensor]

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs[1 : 1 + self.weights]

    def plus(self, add: Tensor, dx: Tensor) -> NormGrad:
        """Return a new operator like this one that also adds `add` to dx. The sum is stored in the given tensor dx."""
        assert not self.extra, self
        make: Any = type(self)
        fused: NormGrad = make(*self.inputs, dx, *self.outputs[1:], add=add)
        return fused

    def emit(self, lowering: Lowering, at: Index, statistics: Tile, sums: Tile | None) -> None:
        """Append the task of one tile to the task list.

        Args:
            at: indices of the tile.
            sums: tile with the sums of w and w xhat over whole rows, if embed is cut into several tiles.
        """
        raise NotImplementedError

    def lower(self, lowering: Lowering) -> None:
        dy, x, statistics, gamma = self.inputs[:4]
        for index in lowering.by_batch(lowering.indices(x, x.axes[:-1]), self.sums):
            columns = [index | {x.axes[-1]: k} for k in range(len(lowering.parts(x, x.axes[-1])))]
            of_rows, sums = lowering.tile(statistics, index | {"stat": 0}), None
            if len(columns) > 1:
                sums = lowering.scratch(f"{self.name}.sums", index, of_rows.shape, of_rows.dtype)
                for at in columns:
                    tiles = [lowering.tile(t, at) for t in (dy, x, gamma)]
                    lowering.emit(f"{self.kernel}_sums", [ACC(sums), R(of_rows), *map(R, tiles)])
            for at in columns:
                self.emit(lowering, at, of_rows, sums)

    @classmethod
    def terms(cls, axes: tuple[str, ...]) -> tuple[list[Expression], Expression, Expression]:
        """Return the expressions of the statistics, of xhat and of w (see NormGrad)."""
        statistics: list[Expression] = [Element(2, (*axes[:-1], k)) for k in range(cls.weights)]
        return statistics, normalised(Element(1, axes), statistics), Element(0, axes) * Element(3, axes[-1:])

    @classmethod
    def results(
        cls, axes: tuple[str, ...], *, add: bool, dbias: bool = False, dropout: Dropout | DropoutArgs | None = None,
        row_numbers: Element | None = None, sums: tuple[int, int] | None = None,
    ) -> tuple[Output, ...]:  # fmt: skip
        """Return the formula of each output in terms of the inputs.

        Args:
            sums: only if embed is cut into several tiles: number of the input with the sums of w and w xhat over whole
                rows, and the size of embed in the whole tensor.
        """
        dy = Element(0, axes)
        (*_, rstd), xhat, w = cls.terms(axes)
        values = [w, w * xhat][-cls.weights :]
        if sums:
            means = [Element(sums[0], (*axes[:-1], k)) * (1 / sums[1]) for k in range(cls.weights)]
        else:
            means = [mean(value, axes[-1]) for value in values]
        dx = rstd * ((w - means[0] if cls.weights > 1 else w) - xhat * means[-1])
        dx = dx + Element(4, axes) if add else dx
        last = dropped(dropout, dx, row_numbers) if dropout else dx
        every = [dx, dy * xhat, dy][: 1 + cls.weights] + [last] * dbias + [last] * (dropout is not None)
        rows = [k for k in range(len(every)) if 0 < k < 1 + cls.weights + dbias]  # outputs that are sums over rows
        return tuple(Output(k, axes[-1:] if k in rows else axes, value, k in rows) for k, value in enumerate(every))

    def scalar(self) -> Definition | None:
        if self.dropout and self.dropout.row_numbers:  # the formula would need row numbers, but they are no input
            return None
        options: dict[str, Any] = {"add": bool(self.extra), "dbias": bool(self.bias), "dropout": self.dropout}
        return Definition(self.output.sizes, self.results(self.output.axes, **options))
