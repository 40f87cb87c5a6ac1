"""Selection of one position along an axis, for example of the first token of each sequence."""

from __future__ import annotations

import numpy as np

from nntile_py.tiles import R, TaskArgs, W

from .band import ALL
from .op import Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype


class SelectArgs(TaskArgs):
    axis: int  # position of the selected axis among the axes of the tile
    index: int  # selected position within the tile; -1: the position lies in another tile


class Select(Op):
    """y = x[..., index, ...]: one position along `axis`. y lacks this axis.

    If the axis is cut, tasks read only the tiles with this position.
    """

    def __init__(self, x: Tensor, out: Tensor, axis: str, index: int) -> None:
        assert out.axes == tuple(a for a in x.axes if a != axis) and x.band == ALL, (x, out)
        super().__init__([x], [out])
        self.axis, self.index, self.picks = axis, index, (axis,)

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, dy = self.inputs[0], grads[0]
        assert dy is not None
        dtype = accumulation_dtype(x.dtype) if x.kind == "param" else x.dtype
        return [g.add(SelectGrad(dy, g.temp("select_grad", x.axes, x.shape, dtype), self.axis, self.index)).output]

    def flop(self) -> float:
        return 0.0

    def elements(self) -> int:
        return 2 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        number, part = next((k, p) for k, p in enumerate(lowering.parts(x, self.axis)) if self.index < p.end)
        for index in lowering.indices(self.output):
            accesses = [W(lowering.tile(self.output, index)), R(lowering.tile(x, index | {self.axis: number}))]
            lowering.emit("select", accesses, SelectArgs(x.axes.index(self.axis), self.index - part.offset))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[0].take(self.index, axis=self.inputs[0].axes.index(self.axis)),)


class SelectGrad(Op):
    """Gradient of Select: dx is dy at the selected position, and 0 elsewhere."""

    def __init__(self, dy: Tensor, out: Tensor, axis: str, index: int) -> None:
        super().__init__([dy], [out])
        self.axis, self.index = axis, index

    def flop(self) -> float:
        return 0.0

    def lower(self, lowering: Lowering) -> None:
        out = self.output
        for index in lowering.indices(out):
            at = self.index - lowering.part(out, self.axis, index).offset
            inside = 0 <= at < lowering.part(out, self.axis, index).size
            read = [R(lowering.tile(self.inputs[0], index))] if inside else []
            args = SelectArgs(out.axes.index(self.axis), at if inside else -1)
            lowering.emit("select_grad", [W(lowering.tile(out, index)), *read], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        dx = np.zeros(self.output.shape)
        np.moveaxis(dx, self.output.axes.index(self.axis), 0)[self.index] = inputs[0]
        return (dx,)


def select(g: GraphLike, x: Tensor, axis: str, index: int) -> Tensor:
    """Add a Select to the graph; return x at position `index` of `axis`, without this axis.

    Raises:
        ValueError: x has no such axis or position.
    """
    if axis not in x.axes or not 0 <= index < x.size(axis):
        raise ValueError(f"select: {x} has no position {index} along {axis}")
    sizes = {a: size for a, size in x.sizes.items() if a != axis}
    return g.add(Select(x, g.temp("select", list(sizes), list(sizes.values()), x.dtype), axis, index)).output
