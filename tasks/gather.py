"""Gather: select positions of each row of the batch, such as the masked tokens, by indices from an input tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nntile_py.tiles import ACC, R, TaskArgs

from .band import ALL
from .op import Array, GraphLike, Index, Lowering, Op, Tensor, accumulation_dtype, require

NOWHERE = -1  # no position: a row of zeros


class GatherArgs(TaskArgs):
    first: int  # first position of x's tile along the gathered axis
    positions: int  # positions of the whole gathered axis
    added: int  # number of axes of `places` that x does not have


class GatherGradArgs(TaskArgs):
    first: int  # first position of dx's tile along the gathered axis
    added: int  # number of axes of `places` that dx does not have


class Gather(Op):
    """y[..., m, :] = x[..., places[..., m], :], zeros where a place is -1.

    Shapes: x [..., axis, width]; places [..., new]; y [..., new, width]. The leading axes are the same, so a tile of y
    reads only tiles of x with the same leading indices. `new` and `width` may be several axes each. If `axis` is cut, a
    task for each tile of x adds this tile's rows to y. `axis` may also be several axes: places then number
    their elements in row-major order, and none of these axes may be cut.

    Args:
        places: int64, a position or -1; the kernel checks the range.
        inverse: [..., axis]: for each row of x its position in y, or -1. Allowed if each row of x occurs at most once
            in y. The gradient is then a gather with `inverse` as its places.
    """

    def __init__(self, x: Tensor, places: Tensor, out: Tensor, inverse: Tensor | None = None) -> None:
        rule = "gather: places need x's first axes, then new axes, which replace the gathered axes of x"
        self.lead, width = _shared(x, places), out.axes[len(places.axes) :]
        self.axes = x.axes[self.lead : len(x.axes) - len(width)]
        new = places.axes[self.lead :]
        require(bool(self.axes and new and width) and not {*new} & {*x.axes} and x.band == ALL, rule, x, places)
        assert out.axes == (*places.axes, *x.axes[-len(width) :]), (x, places, out)
        assert not inverse or inverse.axes == x.axes[: -len(width)], (x, inverse)
        super().__init__([x, places], [out])
        self.inverse, self.picks = inverse, self.axes

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        (x, places), dy = self.inputs, grads[0]
        assert dy is not None
        if self.inverse:
            out = g.temp("gather_grad", x.axes, x.shape, x.dtype)
            return [g.add(Gather(dy, self.inverse, out, places)).output, None]
        dtype = accumulation_dtype(x.dtype) if x.kind == "param" else x.dtype
        return [g.add(GatherGrad(dy, places, g.temp("gather_grad", x.axes, x.shape, dtype))).output, None]

    def flop(self) -> float:
        return 0.0

    def elements(self) -> int:
        return 2 * self.output.numel + self.inputs[1].numel

    def lower(self, lowering: Lowering) -> None:
        x, places = self.inputs
        positions, new = math.prod(map(x.size, self.axes)), len(places.axes) - self.lead
        for index in lowering.indices(self.output):
            for at, first in _parts(lowering, x, self.axes):
                tiles = lowering.tile(x, index | at), lowering.tile(places, index)
                args = GatherArgs(first, positions, new)
                lowering.emit("gather", [ACC(lowering.tile(self.output, index)), *map(R, tiles)], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, places = inputs[0], inputs[1].astype(int)
        leading = places.shape[: self.lead]
        rows = x.reshape(*leading, math.prod(map(self.inputs[0].size, self.axes)), -1)
        at = places.reshape(*leading, -1, 1)
        values = np.where(at == NOWHERE, 0.0, np.take_along_axis(rows, np.maximum(at, 0), axis=-2))
        return (values.reshape(self.output.shape),)


class GatherGrad(Op):
    """dx[..., s, :] = sum of dy[..., m, :] over all m with places[..., m] = s, in the order of m."""

    def __init__(self, dy: Tensor, places: Tensor, out: Tensor) -> None:
        super().__init__([dy, places], [out])
        self.lead, width = _shared(out, places), len(dy.axes) - len(places.axes)
        self.axes, self.new = out.axes[self.lead : len(out.axes) - width], places.axes[self.lead :]

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def flop(self) -> float:
        return float(self.inputs[0].numel)

    def lower(self, lowering: Lowering) -> None:
        (dy, places), out = self.inputs, self.output
        _check_uncut(lowering, out, self.axes)
        for index in lowering.indices(out):
            args = GatherGradArgs(lowering.part(out, self.axes[0], index).offset, len(self.new))
            for new in lowering.indices(places, self.new):
                at = index | new
                lowering.emit(
                    "gather_grad",
                    [ACC(lowering.tile(out, index)), R(lowering.tile(dy, at)), R(lowering.tile(places, at))],
                    args,
                )

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        dy, places = inputs[0], inputs[1].astype(int)
        leading = places.shape[: self.lead]
        dx = np.zeros((*leading, math.prod(map(self.output.size, self.axes)), dy[(0,) * places.ndim].size))
        rows, at = dy.reshape(*leading, -1, dx.shape[-1]), places.reshape(*leading, -1)
        for row in np.ndindex(*at.shape):
            if at[row] != NOWHERE:
                dx[(*row[:-1], at[row])] += rows[row]
        return (dx.reshape(self.output.shape),)


def _shared(x: Tensor, places: Tensor) -> int:
    """Return the number of leading axes that x and places share."""
    return next((k for k, (a, b) in enumerate(zip(x.axes, places.axes, strict=False)) if a != b), len(places.axes))


def _check_uncut(lowering: Lowering, x: Tensor, axes: Sequence[str]) -> None:
    """Raise ValueError if positions are numbered along several axes and one of them is cut."""
    cut = [axis for axis in axes if lowering.cut(x, axis)] if len(axes) > 1 else []
    if cut:
        raise ValueError(f"{lowering.op}: {', '.join(axes)} of {x} are numbered as one axis; {cut[0]} must not be cut")


def _parts(lowering: Lowering, x: Tensor, axes: Sequence[str]) -> list[tuple[Index, int]]:
    """Return the tiles of x along the gathered axes, with the first position of each."""
    _check_uncut(lowering, x, axes)
    if len(axes) > 1:
        return [(dict.fromkeys(axes, 0), 0)]
    return [({axes[0]: number}, part.offset) for number, part in enumerate(lowering.parts(x, axes[0]))]


def gather(g: GraphLike, x: Tensor, places: Tensor, axes: int = 1, inverse: Tensor | None = None) -> Tensor:
    """Return the rows of x [..., axis, width] at places [..., new], zeros where a place is -1: [..., new, width].

    Args:
        axes: number of gathered axes of x; they follow the axes that x shares with places. See Gather.
        inverse: see Gather.
    """
    width = x.axes[_shared(x, places) + axes :]
    sizes = places.sizes | {axis: x.size(axis) for axis in width}
    out = g.temp("gather", list(sizes), list(sizes.values()), x.dtype)
    return g.add(Gather(x, places, out, inverse)).output
