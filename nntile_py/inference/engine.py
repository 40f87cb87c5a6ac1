"""Engine: continues many sequences at once; sequences that end are replaced by waiting ones (continuous batching)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from nntile_py.errors import ConfigError, NNTileError, NotFinite
from nntile_py.execution.runtime import in_turns
from nntile_py.inference.decoder import Copied, Decoder, Passes, Row
from nntile_py.tasks.sample import NO_TOKEN

AHEAD = 2  # groups of decoding passes that are submitted before the tokens of the first group are read
CHANGED = (
    "generation: model.weights or the Runtime has changed while texts were generated; allowed: change them before or"
    " after"
)
Reason = Literal["stop", "length"]  # a token or a text that ends a sequence; the largest number of tokens


class Event(NamedTuple):
    """A new token; `reason`: why the sequence ends with this token, or None if it continues."""

    token: int
    reason: Reason | None


@dataclass(eq=False)
class Request:
    """A prompt that is to be continued.

    Attributes:
        prompt: Token numbers, at least one.
        max_tokens: Largest number of new tokens, at least 1.
        settings: In the order of tasks.sample.SETTINGS.
        seed: Entropy of the draws; equal seeds give equal tokens, whatever other requests are continued meanwhile.
        stops: Numbers of tokens that end the sequence.
        name: What messages call the text.
        row: The sequence while it is continued.
        ended: The sequence has ended, or was cancelled.
        events: Tokens that nobody has taken yet.
        error: Why the sequence ended without its last token, or None.
    """

    prompt: list[int]
    max_tokens: int
    settings: tuple[float, ...]
    seed: tuple[int, ...] = (0,)
    stops: frozenset[int] = frozenset()
    name: str = "the text"
    row: Row | None = None
    ended: bool = False
    events: deque[Event] = field(default_factory=deque)
    error: NNTileError | None = None

    def fail(self, error: NNTileError) -> None:
        """End the sequence without its last token."""
        if not self.ended:
            self.ended, self.error = True, error

    def new_row(self) -> Row:
        """Return the sequence at its start."""
        first, limit = len(self.prompt), len(self.prompt) + self.max_tokens
        draws = np.zeros(limit + 1, np.float32)
        draws[first:] = np.random.default_rng(self.seed).random(limit + 1 - first, np.float32)
        return Row(list(self.prompt), limit, self.settings, draws)


class Flight(NamedTuple):
    """Submitted decoding passes: the copy of their tokens, and the requests by row."""

    copied: Copied
    requests: list[Request | None]


@dataclass
class Engine:
    """Continues requests in the rows of a decoder's passes.

    Up to AHEAD groups of passes are submitted before tokens are read. A row whose sequence has ended stays until a
    waiting request takes its place, or until its pages are full; its further tokens are dropped. The number of rows is
    a power of two; it grows with the number of requests, up to the decoder's, and shrinks when there are none.
    """

    decoder: Decoder
    _waiting: deque[Request] = field(default_factory=deque)
    _active: list[Request | None] = field(default_factory=list)
    _in_flight: deque[Flight] = field(default_factory=deque)
    _passes: Passes | None = None

    @property
    def busy(self) -> bool:
        """True if a request waits or is continued."""
        return bool(self._waiting) or self._alive() > 0

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @in_turns
    def add(self, request: Request) -> None:
        """Let a request wait for a row."""
        self._waiting.append(request)

    @in_turns
    def cancel(self, request: Request) -> None:
        """End a request; its further tokens are dropped."""
        request.ended = True
        if request in self._waiting:
            self._waiting.remove(request)

    @in_turns
    def step(self) -> None:
        """Submit passes, wait for the oldest ones, and give their tokens to the requests. Call it while `busy`."""
        if self.decoder.bound.stale:  # keys and values are those of other weights, or are lost
            self._give_up(ConfigError(CHANGED))
        try:
            self._step()
        except BaseException:  # an interrupt comes at any place, and leaves tokens and pages of no sequence
            self._give_up(NNTileError("generation: interrupted, by Ctrl-C or by an error of another text"))
            raise

    def _step(self) -> None:
        if self._must_change():
            self._collect_all()
            self._clear_ended()
            self._admit()
            return
        if self._passes is None:
            self._passes = self.decoder.start([one.row if one else None for one in self._active])
        while len(self._in_flight) < AHEAD and (room := self._room()) > 0:
            rows = [one.row if one else None for one in self._active]
            copied = self.decoder.decode(self._passes, rows, min(room, self.decoder.passes_at_once))
            self._in_flight.append(Flight(copied, list(self._active)))
        self._collect()

    @in_turns
    def close(self) -> None:
        """Wait for submitted passes and give up all requests."""
        for one in (*self._waiting, *self._active):
            if one:
                one.ended = True
        self._waiting.clear()
        self._collect_all()
        self._clear_ended()

    # -- inside

    def _give_up(self, error: NNTileError) -> None:
        """End the requests that are continued. Submitted passes may run on: their pages are not read again."""
        for one in self._active:
            if one:
                one.fail(error)
        self._waiting = deque(one for one in self._waiting if not one.ended)
        self._active, self._passes = [], None
        self._in_flight.clear()
        self.decoder.release_all()

    def _alive(self) -> int:
        """Return the number of requests that are continued."""
        return sum(1 for one in self._active if one and not one.ended)

    def _room(self) -> int:
        """Return the number of further passes for whose tokens each row has a place."""
        return min((one.row.limit - one.row.past - 1 for one in self._active if one and one.row), default=0)

    def _must_change(self) -> bool:
        """Return True if the rows must change before the next pass."""
        if not self._alive() or (self._room() <= 0 and not self._in_flight):
            return True
        ended = [one for one in self._active if one and one.ended]
        room = len(self._active) < self.decoder.rows or ended or None in self._active
        if not self._waiting or not room:
            return False
        pages = sum(len(one.row.pages) for one in ended if one.row)
        first = self._waiting[0]
        return self.decoder.pages_for(len(first.prompt) + first.max_tokens) <= self.decoder.free_pages + pages

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest passes and give their tokens to the requests that have not ended."""
        if not self._in_flight:
            return
        flight = self._in_flight.popleft()
        for tokens in self.decoder.tokens(flight.copied):
            for one, token in zip(flight.requests, tokens, strict=True):
                if one and not one.ended:
                    _take(one, token)

    def _clear_ended(self) -> None:
        """Take the pages of ended requests back."""
        for number, one in enumerate(self._active):
            if one and one.ended:
                if one.row:
                    self.decoder.release(one.row)
                self._active[number], self._passes = None, None

    def _admit(self) -> None:
        """Give waiting requests rows, and compute their prompts and first tokens."""
        alive = [one for one in self._active if one]
        new: list[Request] = []
        for one in islice(self._waiting, self.decoder.rows - len(alive)):
            row = one.new_row()
            if not self.decoder.admit(row):
                break
            one.row = row
            new.append(one)
        before = len(self._active) if alive else 0
        count = max(before, min(self.decoder.rows, 1 << max(len(alive) + len(new) - 1, 0).bit_length()))
        self._active = [*alive, *new, *[None] * (count - len(alive) - len(new))]
        self._passes = None
        for _ in new:  # requests leave the queue after they are active, so that an interrupt loses no request
            self._waiting.popleft()
        for one, token in zip(new, self.decoder.prefill([one.row for one in new if one.row]), strict=True):
            _take(one, token)


def _take(request: Request, token: int) -> None:
    """Append a token to a request, and end the request if it is the last one."""
    assert request.row
    if token == NO_TOKEN:
        number = len(request.row.tokens) - len(request.prompt) + 1
        what = f"{request.name}: the logits of new token {number} are nan or infinite"
        request.fail(NotFinite(f"{what}; allowed: finite logits, by other weights or another precision"))
        return
    request.row.tokens.append(token)
    full = len(request.row.tokens) == request.row.limit
    reason: Reason | None = "stop" if token in request.stops else "length" if full else None
    request.ended = reason is not None
    request.events.append(Event(token, reason))
