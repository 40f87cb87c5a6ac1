"""Evaluation of Definitions in numpy float64, on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import expression as ex

Array = np.ndarray[Any, Any]


def evaluate(
    definition: ex.Definition, inputs: Sequence[Array], shapes: Sequence[tuple[int, ...]], seed: int = 0
) -> list[Array]:
    """Return all outputs of a Definition, computed in float64.

    Tests compare the result with the operators' references. Of these, only Formula's uses this function.

    Args:
        shapes: shapes of the outputs.
        seed: seed of dropout.
    """
    axes, sizes = definition.axes, tuple(definition.sizes.values())
    outputs = [np.zeros(shape) for shape in shapes]
    known: dict[ex.Expression, Any] = {}

    def value_of(node: ex.Expression) -> Any:
        match node:
            case ex.Element(number, at):
                return aligned(inputs[number], at, axes)
            case ex.ScalarConstant(value):
                return value
            case ex.Extent(axis):
                return definition.sizes[axis]
            case ex.AxisIndex(axis):
                return aligned(np.arange(definition.sizes[axis]), (axis,), axes)
            case ex.Call():
                return ex.FUNCTIONS[node.name].numpy(*(known[part] for part in node.parts))
            case ex.Reduce(kind, axis, x):
                full = np.broadcast_to(known[x], sizes)
                return getattr(full, kind)(axis=axes.index(axis), keepdims=True)
            case ex.Keep():
                index = np.arange(np.prod(sizes), dtype=np.uint64).reshape(sizes)
                if node.row_numbers:
                    rows = known[node.row_numbers].astype(np.uint64) * np.uint64(sizes[-1])
                    index = rows + np.arange(sizes[-1], dtype=np.uint64)
                return dropout_hash(index, node.key, seed) >= np.uint64(node.limit)
        raise TypeError(f"no value of {node!r}")

    for node in definition.nodes():
        known[node] = value_of(node)
    for out in definition.outputs:
        value = np.broadcast_to(known[out.value], sizes)
        lacking = tuple(k for k, axis in enumerate(axes) if axis not in out.at)
        value = value.sum(lacking) if out.total else value.take(0, axis=lacking[0]) if lacking else value
        left = [axis for axis in axes if axis in out.at]
        value = value.transpose([left.index(axis) for axis in out.at if isinstance(axis, str)])
        outputs[out.number][tuple(slice(None) if isinstance(a, str) else a for a in out.at)] = value
    return outputs


def aligned(array: Array, at: ex.Access, axes: tuple[str, ...]) -> Array:
    """Return an input array with the axes of the iteration space, of size 1 for axes that do not index the input.

    Args:
        at: for each axis of the input: the axis of the space that indexes it, or a fixed index.
        axes: axes of the space, in order.
    """
    array = array[tuple(slice(None) if isinstance(a, str) else a for a in at)]
    named = [a for a in at if isinstance(a, str)]
    array = array.transpose([named.index(axis) for axis in axes if axis in named])
    sizes = iter(array.shape)
    return array.reshape([next(sizes) if axis in named else 1 for axis in axes])


def dropout_hash(index: Array, key: int, seed: int) -> Array:
    """Return 32 random bits for each element: a hash of its index, the key and the seed.

    The hash has two rounds of Wellons' lowbias32 (2018). Its last step is omitted: it mixes upper bits into lower bits,
    but dropout compares the bits as a number, which depends mostly on the upper bits. An even index and the next odd
    index share one hash h: they get h + 2**16 h and h, whose upper 16 bits are independent.

    All operations have 32 bits. A hash with operations of 64 bits was too slow: in a norm with dropout it took as long
    as the memory accesses, and inside attention longer than the products.
    """
    mask, u = 2**64 - 1, np.uint32
    start = ((seed * 0x9E3779B97F4A7C15) & mask) ^ ((key * 0xD1B54A32D192ED03) & mask)
    with np.errstate(over="ignore"):
        low, high = (index >> np.uint64(1)).astype(u), (index >> np.uint64(33)).astype(u)
        h = low * u(0x9E3779B1) + u(start & 0xFFFFFFFF)
        h = (h ^ (h >> u(16))) * u(0x7FEB352D) + u(start >> 32) + high * u(0x85EBCA77)
        h = (h ^ (h >> u(15))) * u(0x846CA68B)
        return np.asarray(np.where(index & np.uint64(1), h, h * u(0x10001)))
