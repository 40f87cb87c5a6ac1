"""Attention masks: fixed by position (causal, window; see band.py), or from the step's data (padding, segments)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.tiles import Access, R, TaskArgs, TileRange, Tiling

from .band import Band
from .elementwise import DropoutArgs
from .op import Array, Index, Lowering, Tensor
from .scalar.expression import AxisIndex, Call, Element, Expression


class Limits(TaskArgs):
    """Kernel arguments for the masks of one tile [seq, key] of scores, apart from the causal mask."""

    seq: int  # position of the tile's first query
    key: int  # position of the tile's first key
    window: int  # a query attends to this many keys; the last is at the query's own position; 0: no window
    two_sided: bool  # True: the window also covers as many keys after the query
    padding: bool  # True: the task also has a tile [batch, key], which is 0 where a key is masked
    segments: bool  # True: the task also has a tile of segment offsets
    longest: int  # maximum number of positions in a segment
    dropout: DropoutArgs | None  # of the probabilities; with segments, the task also has a tile of row numbers


@dataclass(frozen=True)
class Mask:
    """The keys to which each query attends. `Mask()` without arguments: all keys.

    If a query attends to no key, its output and its gradient are zero.

    Args:
        causal: a query attends only to keys up to its own position.
        window: a query attends only to the `window` keys that end at its own position.
        two_sided: the window extends in both directions: a query attends to keys less than `window` positions away.
        padding: integers [batch, seq or key], 0 where a key is masked, in any pattern (transformers' attention_mask).
        segments: int64 [sequences + 1]: offsets of consecutive sequences along the positions (cu_seqlens). With a
            batch, [batch, sequences + 1]. A query attends only to its own sequence. Positions from the last offset on
            attend to nothing. Unused offsets equal the last offset.
        longest: maximum number of positions in a segment; None: unknown.
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
            raise ValueError(f"mask: got a window of {window!r}; allowed: a number of positions from 1 up")
        for name, tensor in (("padding", self.padding), ("segments", self.segments)):
            if not (tensor is None or isinstance(tensor, Tensor)):
                raise TypeError(f"mask: {name}: got {tensor!r}; allowed: a Tensor, such as g.input gives")
            if tensor and not tensor.dtype.startswith("int"):
                raise ValueError(f"mask: got {name} of {tensor.dtype}; allowed: integers")
        if self.padding and self.segments:
            raise ValueError("mask: got padding and segments; allowed: segments alone, without padded positions")
        if self.two_sided and (self.causal or window is None):
            raise ValueError("mask: got two_sided; allowed: two_sided with a window and without causal")
        if window is not None and not self.two_sided:
            object.__setattr__(self, "causal", True)

    @property
    def band(self) -> Band:
        return Band(self.causal, self.window, self.two_sided)

    def share(self, keys: int) -> float:
        """Return an upper bound on the fraction of (query, key) pairs in the band that remain with segments.

        Without segments, or if their maximum length is unknown, the bound is 1.
        """
        return min(1.0, self.longest / keys) if self.segments and self.longest else 1.0

    @property
    def inputs(self) -> list[Tensor]:
        return [t for t in (self.padding, self.segments) if t]

    def check(self, batch: int, seq: int, key: int) -> None:
        """Raise ValueError if the mask does not fit `batch` sequences of `seq` queries and `key` keys."""
        if (self.causal or self.window or self.segments) and seq != key:
            kind = "segments" if self.segments else "a window" if self.window else "a causal mask"
            raise ValueError(f"mask: got {kind} for {seq} queries and {key} keys; allowed: as many queries as keys")
        if self.padding and self.padding.axes not in (("batch", "seq"), ("batch", "key")):
            raise ValueError(f"mask: got padding {self.padding}; allowed: the axes batch, then seq or key")
        if self.padding and self.padding.shape != (batch, key):
            raise ValueError(f"mask: padding {self.padding} does not fit {batch} sequences of {key} keys")
        rows = [(batch,), ()] if batch == 1 else [(batch,)]
        if self.segments and (self.segments.shape[:-1] not in rows or self.segments.dtype != "int64"):
            raise ValueError(
                f"mask: got segments {self.segments} for a batch of {batch};"
                " allowed: int64 [batch, sequences + 1], or [sequences + 1] for a batch of 1"
            )

    def fit(self, tiling: Tiling) -> None:
        """Raise ConfigError if a tile covers several rows of the batch, and each row has segment offsets of its own."""
        if self.segments and self.segments.axes[0] == "batch":
            batch = self.segments.shape[0]
            if (tile := tiling.tile("batch", batch)) > 1:
                raise ConfigError(f"tiles.batch: got {tile}; allowed: 1, where a mask has segments of {batch} rows")

    def limits(self, seq: TileRange, key: TileRange, dropout: DropoutArgs | None = None) -> Limits | None:
        """Return a kernel's arguments for the masks of a tile; None if at most the causal mask affects the tile."""
        if not (self.inputs or dropout or self.band.cuts_window(seq, key)):
            return None
        return Limits(
            seq=seq.offset, key=key.offset, window=self.window or 0, two_sided=self.two_sided,
            padding=self.padding is not None, segments=self.segments is not None,
            longest=self.longest or key.size, dropout=dropout,
        )  # fmt: skip

    def accesses(self, lowering: Lowering, at: Index) -> list[Access]:
        """Return read accesses to the tiles of padding or segments, for a task on the key tile at["key"]."""
        return [R(lowering.tile(t, dict.fromkeys(t.axes, 0) | at | {"seq": at["key"]})) for t in self.inputs]

    def condition(self) -> Expression | None:
        """Return an expression that is true where a query attends to a key; None if all queries attend to all keys.

        The expression reads padding as input 1 of the operator. A mask with segments has no such expression.
        """
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
        """Return a boolean array that is true where a query attends to a key.

        Args:
            axes: axes of the scores, which end in seq, key. The array has these axes, with size 1 where the mask is the
                same along an axis.
            data: the values of padding or segments, if the mask has them.
        """
        result = self.band.allowed(sizes["seq"], sizes["key"])[None]
        if self.padding:
            result = result & (data[0] != 0)[:, None]
        if self.segments:
            rows = [_same_segment(offsets, sizes["seq"]) for offsets in np.atleast_2d(data[0])]
            result = result & np.stack(rows)
        known = {"batch": result.shape[0], "seq": sizes["seq"], "key": sizes["key"]}
        return result.reshape([known.get(axis, 1) for axis in axes])


def _same_segment(offsets: Array, positions: int) -> Array:
    """Return a boolean matrix [positions, positions]: true where two positions belong to the same sequence."""
    segment = np.searchsorted(offsets, np.arange(positions), side="right")
    live = (segment > 0) & (segment < len(offsets))
    return np.asarray((segment[:, None] == segment) & live)


def masked_softmax(scores: Array, allowed: Array) -> tuple[Array, Array]:
    """Return the softmax over the last axis, only of scores where `allowed` is true, and the log-sum-exp [..., 1].

    In a row without allowed scores both are 0.
    """
    scores = np.where(allowed, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    total = np.where(total > 0, total, 1.0)
    return e / total, np.log(total) + top
