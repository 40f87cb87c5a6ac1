"""Rotary position embeddings: rotation of pairs of a head's elements by angles proportional to the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import R, TaskArgs, Tiling, W

from .op import Array, GraphLike, Lowering, Op, Tensor

# For each rope_type of transformers' rope_scaling: the other keys that it needs.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


MOST = 2**28  # largest number of entries of a table; in float64 they take 2 GiB


def rotary_table(head_dim: int, positions: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Array:
    """Return a table, float64 [positions, head_dim]: for each position head_dim / 2 cosines, then head_dim / 2 sines.

    The angle of pair i at a position is position * theta^(-2i / head_dim) (Su et al. 2021, eq. 15).

    Args:
        scaling: rope_scaling (rope_parameters) of a transformers config, with rope_type default, linear or llama3. It
            lowers the frequencies theta^(-2i / head_dim) as modeling_rope_utils.ROPE_INIT_FUNCTIONS does.

    Raises:
        ConfigError: another rope_type; a missing, unknown or wrong key; an odd head_dim; too many positions.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim: {head_dim} is not allowed with rotary positions; use an even number")
    if head_dim * positions > MOST:
        need = f"at most {MOST // head_dim} with head_dim {head_dim}"
        raise ConfigError(f"seq: the angles of {positions} rotary positions are too many for a table; allowed: {need}")
    with np.errstate(over="ignore"):
        frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    if not np.isfinite(frequencies).all():
        raise ConfigError(f"rope_theta: {theta} is not allowed; use a number whose inverse is finite")
    frequencies = _scaled(frequencies, scaling or {})
    angles = np.arange(positions)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], 1)


def _scaled(frequencies: Array, scaling: Mapping[str, Any]) -> Array:
    """Return the frequencies lowered as `scaling` says. Raises ConfigError for wrong keys."""
    options = dict(scaling)
    old = options.pop("type", "default")  # in older checkpoints the key rope_type is called type
    kind = options.pop("rope_type", old)
    options.pop("rope_theta", None)  # the caller passes it as `theta`
    if kind not in list(SCALINGS):
        raise ConfigError(f"rope_scaling.rope_type: {kind!r} is not allowed; use one of {', '.join(SCALINGS)}")
    names = SCALINGS[kind]
    for key in {**dict.fromkeys(names), **options}:
        value = options.get(key)
        if key not in names:
            raise ConfigError(f"rope_scaling.{key}: unknown key; rope_type {kind} has {', '.join(names) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
            raise ConfigError(f"rope_scaling.{key}: {value!r} is not allowed; rope_type {kind} needs a positive number")
    if kind == "default":
        return frequencies
    if kind == "linear":
        return np.asarray(frequencies / options["factor"])
    factor, low, high, length = (options[key] for key in names)
    if high <= low:
        raise ConfigError(f"rope_scaling.high_freq_factor: {high} is not allowed; use more than low_freq_factor {low}")
    # Frequencies with at least `high` full turns over the original length stay. Frequencies with at most `low` turns
    # are divided by the factor. Between `low` and `high`, the two results are mixed linearly.
    turns = length * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(frequencies * (kept + (1 - kept) / factor))


class RotaryArgs(TaskArgs):
    seq: int  # position of the axis seq among the axes of x
    head_dim: int  # position of the axis head_dim among the axes of x
    inverse: bool  # True: rotate in the other direction


class Rotary(Op):
    """y = x cos + rotate_half(x) sin, with rotate_half([a, b]) = [-b, a] on the halves of head_dim.

    Source: Su et al. 2021, eq. 34. Element i is paired with element i + head_dim / 2, not with its neighbour, as in
    transformers' apply_rotary_pos_emb.

    Args:
        x: a tensor with the axes seq, head_dim and others, in any order. head_dim is even and never cut.
        table: fp32 or fp64 [seq, rotary], with as many entries along rotary as head_dim: a `rotary_table`. If each
            sequence of the batch has positions of its own: [batch, seq, rotary]; tiles.batch must then be 1.
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

    def fit(self, tiling: Tiling) -> None:
        table = self.inputs[1]
        if "batch" in table.axes and (tile := tiling.tile("batch", table.size("batch"))) > 1:
            raise ConfigError(f"tiles.batch: got {tile}; allowed: 1, where rotary positions differ between rows")

    def lower(self, lowering: Lowering) -> None:
        x, table = self.inputs
        assert not lowering.cut(x, "head_dim"), "head_dim is never cut"
        args = RotaryArgs(x.axes.index("seq"), x.axes.index("head_dim"), self.inverse)
        for index in lowering.indices(x):
            angles = R(lowering.tile(table, index | {"rotary": 0}))
            lowering.emit("rotary", [W(lowering.tile(self.output, index)), R(lowering.tile(x, index)), angles], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        x, table = inputs
        axes = self.inputs[0].axes
        moved = np.moveaxis(x, (axes.index("seq"), axes.index("head_dim")), (-2, -1))
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
