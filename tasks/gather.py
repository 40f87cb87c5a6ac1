"""Some positions of each row of the batch, told by an input, e.g. the masked tokens of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nntile_py.tiles import ACC, R, TaskArgs

from .band import ALL
from .op import Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype, require

NOWHERE = -1  # a place that is none: zeros


class GatherArgs(TaskArgs):
    first: int  # position of the tile of x
    positions: int  # of the whole axis


class GatherGradArgs(TaskArgs):
    first: int  # position of the tile of dx


class Gather(Op):
    """y[..., m, :] = x[..., places[..., m], :], zeros where a place is -1 (torch's gather along x's last axis but one).

    x [..., axis, width]; places [..., new], int64, -1 or a position (checked by the kernel); y [..., new, width]: the
    leading axes are the same, so that a tile takes from itself. A cut axis: each of its tiles adds the rows it has.
    """

    def __init__(self, x: Tensor, places: Tensor, out: Tensor) -> None:
        fits = len(x.axes) > 1 and x.axes[:-2] == places.axes[:-1] and places.axes[-1] not in x.axes
        require(fits and x.band == ALL, "gather: places need x's axes, but a new one for the last two", x, places)
        assert out.axes == (*places.axes, x.axes[-1]), (x, places, out)
        super().__init__([x, places], [out])
        self.axis = x.axes[-2]

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        (x, places), dy = self.inputs, grads[0]
        assert dy is not None
        dtype = accumulation_dtype(x.dtype) if x.kind == "param" else x.dtype
        return [g.add(GatherGrad(dy, places, g.temp("gather_grad", x.axes, x.shape, dtype))).output, None]

    def flop(self) -> float:
        return 0.0

    def words(self) -> int:
        return 2 * self.output.numel + self.inputs[1].numel

    def lower(self, low: Lowering) -> None:
        x, places = self.inputs
        for index in low.indices(self.output):
            for number, part in enumerate(low.parts(x, self.axis)):
                tiles = low.tile(x, index | {self.axis: number}), low.tile(places, index)
                args = GatherArgs(part.offset, x.size(self.axis))
                low.emit("gather", [ACC(low.tile(self.output, index)), *map(R, tiles)], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, places = inputs[0], inputs[1].astype(int)[..., None]
        return (np.where(places == NOWHERE, 0.0, np.take_along_axis(x, np.maximum(places, 0), axis=-2)),)


class GatherGrad(Op):
    """dx[..., s, :] = sum of dy[..., m, :] over the m with places[..., m] = s, in the order of m."""

    def __init__(self, dy: Tensor, places: Tensor, out: Tensor) -> None:
        super().__init__([dy, places], [out])
        self.new = places.axes[-1]

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def flop(self) -> float:
        return float(self.inputs[0].numel)

    def lower(self, low: Lowering) -> None:
        (dy, places), out = self.inputs, self.output
        for index in low.indices(out):
            for number in range(len(low.parts(places, self.new))):
                at = index | {self.new: number}
                args = GatherGradArgs(low.part(out, out.axes[-2], index).offset)
                low.emit("gather_grad", [ACC(low.tile(out, index)), R(low.tile(dy, at)), R(low.tile(places, at))], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        dy, places = inputs[0], inputs[1].astype(int)
        dx = np.zeros(self.output.shape)
        for row in np.ndindex(*places.shape):
            if places[row] != NOWHERE:
                dx[(*row[:-1], places[row])] += dy[row]
        return (dx,)


def gather(g: GraphLike, x: Tensor, places: Tensor) -> Tensor:
    """The rows of x [..., axis, width] at places [..., new], zeros where a place is -1: [..., new, width]."""
    sizes = places.sizes | {x.axes[-1]: x.shape[-1]}
    return g.add(Gather(x, places, g.temp("gather", list(sizes), list(sizes.values()), x.dtype))).output
