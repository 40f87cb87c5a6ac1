"""A user's own operators, as a file of his: RMSNorm with kernels in numpy, Swish with kernels in torch."""

import math
from typing import Any

import numpy as np
import torch

import nntile_py as nt
from nntile_py.tasks import Lowering, Op, Tensor
from nntile_py.tasks.op import accumulation_dtype
from nntile_py.tiles import ACC, R, TaskArgs, W


class NormArgs(TaskArgs):
    width: int  # of the whole axis
    eps: float


def rstd(squares: Any, width: int, eps: float) -> Any:
    return 1 / np.sqrt(squares / width + eps)


@nt.task(squares="ACC", x="R")
def sum_squares(squares: Any, x: Any) -> None:
    squares += (x * x).sum(-1, keepdims=True)


@nt.task(y="W", x="R", squares="R", gamma="R")
def normalise(y: Any, x: Any, squares: Any, gamma: Any, *, width: int, eps: float) -> None:
    y[...] = x * rstd(squares, width, eps) * gamma


@nt.task(dots="ACC", dgamma="ACC", dy="R", x="R", squares="R", gamma="R")
def norm_sums(dots: Any, dgamma: Any, dy: Any, x: Any, squares: Any, gamma: Any, *, width: int, eps: float) -> None:
    dots += (dy * gamma * x).sum(-1, keepdims=True)
    dgamma += (dy * x * rstd(squares, width, eps)).sum(tuple(range(x.ndim - 1)))


@nt.task(dx="W", dy="R", x="R", squares="R", gamma="R", dots="R")
def norm_grad(dx: Any, dy: Any, x: Any, squares: Any, gamma: Any, dots: Any, *, width: int, eps: float) -> None:
    r = rstd(squares, width, eps)
    dx[...] = r * (dy * gamma - x * dots * r * r / width)


class RMSNorm(Op):
    """y = x / sqrt(mean(x^2) + eps) * gamma over x's last axis, and squares = sum(x^2), [..., 1]."""

    def __init__(self, x: Tensor, gamma: Tensor, y: Tensor, squares: Tensor, eps: float) -> None:
        super().__init__([x, gamma], [y, squares])
        self.args = NormArgs(x.shape[-1], eps)

    def gradient(self, g: Any, *grads: Tensor | None) -> list[Tensor | None]:
        (x, gamma), squares, dy = self.inputs, self.outputs[1], grads[0]
        assert dy
        dx = g.temp("norm_grad", x.axes, x.shape, x.dtype)
        dgamma = g.temp("gamma_grad", gamma.axes, gamma.shape, accumulation_dtype(gamma.dtype))
        dots = g.temp("dots", squares.axes, squares.shape, squares.dtype)
        return list(g.add(RMSNormGrad(self, dy, dx, dgamma, dots)).outputs[:2])

    def flop(self) -> float:
        return 4.0 * self.inputs[0].numel

    def lower(self, lowering: Lowering) -> None:
        (x, gamma), (y, squares) = self.inputs, self.outputs
        for index in lowering.indices(x):
            lowering.emit(sum_squares, [ACC(lowering.tile(squares, index | {"one": 0})), R(lowering.tile(x, index))])
        for index in lowering.indices(x):
            tiles = [lowering.tile(t, index | {"one": 0}) for t in (y, x, squares, gamma)]
            lowering.emit(normalise, [W(tiles[0]), *map(R, tiles[1:])], self.args)

    def reference(self, *inputs: Any) -> tuple[Any, ...]:
        x, gamma = inputs
        squares = (x * x).sum(-1, keepdims=True)
        return x * rstd(squares, self.args.width, self.args.eps) * gamma, squares


class RMSNormGrad(Op):
    def __init__(self, forward: RMSNorm, dy: Tensor, dx: Tensor, dgamma: Tensor, dots: Tensor) -> None:
        x, gamma = forward.inputs
        super().__init__([dy, x, forward.outputs[1], gamma], [dx, dgamma, dots])
        self.args = forward.args

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[1]
        for kernel, outputs in ((norm_sums, (2, 1)), (norm_grad, (0,))):
            for index in lowering.indices(x):
                wrote = [lowering.tile(self.outputs[k], index | {"one": 0}) for k in outputs]
                read = [lowering.tile(t, index | {"one": 0}) for t in self.inputs]
                if kernel is norm_grad:
                    read.append(lowering.tile(self.outputs[2], index | {"one": 0}))
                mode = ACC if kernel is norm_sums else W
                lowering.emit(kernel, [*map(mode, wrote), *map(R, read)], self.args)

    def reference(self, *inputs: Any) -> tuple[Any, ...]:
        dy, x, squares, gamma = inputs
        r = rstd(squares, self.args.width, self.args.eps)
        dots = (dy * gamma * x).sum(-1, keepdims=True)
        dgamma = (dy * x * r).sum(tuple(range(x.ndim - 1)))
        return r * (dy * gamma - x * dots * r * r / x.shape[-1]), dgamma, dots


def rms_norm(g: Any, x: Tensor, gamma: Tensor, eps: float = 1e-5) -> Tensor:
    y = g.temp("rms_norm", x.axes, x.shape, x.dtype)
    squares = g.temp("squares", [*x.axes[:-1], "one"], [*x.shape[:-1], 1], accumulation_dtype(x.dtype))
    return g.add(RMSNorm(x, gamma, y, squares, eps)).output  # type: ignore[no-any-return]


@nt.task("torch", y="W", x="R")
def swish_kernel(y: torch.Tensor, x: torch.Tensor, *, beta: float) -> None:
    torch.mul(x, torch.sigmoid(beta * x), out=y)


@nt.task("torch", dx="W", dy="R", x="R")
def swish_grad_kernel(dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, *, beta: float) -> None:
    moved = x.clone().requires_grad_()
    (moved * torch.sigmoid(beta * moved)).backward(dy)
    dx.copy_(moved.grad)  # type: ignore[arg-type]


class SwishArgs(TaskArgs):
    beta: float


class Swish(Op):
    """y = x sigmoid(beta x) (Ramachandran, Zoph and Le 2017)."""

    def __init__(self, x: Tensor, y: Tensor, beta: float = 1.0) -> None:
        super().__init__([x], [y])
        self.beta = beta

    def gradient(self, g: Any, *grads: Tensor | None) -> list[Tensor | None]:
        x, dy = self.inputs[0], grads[0]
        assert dy
        return [g.add(SwishGrad(dy, x, g.temp("swish_grad", x.axes, x.shape, x.dtype), self.beta)).output]

    def lower(self, lowering: Lowering) -> None:
        for index in lowering.indices(self.output):
            tiles = [lowering.tile(t, index) for t in (self.output, *self.inputs)]
            lowering.emit(swish_kernel, [W(tiles[0]), R(tiles[1])], SwishArgs(self.beta))

    def reference(self, *inputs: Any) -> tuple[Any, ...]:
        return (inputs[0] / (1 + np.exp(-self.beta * inputs[0])),)


class SwishGrad(Op):
    def __init__(self, dy: Tensor, x: Tensor, dx: Tensor, beta: float) -> None:
        super().__init__([dy, x], [dx])
        self.beta = beta

    def lower(self, lowering: Lowering) -> None:
        for index in lowering.indices(self.output):
            tiles = [lowering.tile(t, index) for t in (self.output, *self.inputs)]
            lowering.emit(swish_grad_kernel, [W(tiles[0]), *map(R, tiles[1:])], SwishArgs(self.beta))

    def reference(self, *inputs: Any) -> tuple[Any, ...]:
        dy, x = inputs
        s = 1 / (1 + np.exp(-self.beta * x))
        return (dy * (s + self.beta * x * s * (1 - s)),)


def swish(g: Any, x: Tensor, beta: float = 1.0) -> Tensor:
    assert math.isfinite(beta)
    return g.add(Swish(x, g.temp("swish", x.axes, x.shape, x.dtype), beta)).output  # type: ignore[no-any-return]
