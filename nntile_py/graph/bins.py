"""Models on packed sequences: a row of the batch is a bin that holds several, one behind the other.

Inputs that such a graph has besides the model's own: `segments` [batch, offset], the offsets of each bin's sequences
(see Mask); `draws` [batch, seq] and `rows` [batch, sequence], the place of each token in the padded array, and of each
sequence in the batch, by which dropout draws. The axis sequence numbers those of a bin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.declared import Array, Batch
from nntile_py.graph.graph import Graph
from nntile_py.tasks.gather import NOWHERE
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.select import Select

SEGMENTS, DRAWS, ROWS, STARTS = "segments", "draws", "rows", "starts"
LIVE = "seq", "sequence", "masked", "offset"  # axes of which a bin fills a part


def begin(g: Graph, batch: Batch) -> None:
    """Declare what a packed graph has besides; before the model's trace."""
    g.live = frozenset(LIVE)
    g.input(SEGMENTS, {"batch": batch.size, "offset": batch.seq + 1}, below=batch.seq + 1)
    if g.training:
        for name, axis in ((DRAWS, "seq"), (ROWS, "sequence")):
            g.draws[axis] = g.input(name, {"batch": batch.size, axis: batch.seq})


def starts(g: Graph) -> Tensor:
    """The place of the first token of each sequence of a bin, then -1: an input [batch, sequence] of its `segments`."""
    if STARTS in g.tensors:
        return g.tensors[STARTS]
    offsets = segments(g)
    sizes = {"batch": offsets.size("batch"), "sequence": offsets.size("offset") - 1}

    def made(given: Mapping[str, Array]) -> Array:
        first, last = given[SEGMENTS][:, :-1], given[SEGMENTS][:, 1:]
        return np.where(first < last, first, NOWHERE)

    return g.input(STARTS, sizes, below=sizes["sequence"], ignored=NOWHERE, default=made)


def positions_of(segments: Array, capacity: int) -> Array:
    """Of each place of each bin the position in its sequence; 0 behind the last one: int64 [bins, capacity]."""
    places = np.arange(capacity)
    out = np.zeros((len(segments), capacity), np.int64)
    for number, offsets in enumerate(segments):
        segment = np.searchsorted(offsets, places, side="right")
        live = (segment > 0) & (segment < len(offsets))
        out[number, live] = places[live] - offsets[segment[live] - 1]
    return out


def check(g: Graph, model: Any) -> None:
    """ConfigError where a model does not keep packed sequences apart."""
    here = f"model {type(model).__name__}: pack needs"
    for op in g.ops:
        mask = getattr(op, "mask", None)
        if mask is not None and hasattr(mask, "segments") and mask.segments is None:
            raise ConfigError(f"{here} a mask with segments in {op.name}; make it by attention_mask(g, batch)")
        if isinstance(op, Select) and op.axis == "seq":
            raise ConfigError(f"{here} first_tokens(g, x) in the place of {op.name}, which takes one of a bin")
    for name, one in g.inputs.items():
        if "seq" in one.tensor.axes and "batch" not in one.tensor.axes:
            raise ConfigError(f"{here} an axis batch in the input {name}; see position_input(g, batch, positions)")


def segments(g: Graph) -> Tensor:
    return g.tensors[SEGMENTS]
