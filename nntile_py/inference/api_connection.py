"""Connections to clients: requests that time out, clients that disconnect, streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nntile_py.inference.api_request import ApiError

CHECK_SECONDS = 1.0  # seconds between two checks whether a client is still connected


@dataclass
class Watch:
    """Checks once a second whether a request has timed out, and whether its client is still connected.

    Attributes:
        request: The request. `request.state.end` is the time of the event loop at which the request times out.
        late: The error of a request that has timed out.
        next_check: Time of the next check.
    """

    request: HttpRequest
    late: ApiError
    next_check: float = 0.0

    def __post_init__(self) -> None:
        self._plan()

    def _plan(self) -> None:
        self.next_check = min(self.request.state.end, asyncio.get_running_loop().time() + CHECK_SECONDS)

    @property
    def seconds(self) -> float:
        """Seconds until the next check."""
        return max(self.next_check - asyncio.get_running_loop().time(), 0)

    async def check(self) -> None:
        """Raise ApiError if the request has timed out or the client has disconnected."""
        if asyncio.get_running_loop().time() >= self.request.state.end:
            raise self.late
        if await self.request.is_disconnected():
            raise ApiError(499, "the client has gone")
        self._plan()


class EventStream(StreamingResponse):
    """Server-sent events. `end` is called after the last event, or whenever the client disconnects."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
