"""Types of a YAML's keys, and reading of a YAML with errors that name the key and the allowed values."""

import difflib
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError, field_validator
from pydantic.fields import FieldInfo

from nntile_py.errors import ConfigError
from nntile_py.system.folders import read
from nntile_py.typed import plain
from nntile_py.typed import short as short
from nntile_py.yaml_text import MOST_BYTES, one_line, parse, without_space

_UNITS = {"": 1, "B": 1} | {f"{p}B": 10 ** (3 * k) for k, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 2 ** (10 * k) for k, p in enumerate("KMGT", 1)}
SIZES = "a number of bytes, or a size such as '500MB' or '20GiB'"
LEAST_MEMORY = 2**20  # StarPU counts memory in MiB. A smaller number was probably typed without its unit.
MEMORY_SIZES = f"{SIZES}, of at least 1 MiB"
LEAST_DISK = 2**24  # StarPU's own minimum
DISK_SIZES = f"{SIZES}, of at least 16 MiB"
_SIZE = r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*"


@dataclass(frozen=True, eq=False)
class Rule:
    """The allowed values of a key: `words` for messages and docs, `json` as a JSON schema for editors."""

    words: str
    json: dict[str, Any]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return dict(self.json)


def only(words: str, convert: Callable[[Any], Any], **json: Any) -> tuple[PlainValidator, Rule]:
    """Return annotations of a key whose values are checked and converted by `convert`.

    If `convert` returns None, the value is refused, and the error names `words` as allowed. `json` is the key's
    JSON schema.
    """

    def check(value: Any) -> Any:
        result = convert(value)
        if result is None:
            raise ValueError(words)
        return result

    return PlainValidator(check), Rule(words, json)


# {argument of `number`: (the bound in words, its name in JSON schema, the comparison)}
_BOUNDS: dict[str, tuple[str, str, Callable[[Any, Any], bool]]] = {
    "least": ("of at least", "minimum", operator.ge),
    "above": ("above", "exclusiveMinimum", operator.gt),
    "most": ("at most", "maximum", operator.le),
    "below": ("below", "exclusiveMaximum", operator.lt),
}


def integer(least: int, most: int | None = None) -> tuple[PlainValidator, Rule]:
    """Return annotations of a key that accepts integers from `least` to `most`; without `most`, below 2^63.

    Larger integers are refused: to list the tiles of an axis of 2^63 entries would never end.
    """
    words = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    end = 2**63 if most is None else most + 1

    def convert(value: Any) -> int | None:
        if type(value) is int and value >= end and most is None:
            raise ValueError(f"{words} and less than 2^63")
        return value if type(value) is int and least <= value < end else None

    return only(words, convert, type="integer", minimum=least, **({} if most is None else {"maximum": most}))


def number(**bounds: float) -> tuple[PlainValidator, Rule]:
    """Return annotations of a key that accepts finite numbers within the bounds `least`, `above`, `most`, `below`."""

    def convert(value: Any) -> float | None:
        inside = type(value) in (int, float) and math.isfinite(value)
        return float(value) if inside and all(_BOUNDS[of][2](value, bound) for of, bound in bounds.items()) else None

    words = "a number " + " and ".join(f"{_BOUNDS[of][0]} {bound}" for of, bound in bounds.items())
    return only(words, convert, type="number", **{_BOUNDS[of][1]: bound for of, bound in bounds.items()})


def in_bytes(value: Any) -> int | None:
    """Return a size as a number of bytes; None if it is neither a positive integer nor a text such as '20GiB'."""
    if isinstance(value, str) and (match := re.fullmatch(_SIZE, value)):
        unit = _UNITS.get(match[2].upper())
        size = float(match[1]) * (unit or 0)
        value = int(size) if math.isfinite(size) else None
    if isinstance(value, float) and value.is_integer():  # 2e9
        value = int(value)
    return value if type(value) is int and value > 0 else None


def memory_bytes(value: Any) -> int | None:
    """Return a bound on memory as a number of bytes; None if it is no size, or smaller than LEAST_MEMORY."""
    size = in_bytes(value)
    return size if size and size >= LEAST_MEMORY else None


def disk_bytes(value: Any) -> int | None:
    """Return a bound on the bytes on a disk; None if it is no size, or smaller than LEAST_DISK."""
    size = in_bytes(value)
    return size if size and size >= LEAST_DISK else None


def _betas(value: Any) -> tuple[float, float] | None:
    two = isinstance(value, list | tuple) and len(value) == 2
    fits = two and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value)
    return (float(value[0]), float(value[1])) if fits else None


Count = Annotated[int, *integer(1)]
Natural = Annotated[int, *integer(0)]
if TYPE_CHECKING:
    Filled = int
else:
    Filled = Count | None
UNFILLED: Any = None  # default of a field of the type Filled: a number that a validator or the run fills in
Layers = Annotated[int, *integer(1, 1000)]  # at most 1000, because planning more layers takes minutes
Rows = Annotated[int, *integer(1, 2**31 - 1)]
if TYPE_CHECKING:  # commands replace "auto" by a number before they use the key
    RowsOrAuto = int
else:
    RowsOrAuto = Annotated[
        int | str,
        *only(
            f"an integer from 1 to {2**31 - 1}, or 'auto'",
            lambda v: v if v == "auto" or (type(v) is int and 1 <= v < 2**31) else None,
            anyOf=[{"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, {"const": "auto"}],
        ),
    ]
Positive = Annotated[float, *number(above=0)]
NonNegative = Annotated[float, *number(least=0)]
BelowOne = Annotated[float, *number(least=0, below=1)]
Inside = Annotated[float, *number(above=0, below=1)]
Share = Annotated[float, *number(above=0, most=0.5)]
Part = Annotated[float, *number(above=0, most=1)]
Size = Annotated[
    int,
    *only(
        SIZES, in_bytes,
        anyOf=[{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^{_SIZE}$"}],
    ),
]  # fmt: skip
MemorySize = Annotated[
    int,
    *only(
        MEMORY_SIZES, memory_bytes,
        anyOf=[{"type": "integer", "minimum": LEAST_MEMORY}, {"type": "string", "pattern": f"^{_SIZE}$"}],
    ),
]  # fmt: skip
DiskSize = Annotated[
    int,
    *only(
        DISK_SIZES, disk_bytes,
        anyOf=[{"type": "integer", "minimum": LEAST_DISK}, {"type": "string", "pattern": f"^{_SIZE}$"}],
    ),
]  # fmt: skip
Names = Annotated[
    Sequence[str],
    *only(
        "a list of names",
        lambda v: tuple(v) if isinstance(v, list | tuple) and all(isinstance(name, str) for name in v) else None,
        type="array", items={"type": "string"},
    ),
]  # fmt: skip
Switch = Annotated[bool, *only("true or false", lambda v: v if type(v) is bool else None, type="boolean")]
Betas = Annotated[
    Sequence[float],
    *only(
        "two numbers of at least 0 and below 1, such as [0.9, 0.95]", _betas,
        type="array", minItems=2, maxItems=2, items={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    ),
]  # fmt: skip
MOST_WORKERS = 4096  # largest number of workers of a machine, even of one that `nntile plan` only simulates
Workers = Annotated[
    int | str,
    *only(
        f"an integer from 0 to {MOST_WORKERS}, or 'all'",
        lambda v: v if v == "all" or (type(v) is int and 0 <= v <= MOST_WORKERS) else None,
        anyOf=[{"type": "integer", "minimum": 0, "maximum": MOST_WORKERS}, {"const": "all"}],
    ),
]
File = Annotated[str, Rule("the path of a file that exists", {"type": "string"})]
Folder = Annotated[str, Rule("the path of a folder that exists", {"type": "string"})]
Checked = TypeVar("Checked", bound=BaseModel)


class Section(BaseModel):
    """A section of a YAML. The text below a field documents the key in `nntile init`, docs/reference and editors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Copy the documentation of a base class's field to the same field here if this field has no text.

        Remove annotations from the signature that help() shows: they hold the rules that check values.
        """
        for name, field in cls.model_fields.items():
            above = (base.model_fields.get(name) for base in cls.__mro__[1:] if issubclass(base, Section))
            field.description = field.description or next((f.description for f in above if f and f.description), None)
        fields = [of.replace(annotation=of.empty) for of in inspect.signature(cls).parameters.values()]
        cls.__signature__ = inspect.Signature(fields)


class Settings(Section):
    """A section that is also a class of the Python interface, such as nt.AdamW.

    It is built from keyword arguments and immutable. `section` is the section's name in a YAML.

    Raises:
        ConfigError: A value is not allowed. The message names the section and the key."""

    model_config = ConfigDict(frozen=True)
    section: ClassVar[str]

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(explained(type(self), error, f"{self.section}.")) from None

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        """Convert a NumPy number, or a list of NumPy numbers, to Python numbers."""
        return [plain(item) for item in value] if isinstance(value, list | tuple) else plain(value)


def assignment(item: str) -> tuple[str, Any]:
    """Split the argument of --set, such as "tiles.embed=96", into key and parsed value."""
    key, equals, text = item.partition("=")
    if not equals or not all(key.strip().split(".")):
        lacks = "an empty key" if equals else "no `=`"
        raise ConfigError(f"--set {item}: has {lacks}; allowed: key=value, such as tiles.embed=96")
    return key.strip(), parse(text, f"--set {item}")


def read_yaml(path: Path, key: str, cls: type[BaseModel]) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file as a dict, without checks of its keys.

    Args:
        path: The file.
        key: Name of the option or key that gives the file, for errors.
        cls: The class of the mapping; errors list its keys.
    """
    try:
        tree = parse(read(path, 4 * MOST_BYTES + 1).decode(), str(path))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{key}: {reason}: {path}; allowed: the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text ({error}); allowed: a YAML file") from None
    if not isinstance(tree, dict):
        if isinstance(tree, str) and (message := without_space(tree)):
            raise ConfigError(f"{path}: {message}")
        what = "is empty" if tree is None else f"holds {one_line(tree)}"
        raise ConfigError(f"{path}: {what}; allowed: a mapping of {', '.join(_keys(cls))}")
    return tree


def validated(
    cls: type[Checked], tree: dict[str, Any], prefix: str = "", elsewhere: Callable[[], Iterable[str]] = tuple
) -> Checked:
    """Return an instance of the section class `cls` with the values of a YAML's mapping.

    Args:
        cls: Class of the section.
        tree: The mapping.
        prefix: The section's name with a dot, such as "train.", for messages.
        elsewhere: Returns the dotted keys of all sections, to suggest the right section for a misplaced key.

    Raises:
        ConfigError: At least one key is wrong. The message names all wrong keys."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explained(cls, error, prefix, elsewhere())) from None


def checked_value(key: str, kind: Any, value: Any) -> Any:
    """Return a value that the rule of an annotation such as NonNegative has checked and converted.

    Raises:
        ConfigError: The value is not allowed. The message names `key`."""
    validator = next(part for part in get_args(kind) if isinstance(part, PlainValidator))
    check: Callable[[Any], Any] = validator.func  # type: ignore[assignment]
    try:
        return check(plain(value))
    except ValueError as error:
        raise ConfigError(f"{key}: got {short(value)}; allowed: {error}") from None


def explained(cls: type[BaseModel], error: ValidationError, prefix: str = "", elsewhere: Iterable[str] = ()) -> str:
    """Return pydantic's error as a message with one line for each wrong key; see `validated` for the arguments."""
    places = list(elsewhere)
    # An error without `loc` is about the section itself: its name needs no dot.
    heads = ((prefix if e["loc"] else prefix.rstrip("."), e) for e in error.errors())
    return "\n  ".join(head + _explain(cls, e, places) for head, e in heads)


def allowed(given: Any, known: list[str], elsewhere: Iterable[str] = ()) -> str:
    """Return the end of a message about an unknown name: a suggestion, and all allowed names.

    The suggestion is the first match of: an equal name in another section, a similar name in `known`, a similar name in
    another section.

    Args:
        given: The unknown name.
        known: The allowed names.
        elsewhere: Dotted keys of all sections."""
    last = {key: key.rpartition(".")[2] for key in elsewhere}
    meant = [key for key, name in last.items() if name == given]
    meant = meant or difflib.get_close_matches(str(given), known, n=1)
    if not meant and (close := difflib.get_close_matches(str(given), set(last.values()), n=1, cutoff=0.75)):
        meant = [key for key, name in last.items() if name == close[0]]
    return (f"did you mean {' or '.join(meant)}? " if meant else "") + f"allowed: {', '.join(known)}"


def _explain(cls: type[BaseModel], error: Any, elsewhere: list[str]) -> str:
    """Return one of pydantic's errors as a line with the key, its value and the allowed values."""
    loc = error["loc"]
    key = ".".join(map(str, loc))
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return f"{key}: unknown key; {allowed(loc[-1], _keys(_inner(cls, loc[:-1])), elsewhere)}"
    if error["type"] == "missing":
        return f"{key}: not given, but required; allowed: {words(_inner(cls, loc[:-1]).model_fields[loc[-1]])}"
    what = str(error.get("ctx", {}).get("error", error["msg"].removeprefix("Input should be ")))
    what = "a text" if error["type"] == "string_type" else what
    if error["type"] in ("model_type", "model_attributes_type", "list_type"):
        field = _inner(cls, loc[:-1]).model_fields.get(loc[-1]) if loc else None
        what = words(field) if field else "a list" if error["type"] == "list_type" else _section_words(_inner(cls, loc))
    return f"{key}: got {one_line(error['input'])}; allowed: {what}"


# -- keys of a section


def keys(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) of a section and its inner sections. An inner section comes before its own keys."""
    for name, field in cls.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        if inner := section_of(field):
            yield from keys(inner, f"{key}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of the section that a key holds, or None if the key holds a plain value.

    A list of sections with a Rule counts as a plain value: the Rule describes the sections' keys."""
    if any(isinstance(rule, Rule) and rule.json.get("type") == "array" for rule in field.metadata):
        return None
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def words(field: FieldInfo) -> str:
    """Return the allowed values of a key in words."""
    return _words(field.annotation, field.metadata)


def _words(kind: Any, metadata: Iterable[Any] = ()) -> str:
    rule = next((m.words for m in metadata if isinstance(m, Rule)), None)
    origin, arguments = get_origin(kind), get_args(kind)
    if rule or origin is Annotated:
        return rule or _words(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return ", or ".join(_words(a) for a in arguments if a is not NoneType)
    if origin is Literal:
        names = [f"'{a}'" for a in arguments]
        return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _section_words(kind)
    plain = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "a section"}
    if origin is list:
        return f"a list of {_words(arguments[0])}"
    return plain.get(origin or kind) or str(kind)



def _section_words(cls: type[BaseModel]) -> str:
    return f"a section with {', '.join(_keys(cls))}"


def _inner(cls: type[BaseModel], loc: Iterable[Any]) -> type[BaseModel]:
    """Return the class of the inner section at the path `loc` of names (and list indices) below the section `cls`."""
    for name in loc:
        field = next((f for n, f in cls.model_fields.items() if name in (n, f.alias)), None)
        cls = (section_of(field) if field else None) or cls
    return cls


def _keys(cls: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in cls.model_fields.items()]


def absolute(path: str) -> Path:
    """Return the absolute path, with symbolic links resolved and ~ expanded. Circular links stay unresolved."""
    return Path(os.path.realpath(os.path.expanduser(path)))
