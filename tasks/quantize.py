"""Quantisation of tensors to 8 bits for matrix products (precision: fp8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import R, TaskArgs, W
from nntile_py.tiles.dtypes import DTYPES

from .band import ALL
from .op import Array, Lowering, Op, Tensor, permutation


class QuantizeArgs(TaskArgs):
    # For each output: the number of its leading axes, over which the product does not sum, and the permutation of the
    # input's axes.
    layouts: tuple[int, ...]


class Quantize(Op):
    """q = round(x / s) with one scale s for each tile, or for each row of a tile: 8-bit tiles hold q, then all s.

    s is the smallest power of two with |x| / s at most the largest value of the dtype, for all x of the tile (row). So
    x / s is exact before the rounding (to nearest, ties to even). A tile's scales depend only on this tile in this
    step. This current scaling (Micikevicius et al. 2022, FP8 Formats for Deep Learning) needs no state in checkpoints,
    and the result does not depend on which worker computes the tile. A tile (row) of zeros has s = 1. A tile (row) with
    a value that is not finite has s = NaN.

    Each output has the axes of x in another order, because 8-bit products on GPUs need operands whose summed axes come
    last. For example, the forward pass sums an activation over its features, and the weight's gradient sums it over
    its tokens. So the Quantize of an activation has two outputs.

    With packed sequences, a step fills only a part of a tile. Only this part determines the scales. On GPUs, zeros
    follow this part up to a multiple of UNIT tokens, if the tile has room for a multiple of UNIT tokens. So a product
    can sum over this multiple.

    Args:
        outs: outputs with a scaled dtype; Tensor.scaled is 0 (a scale for each tile) or the number in `rows`.
        rows: for each output, the number of its leading axes, over which the product does not sum.
    """

    colours: ClassVar = {"forward": "#b8860b", "backward": "#8b6508"}

    def __init__(self, x: Tensor, outs: Sequence[Tensor], rows: Sequence[int]) -> None:
        assert x.band == ALL and all({*out.axes} == {*x.axes} and DTYPES[out.dtype].largest for out in outs), (x, outs)
        assert all(out.scaled in (0, count) for out, count in zip(outs, rows, strict=True)), (outs, rows)
        super().__init__([x], list(outs))
        self.rows = tuple(rows)

    def flop(self) -> float:
        return 2.0 * self.inputs[0].numel  # the maximum, and the rounding

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        orders = (permutation(x.axes, out.axes) for out in self.outputs)
        args = QuantizeArgs(tuple(n for rows, order in zip(self.rows, orders, strict=True) for n in (rows, *order)))
        for index in lowering.indices(x):
            outs = [W(lowering.tile(out, index)) for out in self.outputs]
            lowering.emit("quantize", [*outs, R(lowering.tile(x, index))], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x = self.inputs[0]
        orders = (permutation(x.axes, out.axes) for out in self.outputs)
        return tuple(
            quantized(inputs[0].transpose(order), out.dtype, out.scaled)
            for order, out in zip(orders, self.outputs, strict=True)
        )


def quantized(x: Array, dtype: str, scaled: int = 0) -> Array:
    """Quantise a tile with the values x to a scaled dtype. Return the values that the tile then represents, float64.

    scaled: number of leading axes whose entries have scales of their own.
    """
    x = np.asarray(x, np.float64)
    top, largest = np.abs(x).max(axis=tuple(range(scaled, x.ndim)), keepdims=True, initial=0.0), DTYPES[dtype].largest
    mantissa, least = {"e4m3": (3, -6), "e5m2": (2, -14)}[dtype]  # mantissa bits, smallest normal exponent
    exponent = np.ceil(np.log2(top / largest, where=top > 0, out=np.zeros(top.shape)))
    scale = np.where(np.isfinite(top), 2.0**exponent, np.nan)
    y = np.where(np.isnan(scale), np.nan, x) / scale
    step = 2.0 ** (
        np.maximum(np.floor(np.log2(np.abs(y), where=y != 0, out=np.full(y.shape, -99.0))), least) - mantissa
    )
    return np.asarray(np.round(y / step) * step * scale)
