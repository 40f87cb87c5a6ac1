"""An operator of your own, y = relu(x)^2 (So et al. 2021, "Primer"), with kernels in numpy, checked against float64.

docs/write-an-operator.md explains each line.
"""

import argparse
from typing import Any

import numpy as np

import nntile_py as nt
from nntile_py.tasks import Op, Tensor
from nntile_py.tiles import R, TaskArgs, W


class NoArgs(TaskArgs):
    pass


@nt.task(y="W", x="R")
def squared_relu_tile(y: Any, x: Any) -> None:
    np.maximum(x, 0, out=y)
    y *= y


@nt.task(dx="W", dy="R", x="R")
def squared_relu_grad_tile(dx: Any, dy: Any, x: Any) -> None:
    np.maximum(x, 0, out=dx)
    dx *= 2 * dy


class SquaredReLU(Op):
    """y = relu(x)^2."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__([x], [y])

    def gradient(self, g: nt.Graph, dy: Tensor) -> list[Tensor]:
        (x,) = self.inputs
        return [g.add(SquaredReLUGrad(dy, x, g.temp("squared_relu_grad", x.axes, x.shape, x.dtype))).output]

    def lower(self, lowering: Any) -> None:
        for index in lowering.indices(self.output):
            lowering.emit(
                squared_relu_tile,
                [W(lowering.tile(self.output, index)), R(lowering.tile(self.inputs[0], index))],
                NoArgs(),
            )

    def reference(self, x: Any) -> tuple[Any, ...]:
        return (np.maximum(x, 0) ** 2,)


class SquaredReLUGrad(Op):
    """dx = 2 dy relu(x)."""

    def __init__(self, dy: Tensor, x: Tensor, dx: Tensor) -> None:
        super().__init__([dy, x], [dx])

    def lower(self, lowering: Any) -> None:
        for index in lowering.indices(self.output):
            reads = [R(lowering.tile(tensor, index)) for tensor in self.inputs]
            lowering.emit(squared_relu_grad_tile, [W(lowering.tile(self.output, index)), *reads], NoArgs())

    def reference(self, dy: Any, x: Any) -> tuple[Any, ...]:
        return (2 * dy * np.maximum(x, 0),)


def squared_relu(g: nt.Graph, x: Tensor) -> Tensor:
    """Add the operator to a model's graph: `squared_relu(g, x)` replaces `activation(g, x, "relu")`."""
    return g.add(SquaredReLU(x, g.temp("squared_relu", x.axes, x.shape, x.dtype))).output


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    nt.testing.check_operator(lambda case: case.add(SquaredReLU(case.x("batch ffn"), case.y("batch ffn"))))
    print("uncut and in tiles, the result equals the reference, and the gradient equals finite differences")
