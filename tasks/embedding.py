"""Embedding look-up and its gradient. The table may be cut along its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, R, TaskArgs

from .op import Array, GraphLike, Lowering, Op, Tensor, accumulation_dtype


class EmbeddingArgs(TaskArgs):
    first: int  # first row of the table's tile
    rows: int  # rows of the whole table


class EmbeddingGradArgs(TaskArgs):
    first: int  # first row of the gradient's tile
    padding: tuple[int, ...] = ()  # number in the whole table of the row without a gradient, if the tile has this row


class Embedding(Op):
    """y[..., :] = table[ids[...], :]. If the table's rows are cut, one task per tile of the table adds its rows to y.

    ids: int64; the kernel checks that they are rows of the table. The row `padding` gets no gradient, like padding_idx
    of torch.nn.Embedding.
    """

    def __init__(self, ids: Tensor, table: Tensor, out: Tensor, padding: int | None = None) -> None:
        super().__init__([ids, table], [out])
        self.rows, self.picks, self.padding = table.axes[0], table.axes[:1], padding

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        ids, table = self.inputs
        assert grads[0] is not None
        out = g.temp("embedding_grad", table.axes, table.shape, accumulation_dtype(table.dtype))
        return [None, g.add(EmbeddingGrad(ids, grads[0], out, self.padding)).output]

    def flop(self) -> float:
        return float(self.output.numel)

    def elements(self) -> int:
        ids, table = self.inputs
        return ids.numel + min(table.numel, self.output.numel) + self.output.numel

    def lower(self, lowering: Lowering) -> None:
        ids, table = self.inputs
        for index in lowering.indices(self.output):
            for row, part in enumerate(lowering.parts(table, self.rows)):
                tile = lowering.tile(table, index | {self.rows: row})
                accesses = [ACC(lowering.tile(self.output, index)), R(lowering.tile(ids, index)), R(tile)]
                lowering.emit("embedding", accesses, EmbeddingArgs(part.offset, table.size(self.rows)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[1][inputs[0].astype(int)],)


class EmbeddingGrad(Op):
    """dtable[r, :] = sum of dy[i, :] over all i with ids[i] = r, in the order of i; zeros for r = padding."""

    colours: ClassVar = {"backward": "#1b3a6b"}

    def __init__(self, ids: Tensor, dy: Tensor, out: Tensor, padding: int | None = None) -> None:
        super().__init__([ids, dy], [out])
        self.rows, self.padding = out.axes[0], padding

    @property
    def sums(self) -> Sequence[Tensor]:
        return [self.output]

    def flop(self) -> float:
        return float(self.inputs[1].numel)

    def elements(self) -> int:
        tied = self.output.storage is not self.output  # the output also contains another gradient of the table
        (ids, dy), out = self.inputs, self.output
        return ids.numel + dy.numel + (2 * min(dy.numel, out.numel) if tied else out.numel)

    def lower(self, lowering: Lowering) -> None:
        ids, dy = self.inputs
        for row in lowering.indices(self.output):
            part = lowering.part(self.output, self.rows, row)
            padding = [p for p in (self.padding,) if p is not None and part.offset <= p < part.end]
            args = EmbeddingGradArgs(part.offset, tuple(padding))
            for index in lowering.indices(ids):
                of_rows = lowering.tile(dy, index | row)
                accesses = [ACC(lowering.tile(self.output, row)), R(lowering.tile(ids, index)), R(of_rows)]
                lowering.emit("embedding_grad", accesses, args, flop=float(math.prod(of_rows.shape)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        out = np.zeros(self.output.shape)
        np.add.at(out, inputs[0].astype(int), inputs[1])
        if self.padding is not None:
            out[self.padding] = 0
        return (out,)


def embedding(g: GraphLike, ids: Tensor, table: Tensor, *, padding: int | None = None) -> Tensor:
    """Return table[ids], with the axes of ids, then the table's second axis; ids: row numbers, int64.

    Args:
        padding: number of the row that gets no gradient from look-ups; None: all rows get a gradient.
    """
    axes, shape = [*ids.axes, table.axes[1]], [*ids.shape, table.shape[1]]
    return g.add(Embedding(ids, table, g.temp("rows", axes, shape, table.dtype), padding)).output
