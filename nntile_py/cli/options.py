"""Shared by the commands of nntile: the typer app, common options, and printing."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nntile_py.command_line import CommandApp, only_model_type
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system import launcher
from nntile_py.system.units import counted

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

UNCUT = 10**4  # width, in characters, of output that does not go to a terminal: no line is wrapped

app = CommandApp(epilog="Example: nntile init my.yaml && nntile train my.yaml")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of a run; `nntile init` writes one.")]
OptionalConfig = Annotated[
    str | None, typer.Argument(metavar="[CONFIG]", help="YAML file of a run. [default: --work at BERT-large's size]")
]


def _complete_key(incomplete: str) -> list[str]:
    """Return completions of --set in a shell: the keys, of any model, that begin with the typed text."""
    from nntile_py.config.run_config import all_keys
    from nntile_py.models.registry import known

    keys = (f"{key}=" for cls in known().values() for key in all_keys(cls.Config))
    return [key for key in dict.fromkeys(keys) if key.startswith(incomplete)]


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, such as tiles.embed=96.", autocompletion=_complete_key
    ),
]
ModelType = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="model.type=FILE.py:CLASS",
        help="The model is this class of your own, and its file may run. Other keys are not allowed.",
        callback=only_model_type,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cpus = Annotated[int | None, typer.Option(help="CPU workers. [default: all cores, none with GPUs]")]
Cuda = Annotated[int, typer.Option(help="GPUs.")]
Precision = Annotated[str, typer.Option(help="fp32; on GPUs also tf32, bf16 or fp16, on CPUs fp64.")]


def load_config(config: str, sets: list[str] | None) -> "RunConfig":
    """Read the YAML file CONFIG, and replace `train.grad_accumulation: auto` by a number of micro-batches.

    The values of --set override keys of the file.
    """
    from nntile_py.config.builders import with_micro_batches
    from nntile_py.config.run_config import load

    return with_micro_batches(load(config, sets or []))


def fields_of(sets: list[str] | None) -> dict[str, Any]:
    """Return the fields of a model's config that `--set model.KEY=VALUE` options name."""
    from nntile_py.config.inference_config import model_fields

    return model_fields(sets or [])


@contextmanager
def ends_at_ctrl_c(message: Callable[[], str]) -> Iterator[None]:
    """Context manager: Ctrl-C in its block prints the message and ends the command with exit status 130."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; {message()}", file=sys.stderr)
        raise typer.Exit(130) from None


def alone(command: str) -> None:
    """Raise ConfigError if mpirun or srun started several processes."""
    if (size := launcher.started()[1]) > 1:
        raise ConfigError(
            f"nntile {command}: mpirun or srun has started {size} processes; allowed: one process without"
            " mpirun. The command itself starts mpirun for points with a number in runtime.nodes"
        )


def choose_micro_batches(config: "RunConfig", *, quiet: bool = False) -> "RunConfig":
    """Return the config with a number of micro-batches. If the config has `auto`, print the number, unless `quiet`."""
    from nntile_py.config.builders import with_micro_batches

    chosen = with_micro_batches(config)
    if chosen is not config and launcher.leads() and not quiet:
        size = chosen.train.batch
        what = f"{chosen.train.grad_accumulation}, each of {counted(size, 'sequence')}"
        print(f"micro-batches: {what}, chosen by estimates; `nntile plan` shows the estimates", flush=True)
    return chosen


def choose_tiles(config: "RunConfig", *, quiet: bool = False) -> "RunConfig":
    """Return the config with tile sizes. If it has `tiles: auto`, print the sizes that are chosen, unless `quiet`."""
    from nntile_py.config.builders import auto_tiles, with_tiles
    from nntile_py.config.sections import AUTO_TILES
    from nntile_py.graph.tile_choice import tiles_text

    if config.tiles != AUTO_TILES:
        return config
    kept = auto_tiles(config)
    if launcher.leads() and not quiet:
        by = "as measured by `nntile sweep --auto`" if kept.how == "measured" else "by estimates"
        print(f"tiles: {tiles_text(kept.tiles)}, chosen {by}; `nntile plan` shows the estimates", flush=True)
    return with_tiles(config)


def note_tiles(config: Any, spec: Any) -> None:
    """Print a note to stderr if the config's tiles are far too small, so that tasks would be too short."""
    from nntile_py.analysis.tile_advice import note

    with suppress(NNTileError):  # the command itself reports wrong configs
        if launcher.leads() and (text := note(config, spec)):
            print(text, file=sys.stderr, flush=True)


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless the option's value is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{option}: got {value!r}; allowed: {', '.join(allowed)}")


def show(what: Any) -> None:
    """Print a dict or list as JSON, and other objects with rich. Lines are wrapped only on a terminal."""
    if isinstance(what, (dict, list)):
        print(json.dumps(what, indent=2))
    else:
        from rich.console import Console

        console = Console()
        if console.is_terminal and launcher.started()[1] == 1:  # under mpirun, output may look like a terminal
            console.print(what)
        else:  # programs that read the output need each row of a table in one line
            console = Console(width=UNCUT, force_terminal=False)
            with console.capture() as text:
                console.print(what)
            print("\n".join(map(str.rstrip, text.get().splitlines())))
