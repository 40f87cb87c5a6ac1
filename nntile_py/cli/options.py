"""Parts that all commands of nntile share: the app, options, output."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system import launcher

UNCUT = 10**4  # columns of output that is not a terminal

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    epilog="Example: nntile init my.yaml && nntile train my.yaml",
)  # fmt: skip

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, such as `nntile init` writes.")]


def _complete_key(incomplete: str) -> list[str]:
    """Complete --set in a shell: the keys of all models."""
    from nntile_py.config.run_config import all_keys
    from nntile_py.models.registry import known

    found = (f"{key}=" for cls in known().values() for key in all_keys(cls.Config))
    return [key for key in dict.fromkeys(found) if key.startswith(incomplete)]


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, such as tiles.embed=96.", autocompletion=_complete_key
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def alone(command: str) -> None:
    """Refuse a start by mpirun."""
    if (size := launcher.started()[1]) > 1:
        raise ConfigError(
            f"nntile {command}: mpirun or srun has started {size} processes; allowed: one process without"
            " mpirun, which starts mpirun itself for points with a number in runtime.nodes"
        )


def note_tiles(config: Any, spec: Any) -> None:
    """Print a note if tiles are far too small. The command itself reports all other mistakes."""
    from contextlib import suppress

    from nntile_py.analysis.tile_advice import note

    with suppress(NNTileError):
        if launcher.leads() and (text := note(config, spec)):
            print(text, file=sys.stderr, flush=True)


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option}: {value!r} is not allowed; use {', '.join(allowed)}")


def show(what: Any) -> None:
    if isinstance(what, (dict, list)):
        print(json.dumps(what, indent=2))
    else:
        from rich.console import Console

        console = Console()
        if console.is_terminal and launcher.started()[1] == 1:  # mpirun gives ranks something like a terminal
            console.print(what)
        else:  # programs that read the output need each row in one line
            wide = Console(width=UNCUT, force_terminal=False)
            with wide.capture() as text:
                wide.print(what)
            print("\n".join(map(str.rstrip, text.get().splitlines())))
