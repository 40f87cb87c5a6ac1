"""Rotary position embeddings: rotation of pairs of a head's elements by angles proportional to the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import R, TaskArgs, W

from .op import Array, GraphLike, Lowering, Op, Tensor
from .rotary_scaling import Angles, scaled

MOST = 2**28  # largest number of entries of a table; in float64 they take 2 GiB


def rotary_table(
    head_dim: int, positions: int, theta: float, scaling: Mapping[str, Any] | None = None, *, packed: bool = False
) -> Array:
    """Return a table, float64 [positions, head_dim]: for each position head_dim / 2 cosines, then head_dim / 2 sines.

    The angle of pair i at a position is position * theta^(-2i / head_dim) (Su et al. 2021, eq. 15).

    Args:
        scaling: rope_scaling (rope_parameters) of a transformers config, with rope_type default, linear, dynamic,
            llama3, yarn or longrope. It changes the frequencies theta^(-2i / head_dim), and yarn and longrope the
            size of cosines and sines, as modeling_rope_utils.ROPE_INIT_FUNCTIONS does.
        packed: True for packed sequences. longrope then allows no positions beyond the original length, because its
            frequencies depend on the length of each sequence.

    Raises:
        ConfigError: another rope_type; a missing, unknown or wrong key; an odd head_dim; too many positions.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim: got {head_dim} with rotary positions; allowed: an even number")
    if head_dim * positions > MOST:
        need = f"at most {MOST // head_dim} with head_dim {head_dim}"
        raise ConfigError(f"seq: the angles of {positions} rotary positions are too many for a table; allowed: {need}")
    with np.errstate(over="ignore"):
        frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    if not np.isfinite(frequencies).all():
        raise ConfigError(f"rope_theta: got {theta}; allowed: a number whose inverse is finite")
    frequencies, factor = scaled(Angles(frequencies, theta, positions, packed), scaling or {})
    angles = np.arange(positions)[:, None] * frequencies
    return factor * np.concatenate([np.cos(angles), np.sin(angles)], 1)


class RotaryArgs(TaskArgs):
    seq: int  # position of the axis seq among the axes of x
    head_dim: int  # position of the axis head_dim among the axes of x
    inverse: bool  # True: rotate in the other direction
    batch: int = -1  # position of the axis batch among the axes of x if each row of the batch has angles of its own


class Rotary(Op):
    """y = x cos + rotate_half(x) sin, with rotate_half([a, b]) = [-b, a] on the halves of head_dim.

    Source: Su et al. 2021, eq. 34. Element i is paired with element i + head_dim / 2, not with its neighbour, as in
    transformers' apply_rotary_pos_emb.

    Args:
        x: a tensor with the axes seq, head_dim and others, in any order. head_dim is even and never cut.
        table: fp32 or fp64 [seq, rotary], with as many entries along rotary as head_dim: a `rotary_table`. If each
            sequence of the batch has positions of its own: [batch, seq, rotary].
        inverse: True: rotate in the other direction, as the gradient does.

    Raises:
        ValueError: sizes do not fit.
    """

    picks = ("rotary",)

    def __init__(self, x: Tensor, table: Tensor, y: Tensor, inverse: bool = False) -> None:
        width = x.size("head_dim")
        rows = {axis: x.size(axis) for axis in table.axes[:-1] if axis in x.axes}
        fits = table.axes in (("seq", "rotary"), ("batch", "seq", "rotary")) and table.sizes == rows | {"rotary": width}
        if width % 2 or not fits:
            raise ValueError(f"rotary: {table!r} does not fit {x!r}: it needs [seq, rotary = head_dim], head_dim even")
        super().__init__([x, table], [y])
        self.inverse = inverse

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        x, table = self.inputs
        dy = grads[0]
        assert dy is not None
        dx = g.temp("rotary_grad", x.axes, x.shape, x.dtype)
        return [g.add(Rotary(dy, table, dx, not self.inverse)).output, None]

    def flop(self) -> float:
        return 3.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        x, table = self.inputs
        assert not lowering.cut(x, "head_dim"), "head_dim is never cut"
        batch = x.axes.index("batch") if "batch" in table.axes else -1
        args = RotaryArgs(x.axes.index("seq"), x.axes.index("head_dim"), self.inverse, batch)
        for index in lowering.indices(x):
            angles = R(lowering.tile(table, index | {"rotary": 0}))
            lowering.emit("rotary", [W(lowering.tile(self.output, index)), R(lowering.tile(x, index)), angles], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, table = inputs
        axes = self.inputs[0].axes
        moved = np.moveaxis(x, (axes.index("seq"), axes.index("head_dim")), (-2, -1))
        if "batch" in self.inputs[1].axes:
            rest = [axis for axis in axes if axis not in ("seq", "head_dim")]
            shape = [len(table) if axis == "batch" else 1 for axis in rest]
            table = table.reshape([*shape, *table.shape[1:]])
        a, b = np.split(moved, 2, -1)
        cos, sin = np.split(table, 2, -1)
        sin = -sin if self.inverse else sin
        y = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return (np.moveaxis(y, (-2, -1), (axes.index("seq"), axes.index("head_dim"))),)


def rotary(g: GraphLike, x: Tensor, table: Tensor) -> Tensor:
    """Add a Rotary to the graph; return x rotated by the angles of its positions.

    Args:
        table: an input with the values of `rotary_table`.
    """
    return g.add(Rotary(x, table, g.temp("rotary", x.axes, x.shape, x.dtype))).output
