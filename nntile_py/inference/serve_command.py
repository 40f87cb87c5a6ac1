"""`nntile serve`: run the HTTP server of a model until a signal comes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn

from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.step import check_precision
from nntile_py.inference.api_server import Api
from nntile_py.inference.open_model import open_model
from nntile_py.inference.service import Service

ENDING = 10  # seconds after SIGINT or SIGTERM in which open requests may end


def serve_folder(
    folder: Path, address: tuple[str, int], name: str | None, timeout: float, workers: tuple[int | None, int],
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Serve the model of a folder until SIGINT or SIGTERM.

    Args:
        folder: The folder, see open_model.
        address: Host and port; port 0: any free port.
        name: Name of the model. None: the folder's name.
        timeout: Seconds after which a request ends.
        workers: Number of CPU workers (None: the default), and number of GPUs.
        options: Arguments of Service.

    Raises:
        ConfigError: An option or the folder is wrong, or the address cannot be used.
    """
    opened = open_model(folder)
    cpus, cuda = workers
    check_precision("precision", options["precision"], cuda > 0)
    positions = getattr(opened.model.config, "positions", None)
    if (most := options["max_length"]) and positions and most > positions:
        raise ConfigError(f"--max-length: got {most}; allowed: at most the {positions} positions of the model")
    listener = _listener(address)
    with listener, Runtime(cpus=cpus, cuda=cuda):
        service = Service(opened, **options)
        try:
            app = Api(service, name or folder.resolve().name, timeout).app()
            host, port = listener.getsockname()[:2]
            print(f"serving {folder} on http://{host}:{port}/v1; Ctrl-C ends it", flush=True)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=ENDING)
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            service.stop()


def _listener(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        number = error.errno or 0 if isinstance(error, OSError) else 0
        reason = os.strerror(number) if number > 0 else str(error)
        need = "a free port of this machine, or --port 0 for any"
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {reason}; allowed: {need}") from None
