"""Generates pages of docs/reference/: keys of YAML files, commands and their options, functions of models/parts.py.

    scripts/reference.py [FOLDER]

Run it after a change of the docstrings or help texts that it reads. A test fails if the pages are out of date."""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from nntile_py.cli import app
from nntile_py.config.describe import model_reference, reference, tables
from nntile_py.measure.commands import bench_app
from nntile_py.measure.sweep_spec import Sweep
from nntile_py.models import parts as parts_of_models

_HEAD = """# Commands

<!-- Written by scripts/reference.py from the commands' own help; change the texts there. -->

`nntile COMMAND --help` shows the same. A wrong option, key, value, file or folder ends a command with exit status 2 and
one message that says what is allowed. Another error, such as a full disk, ends it with status 1 (`NNTILE_DEBUG=1` shows
the traceback). `nntile --install-completion` makes your shell complete commands, options, and keys after `--set`.
"""
_SWEEPS = """# Keys of a sweep's YAML

<!-- Written by scripts/reference.py from nntile_py/measure/sweep_spec.py; change the texts there. -->

`nntile sweep FILE` measures a config with other values of some keys: see [Make it faster](../tuning.md#sweeps).
"""
_PARTS = """# Parts of models

<!-- Written by scripts/reference.py from the docstrings of models/parts.py; change the texts there. -->

The functions of `nntile_py.models.parts` for a [model of your own](../write-a-model.md). `g` is the graph, `x` a
tensor, `batch` the argument of `trace`, `name` the prefix of the parameters' names; sizes are `{axis: size}`.

| call | result |
|---|---|
"""
_TYPES = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def commands() -> str:
    """Return the page docs/reference/commands.md, with all commands."""
    return "\n".join([_HEAD, *_pages(app, "nntile"), *_pages(bench_app, "nntile bench")])


def sweeps() -> str:
    """Return the page docs/reference/sweeps.md, with the keys of a sweep's YAML."""
    return "\n".join([_SWEEPS, *tables(Sweep)])


def parts() -> str:
    """Return the page docs/reference/parts.md, with the functions of models/parts.py."""
    rows = []
    for name, function in inspect.getmembers(parts_of_models, inspect.isfunction):
        if function.__module__ == parts_of_models.__name__ and not name.startswith("_"):
            meaning = " ".join((inspect.getdoc(function) or "").split())
            rows.append(f"| `{name}({_arguments(function)})` | {meaning} |\n".replace("[", r"\["))
    return _PARTS + "".join(rows)


def _arguments(function: Callable[..., Any]) -> str:
    """Return a function's parameters as text, with defaults and without types."""
    bare = [given.replace(annotation=given.empty) for given in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


def _pages(group: typer.Typer, prefix: str) -> Iterator[str]:
    for command in group.registered_commands:
        assert command.callback and command.epilog
        if command.add_help_option:  # `bench` has its own group of commands
            name = command.name or command.callback.__name__
            yield from _page(command.callback, f"{prefix} {name}", command.epilog)


def _page(function: Callable[..., None], name: str, example: str) -> Iterator[str]:
    kinds = get_type_hints(function, include_extras=True)
    rows = [_row(key, kinds[key], one.default) for key, one in inspect.signature(function).parameters.items()]
    usage = [name, *(typed for typed, _ in rows if not typed.startswith("-")), *(["[OPTIONS]"] if rows else [])]
    yield from (f"## {name}", "", " ".join((inspect.getdoc(function) or "").split()), "")
    yield from ("```text", f"Usage:   {' '.join(usage)}", example, "```", "", "| | |", "|---|---|")
    yield from ("| `{}` | {} |".format(*(cell.replace("|", r"\|") for cell in row)) for row in rows)
    yield ""


def _row(name: str, kind: Any, default: Any) -> tuple[str, str]:
    """Return a command's parameter as users type it, such as "--out PATH", and its help text."""
    infos = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    info = next((info for info in infos if isinstance(info, ArgumentInfo | OptionInfo)), OptionInfo())
    kind = get_args(kind)[0] if infos else kind
    kinds = {kind, *get_args(kind), *(inner for part in get_args(kind) for inner in get_args(part))}
    value = info.metavar or next((word for type_, word in _TYPES.items() if type_ in kinds), "")
    if isinstance(info, ArgumentInfo):
        typed = (info.metavar or name.upper()).strip("[]")
        typed = typed if default is inspect.Parameter.empty else f"[{typed}]"
    else:
        dashed = f"--{name.replace('_', '-')}"
        # typer stores the name of Annotated[..., typer.Option("--set")] as the default.
        names = [str(name) for name in (info.default, *(info.param_decls or ())) if str(name).startswith("--")]
        names = names or ([dashed, f"--no-{dashed[2:]}"] if bool in kinds else [dashed])
        typed = f"{', '.join(names)} {'' if bool in kinds else value}".strip()
    return typed, " ".join(filter(None, (info.help, _default(info, default))))


def _default(info: ArgumentInfo | OptionInfo, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "[required]" if isinstance(info, OptionInfo) else ""
    shown = default not in (None, "") and not isinstance(default, bool) and "[default: " not in (info.help or "")
    return f"[default: {default}]" if shown else ""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"config.md": reference(), "models.md": model_reference(), "sweeps.md": sweeps()}
    pages |= {"commands.md": commands(), "parts.md": parts()}
    for name, text in pages.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
