"""The flop of packed work, counted from the lengths of the sequences that ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from nntile_py.graph.graph import Graph
from nntile_py.graph.step_inputs import StepInputs
from nntile_py.tasks.band import Band
from nntile_py.tasks.op import CONTRACTION, Op
from nntile_py.tiles import TileRange
from nntile_py.tiles.task import live_slot


@dataclass(frozen=True)
class PackedFlop:
    """The flop of products and attention in a packed pass, as a function of what its bins hold.

    Attributes:
        fixed: flop that do not depend on the bins' content.
        by_slot: flop for each entry of a live axis, by the slot that holds the number of entries in a bin.
        by_band: flop for each attended pair (query, key) of a sequence, by the band of the attention's mask.
    """

    fixed: float
    by_slot: Mapping[str, float]
    by_band: Mapping[Band, float]

    @classmethod
    def of(cls, graph: Graph) -> PackedFlop:
        """Count a packed graph."""
        fixed, by_slot, by_band = 0.0, defaultdict[str, float](float), defaultdict[Band, float](float)
        for op in graph.ops:
            if op.category is not CONTRACTION:
                continue
            sizes = {axis: size for t in (*op.inputs, *op.outputs) for axis, size in t.sizes.items()}
            live = next((axis for axis in sizes if axis in graph.live), None)
            if pairs := _pairs(op, sizes):
                band, count = pairs
                by_band[band] += op.products() / (sizes["batch"] * count)
            elif live:
                for part in range(sizes["batch"]):
                    by_slot[live_slot(live, part)] += op.products() / (sizes["batch"] * sizes[live])
            else:
                fixed += op.products()
        return cls(fixed, by_slot, by_band)

    def __call__(self, filled: StepInputs) -> float:
        """Return the flop of all passes over these packed inputs."""
        entries = sum(self.by_slot.get(slot, 0.0) * count for slots in filled.live for slot, count in slots.items())
        lengths = Counter(place.length for place in filled.places)
        pairs = sum(
            flop * band.area(TileRange(0, n), TileRange(0, n)) * times
            for band, flop in self.by_band.items() for n, times in lengths.items()
        )  # fmt: skip
        return self.fixed * len(filled.live) + entries + pairs


def _pairs(op: Op, sizes: Mapping[str, int]) -> tuple[Band, float] | None:
    """Return the band of an operator on pairs of tokens, and the number of pairs that products() counts in a bin.

    None: the operator does not work on pairs.
    """
    mask = getattr(getattr(op, "forward", op), "mask", None)
    if mask is not None and getattr(mask, "segments", None):  # a fused attention or its gradient
        whole = TileRange(0, sizes["seq"])
        return mask.band, mask.band.area(whole, whole) * mask.share(sizes["seq"])
    if {"seq", "key"} <= sizes.keys():  # a product with stored scores, which counts all pairs
        scores = next(t for t in (*op.inputs, *op.outputs) if {"seq", "key"} <= {*t.axes})
        return scores.band, sizes["seq"] * sizes["key"]
    return None
