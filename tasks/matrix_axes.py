"""A parameter's axes as the rows and columns of the matrices that it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .op import Array, Index, Lowering, Tensor


@dataclass(frozen=True)
class MatrixAxes:
    """A parameter's axes as stacked matrices: each index of the axes `matrices` is a matrix of `rows` by `columns`."""

    matrices: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def shape(self, param: Tensor) -> tuple[int, int, int]:
        """Return the number of matrices, and the numbers of rows and columns of a matrix."""
        matrices, rows, columns = (
            math.prod(map(param.size, axes)) for axes in (self.matrices, self.rows, self.columns)
        )  # fmt: skip
        return matrices, rows, columns

    def strides(self, param: Tensor) -> tuple[int, ...]:
        """Return the stride of each of the parameter's axes in the contiguous stack of matrices."""
        strides, stride = dict[str, int](), 1
        for axis in reversed((*self.matrices, *self.rows, *self.columns)):
            strides[axis] = stride
            stride *= param.size(axis)
        return tuple(strides[axis] for axis in param.axes)

    def place(self, lowering: Lowering, param: Tensor, index: Index) -> int:
        """Return the position in the stack of matrices of the first element of a tile of the parameter."""
        offsets = (lowering.part(param, axis, index).offset for axis in param.axes)
        return sum(at * stride for at, stride in zip(offsets, self.strides(param), strict=True))

    def stacked(self, value: Array, param: Tensor) -> Array:
        """Return the parameter's value as an array [matrices, rows, columns]."""
        order = [param.axes.index(axis) for axis in (*self.matrices, *self.rows, *self.columns)]
        return value.transpose(order).reshape(self.shape(param))

    def unstacked(self, stack: Array, param: Tensor) -> Array:
        """Return an array [matrices, rows, columns] in the parameter's shape: the inverse of `stacked`."""
        axes = (*self.matrices, *self.rows, *self.columns)
        value = stack.reshape([param.size(axis) for axis in axes])
        return value.transpose([axes.index(axis) for axis in param.axes])
