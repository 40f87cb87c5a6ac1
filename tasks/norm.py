"""What normalisations over embed have in common: the residual stream's add before them, and that of its gradient."""

from __future__ import annotations

from typing import Any, ClassVar

from .elementwise import Dropout
from .op import NORMALIZATION, Op, Tensor


class Norm(Op):
    """Inputs x, the weights and, if there is one, the residual; outputs y, stat and, with a residual, the total.

    A subclass is constructed as (*inputs but the residual, y, stat, eps, residual, total); one with `takes_dropout`
    also takes a Dropout of x.
    """

    category = NORMALIZATION
    takes_dropout: ClassVar[bool] = False
    stat: Tensor
    eps: float
    residual: Tensor | None
    total: Tensor | None
    dropout: Dropout | None = None

    @property
    def fused(self) -> list[str]:
        """What was fused into it, each an operation an element."""
        return ["residual"] * bool(self.residual) + ["dropout"] * bool(self.dropout)

    @property
    def title(self) -> str:
        return " + ".join([self.kind, *self.fused])

    def onto(self, x: Tensor, residual: Tensor, total: Tensor, **dropout: Any) -> Norm:
        """This norm of x + residual, which is kept as `total`, instead of its present input."""
        assert not self.residual, self
        make: Any = type(self)
        made: Norm = make(x, *self.inputs[1:], self.output, self.stat, self.eps, residual, total, **dropout)
        return made


class NormGrad(Op):
    """Inputs dy, x, stat, gamma and, if there is one, what is added to dx; outputs dx and the weights' gradients.

    A subclass is constructed as (*inputs but the addend, *outputs, add).
    """

    category = NORMALIZATION
    extra: Tensor | None
    bias: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def fused(self) -> list[str]:
        """What was fused into it, each an operation an element."""
        parts = {"add": self.extra, "dropout": self.dropout, "bias gradient": self.bias}
        return [name for name, there in parts.items() if there]

    @property
    def title(self) -> str:
        return " + ".join([self.kind, *self.fused])

    def plus(self, add: Tensor, dx: Tensor) -> NormGrad:
        """This gradient with `add` added to dx, in a tensor of its own."""
        assert not self.extra, self
        make: Any = type(self)
        made: NormGrad = make(*self.inputs, dx, *self.outputs[1:], add=add)
        return made
