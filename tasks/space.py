"""The iteration space of an operator: its independent axes and its reductions.

As in Ivanov et al. 2021 ("Data movement is all you need", section IV): two operators can be fused where their spaces
are equal, or differ by a reduction alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .op import Op


@dataclass(frozen=True)
class Space:
    """Axes with their sizes, in order, and the axes of each reduction, reductions within rows first.

    A product has one reduction, over its summed axes. The gradient of LayerNorm has two: over embed for dx, and over
    the axes of rows for the gradients of its weights.
    """

    sizes: Mapping[str, int]
    reductions: tuple[tuple[str, ...], ...] = ()

    @property
    def independent(self) -> tuple[str, ...]:
        """Axes without a reduction."""
        taken = {axis for axes in self.reductions for axis in axes}
        return tuple(axis for axis in self.sizes if axis not in taken)


def space(op: Op) -> Space:
    """Return the operator's iteration space, from its scalar form or else from the axes of its tensors.

    Without a scalar form, axes of outputs are independent. Axes only in inputs are reduced, unless the operator
    looks up along them, as in a table.
    """
    form = op.scalar()
    if form is not None:
        return Space(dict(form.sizes), form.reduced)
    outer, inner = ({axis: n for t in some for axis, n in t.sizes.items()} for some in (op.outputs, op.inputs))
    inner = {axis: n for axis, n in inner.items() if axis not in op.picks}
    reduced = tuple(axis for axis in inner if axis not in outer)
    return Space(outer | inner, (reduced,) if reduced else ())
