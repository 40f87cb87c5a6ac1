"""What the commands of nntile share: the app, options, what is printed."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system import launcher

UNCUT = 10**4  # columns, where there is no terminal

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    epilog="Example: nntile init my.yaml && nntile train my.yaml",
)  # fmt: skip

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, such as `nntile init` writes.")]


def _complete_key(incomplete: str) -> list[str]:
    """For a shell that completes --set: the keys of all models."""
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
    """Refuse to be started by mpirun."""
    if (size := launcher.started()[1]) > 1:
        raise ConfigError(
            f"nntile {command}: mpirun or srun has started {size} of it; allowed: one without mpirun, which itself"
            " starts mpirun for points whose runtime.nodes is a number"
        )


def note_tiles(config: Any) -> None:
    """Say at once where the tiles are far too small; what else is wrong the command itself tells."""
    from contextlib import suppress

    from nntile_py.analysis.tile_advice import note

    with suppress(NNTileError):
        if launcher.leads() and (told := note(config)):
            print(told, file=sys.stderr, flush=True)


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option}: {value!r} is not allowed; use {', '.join(allowed)}")


def show(what: Any) -> None:
    if isinstance(what, (dict, list)):
        print(json.dumps(what, indent=2))
    else:
        from rich.console import Console

        console = Console()
        if console.is_terminal and launcher.started()[1] == 1:  # what mpirun shows a rank looks like one
            console.print(what)
        else:  # whatever reads it wants each row in one line
            wide = Console(width=UNCUT, force_terminal=False)
            with wide.capture() as text:
                wide.print(what)
            print("\n".join(map(str.rstrip, text.get().splitlines())))
