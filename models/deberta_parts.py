"""Parts of DeBERTa beside its layers.

Rows of distances, padding that attends to all positions, and the convolution of large models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph import packed_inputs
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ZEROS
from nntile_py.graph.params import Array, Batch
from nntile_py.models.model_config import ModelConfig
from nntile_py.models.parts import INIT, norm, padding
from nntile_py.schema import short
from nntile_py.tasks.activation import activation
from nntile_py.tasks.contract import contract, linear
from nntile_py.tasks.elementwise import add, dropout, multiply, rename, transpose
from nntile_py.tasks.gather import NOWHERE, gather
from nntile_py.tasks.op import Tensor

POSITION_KINDS = "c2p", "p2c"  # scores of queries and positions of keys; of keys and positions of queries


class Relative(NamedTuple):
    """Embeddings of distances between query and key, for RelativeScores.

    Attributes:
        table: Embeddings [relative, embed], only of the distances that occur.
        of_distance: Row of the table for each distance, [distance].
    """

    table: Tensor
    of_distance: Tensor


def log_buckets(distance: Array, buckets: int, longest: int) -> Array:
    """Return the bucket (int64) of each distance between key and query.

    With m = buckets / 2, the bucket of a distance d up to m is d. The bucket of a larger d is
    m + ceil((m - 1) log(d / m) / log((longest - 1) / m)). Negative distances have negative buckets. The logarithm is
    computed in fp32, because its rounding decides where a bucket ends: results equal those of transformers'
    make_log_bucket_position.
    """
    import torch

    middle, size = buckets // 2, np.abs(distance)
    logarithm = torch.log(torch.from_numpy(np.maximum(size, middle)) / middle)
    steps = logarithm / torch.log(torch.tensor((longest - 1) / middle)) * (middle - 1)
    return np.where(size <= middle, distance, np.sign(distance) * (steps.ceil().long().numpy() + middle))


def distance_rows(places: int, length: int, buckets: int, longest: int) -> tuple[Array, Array]:
    """Return the rows of the distance table that are needed, in descending order, and an index into them.

    The index has an entry for each distance query - key from places - 1 down to -(places - 1).

    Args:
        places: Size of the axis seq.
        length: Length of the longest sequence. Distances of `length` or more have the row of distance length - 1.
        buckets: Number of buckets in each direction; 0: each distance has a row.
        longest: The number of rows in each direction without buckets.
    """
    distance, span = np.clip(np.arange(places - 1, -places, -1), 1 - length, length - 1), buckets or longest
    bucket = log_buckets(distance, buckets, longest) if buckets else distance
    rows, index = np.unique(-np.clip(bucket + span, 0, 2 * span - 1), return_inverse=True)
    return -rows, index


class Padding:
    """The positions of a batch that hold padding, where DeBERTa computes more than other models.

    Their embeddings are zero, and each of them attends to all positions of its row with the same weight. A label at
    padding, or a first token that is padding, makes these values part of the loss.
    """

    def __init__(self, g: Graph, mask: Tensor) -> None:
        def places(given: Mapping[str, Array], real: bool) -> Array:
            found: Array = ((given[mask.name] != 0) == real)[..., None]
            return found

        self.g, sizes = g, mask.sizes | {"one": 1}
        self.real = g.input("real_tokens", sizes, None, default=partial(places, real=True))
        self.padded = g.input("padding_tokens", sizes, None, default=partial(places, real=False))
        self.ones = g.input("ones", {"one": 1, "key": mask.size("seq")}, None, default=1.0)
        self.masks: dict[tuple[str, ...], Tensor] = {}

    def zeroed(self, x: Tensor) -> Tensor:
        """Return x [batch, seq, ...] with zeros at padding."""
        width = {axis: x.size(axis) for axis in x.axes[2:]}
        if x.axes not in self.masks:
            ones = self.g.input(f"ones_{'_'.join(width)}", {"one": 1} | width, None, default=1.0)
            self.masks[x.axes] = contract(self.g, self.real, ones, x.axes)
        return multiply(self.g, x, self.masks[x.axes])

    def attended(self, x: Tensor, values: Tensor) -> Tensor:
        """Return the attention's output x with the mean of all values [..., key, head_dim] at padding.

        The result has the axes batch, seq, heads, head_dim.
        """
        g, axes = self.g, ["batch", "seq", "heads", "head_dim"]
        head = [axis for axis in values.axes if axis not in ("key", "head_dim")]
        mean = contract(g, self.ones, values, [*head, "one", "head_dim"], scale=1 / values.size("key"))
        return add(g, self.zeroed(transpose(g, x, axes)), contract(g, self.padded, mean, axes))


def padding_of(g: Graph, batch: Batch) -> Padding | None:
    """Return the padding of the batch, or None if no step has padding."""
    mask = None if batch.packed else padding(g, batch)
    return Padding(g, mask) if mask else None


def convolved(g: Graph, batch: Batch, c: ModelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Return norm(y + act(convolution of x)), with x [batch, seq, embed] the embeddings and y the first layer's output.

    The convolution has c.conv taps along the positions of a sequence, with zeros before and after the sequence. The
    taps are an axis of a gather, so the convolution is a product over this axis and embed.
    """
    name, taps = "deberta.encoder.conv", np.arange(c.conv) - c.conv // 2

    def neighbours(places: Array, first: Array | int, end: Array | int) -> Array:
        found = places[..., None] + taps
        return np.where((found >= np.asarray(first)[..., None]) & (found < np.asarray(end)[..., None]), found, NOWHERE)

    def of_bins(given: Mapping[str, Array]) -> Array:
        places, offsets = np.arange(batch.seq), given[packed_inputs.SEGMENTS]
        number = np.stack([np.searchsorted(row, places, side="right") for row in offsets])
        live = (number > 0) & (number < offsets.shape[1])
        first = np.take_along_axis(offsets, np.maximum(number - 1, 0), 1)
        end = np.where(live, np.take_along_axis(offsets, np.minimum(number, offsets.shape[1] - 1), 1), 0)
        return neighbours(np.broadcast_to(places, first.shape), first, end)

    sizes = {"batch": batch.size, "key": batch.seq, "tap": c.conv}
    default = of_bins if batch.packed else neighbours(np.arange(batch.seq), 0, batch.seq)
    places = g.input("conv_places", sizes, below=batch.seq, ignored=NOWHERE, default=default)
    with g.scope("conv"):
        weight = g.param(f"{name}.conv.weight", {"hidden": c.embed, "embed": c.embed, "tap": c.conv}, INIT)
        bias = g.param(f"{name}.conv.bias", {"hidden": c.embed}, ZEROS)
        z = linear(g, gather(g, x, places), weight, ["batch", "key", "hidden"], bias)
        z = activation(g, dropout(g, rename(g, z, key="seq", hidden="embed"), c.dropout), c.conv_activation)
        return norm(g, add(g, z, y), f"{name}.LayerNorm", c.layer_norm_eps)


def position_kinds(value: Any) -> list[str]:
    """Return the list of score terms, c2p and/or p2c, from pos_att_type: a list, or a text such as "c2p|p2c"."""
    found = [one.strip() for one in value.lower().split("|")] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not set(found) <= set(POSITION_KINDS) or len(set(found)) < len(found):
        raise ConfigError(f"model: pos_att_type is {short(value)} in the model's config; allowed: c2p, p2c or both")
    return found
