"""Sampling of the next token of each sequence from its logits, on the device.

Axes: batch, vocab; setting (of SETTINGS), draw and position (positions of a sequence), entry (of a page table).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, RW, R, TaskArgs

from .cached_attention import COUNT, PAST
from .op import Array, GraphLike, Lowering, Op, Tensor, require

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # columns of the settings
NO_TOKEN = -1  # drawn instead of a token if a logit of the row is nan, or the largest is infinite


class UniteArgs(TaskArgs):
    first: int  # first column of x's tile in the row of y


class Unite(Op):
    """y = x [batch, ..., vocab] with uncut rows: each tile of x fills a part of the rows.

    y is [batch, token] if x has one row of logits for each sequence of the batch, else [batch, ..., token].
    """

    independent = True

    def __init__(self, x: Tensor, out: Tensor) -> None:
        require(x.axes[0] == "batch" and x.numel == out.numel, "unite: x and y need the same rows", x, out)
        super().__init__([x], [out])

    @property
    def sums(self) -> Sequence[Tensor]:
        return self.outputs

    def flop(self) -> float:
        return 0.0

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs[0]
        for index in lowering.indices(x):
            out = lowering.tile(self.output, index | {"token": 0})
            args = UniteArgs(lowering.part(x, x.axes[-1], index).offset)
            lowering.emit("unite", [ACC(out), R(lowering.tile(x, index))], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        return (inputs[0].reshape(self.output.shape),)


class SampleArgs(TaskArgs):
    tokens: int  # number of tokens that may be drawn: the first columns of the logits
    greedy: bool  # True: take the largest logit; the task has no tiles of settings and draws
    advances: bool  # True: the task also has the tiles ids and, if penalised, writes the history
    penalised: bool  # True: the task also has the history's tile


class Sample(Op):
    """Draw a token for each row of logits [batch, ..., vocab].

    The settings are applied in transformers' order:

    * repetition_penalty: for each token in the history, a positive logit is divided by the penalty, and a negative
      logit is multiplied by the penalty.
    * temperature: logits are divided by the temperature; 0: the largest logit is taken.
    * top_k: the k largest logits stay; 0: all.
    * top_p: a token stays if the sum of all larger probabilities is less than top_p.
    * min_p: a token stays if its probability is at least min_p times the largest probability.

    The draw u in [0, 1) then takes the first token, in the order of falling logits, whose cumulative probability
    exceeds u. A row without new tokens gets token 0 for position past + count. A row with a nan, or with an infinite
    largest logit, gets NO_TOKEN, and the next pass over this row reads token 0.

    Args:
        table: int64 [batch, entry], the page table, see CachedAttention.
        drawn: int64 [batch, ring]: column p % ring gets the token for position p of a sequence; other columns stay.
        settings: fp32 [batch, setting], in the order of SETTINGS. None: take the largest logit.
        draws: fp32 [batch, draw]; column past + count is the draw for the token at this position.
        history: int64 [batch, draw]: columns 0 to past + count - 1 are the sequence's tokens. None: no penalty.
        ids: int64 [batch, seq] with one position. The operator then prepares the next pass: it writes the token into
            `ids` and the history, and adds `count` to `past`. None: the table and the history are only read.
        tokens: number of tokens that may be drawn; None: all columns.
        after: the outputs: tensors in the storage of those inputs that the operator changes (drawn; with `ids` also
            table, history and ids).
    """

    independent = True
    colours: ClassVar = {"forward": "#e377c2"}

    def __init__(
        self, logits: Tensor, table: Tensor, drawn: Tensor, settings: Tensor | None = None, draws: Tensor | None = None,
        history: Tensor | None = None, ids: Tensor | None = None, tokens: int | None = None,
        after: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        require((settings is None) == (draws is None), "sample: settings and draws belong together", settings, draws)
        require(bool(settings) or not history, "sample: a history needs settings", history)
        self.table, self.settings, self.draws, self.history, self.ids = table, settings, draws, history, ids
        self.tokens = tokens or logits.shape[-1]
        self.drawn = drawn
        super().__init__([logits, table, drawn, *(t for t in (settings, draws, history, ids) if t)], after)

    def flop(self) -> float:
        return float(self.inputs[0].numel)

    def lower(self, lowering: Lowering) -> None:
        logits = self.inputs[0]
        args = SampleArgs(self.tokens, self.settings is None, self.ids is not None, self.history is not None)
        changes = RW if self.ids else R
        zeros = {axis: 0 for tensor in self.inputs for axis in tensor.axes}
        for at in lowering.indices(self.drawn):
            index = zeros | at
            accesses = [RW(lowering.tile(self.drawn, index)), R(lowering.tile(logits, index))]
            accesses += [changes(lowering.tile(self.table, index))]
            accesses += [R(lowering.tile(t, index)) for t in (self.settings, self.draws) if t]
            accesses += [changes(lowering.tile(t, index)) for t in (self.history, self.ids) if t]
            lowering.emit("sample", accesses, args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        values = dict(zip(self.inputs, inputs, strict=True))
        logits, table = inputs[0].reshape(len(inputs[0]), -1), inputs[1].astype(int).copy()
        ring = inputs[2].copy()
        history = values[self.history].copy() if self.history else None
        chosen = np.zeros(len(logits))
        for b, (past, count) in enumerate(table[:, [PAST, COUNT]].tolist()):
            at = past + count
            known: Array | list[int] = history[b, :at].astype(int) if history is not None else []
            if self.settings and self.draws and count:
                chosen[b] = drawn(logits[b, : self.tokens], values[self.settings][b], values[self.draws][b, at], known)
            elif count:
                chosen[b] = largest(logits[b, : self.tokens])
            ring[b, at % ring.shape[1]] = chosen[b]
            chosen[b] = max(chosen[b], 0)
            if history is not None and count and at < history.shape[1]:
                history[b, at] = chosen[b]
        if not self.ids:
            return (ring,)
        table[:, PAST] += table[:, COUNT]
        return (ring, table, *([history] if history is not None else []), chosen[:, None])


def largest(logits: Array) -> int:
    """Return the index of the (first) largest logit; NO_TOKEN if a logit is nan or the largest is infinite."""
    usable = not np.isnan(logits).any() and np.isfinite(logits.max())
    return int(logits.argmax()) if usable else NO_TOKEN


def drawn(logits: Array, settings: Array, u: float, history: Array | Sequence[int] = ()) -> int:
    """Return the token that Sample draws from a row of logits; see Sample for the arguments."""
    temperature, top_k, top_p, min_p, penalty = (float(value) for value in settings)
    scores = logits.astype(np.float64)
    seen = np.unique(np.asarray(history, int))
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if (first := largest(scores)) == NO_TOKEN or temperature == 0:
        return first
    order = np.argsort(-scores, kind="stable")[: int(top_k) or None]
    p = np.exp((scores[order] - scores[order[0]]) / temperature)
    before = np.cumsum(p) - p
    kept = (before < top_p * p.sum()) & (p >= min_p * p[0])
    p = p[: max(int(kept.sum()), 1)]
    return int(order[min(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"), len(p) - 1)])


def unite(g: GraphLike, x: Tensor) -> Tensor:
    """Return the logits x [batch, ..., vocab] with uncut rows, as [batch, token] or [batch, ..., token]; see Unite."""
    inner = {} if x.numel == x.shape[0] * x.shape[-1] else dict(zip(x.axes[1:-1], x.shape[1:-1], strict=True))
    sizes = {"batch": x.shape[0], **inner, "token": x.shape[-1]}
    return g.add(Unite(x, g.temp("logits", list(sizes), list(sizes.values()), x.dtype))).output
