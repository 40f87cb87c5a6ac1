"""`nntile serve`: run the HTTP server of a model until a signal comes."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nntile_py.data.tables import check_whole
from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.step import check_precision
from nntile_py.inference.api_request import ApiError
from nntile_py.inference.api_server import Api
from nntile_py.inference.open_model import open_model
from nntile_py.inference.service import Service

ENDING = 10.0  # seconds after SIGINT or SIGTERM in which open requests may end
CLOSING = 1.0  # seconds between the errors for open requests and the end of the server
SILENCE = 60.0  # largest time, in seconds, that a connection may take for the headers of its next request


def serve_folder(
    folder: Path, address: tuple[str, int], name: str | None, timeout: float, workers: tuple[int | None, int],
    options: Mapping[str, Any], fields: Mapping[str, Any],
) -> None:  # fmt: skip
    """Serve the model of a folder until SIGINT or SIGTERM.

    Args:
        folder: The folder, see open_model.
        address: Host and port; port 0: any free port.
        name: Name of the model. None: the folder's name.
        timeout: Seconds after which a request ends.
        workers: Number of CPU workers (None: the default), and number of GPUs.
        options: Arguments of Service.
        fields: Fields of the model's config that replace the folder's, see open_model.

    Raises:
        ConfigError: An option or the folder is wrong, or the address cannot be used.
    """
    name = folder.resolve().name if name is None else name
    check_whole("--name", name, ConfigError)
    if not name:
        raise ConfigError("--name: got an empty text; allowed: a text that is not empty")
    opened = open_model(folder, fields, torch_modules=False)
    cpus, cuda = workers
    check_precision("precision", options["precision"], cuda > 0)
    positions = getattr(opened.model.config, "positions", None)
    if (most := options["max_length"]) and positions and most > positions:
        raise ConfigError(f"--max-length: got {most}; allowed: at most the {positions} positions of the model")
    listener = _listener(address)
    with listener, Runtime(cpus=cpus, cuda=cuda):
        service = Service(opened, **options)
        try:
            app = Api(service, name, timeout).app()
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"serving {folder} on http://{shown}:{port}/v1; Ctrl-C ends it", flush=True)
            # h11 limits the length of headers. _Server._close_silent reads attributes of H11Protocol.
            config = uvicorn.Config(app, log_level="warning", lifespan="off", http=_Protocol, ws="none")
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # a line for each request
            _Server(config, service, min(timeout, SILENCE)).run(sockets=[listener])
        finally:
            service.stop()
    print("the server has ended", file=sys.stderr)


class _Protocol(H11Protocol):
    """Answers a request that is not valid HTTP with a JSON error."""

    def send_400_response(self, msg: str) -> None:
        """Send the error unless another answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = ApiError(400, "the request is not valid HTTP; allowed: HTTP/1.1").response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle:  # the application's own answer is dropped
                self.cycle.disconnected = True
        self.transport.close()


class _Server(uvicorn.Server):
    """Ends by SIGINT or SIGTERM, with exit status 0.

    Open requests have ENDING seconds after the first signal. After this time, or at a second signal, they get an error.
    A connection without an open request is closed after `silence` seconds.
    """

    def __init__(self, config: uvicorn.Config, service: Service, silence: float) -> None:
        super().__init__(config)
        self._service, self._at_once = service, False
        self._silence, self._next_note = silence, 0.0
        # Key: an idle connection and its last request. Value: time of the first check that saw the connection idle.
        self._silent: dict[Any, float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        await super().startup(sockets)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print a line at most once a minute if the process has too many open files to accept connections.

        asyncio itself would print thousands of tracebacks each second.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_note:
            self._next_note = loop.time() + 60
            count = f"open connections: {len(self.server_state.connections)}"
            note = f"{error.strerror} ({count}): further connections wait; `ulimit -n` raises the limit"
            print(note, file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server is to end. uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._close_silent()
        return await super().on_tick(counter)

    def _close_silent(self) -> None:
        """Close connections without an open request after some time; uvicorn waits for their headers forever."""
        now, connections = asyncio.get_running_loop().time(), self.server_state.connections
        lasts = [(one, one.cycle) for one in connections if isinstance(one, H11Protocol)]
        idle = [(one, cycle) for one, cycle in lasts if cycle is None or cycle.response_complete]
        self._silent = {pair: self._silent.get(pair, now) for pair in idle}
        for (connection, _), since in self._silent.items():
            if now - since >= self._silence:
                connection.transport.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager: signals end the server. Afterwards, signals have no effect until the process ends."""
        signals = signal.SIGINT, signal.SIGTERM
        for number in signals:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at a second signal, end open requests at once."""
        if not self.should_exit:
            note = f"the server ends: open requests have {ENDING:g} s; a second signal ends them at once"
            print(note, file=sys.stderr, flush=True)
        self._at_once, self.should_exit = self.should_exit, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, wait for open requests, then end the requests that are left."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + ENDING
        while loop.time() < end and not self._at_once:
            await asyncio.sleep(0.1)
        self._service.end()
        await asyncio.sleep(CLOSING)
        self.force_exit = True  # clients that still send a request, or read no answer, are cut off


def _listener(address: tuple[str, int]) -> socket.socket:
    host, port = address[0].removeprefix("[").removesuffix("]"), address[1]  # an address of a URL: [::1]
    if not host or not host.isprintable():  # half of a character is not printable; socket would leave a socket open
        got = repr(host) if host else "an empty text"
        raise ConfigError(f"--host: got {got}; allowed: an address of this machine, or 0.0.0.0 for all")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        of_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        name, need = ("--port", "a free port of this machine, or --port 0 for any") if of_port else (
            "--host", "an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        )  # fmt: skip
        reason = f"{getattr(error, 'strerror', 'this is no name of a host')}".partition(" (while")[0]
        raise ConfigError(f"{name}: cannot listen on {host}:{port}: {reason}; allowed: {need}") from None
