"""The commands `nntile init`, `nntile config`, `nntile train` and `nntile merge`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from nntile_py.cli.options import (
    ModelType,
    Sets,
    app,
    choose_micro_batches,
    choose_tiles,
    ends_at_ctrl_c,
    fields_of,
    note_tiles,
    show,
)
from nntile_py.errors import ConfigError
from nntile_py.runs import check_writable, newest_run, run_folder, run_of, taken
from nntile_py.system import launcher, output
from nntile_py.system.folders import NO_ROOM, write_new

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig


@app.command(epilog="Example: nntile init my.yaml --set data.source=my.txt")
def init(
    file: Annotated[Path | None, typer.Argument(help="The YAML file to write. [default: MODEL.yaml]")] = None,
    model: Annotated[
        str, typer.Option(metavar="TYPE", help="gpt2, bert, llama, ..., or a class of yours: my_file.py:MyModel.")
    ] = "gpt2",
    sets: Sets = None,
) -> None:
    """Write a YAML file for training, with all keys and a comment for each key."""
    from nntile_py.config.describe import initial

    file = file or Path(f"{model.rpartition(':')[2].lower()}.yaml")
    text = initial(str(file), model, sets or [])
    try:
        write_new(file, text)
    except FileExistsError:
        raise ConfigError(f"FILE: {file} exists; allowed: the name of a new file") from None
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise ConfigError(f"FILE: {file}: {error.strerror}; allowed: the name of a new file") from None
    print(f"wrote {file}; train it with: nntile train {file}")


@app.command(epilog="Example: nntile config my.yaml --set fusion=false")
def config(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file; not with --schema.")] = None,
    sets: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema of the keys, for editors.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="TYPE", help="With --schema: only this type of model. [default: all types]")
    ] = None,
) -> None:
    """Print CONFIG with all defaults filled in."""
    if schema == (config is not None) or (model and not schema):
        raise ConfigError("nntile config: allowed: CONFIG, or --schema with or without --model TYPE")
    if schema:
        from nntile_py.config.describe import schema as of

        show(of(model))
    else:
        from nntile_py.config.run_config import load

        print(load(str(config), sets or []).to_yaml(), end="")


@app.command(epilog="Example: nntile train my.yaml --set train.steps=100 --out runs/try")
@output.may_fail("training goes on, Ctrl-C stops it")
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file; with --resume also the folder of a run or a checkpoint.")
    ],
    where: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="With --resume: folder of a run or a checkpoint. [default: --out]"),
    ] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME for NAME.yaml]")] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace the run in the folder when this run has its first checkpoint. Files that no run wrote stay.",
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run from its newest complete checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every step: train.log_every=1.")] = False,
    rescue: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder to save to if the disk of the run's folder is full at the start or at the end."
        ),
    ] = None,
) -> None:
    """Train the model that CONFIG describes."""
    from nntile_py.config.builders import step_spec
    from nntile_py.config.scheduler_file import check_machine

    overrides = [*(sets or []), *["train.log_every=1"] * verbose]
    if resume:
        start = _resumed_run(config, where, out, overrides, overwrite, quiet)
    else:
        start = _new_run(config, where, out, overrides, overwrite)
    folder = start.folder
    if rescue and (taken(rescue) or os.path.realpath(rescue) == os.path.realpath(folder)):
        raise ConfigError(f"--rescue: {rescue} is the run's folder or not empty; allowed: another new or empty folder")
    check_machine(start.config.runtime)
    loaded = choose_tiles(choose_micro_batches(start.config, quiet=quiet), quiet=quiet)
    spec = step_spec(loaded)
    note_tiles(loaded, spec)
    with ends_at_ctrl_c(lambda: "saved checkpoints stay"):
        from rich.console import Console

        from nntile_py.training.run import train as run

        status = run(
            loaded.model_copy(update={"out": str(folder)}), spec, folder, Console(quiet=quiet),
            resume=start.checkpoint, replaces=overwrite and not resume, rescue=rescue, overrides=start.overrides,
        )  # fmt: skip
    raise typer.Exit(status)


@app.command(epilog="Example: nntile merge runs/my_run my_model")
def merge(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a run, or of save_pretrained.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder, which transformers reads.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapters of peft. [default: those in FOLDER]")] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the adapters alone, as peft reads them.")
    ] = False,
    sets: ModelType = None,
) -> None:
    """Add LoRA's adapters to the weights that they adapt."""
    from nntile_py.inference.merge_command import merge as merged

    with ends_at_ctrl_c(lambda: "nothing is written"):
        print(merged(folder, out, adapter, adapter_only, fields_of(sets)))


class _RunStart(NamedTuple):
    """Config, options and folders with which a run starts.

    Attributes:
        config: The run's config.
        overrides: The `--set` options of the run.
        folder: The run's folder.
        checkpoint: The folder to resume from; None: a new run.
    """

    config: "RunConfig"
    overrides: list[str]
    folder: Path
    checkpoint: Path | None


def _new_run(config: str, where: Path | None, out: Path | None, overrides: list[str], overwrite: bool) -> _RunStart:
    """Return the start of a new run. Arguments: see `train`."""
    from nntile_py.config.run_config import load

    if os.path.isdir(config):
        need = f"the path of a YAML file; to continue a run: nntile train --resume {config}"
        raise ConfigError(f"CONFIG: is a folder: {config}; allowed: {need}")
    loaded = load(config, overrides)
    if where:
        raise ConfigError(f"DIR: {where} is given without --resume; allowed: nntile train {config} --resume {where}")
    return _RunStart(loaded, overrides, run_folder(Path(config).stem, loaded.out, out, overwrite, trains=True), None)


def _resumed_run(
    config: str, where: Path | None, out: Path | None, overrides: list[str], overwrite: bool, quiet: bool
) -> _RunStart:
    """Return the start of a resumed run, with the run's saved options and choices. Arguments: see `train`."""
    from nntile_py.checkpoint.resume import candidates_in
    from nntile_py.config.run_config import load
    from nntile_py.config.saved_code import check_saved_overrides

    name = Path(config).stem
    of_run = where is None and not Path(config).is_file()  # typed as: nntile train --resume runs/my_run
    if of_run:
        where = Path(config)
        config = _config_of_run(where)

    def newest(configured: str | None) -> Path:
        from nntile_py.checkpoint.format import checkpoints_in

        start = where or newest_run(name, configured, out)
        return next((folder for _, folder in checkpoints_in(start)), start)

    loaded = load(config, overrides, newest, of_run)
    start = where or newest_run(name, loaded.out, out)
    if out:
        check_writable("--out", out)
    candidates_in(start)  # refuse a folder without checkpoints before any other work
    if where is None and not quiet and launcher.leads():
        print(f"resuming {start}" + (f", the newest run of {config}" if start != out else ""), flush=True)
    folder = out or run_of(start)
    if again := _saved_overrides(start, overrides):
        check_saved_overrides(again, start, overrides)
        overrides = [*again, *overrides]
        if not of_run:  # if CONFIG is a run's folder, its config.yaml already has these values
            loaded = load(config, overrides, newest)
    loaded = _with_saved_choices(loaded, start)
    if overwrite:
        raise ConfigError("--overwrite: got --resume too, which continues a run; allowed: one of the two")
    if os.path.realpath(folder) != os.path.realpath(run_of(start)) and taken(folder):
        raise ConfigError(f"--out: {folder} is another folder than that of {start}; allowed: a new or empty folder")
    return _RunStart(loaded, overrides, folder, start)


def _config_of_run(where: Path) -> str:
    """Return the path of the config.yaml of a run. where: the run's folder or one of its checkpoints."""
    config = str(run_of(where) / "config.yaml")
    if os.path.isfile(config):
        return config
    wrong = f"no such file or folder: {where}"
    if where.is_dir():
        wrong = f"{where} is not the folder of a run: {config} does not exist"
    need = "a YAML file, or with --resume the folder of a run, or one of its checkpoints"
    raise ConfigError(f"CONFIG: {wrong}; allowed: {need}")


def _with_saved_choices(config: "RunConfig", start: Path) -> "RunConfig":
    """Return the config with the number of micro-batches and the tile sizes of the run to resume, in place of `auto`.

    With other values, the resumed run would not have the same bits.
    """
    from nntile_py.checkpoint.resume import saved_micro_batches, saved_tiles
    from nntile_py.config.builders import micro_batched
    from nntile_py.config.sections import AUTO_TILES, TilesSection

    saved = saved_micro_batches(start) if config.train.auto_micro_batches else None
    if saved and config.train.batch in (saved[0], saved[0] * saved[1]):  # of the run's folder, or of the first config
        config = micro_batched(config, *saved)
    if config.tiles != AUTO_TILES or (tiles := saved_tiles(start)) is None:
        return config
    return config.model_copy(update={"tiles": TilesSection(**tiles)})


def _saved_overrides(start: Path, overrides: list[str]) -> list[str]:
    """Return and print the `--set` options of the run to resume, without keys that `overrides` sets again."""
    from nntile_py.checkpoint.resume import saved_overrides

    keys = {item.partition("=")[0] for item in overrides}
    again = [item for item in saved_overrides(start) if item.partition("=")[0] not in keys | {"out"}]
    if again and launcher.leads():
        print(f"options of the run so far: {' '.join(f'--set {item}' for item in again)}", flush=True)
    return again
