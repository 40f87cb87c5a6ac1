"""Point-wise operators defined by a formula of elements. Inputs may lack some of the result's axes (broadcast).

A tensor of one number has the single axis `one`, of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .elementwise import Sum
from .generated import Generated
from .op import Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype, require
from .scalar import expression as ex
from .scalar.derivative import derivative_of
from .scalar.evaluate import evaluate

ONE = "one"


def element(number: int, x: Tensor) -> ex.Element:
    """Return the expression that reads input `number`, which is the tensor x, at the current point."""
    return ex.Element(number, (0,) if x.axes == (ONE,) else x.axes)


class Formula(Op):
    """y = `value` at each point of y's axes, where `value` is an expression of the inputs' elements.

    Args:
        inputs: tensors with a subset of the axes of `out`, in any order; or with the axis `one` alone.
        value: the expression. It contains `element(k, inputs[k])` where it reads input k.
        label: name of the function in drawings and reports.
    """

    def __init__(self, inputs: Sequence[Tensor], out: Tensor, value: ex.Expression, label: str = "") -> None:
        for x in inputs:
            require(x.axes == (ONE,) or {*x.axes} <= {*out.axes}, "formula: inputs need axes of the result", x, out)
        super().__init__(inputs, [out])
        self.value, self.label = value, label

    @property
    def title(self) -> str:
        return self.label or self.kind

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        dy = grads[0]
        assert dy is not None
        return [self._gradient_of(g, k, dy) if x.requires_grad else None for k, x in enumerate(self.inputs)]

    def _gradient_of(self, g: GraphLike, number: int, dy: Tensor) -> Tensor | None:
        x = self.inputs[number]
        if (factor := derivative_of(self.value, number)) is None:
            return None
        used = sorted({node.number for node in ex.walk(factor) if isinstance(node, ex.Element)})
        known: dict[ex.Expression, ex.Expression] = {}
        factor = ex.replaced(factor, known, lambda read: ex.Element(1 + used.index(read.number), read.at))
        # Choose an order of axes in which the sum is fast. If x lacks dy's last axis, and has its axes in dy's order,
        # keep dy's order: the sum runs along contiguous rows. Otherwise the summed axes come first: the sum adds whole
        # rows.
        first = [axis for axis in dy.axes if axis not in x.axes]
        ordered = [axis for axis in dy.axes if axis in x.axes] == [*x.axes] and dy.axes[-1:] != x.axes[-1:]
        axes = [*dy.axes] if ordered else [*first, *x.axes]
        sizes = dy.sizes | x.sizes
        summed = len(axes) > len(x.axes)
        dtype = dy.dtype if summed else accumulation_dtype(x.dtype) if x.kind == "param" else x.dtype
        full = g.temp("formula_grad", axes, [sizes[axis] for axis in axes], dtype)
        value = (
            element(0, dy) if isinstance(factor, ex.ScalarConstant) and factor.value == 1 else element(0, dy) * factor
        )
        dx = g.add(Formula([dy, *(self.inputs[k] for k in used)], full, value, f"{self.label}'")).output
        if summed:
            total = g.temp("formula_sum", x.axes, x.shape, accumulation_dtype(x.dtype))
            dx = g.add(Sum(dx, total)).output
            if x.kind != "param" and dx.dtype != x.dtype:
                dx = converted(g, dx, x.dtype)
        return dx

    def flop(self) -> float:
        return float(sum(isinstance(node, ex.Call) for node in ex.walk(self.value))) * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        Generated([self], self.outputs).lower(lowering)

    def scalar(self) -> ex.Definition:
        return ex.Definition(self.output.sizes, (ex.Output(0, self.output.axes, self.value),))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return tuple(evaluate(self.scalar(), inputs, [self.output.shape]))


class Total(Sum):
    """y = sum of x over the axes missing in y. Unlike Sum it has a gradient: dx = dy at each summed point."""

    colours: ClassVar = {}

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, dy = self.inputs[0], grads[0]
        assert dy is not None
        return [spread_over(g, dy, x.sizes, x.dtype)]


def converted(g: GraphLike, x: Tensor, dtype: str) -> Tensor:
    """Return x in another dtype."""
    return g.add(Formula([x], g.temp("converted", x.axes, x.shape, dtype), element(0, x), "convert")).output


def spread_over(g: GraphLike, x: Tensor, sizes: dict[str, int], dtype: str | None = None) -> Tensor:
    """Return x repeated along the axes of `sizes` {axis: size} that x lacks."""
    out = g.temp("spread", list(sizes), list(sizes.values()), dtype or x.dtype)
    return g.add(Formula([x], out, element(0, x), "spread")).output


def total_over(g: GraphLike, x: Tensor, axes: Sequence[str]) -> Tensor:
    """Return the sum of x over `axes`; of all axes: a tensor with the axis `one`."""
    kept = {axis: size for axis, size in x.sizes.items() if axis not in axes}
    if not kept:
        x, kept = spread_over(g, x, {ONE: 1} | x.sizes), {ONE: 1}
    out = g.temp("total", list(kept), list(kept.values()), accumulation_dtype(x.dtype))
    return g.add(Total(x, out)).output
