"""Parses YAML within limits of size, and writes YAML. Values without quotes are read as in YAML 1.2."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import yaml

from nntile_py.errors import ConfigError

# Line ends of YAML 1.1 that are characters of a line in YAML 1.2: next line, line separator, paragraph separator.
_NO_BREAKS = "\x85\u2028\u2029"


class _NoSpace(yaml.constructor.ConstructorError):
    """A key has no space after its colon. `problem` is the complete message."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys, and reads plain values by _PLAIN instead of YAML 1.1.

    PyYAML ends lines at _NO_BREAKS, as YAML 1.1 does. The loader therefore replaces these characters before parsing by
    characters that the text does not have, and restores them in the values.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        lower = text.lower()  # escapes such as \ue000 in quotes count as characters of the text
        private = range(0xE000, 0xF900)  # Unicode's Private Use Area
        unused = (chr(code) for code in private if chr(code) not in text and f"{code:x}" not in lower)
        instead: dict[str, str | int | None] = dict(zip(_NO_BREAKS, unused, strict=False))
        if len(instead) < len(_NO_BREAKS):
            raise ConfigError("too many characters of the Private Use Area")
        self._back = str.maketrans({str(new): old for old, new in instead.items()})
        super().__init__(text.translate(str.maketrans(instead)))

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        return value.translate(self._back) if isinstance(value, str) else value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, value in node.value:
            if joined := _joined_in(key, value):
                lines = joined.end_mark.line > joined.start_mark.line
                first = joined.value.partition(" ")[0] if lines else joined.value
                raise _NoSpace(None, None, without_space(first), joined.start_mark)
            if key.value in seen:
                problem = f"{key.value!r} is given twice; allowed: once"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_JOINED = re.compile(r"\s*(?:- )?([A-Za-z_]\w*):((?!//)\S.*)")  # a key and its value, without a space between them

_ALIAS = re.compile(r"\*(?:\[[^]]*]|[^\s,\]}])*")  # * and a pattern of names after it, such as *.h.[01].*


def without_space(text: str) -> str:
    """Return a message if a line or a value is a key without a space after its colon, such as layers:4; else "".

    YAML reads layers:4 as one text."""
    match = _JOINED.match(text)
    if not match:
        return ""
    return f"got {match[0].strip()}, with no space after the colon; allowed: {match[1]}: {match[2]}"


def _joined_in(key: yaml.Node, value: yaml.Node) -> yaml.ScalarNode | None:
    """Return the node whose text is a key and a value without a space between them; None if there is none.

    The node is a key without a value ({layers:4}), or the section below a key (`model:`, then a line `layers:4`)."""
    if not isinstance(value, yaml.ScalarNode) or value.style is not None:
        return None
    if isinstance(key, yaml.ScalarNode) and key.style is None and not value.value and _JOINED.match(key.value):
        return key
    below = key.start_mark.line < value.start_mark.line
    return value if below and _JOINED.match(value.value) else None


def _line_without_space(text: str, error: yaml.MarkedYAMLError) -> str:
    """Return the line's number and the message of `without_space` if such a line causes the error; else ""."""
    if isinstance(error, _NoSpace) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    lines = text.split("\n")
    marks = [mark.line for mark in (error.context_mark, error.problem_mark) if mark]
    before = max(marks, default=0) - 1
    while before > 0 and lines[before].partition("#")[0].strip() == "":
        before -= 1
    for number in (*marks, before):
        if 0 <= number < len(lines) and (message := without_space(lines[number])):
            return f"line {number + 1}: {message}"
    return ""


def _star(text: str, error: yaml.MarkedYAMLError) -> str:
    """Return a hint if an alias, which begins with *, causes the error, as in [*.wte.*]; else ""."""
    alone = error.problem and error.problem.startswith("found undefined alias")
    mark = error.context_mark if error.context == "while scanning an alias" else error.problem_mark if alone else None
    line = text.splitlines()[mark.line : mark.line + 1] if mark else []
    match = _ALIAS.match(line[0], mark.column) if mark and line else None
    if match is None:
        return ""
    return f'; allowed: a text that begins with * in quotes: "{match[0]}"'


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text which the loader, or YAML 1.1, would read as another value."""


# {type of a value without quotes: (its form, its first characters)}, as in YAML 1.2 without octal numbers. Other values
# are texts, even if YAML 1.1 reads them as numbers or truth values: 010 (8), 1:30 (90), 1_000, yes, off.
_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9]\d*)|0x[\da-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?((0|[1-9]\d*)\.\d*([eE][-+]?\d+)?|(0|[1-9]\d*|\.\d+)[eE][-+]?\d+|\.\d+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": ("<<", "<"),
}
for _name, (_form, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"({_form})$", re.ASCII), list(_first))


_BREAK = re.compile(r"[\n\x85\u2028\u2029]")  # line breaks of YAML; a carriage return is always escaped


class _OneLineDumper(_Dumper):
    """A YAML dumper that writes a text with line breaks in double quotes, and the value of an alias at each use."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAK.search(text) else None)


_OneLineDumper.add_representer(str, _OneLineDumper.represent_text)


def dump(value: Any, **style: Any) -> str:
    """Return a value as YAML that `parse` reads as the same value. style: arguments of yaml.dump."""
    return str(yaml.dump(value, Dumper=_Dumper, **style))


def as_written(value: Any) -> str:
    """Return a value as a YAML file has it, on one line, such as null, true, {batch: 2} or python-stdlib.

    A number, a value that YAML lacks, such as an array, and a value with too many levels become repr(value)."""
    if isinstance(value, dict | list | bool | str | None):
        with suppress(yaml.YAMLError, RecursionError):
            text = str(
                yaml.dump(value, Dumper=_OneLineDumper, default_flow_style=True, width=10**6, allow_unicode=True)
            )
            return text.removesuffix("\n").removesuffix("\n...")
    return repr(value)


def one_line(value: Any) -> str:
    """Return a value for a message as YAML on one line, such as {batch: 2}, cut to at most 60 characters.

    A text is in quotes. A value that YAML lacks, such as an array, becomes repr(value), and so does a long value:
    YAML of 90,000 numbers takes seconds."""
    text = repr(value)
    if not isinstance(value, str) and len(text) <= 1000:
        text = as_written(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


MOST_BYTES, MOST_VALUES, MOST_BITS = 10**6, 10**5, 1024  # limits: characters and values of a YAML, bits of a number


def parse(text: str, what: str) -> Any:
    """Parse a YAML text within the limits above; `what` names the text in errors. Raises ConfigError."""
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{what}: {len(text):,} characters; allowed: at most {MOST_BYTES:,}")
    try:
        tree = yaml.load(text, _Loader)
        values = _unfolded(tree, {})
    except yaml.MarkedYAMLError as error:
        if cause := _line_without_space(text, error):
            raise ConfigError(f"{what}, {cause}") from None
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or ""
        problem += _star(text, error) or ("" if "; allowed: " in problem else "; allowed: YAML")
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{what}{where}: {problem}") from None
    except Exception as error:  # PyYAML's constructors, such as of !!timestamp, raise various classes of errors
        raise ConfigError(f"{what}: {error}; allowed: YAML") from None
    if values > MOST_VALUES:
        need = f"at most {MOST_VALUES:,} values; the values of an alias (*name) count at each use"
        raise ConfigError(f"{what}: holds more values, or an alias within itself; allowed: {need}")
    return tree


def _unfolded(value: Any, counted: dict[int, int]) -> int:
    """Return the number of values in a parsed YAML, with aliases counted at each use.

    A list or mapping that contains itself counts as more than MOST_VALUES. `counted` caches the numbers by id.
    """
    if isinstance(value, dict | list | tuple | set):
        if id(value) not in counted:
            counted[id(value)] = MOST_VALUES + 1
            parts = (*value, *value.values()) if isinstance(value, dict) else value
            counted[id(value)] = 1 + sum(_unfolded(part, counted) for part in parts)
        return counted[id(value)]
    if type(value) is int and value.bit_length() > MOST_BITS:  # Python refuses to print much larger numbers
        raise ValueError(f"a number of {value.bit_length():,} bits; allowed: at most {MOST_BITS:,}")
    return 1 + len(value) // 1000 if isinstance(value, str) else 1
