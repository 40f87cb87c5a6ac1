"""The command `nntile serve`."""

from pathlib import Path
from typing import Annotated

import typer

from nntile_py.cli.options import Cpus, Cuda, ModelType, Precision, alone, app, fields_of
from nntile_py.errors import ConfigError, as_options


@app.command(epilog="Example: nntile serve runs/my_run --port 8000")
def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a run, a checkpoint, or of save_pretrained.")
    ],
    port: Annotated[int, typer.Option(help="Port; 0: any free port.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. There is no password.")] = "127.0.0.1",
    name: Annotated[str | None, typer.Option(help="Name of the model. [default: the folder's name]")] = None,
    batch: Annotated[int, typer.Option(help="Texts that are generated at once.", min=1)] = 8,
    queue: Annotated[int, typer.Option(help="Waiting texts; further requests get status 429.", min=0)] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(help="Largest length of a prompt and its answer. [default: the positions, at most 2048]", min=2),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request ends with status 504.", min=0.1)] = 600,
    cache: Annotated[
        str | None, typer.Option(help="Memory for keys and values, such as 2GiB. [default: --batch x --max-length]")
    ] = None,
    cpus: Cpus = None,
    cuda: Cuda = 0,
    precision: Precision = "fp32",
    sets: ModelType = None,
) -> None:
    """Serve a model over HTTP with OpenAI's interface: completions, chat, embeddings."""
    alone("serve")
    try:
        import starlette as starlette
        import uvicorn as uvicorn
    except ModuleNotFoundError as error:
        need = "to install it: pip install starlette uvicorn"
        raise ConfigError(f"nntile serve: the package {error.name} is missing; allowed: {need}") from None
    from nntile_py.inference.serve_command import serve_folder

    options = {"batch": batch, "queue": queue, "max_length": max_length, "cache": cache, "precision": precision}
    with as_options(*options, "cpus", "cuda"):
        serve_folder(folder, (host, port), name, timeout, (cpus, cuda), options, fields_of(sets))
