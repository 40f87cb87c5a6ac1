"""YAML to checked values: what a key may hold, and errors that name the key and what is allowed."""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from nntile_py.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def only(what: str, convert: Callable[[Any], Any]) -> tuple[PlainValidator, Any]:
    """A validator that takes what `convert` turns into a value other than None; all else is refused, saying `what`."""

    def check(value: Any) -> Any:
        result = convert(value)
        if result is None:
            raise ValueError(what)
        return result

    return PlainValidator(check), Field(description=what)


def integer(least: int) -> tuple[PlainValidator, Any]:
    return only(f"an integer of at least {least}", lambda v: v if type(v) is int and v >= least else None)


def number(what: str, inside: Callable[[float], bool]) -> tuple[PlainValidator, Any]:
    return only(what, lambda v: float(v) if type(v) in (int, float) and math.isfinite(v) and inside(v) else None)


def _bytes(value: Any) -> int | None:
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        unit = _UNITS.get(match[2].upper())
        value = unit and int(float(match[1]) * unit)
    return value if type(value) is int and value > 0 else None


Count = Annotated[int, *integer(1)]
Natural = Annotated[int, *integer(0)]
Positive = Annotated[float, *number("a number above 0", lambda v: v > 0)]
NonNegative = Annotated[float, *number("a number of at least 0", lambda v: v >= 0)]
BelowOne = Annotated[float, *number("a number of at least 0 and below 1", lambda v: 0 <= v < 1)]
Inside = Annotated[float, *number("a number above 0 and below 1", lambda v: 0 < v < 1)]
Share = Annotated[float, *number("a number above 0 and at most 0.5", lambda v: 0 < v <= 0.5)]
Size = Annotated[int, *only("a number of bytes, or a size such as '500MB' or '20GiB'", _bytes)]
Switch = Annotated[bool, *only("true or false", lambda v: v if type(v) is bool else None)]
Betas = Annotated[
    list[float],
    *only(
        "two numbers of at least 0 and below 1, such as [0.9, 0.95]",
        lambda v: (
            [float(b) for b in v]
            if isinstance(v, list) and len(v) == 2 and all(type(b) in (int, float) and 0 <= b < 1 for b in v)
            else None
        ),
    ),
]
Workers = Annotated[
    int | str,
    *only("an integer of at least 0, or 'all'", lambda v: v if v == "all" or (type(v) is int and v >= 0) else None),
]
Checked = TypeVar("Checked", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """YAML with two traps removed: 1e-3 is a number (YAML 1.1 has it as text), a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str, what: str) -> Any:
    """What a YAML text holds; `what` names it in errors."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{what}{where}: {error.problem or error.context}; allowed: YAML") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{what}: {error}; allowed: YAML") from None


def assignment(item: str) -> tuple[str, Any]:
    """Key and value of a --set."""
    key, equals, text = item.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"--set {item}: allowed: key=value, such as tiles.embed=96")
    return key.strip(), parse(text, f"--set {item}")


def read_yaml(path: Path, key: str, cls: type[BaseModel]) -> dict[str, Any]:
    """The mapping that a YAML file holds, not yet checked against `cls`; `key` is what the user called it."""
    try:
        tree = parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{key}: {reason}: {path}; allowed: the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text ({error}); allowed: a YAML file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {short(tree)}; allowed: a mapping of {', '.join(_keys(cls))}")
    return tree


def validated(cls: type[Checked], tree: dict[str, Any], prefix: str = "") -> Checked:
    """The tree as a `cls`; else one ConfigError that names every wrong key."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explained(cls, error, prefix)) from None


def explained(cls: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """One line for each wrong key of a `cls`."""
    return "\n  ".join(prefix + _explain(cls, e) for e in error.errors())


def allowed(given: Any, known: list[str]) -> str:
    """The end of a message: the known name that is like the given one, and all of them."""
    close = difflib.get_close_matches(str(given), known, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"allowed: {', '.join(known)}"


def _explain(cls: type[BaseModel], error: Any) -> str:
    """One line: the key, what it got, what is allowed."""
    loc = error["loc"]
    key = ".".join(map(str, loc))
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return f"{key}: unknown key; {allowed(loc[-1], _keys(_inner(cls, loc[:-1])))}"
    if error["type"] == "missing":
        field = _inner(cls, loc[:-1]).model_fields[loc[-1]]
        what = field.description or f"a section with {', '.join(_keys(_inner(cls, loc)))}"
        return f"{key}: not given, but required; allowed: {what}"
    what = str(error.get("ctx", {}).get("error", error["msg"].removeprefix("Input should be ")))
    if error["type"] in ("model_type", "model_attributes_type"):
        what = f"a section with {', '.join(_keys(_inner(cls, loc)))}"
    return f"{key}: got {short(error['input'])}; allowed: {what}"


def _inner(cls: type[BaseModel], loc: Iterable[Any]) -> type[BaseModel]:
    """The section at a place; those in a list, or with null as the other choice, too."""
    for name in loc:
        field = next((f for n, f in cls.model_fields.items() if name in (n, f.alias)), None)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        cls = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), cls)
    return cls


def _keys(cls: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in cls.model_fields.items()]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
