"""Attention masks: which keys a query attends to, by position (see band.py) and by data that each step brings."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import Access, Part, R, TaskArgs, Tiling

from .band import Band
from .elementwise import DropoutArgs
from .op import Array, Index, Lowering, Tensor
from .scalar.expression import AxisIndex, Call, Element, Expression


class Limits(TaskArgs):
    """Of the tiles [seq, key] of a task: what is masked beyond the causal diagonal."""

    seq: int  # position of the tile's first query
    key: int  # and of its first key
    window: int  # keys that a query attends to, itself the last of them; 0: no window
    two_sided: bool  # and as many after it, itself the first of them
    padding: bool  # a tile [batch, key] follows the others: 0 where a key is masked
    segments: bool  # a tile of offsets follows
    longest: int  # positions of a segment, at most
    dropout: DropoutArgs | None  # of the probabilities; with segments the numbers of the positions' tokens follow


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to; `Mask()`: all of them.

    causal: key <= query. window: the last `window` of those, the query's own position included (causal); two_sided: as
    many after it too, so that a key is attended to that is less than `window` positions away. padding: integers [batch,
    seq or key], 0 where a key is masked, in any pattern (transformers' attention_mask). segments: int64 [sequences +
    1], the offsets of sequences that lie one behind the other along the positions (cu_seqlens), or [batch, sequences +
    1], those of each row of the batch: a query attends to its own sequence; what is there beyond the last offset
    attends to nothing; unused offsets equal the last. longest: positions of a segment, at most (None: any number). A
    query that attends to nothing gets zeros, and passes no gradient.
    """

    causal: bool = False
    window: int | None = None
    padding: Tensor | None = None
    segments: Tensor | None = None
    two_sided: bool = False
    longest: int | None = None

    def __post_init__(self) -> None:
        window = self.window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"mask: a window of {window!r} is not allowed; use a number of positions from 1 up")
        for name, tensor in (("padding", self.padding), ("segments", self.segments)):
            if not (tensor is None or isinstance(tensor, Tensor)):
                raise TypeError(f"mask: {name}: got {tensor!r}; allowed: a Tensor, such as g.input gives")
            if tensor and not tensor.dtype.startswith("int"):
                raise ValueError(f"mask: {name} of {tensor.dtype} are not allowed; use integers")
        if self.padding and self.segments:
            raise ValueError("mask: padding and segments together are not supported; leave padded positions out")
        if self.two_sided and (self.causal or window is None):
            raise ValueError("mask: two_sided is not allowed here; use it with a window, and without causal")
        if window is not None and not self.two_sided:
            object.__setattr__(self, "causal", True)

    @property
    def band(self) -> Band:
        return Band(self.causal, self.window, self.two_sided)

    def share(self, keys: int) -> float:
        """Of the pairs in the band those that can be in one segment, at most."""
        return min(1.0, self.longest / keys) if self.segments and self.longest else 1.0

    @property
    def inputs(self) -> list[Tensor]:
        return [t for t in (self.padding, self.segments) if t]

    def check(self, batch: int, seq: int, key: int) -> None:
        """Raises ValueError where the mask does not fit numbers of sequences, queries and keys."""
        if (self.causal or self.window or self.segments) and seq != key:
            kind = "segments" if self.segments else "a window" if self.window else "a causal mask"
            raise ValueError(f"mask: {kind} of {seq} queries and {key} keys is not supported; use as many of both")
        if self.padding and self.padding.axes not in (("batch", "seq"), ("batch", "key")):
            raise ValueError(f"mask: padding {self.padding} is not supported; its axes must be batch, then seq or key")
        if self.padding and self.padding.shape != (batch, key):
            raise ValueError(f"mask: padding {self.padding} does not fit {batch} sequences of {key} keys")
        rows = [(batch,), ()] if batch == 1 else [(batch,)]
        if self.segments and (self.segments.shape[:-1] not in rows or self.segments.dtype != "int64"):
            raise ValueError(
                f"mask: segments {self.segments} of {batch} batches are not supported;"
                " use int64 [batch, sequences + 1], or [sequences + 1] of one batch of tokens"
            )

    def fit(self, tiling: Tiling) -> None:
        """ConfigError: the segments of several rows of the batch would be in one task."""
        if self.segments and self.segments.axes[0] == "batch":
            batch = self.segments.shape[0]
            if (tile := tiling.tile("batch", batch)) > 1:
                raise ConfigError(f"tiles.batch: got {tile}; allowed: 1, where a mask has segments of {batch} rows")

    def limits(self, seq: Part, key: Part, dropout: DropoutArgs | None = None) -> Limits | None:
        """What a kernel has to be told of a tile; None if the diagonal is all."""
        if not (self.inputs or dropout or self.band.cuts_window(seq, key)):
            return None
        return Limits(
            seq=seq.offset, key=key.offset, window=self.window or 0, two_sided=self.two_sided,
            padding=self.padding is not None, segments=self.segments is not None,
            longest=self.longest or key.size, dropout=dropout,
        )  # fmt: skip

    def accesses(self, low: Lowering, at: Index) -> list[Access]:
        """The tiles of data that belong to those of the keys at["key"]."""
        return [R(low.tile(t, dict.fromkeys(t.axes, 0) | at | {"seq": at["key"]})) for t in self.inputs]

    def condition(self) -> Expression | None:
        """Whether a key is attended to, for each point of the scores, whose operator reads `padding` as input 1.

        None: all are. Segments have no such form."""
        assert not self.segments, self
        query, key, padding = AxisIndex("seq"), AxisIndex("key"), self.padding
        terms = [query + 1 > key] if self.causal else []
        if self.window is not None:
            terms.append(key + self.window > query)
        if self.two_sided and self.window is not None:
            terms.append(query + self.window > key)
        if padding:
            terms.append(Call("unequal", Element(1, ("batch", "key")), 0.0))
        return functools.reduce(operator.and_, terms) if terms else None

    def allowed(self, sizes: dict[str, int], axes: Sequence[str], data: Sequence[Array]) -> Array:
        """Whether a key is attended to, as an array that broadcasts over `axes`, which end in seq, key."""
        result = self.band.allowed(sizes["seq"], sizes["key"])[None]
        if self.padding:
            result = result & (data[0] != 0)[:, None]
        if self.segments:
            rows = [_same_segment(offsets, sizes["seq"]) for offsets in np.atleast_2d(data[0])]
            result = result & np.stack(rows)
        known = {"batch": result.shape[0], "seq": sizes["seq"], "key": sizes["key"]}
        return result.reshape([known.get(axis, 1) for axis in axes])


def _same_segment(offsets: Array, positions: int) -> Array:
    """Whether two positions are of one sequence, [positions, positions]."""
    segment = np.searchsorted(offsets, np.arange(positions), side="right")
    live = (segment > 0) & (segment < len(offsets))
    return np.asarray((segment[:, None] == segment) & live)


def masked_softmax(scores: Array, allowed: Array) -> tuple[Array, Array]:
    """Softmax over the last axis of what is allowed, and log-sum-exp [..., 1]; zeros where nothing is allowed."""
    scores = np.where(allowed, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    total = np.where(total > 0, total, 1.0)
    return e / total, np.log(total) + top
