"""The iteration space of an operator: the axes of its loops, and the axes over which it reduces (sums, maxima).

Two operators can be fused if their spaces are equal, or differ only by a reduction (Ivanov et al. 2021, "Data movement
is all you need", section IV).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .op import Op


@dataclass(frozen=True)
class Space:
    """An iteration space.

    A matrix product has one reduction, over its summed axes. The gradient of LayerNorm has two reductions: over embed
    for dx, and over all other axes for the gradients of the weights.

    Args:
        sizes: {axis: size} of all axes, in order.
        reductions: the axes of each reduction; reductions over the last axis come first.
    """

    sizes: Mapping[str, int]
    reductions: tuple[tuple[str, ...], ...] = ()

    @property
    def independent(self) -> tuple[str, ...]:
        """Axes over which the operator does not reduce."""
        taken = {axis for axes in self.reductions for axis in axes}
        return tuple(axis for axis in self.sizes if axis not in taken)


def space(op: Op) -> Space:
    """Return the operator's iteration space, derived from its scalar form or else from the axes of its tensors.

    Without a scalar form, the axes of the outputs count as independent. Axes that only inputs have count as reduced,
    unless the operator looks entries up along them, as in a table (`picks`).
    """
    form = op.scalar()
    if form is not None:
        return Space(dict(form.sizes), form.reduced)
    outer, inner = ({axis: n for t in some for axis, n in t.sizes.items()} for some in (op.outputs, op.inputs))
    inner = {axis: n for axis, n in inner.items() if axis not in op.picks}
    reduced = tuple(axis for axis in inner if axis not in outer)
    return Space(outer | inner, (reduced,) if reduced else ())
