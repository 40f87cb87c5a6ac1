"""Engine: continues many sequences at once.

A waiting sequence takes the place of a sequence that has ended (continuous batching).
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from nntile_py.errors import ConfigError, NNTileError, NotFinite
from nntile_py.execution.runtime import in_turns
from nntile_py.inference.decoder import CHANGED, Decoder, DrawnToken, Passes, PendingTokens, Row
from nntile_py.inference.token_logprobs import TokenLogProbs
from nntile_py.tasks.sample import NO_TOKEN

AHEAD = 2  # groups of decoding passes that are submitted before the tokens of the first group are read
Reason = Literal["stop", "length"]  # stop: a stop token or a stop text; length: the largest number of tokens


class Event(NamedTuple):
    """A new token.

    Attributes:
        token: Number of the token.
        reason: Why the sequence ends with this token; None: it continues.
        logprobs: Log-probabilities of the token, if the request asks for them.
    """

    token: int
    reason: Reason | None
    logprobs: TokenLogProbs | None = None


@dataclass(eq=False)
class Request:
    """A prompt to continue, and the state of its continuation.

    Attributes:
        prompt: Token numbers, at least one.
        max_tokens: Largest number of new tokens, at least 1.
        settings: Sampling settings, in the order of tasks.sample.SETTINGS.
        seed: Seed of the draws. Equal seeds give equal tokens, whatever other requests the engine has.
        stops: Numbers of tokens that end the sequence.
        name: Name of the text in messages.
        logprobs: How many most probable tokens to return with each new token; None: no log-probabilities.
        of_prompt: With `logprobs`: compute the log-probabilities of the prompt's tokens too, see Row.
        row: The sequence in the decoder; None: the request still waits.
        ended: The sequence has ended, or was cancelled.
        events: New tokens that the caller has not taken yet.
        error: Error that ended the sequence early, or None.
    """

    prompt: list[int]
    max_tokens: int
    settings: tuple[float, ...]
    seed: tuple[int, ...] = (0,)
    stops: frozenset[int] = frozenset()
    name: str = "the text"
    logprobs: int | None = None
    of_prompt: bool = False
    row: Row | None = None
    ended: bool = False
    events: deque[Event] = field(default_factory=deque)
    error: NNTileError | None = None

    def fail(self, error: NNTileError) -> None:
        """End the sequence by an error, unless it has ended already."""
        if not self.ended:
            self.ended, self.error = True, error

    def new_row(self) -> Row:
        """Return the row with which the sequence starts: the prompt and its draws."""
        first, limit = len(self.prompt), len(self.prompt) + self.max_tokens
        draws = np.zeros(limit + 1, np.float32)
        draws[first:] = np.random.default_rng(self.seed).random(limit + 1 - first, np.float32)
        row = Row(list(self.prompt), limit, self.settings, draws, logprobs=self.logprobs)
        if self.of_prompt and self.logprobs is not None:
            row.prompt_logprobs = []
        return row


class SubmittedPasses(NamedTuple):
    """A group of submitted decoding passes: their tokens, and the request of each row."""

    pending: PendingTokens
    requests: list[Request | None]


@dataclass
class Engine:
    """Continues requests in the rows of a decoder's passes.

    Up to AHEAD groups of passes are submitted before the tokens of the first group are read. When a sequence ends, its
    row stays in the passes until a waiting request needs the row, or until the row's pages are full. Further tokens of
    the row are dropped. The number of rows is a power of two, or the decoder's largest number of rows. It grows with
    the number of requests, and shrinks when all sequences have ended.
    """

    decoder: Decoder
    _waiting: deque[Request] = field(default_factory=deque)
    _active: list[Request | None] = field(default_factory=list)
    _in_flight: deque[SubmittedPasses] = field(default_factory=deque)
    _passes: Passes | None = None

    @property
    def busy(self) -> bool:
        """True if a request waits, or a row's sequence has not ended."""
        return bool(self._waiting) or self._active_count() > 0

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @in_turns
    def add(self, request: Request) -> None:
        """Append a request to the requests that wait for a row."""
        self._waiting.append(request)

    @in_turns
    def cancel(self, request: Request) -> None:
        """End a request; its further tokens are dropped."""
        request.ended = True
        if request in self._waiting:
            self._waiting.remove(request)

    @in_turns
    def step(self) -> None:
        """Submit passes, wait for the oldest group, and give its tokens to the requests. Call `step` while `busy`."""
        if self.decoder.bound.stale:  # the cache is lost, or has keys and values of other weights
            self._give_up(ConfigError(CHANGED))
        try:
            self._step()
        except BaseException:  # an interrupt comes at any place, and leaves tokens and pages inconsistent
            self._give_up(NNTileError("generation: interrupted, by Ctrl-C or by an error of another text"))
            raise

    def _step(self) -> None:
        if self._must_change():
            self._collect_all()
            self._clear_ended()
            self._admit()
            return
        if self._passes is None:
            self._passes = self.decoder.start([request.row if request else None for request in self._active])
        while len(self._in_flight) < AHEAD and (count := self._passes_that_fit()) > 0:
            rows = [request.row if request else None for request in self._active]
            pending = self.decoder.decode(self._passes, rows, min(count, self.decoder.passes_at_once))
            self._in_flight.append(SubmittedPasses(pending, list(self._active)))
        self._collect()

    @in_turns
    def close(self) -> None:
        """End all requests and wait for submitted passes."""
        for request in (*self._waiting, *self._active):
            if request:
                request.ended = True
        self._waiting.clear()
        self._collect_all()
        self._clear_ended()

    # -- inside

    def _give_up(self, error: NNTileError) -> None:
        """End the requests that have rows by an error. Submitted passes may still run; nothing reads their results."""
        for request in self._active:
            if request:
                request.fail(error)
        self._waiting = deque(request for request in self._waiting if not request.ended)
        self._active, self._passes = [], None
        self._in_flight.clear()
        self.decoder.release_all()

    def _active_count(self) -> int:
        """Return the number of rows whose sequences have not ended."""
        return sum(1 for request in self._active if request and not request.ended)

    def _passes_that_fit(self) -> int:
        """Return the number of further passes whose tokens fit into the pages of every row."""
        rows = [request.row for request in self._active if request and request.row]
        return min((row.limit - row.past - 1 for row in rows), default=0)

    def _must_change(self) -> bool:
        """Return True if the rows must change before the next pass."""
        if not self._active_count() or (self._passes_that_fit() <= 0 and not self._in_flight):
            return True
        return bool(self._waiting) and self._place(self._waiting[0], ended=True) is not None

    def _place(self, request: Request, *, ended: bool) -> int | None:
        """Return the number of the first row that a waiting request can take; None: no free row has enough pages.

        Args:
            ended: True: the rows and pages of ended requests count as free.
        """
        decoder, need = self.decoder, self.decoder.pages_for(len(request.prompt) + request.max_tokens)
        free: list[int] = []
        released = Counter[int]()  # {part: pages of ended requests}
        for place, one in enumerate(self._active):
            if one is None or (ended and one.ended):
                free.append(place)
                if one and one.row:
                    released[one.row.part] += len(one.row.pages)
        for place in free + list(range(len(self._active), decoder.rows)):
            part = decoder.part_of(place)
            if need <= decoder.free_pages(part) + released[part]:
                return place
        return None

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest group of passes and give its tokens to the requests that have not ended."""
        if not self._in_flight:
            return
        passes = self._in_flight.popleft()
        for tokens in self.decoder.tokens(passes.pending):
            for request, token in zip(passes.requests, tokens, strict=True):
                if request:
                    _append_token(request, token)

    def _clear_ended(self) -> None:
        """Free the rows and the pages of ended requests."""
        for number, request in enumerate(self._active):
            if request and request.ended:
                if request.row:
                    self.decoder.release(request.row)
                self._active[number], self._passes = None, None

    def _admit(self) -> None:
        """Give rows to waiting requests, and prefill their prompts, which draws their first tokens.

        During this call, another thread may cancel requests, and so may Python when it deletes a stream. Cancelled
        requests keep their rows.
        """
        if not any(self._active):
            self._active = []
        self._passes, new = None, list[Request]()
        for request in [*self._waiting]:
            row, place = request.new_row(), self._place(request, ended=False)
            if place is None or not self.decoder.admit(row, place):
                break
            request.row = row
            new.append(request)
            count = min(self.decoder.rows, 1 << place.bit_length())
            self._active += [None] * (count - len(self._active))
            self._active[place] = request
        for request in new:  # requests leave the queue after they are active, so that an interrupt loses no request
            with suppress(ValueError):  # the request was cancelled
                self._waiting.remove(request)
        tokens = self.decoder.prefill([request.row for request in new if request.row])
        for request, token in zip(new, tokens, strict=True):
            _append_token(request, token)


def _append_token(request: Request, drawn: DrawnToken) -> None:
    """Append a token to a request that has not ended, and end the request if it is complete.

    End the request by an error if no token was drawn.
    """
    if request.ended:
        return
    assert request.row
    token = drawn.number
    if token == NO_TOKEN:
        number = len(request.row.tokens) - len(request.prompt) + 1
        what = f"{request.name}: the logits of new token {number} are nan or infinite"
        request.fail(NotFinite(f"{what}; allowed: finite logits, by other weights or another precision"))
        return
    request.row.tokens.append(token)
    full = len(request.row.tokens) == request.row.limit
    reason: Reason | None = "stop" if token in request.stops else "length" if full else None
    request.ended = reason is not None
    request.events.append(Event(token, reason, drawn.logprobs))
