"""The iteration space of an operator: the axes that it computes along, and those that it reduces.

As in Ivanov et al. 2021 ("Data movement is all you need", section IV): two operators can be fused where their spaces
are equal, or differ by a reduction alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .op import Op


@dataclass(frozen=True)
class Space:
    """Axes with their sizes, in order. reductions: the axes of each reduction, those within rows first.

    A product has one reduction, over the axes that it sums over; a LayerNorm's gradient two: embed for dx, the axes of
    the rows for the gradients of its weights.
    """

    sizes: Mapping[str, int]
    reductions: tuple[tuple[str, ...], ...] = ()

    @property
    def independent(self) -> tuple[str, ...]:
        """Axes that no reduction takes away."""
        taken = {axis for axes in self.reductions for axis in axes}
        return tuple(axis for axis in self.sizes if axis not in taken)


def space(op: Op) -> Space:
    """The operator's iteration space: of its scalar form, or else from its tensors' axes.

    Then what is in outputs is not reduced, and what is only in inputs is, but for axes along which it looks up.
    """
    form = op.scalar()
    if form is not None:
        return Space(dict(form.sizes), form.reduced)
    outer, inner = ({axis: n for t in some for axis, n in t.sizes.items()} for some in (op.outputs, op.inputs))
    inner = {axis: n for axis, n in inner.items() if axis not in op.picks}
    reduced = tuple(axis for axis in inner if axis not in outer)
    return Space(outer | inner, (reduced,) if reduced else ())
