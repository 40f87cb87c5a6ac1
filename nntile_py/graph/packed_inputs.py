"""Inputs of models on packed sequences: a row of the batch is a bin that holds several sequences.

The engine adds three inputs to those of the model:

* `segments` [batch, offset]: offsets of the sequences in each bin (see Mask).
* `draws` [batch, seq], only in training: position of each token in the padded array. Dropout of values for each token
  draws its random numbers by this position.
* `rows` [batch, sequence], only in training: row of each sequence of a bin in the padded array. Dropout of values for
  each sequence draws its random numbers by this row.

A model may unpack its sequences into padded rows (see `apart`), with the axes [batch, row, place]. The axis `row`
numbers the sequences of a bin; without packing its size is 1. The axis `place` numbers the positions of a padded row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Array, Batch, Input
from nntile_py.tasks.gather import NOWHERE
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.select import Select

SEGMENTS, DRAWS, ROWS, STARTS = "segments", "draws", "rows", "starts"
ROW_PLACES, TOKEN_PLACES = "row_places", "token_places"
OWN = SEGMENTS, DRAWS, ROWS, STARTS, ROW_PLACES, TOKEN_PLACES  # inputs that the engine computes, not the user
LIVE = "seq", "sequence", "masked", "offset"  # axes of which a step fills only a part in each bin


def begin(g: Graph, batch: Batch) -> None:
    """Declare the inputs that the engine adds to a packed graph. Call it before the model's trace."""
    g.live = frozenset(LIVE)
    g.input(SEGMENTS, {"batch": batch.size, "offset": batch.seq + 1}, below=batch.seq + 1)
    if g.training:
        for name, axis in ((DRAWS, "seq"), (ROWS, "sequence")):
            g.row_numbers[axis] = g.input(name, {"batch": batch.size, axis: batch.seq})


def number_rows(g: Graph, x: Tensor) -> None:
    """Declare row numbers for dropout of a value of each token that has several axes: x [batch, seq, heads, head_dim].

    The numbers are those of the padded array, as for values with one axis. Without packing there is nothing to declare.
    """
    tokens, more = g.row_numbers.get("seq"), {axis: x.size(axis) for axis in x.axes[2:-1]}
    name = "_".join((DRAWS, *more))
    if tokens is None or not more or x.axes[:2] != tokens.axes or name in g.tensors:
        return

    def numbered(given: Mapping[str, Array]) -> Array:
        draws, count = given[DRAWS], math.prod(more.values())
        return (draws[..., None] * count + np.arange(count)).reshape(*draws.shape, *more.values())

    g.row_numbers[name] = g.input(name, tokens.sizes | more, default=numbered)


def starts(g: Graph) -> Tensor:
    """Return the input [batch, sequence] with the position of each sequence's first token in its bin.

    Entries behind the last sequence of a bin are -1. The first call declares the input.
    """
    if STARTS in g.tensors:
        return g.tensors[STARTS]
    offsets = segments(g)
    sizes = {"batch": offsets.size("batch"), "sequence": offsets.size("offset") - 1}

    def first_positions(given: Mapping[str, Array]) -> Array:
        first, last = given[SEGMENTS][:, :-1], given[SEGMENTS][:, 1:]
        return np.where(first < last, first, NOWHERE)

    return g.input(STARTS, sizes, below=sizes["sequence"], ignored=NOWHERE, default=first_positions)


def positions_of(segments: Array, capacity: int) -> Array:
    """Return each token's position in its sequence: int64 [bins, capacity]; 0 behind the last sequence of a bin.

    segments: the offsets of each bin's sequences.
    """
    places = np.arange(capacity)
    out = np.zeros((len(segments), capacity), np.int64)
    for number, offsets in enumerate(segments):
        segment = np.searchsorted(offsets, places, side="right")
        live = (segment > 0) & (segment < len(offsets))
        out[number, live] = places[live] - offsets[segment[live] - 1]
    return out


def apart(g: Graph, batch: Batch, mask: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Declare two inputs of indices: to unpack tokens into rows padded to `length`, and to pack the rows again.

    Args:
        mask: without packing, the input attention_mask [batch, seq], or None: all positions hold tokens.
        length: positions of a padded row.

    Returns:
        Two inputs of indices. The first, [batch, row, place], holds for each place of a padded row the position of its
        token. The second, [batch, seq], holds for each token the index of its place, counted through the rows of its
        bin. -1 is padding.

    Raises:
        ConfigError: sequences may be longer than `length`, or the model has unpacked them to another length before.
    """
    if ROW_PLACES in g.tensors and g.tensors[ROW_PLACES].size("place") == length:
        return g.tensors[ROW_PLACES], g.tensors[TOKEN_PLACES]
    if ROW_PLACES in g.tensors or length < batch.length:
        need = "the same in all places of a model" if ROW_PLACES in g.tensors else f"at least seq = {batch.length}"
        raise ConfigError(f"sequences_apart: got length {length}; allowed: {need}")
    count = batch.seq // batch.length
    # Without packing: the positions of a row, then -1 as padding.
    padded = np.where(np.arange(length) < batch.seq, np.arange(length), NOWHERE)

    def of_bins(given: Mapping[str, Array]) -> Array:
        return row_places(given[SEGMENTS], count, length)

    def of_mask(given: Mapping[str, Array]) -> Array:
        assert mask
        real = np.pad(given[mask.name], ((0, 0), (0, length - batch.seq))) != 0
        return np.where(real, padded, NOWHERE)[:, None]

    def back(given: Mapping[str, Array]) -> Array:
        return token_places(given[ROW_PLACES], batch.seq)

    derived = batch.packed or mask
    rows, tokens = {"batch": batch.size, "row": count, "place": length}, {"batch": batch.size, "seq": batch.seq}
    of_rows = of_bins if batch.packed else of_mask
    row_default, token_default = (of_rows, back) if derived else (padded, padded[: batch.seq])
    return (
        g.input(ROW_PLACES, rows, below=batch.seq, ignored=NOWHERE, default=row_default),
        g.input(TOKEN_PLACES, tokens, below=count * length, ignored=NOWHERE, default=token_default),
    )


def rows_of(inputs: Mapping[str, Input]) -> int | None:
    """Return the largest number of sequences that a bin may hold; None: no limit except the bin's capacity."""
    return inputs[ROW_PLACES].tensor.size("row") if ROW_PLACES in inputs else None


def row_places(segments: Array, rows: int, length: int) -> Array:
    """Return for each sequence the positions of its tokens in the bin, then -1: int64 [bins, rows, length].

    Args:
        segments: the offsets of each bin's sequences.
        rows: largest number of sequences in a bin.
        length: positions of a padded row.

    Raises:
        ValueError: a bin has more than `rows` sequences.
    """
    first, lengths = segments[:, :-1], np.diff(segments)
    if (most := int((lengths > 0).sum(1).max())) > rows:
        raise ValueError(f"{SEGMENTS}: {most} sequences in a bin; allowed: {rows}, as the model takes them apart")
    places = np.arange(length)
    inside = places < lengths[:, :rows, None]
    return np.where(inside, first[:, :rows, None] + places, NOWHERE)


def token_places(places: Array, tokens: int) -> Array:
    """Return the inverse of `row_places`: int64 [bins, tokens], for each token of a bin its index in the bin's places.

    places: [bins, rows, length], as `row_places` returns it; an index counts the entries of one bin. -1 is padding.
    """
    flat = places.reshape(len(places), -1)
    out = np.full((len(places), tokens), NOWHERE, np.int64)
    row, at = np.nonzero(flat != NOWHERE)
    out[row, flat[row, at]] = at
    return out


def check(g: Graph, model: Any) -> None:
    """Raise ConfigError if an operator or an input of a model would mix the sequences of a bin."""
    here = f"model {type(model).__name__}: pack needs"
    for op in g.ops:
        mask = getattr(op, "mask", None)
        if mask is not None and hasattr(mask, "segments") and mask.segments is None:
            raise ConfigError(f"{here} a mask with segments in {op.name}; allowed: the mask attention_mask(g, batch)")
        if isinstance(op, Select) and op.axis == "seq":
            raise ConfigError(f"{here} first_tokens(g, x) instead of {op.name}, which selects one token per bin")
    for name, one in g.inputs.items():
        if "seq" in one.tensor.axes and "batch" not in one.tensor.axes:
            raise ConfigError(f"{here} an axis batch in the input {name}; allowed: position_input(g, batch, positions)")


def segments(g: Graph) -> Tensor:
    """Return the input [batch, offset] with the offsets of each bin's sequences."""
    return g.tensors[SEGMENTS]
