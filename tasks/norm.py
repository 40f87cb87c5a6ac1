"""Base classes of normalisations over embed and of their gradients, with the residual stream's additions."""

from __future__ import annotations

from typing import Any, ClassVar

from .elementwise import Dropout
from .op import NORMALIZATION, Op, Tensor


class Norm(Op):
    """A normalisation over embed, optionally of x + residual.

    Inputs: x, the weights, the residual if there is one. Outputs: y, statistics, and x + residual if there is a
    residual. The constructor of a subclass takes (x, *weights, y, statistics, eps, residual, total), and a Dropout of x
    if `takes_dropout` is true.
    """

    category = NORMALIZATION
    takes_dropout: ClassVar[bool] = False
    statistics: Tensor
    eps: float
    residual: Tensor | None
    total: Tensor | None
    dropout: Dropout | None = None

    @property
    def fused(self) -> list[str]:
        """Names of the fused operations, each of which costs one flop per element."""
        return ["residual"] * bool(self.residual) + ["dropout"] * bool(self.dropout)

    @property
    def title(self) -> str:
        return " + ".join([self.kind, *self.fused])

    def onto(self, x: Tensor, residual: Tensor, total: Tensor, **dropout: Any) -> Norm:
        """Return this normalisation applied to x + residual; the sum is stored as `total`."""
        assert not self.residual, self
        make: Any = type(self)
        fused: Norm = make(x, *self.inputs[1:], self.output, self.statistics, self.eps, residual, total, **dropout)
        return fused


class NormGrad(Op):
    """Gradient of a normalisation, optionally with a tensor `add` added to dx.

    Inputs: dy, x, statistics, gamma, `add` if there is one. Outputs: dx and the gradients of the weights. The
    constructor of a subclass takes (dy, x, statistics, gamma, *outputs, add).
    """

    category = NORMALIZATION
    extra: Tensor | None
    bias: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def fused(self) -> list[str]:
        """Names of the fused operations, each of which costs one flop per element."""
        parts = {"add": self.extra, "dropout": self.dropout, "bias gradient": self.bias}
        return [name for name, tensor in parts.items() if tensor]

    @property
    def title(self) -> str:
        return " + ".join([self.kind, *self.fused])

    def plus(self, add: Tensor, dx: Tensor) -> NormGrad:
        """Return this gradient with `add` added to its input gradient; the sum is stored in the tensor dx."""
        assert not self.extra, self
        make: Any = type(self)
        fused: NormGrad = make(*self.inputs, dx, *self.outputs[1:], add=add)
        return fused
