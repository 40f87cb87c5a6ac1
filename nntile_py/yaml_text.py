"""Parses YAML within limits of size, and writes YAML. Values without quotes are read as in YAML 1.2."""

from __future__ import annotations

import re
from typing import Any

import yaml

from nntile_py.errors import ConfigError

# Line ends of YAML 1.1 that are characters of a line in YAML 1.2: next line, line separator, paragraph separator.
_NO_BREAKS = "\x85\u2028\u2029"


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
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


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


def dump(value: Any, **style: Any) -> str:
    """Return a value as YAML that `parse` reads as the same value. style: arguments of yaml.dump."""
    return str(yaml.dump(value, Dumper=_Dumper, **style))


MOST_BYTES, MOST_VALUES, MOST_BITS = 10**6, 10**5, 1024  # limits: characters and values of a YAML, bits of a number


def parse(text: str, what: str) -> Any:
    """Parse a YAML text within the limits above; `what` names the text in errors. Raises ConfigError."""
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{what}: {len(text):,} characters; allowed: at most {MOST_BYTES:,}")
    try:
        tree = yaml.load(text, _Loader)
        values = _unfolded(tree, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{what}{where}: {error.problem or error.context}; allowed: YAML") from None
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
