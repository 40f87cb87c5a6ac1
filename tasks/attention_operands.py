"""The operands q, k and v of attention: tensors, or slices of packed tensors, and checks of their axes and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nntile_py.tiles import TaskArgs, Tile

from .elementwise import transpose
from .mask import Mask
from .op import Array, GraphLike, Index, Lowering, Tensor

BHSD = ("batch", "heads", "seq", "head_dim")
# {axis of k or v: axis of q with the same role}; the axis all_heads has the heads of q, k and v in one tensor.
ROLES = {"kv_heads": "heads", "all_heads": "heads", "key": "seq"}

Operand = Tensor | tuple[Tensor, int]  # a tensor, or a slice of its axis qkv


class OperandsArgs(TaskArgs):
    """Where a task finds q, k, v (or dq, dk, dv) among its tiles, and the order of the axes of these tiles."""

    axis: int  # position of the axis qkv; -1: no tile has this axis
    order: tuple[int, int, int, int]  # positions of b, h, s, d among the axes without qkv; -1: missing
    q: tuple[int, int]  # number of the tile among the operands; index on its axis qkv, or -1
    k: tuple[int, int]
    v: tuple[int, int]  # (-1, -1) if the task does not read v


def order_of(axes: Sequence[str]) -> tuple[int, int, int, int]:
    """Return the positions of batch, heads (kv_heads), seq (key) and head_dim in `axes` without qkv; -1: no batch."""
    roles = [ROLES.get(axis, axis) for axis in axes if axis != "qkv"]
    b, h, s, d = (roles.index(axis) if axis in roles else -1 for axis in BHSD)
    return b, h, s, d


def as_bhsd(x: Array, order: Sequence[int]) -> Array:
    return x.transpose(order) if min(order) >= 0 else x.transpose(order[1:])[None]


def from_bhsd(x: Array, order: Sequence[int]) -> Array:
    back = np.argsort(order if min(order) >= 0 else order[1:]).tolist()
    return (x if min(order) >= 0 else x[0]).transpose(back)


class Operands:
    """q, k and v, each a tensor or a slice of a tensor along its axis qkv."""

    def __init__(self, q: Operand, k: Operand, v: Operand) -> None:
        self.parts = [part if isinstance(part, tuple) else (part, -1) for part in (q, k, v)]
        self.tensors = list(dict.fromkeys(tensor for tensor, _ in self.parts))
        packed = {t.axes.index("qkv") for t, index in self.parts if index >= 0}
        orders = {order_of(t.axes) for t in self.tensors}
        if len(packed) > 1 or len(orders) > 1:
            raise ValueError(f"attention: {self.tensors} must have their axes in one order")
        self.axis, self.order = packed.pop() if packed else -1, orders.pop()

    def on(self, tensors: Sequence[Tensor]) -> Operands:
        """Return the same slices of other tensors."""
        other = dict(zip(self.tensors, tensors, strict=True))
        q, k, v = ((other[t], index) if index >= 0 else other[t] for t, index in self.parts)
        return Operands(q, k, v)

    def tiles(
        self, lowering: Lowering, at: Index, key: Index, *, values: bool = True
    ) -> tuple[list[Tile], OperandsArgs]:
        """Return the tiles of q at `at` and of k, v at `key`, each once, and the places of q, k and v among the tiles.

        values: False: the task does not read v, and v has the place (-1, -1).
        """
        tiles: list[Tile] = []
        places = []
        wheres = (at, key, key) if values else (at, key)
        for (tensor, index), where in zip(self.parts, wheres, strict=False):
            tile = lowering.tile(tensor, where | {"qkv": 0})
            if tile not in tiles:
                tiles.append(tile)
            places.append((tiles.index(tile), index))
        q, k, v = places if values else [*places, (-1, -1)]
        return tiles, OperandsArgs(axis=self.axis, order=self.order, q=q, k=k, v=v)

    def split(self, *arrays: Array) -> list[Array]:
        """Return q, k, v as arrays [b, h, s, d], from the arrays of the operands' tensors."""
        whole = dict(zip(self.tensors, arrays, strict=True))
        parts = [whole[t] if i < 0 else whole[t].take(i, axis=self.axis) for t, i in self.parts]
        return [as_bhsd(x, self.order) for x in parts]

    def join(self, *arrays: Array) -> list[Array]:
        """Return the arrays of the operands' tensors, from q, k, v as arrays [b, h, s, d]: the inverse of `split`."""
        result = [np.zeros(t.shape) for t in self.tensors]
        for (tensor, index), x in zip(self.parts, arrays, strict=True):
            whole = result[self.tensors.index(tensor)]
            (whole if index < 0 else np.moveaxis(whole, self.axis, 0)[index])[...] = from_bhsd(x, self.order)
        return result


def checked(g: GraphLike, q: Operand, k: Operand, v: Operand, mask: Mask) -> Operands:
    """Return the operands, with k and v transposed to q's order of axes.

    Raises:
        ValueError: q, k and v do not fit one another or the mask.
    """
    x, *others = (part[0] if isinstance(part, tuple) else part for part in (q, k, v))
    first, *rest = ([axis for axis in t.axes if axis != "qkv"] for t in (x, *others))
    if not set(BHSD[1:]) <= set(first) <= set(BHSD):
        raise ValueError(f"attention: the queries {x} must have the axes {', '.join(BHSD)}")
    sizes = {"batch": 1} | x.sizes
    shapes = []
    for t, axes in zip(others, rest, strict=True):
        mine = {ROLES.get(axis, axis): t.size(axis) for axis in axes}
        alike = all(mine.get(axis) == sizes[axis] for axis in ("batch", "head_dim") if axis in first)
        if len(mine) != len(axes) or sorted(mine) != sorted(first) or not alike:
            raise ValueError(f"attention: keys or values {t} do not fit the queries {x}")
        if sizes["heads"] % mine["heads"] or ("heads" in axes and mine["heads"] != sizes["heads"]):
            raise ValueError(
                f"attention: {sizes['heads']} heads cannot share {mine['heads']} of {t};"
                " their axis must be kv_heads, and divide the number of heads"
            )
        if "seq" in axes and mine["seq"] != sizes["seq"]:
            raise ValueError(f"attention: {t} has another length than the queries {x}; name its axis key")
        shapes.append({axis: t.size(axis) for axis in axes})
    if shapes[0] != shapes[1]:
        raise ValueError(f"attention: keys {others[0]} and values {others[1]} must have the same axes")
    mask.check(sizes["batch"], sizes["seq"], mine["seq"])
    parts = [q]
    for part, axes in zip((k, v), rest, strict=True):
        wanted = [next(a for a in axes if ROLES.get(a, a) == axis) for axis in first]
        parts.append(part if isinstance(part, tuple) else transpose(g, part, wanted))
    return Operands(*parts)
