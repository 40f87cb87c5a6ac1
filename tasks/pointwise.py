"""Base class of element-wise operators whose tensors have the same axes. One formula defines such an operator."""

from __future__ import annotations

from typing import ClassVar

from nntile_py.tiles import R, TaskArgs, W
from nntile_py.tiles.arguments import NO_ARGS

from .op import Array, Lowering, Op
from .scalar.expression import Definition, Element, Number, Output


class Pointwise(Op):
    """An operator whose outputs are formula(*inputs), element by element. All tensors have the same axes.

    The formula defines both the scalar form, from which fusion generates kernels, and the reference. A task of `kernel`
    has the tiles of the outputs, then the tiles of the inputs.
    """

    kernel: ClassVar[str]

    def args(self) -> TaskArgs:
        """Return the arguments of the kernel."""
        return NO_ARGS

    def formula(self, *inputs: Number) -> tuple[Number, ...]:
        """Return the outputs: arrays if the inputs are arrays, expressions if the inputs are expressions."""
        raise NotImplementedError

    def lower(self, lowering: Lowering) -> None:
        args = self.args()
        for index in lowering.indices(self.output):
            written = [W(lowering.tile(t, index)) for t in self.outputs]
            lowering.emit(self.kernel, [*written, *(R(lowering.tile(t, index)) for t in self.inputs)], args)

    def scalar(self) -> Definition:
        axes = self.output.axes
        values = self.formula(*(Element(k, axes) for k in range(len(self.inputs))))
        return Definition(self.output.sizes, tuple(Output(k, axes, value) for k, value in enumerate(values)))

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return self.formula(*inputs)
