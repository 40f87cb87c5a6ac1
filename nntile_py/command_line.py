"""Typer apps of nntile: wrong use of the command line raises ConfigError, like any other wrong input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from nntile_py.errors import ConfigError

# Options for settings that a config has as keys.
SETTINGS = ("tiles", "cpus", "cuda", "precision", "batch", "cache", "max_length", "seed")
UNCUT = 10**4  # characters of a command's description in the list of commands: none is shortened
# typer's own base class of errors about the command line, which has no public name.
_UsageError: Any = typer.BadParameter.__base__


class CommandApp(typer.Typer):
    """A typer app with the rules of CheckedGroup and CheckedCommand. Options: as for typer.Typer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=CheckedGroup, pretty_exceptions_enable=False, rich_markup_mode=None, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Return typer's decorator that adds a command."""
        return super().command(name, cls=CheckedCommand, **options)


class CheckedGroup(TyperGroup):
    """The commands of an app. Help lists their descriptions uncut; a usage error becomes a ConfigError."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _usage_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help(), file=sys.stderr)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(UNCUT)) for name, command in self.commands.items()])


class CheckedCommand(TyperCommand):
    """A command. Empty arguments and empty paths are refused: Path("") would be the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            typed, extra, _ = self.make_parser(ctx).parse_args([*args])  # {parameter: text, or list of texts}
            if extra and not (ctx.allow_extra_args or ctx.resilient_parsing):
                raise _UsageError(self._explain_extra(extra), ctx)
            try:
                rest = super().parse_args(ctx, args)
            except typer.BadParameter as error:
                raise _UsageError(self._explain(error, typed), ctx) from None
            if not ctx.resilient_parsing and not ctx.ignore_unknown_options:  # the rest is for another program
                self._check_not_empty(ctx, typed)
        except _UsageError as error:
            error.ctx = error.ctx or ctx
            if getattr(error, "possibilities", None) is not None and error.option_name == "--set":
                raise _UsageError(self.explain_set(), ctx) from None
            raise
        return rest

    def explain_set(self, *known: str) -> str:
        """Return the message on --set for a command that reads no config. It names the command's own options.

        known: Assignments that --set accepts."""
        own = [*known, *(_name(param) for param in self.params if param.name in SETTINGS)]
        keys = "other keys" if known else "keys"
        return f"--set: the command takes no {keys} of a config; allowed: {', '.join(own or ['other options'])}"

    def _explain(self, error: Any, typed: Mapping[str, Any]) -> str:
        """Return the message on a parameter that is missing or has a wrong value."""
        param, kinds = error.param, self._hints()
        if param is None or param.name not in kinds:
            return str(error.format_message())
        if not isinstance(value := typed.get(param.name), str):
            return f"{_name(param)}: missing"
        return f"{_name(param)}: got {value}; allowed: {_allowed(kinds[param.name]) or error.message}"

    def _explain_extra(self, extra: list[str]) -> str:
        """Return the message on arguments that the command does not have, with an example of the command."""
        names = [_name(param) for param in self.params if param.param_type_name == "argument"]
        example = f". {self.epilog}" if self.epilog else ""
        return f"got the extra argument {' '.join(extra)}; allowed: {', '.join([*names, 'options'])}{example}"

    def _check_not_empty(self, ctx: Any, typed: Mapping[str, Any]) -> None:
        for param in self.params:
            value = typed.get(param.name or "")
            if value != "" and not (isinstance(value, list | tuple) and "" in value):
                continue
            is_path = Path in _kinds(self._hints()[param.name or ""])
            if is_path or param.param_type_name == "argument":
                what = "path" if is_path else "text"
                raise _UsageError(f"{_name(param)}: got an empty text; allowed: a {what} that is not empty", ctx)

    def _hints(self) -> dict[str, Any]:
        """Return {parameter: its annotation}."""
        return get_type_hints(self.callback, include_extras=True)


def only_model_type(ctx: typer.Context, sets: list[str] | None) -> list[str] | None:
    """Callback of an option --set that accepts the key model.type alone. Raises a usage error for another key."""
    for item in sets or []:
        if item.partition("=")[0].strip() != "model.type":
            command: Any = ctx.command
            raise _UsageError(command.explain_set("--set model.type=FILE.py:CLASS"), ctx)
    return sets


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Context manager: a usage error becomes a ConfigError, with a second line that names the command's help."""
    try:
        yield
    except _UsageError as error:
        more = f"\nsee: {error.ctx.command_path} --help" if error.ctx else ""
        message = str(error.format_message())
        if message.endswith("requires an argument."):
            message = f"{error.option_name}: missing; allowed: {error.option_name} VALUE"
        raise ConfigError(f"{message}{more}") from None


def _name(param: Any) -> str:
    """Return a parameter's name in messages, such as --data or RUN."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper()).strip("[].")


def _kinds(hint: Any) -> set[Any]:
    """Return the types in an annotation: {list, Path} for Annotated[list[Path] | None, typer.Option()]."""
    return {hint, *(kind for part in get_args(hint) if not isinstance(part, str) for kind in _kinds(part))}


def _allowed(hint: Any) -> str:
    """Return the numbers that a parameter accepts, as text; "" if it accepts other values."""
    kinds = _kinds(hint)
    word = "an integer" if int in kinds else "a number" if float in kinds else ""
    limits = next((part for part in get_args(hint) if hasattr(part, "min")), None)
    ends = (getattr(limits, "min", None), getattr(limits, "max", None))
    least, most = ("" if end is None else f"{end:.15g}" for end in ends)
    if not word or not (least or most):
        return word
    if least and most:
        return f"{word} from {least} to {most}"
    return f"{word} of at least {least}" if least else f"{word} of at most {most}"
