"""Arguments of kernels besides tiles. Each is declared once, and read by name in Python, Triton and C++."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, Self, dataclass_transform


@dataclass(frozen=True, slots=True)
class Slot:
    """A float argument that may change every step. The program looks its value up by `name` at submission."""

    name: str


class Kind(NamedTuple):
    """The type of an argument, parsed from its annotation.

    Attributes:
        base: int, bool, float, Slot, or the name of another class of arguments (a group).
        length: number of ints in a tuple; -1: any number; None: not a tuple.
        optional: whether a group may be None.
    """

    base: str
    length: int | None = None
    optional: bool = False

    @property
    def group(self) -> bool:
        return self.base not in ("int", "bool", "float", "Slot")


def kind_of(annotation: str) -> Kind:
    """Parse an annotation: int, bool, float, Slot, tuple[int, int], tuple[int, ...], a group or an optional group."""
    if match := re.fullmatch(r"tuple\[((int, )*)(int|\.\.\.)\]", annotation):
        return Kind("int", -1 if match[3] == "..." else match[1].count("int") + 1)
    if match := re.fullmatch(r"(?:\w+\.)*(\w+)( \| None)?", annotation):
        kind = Kind(match[1], optional=bool(match[2]))
        if kind.group or not kind.optional:
            return kind
    raise TypeError(f"an argument of a kernel cannot be a {annotation}")


class WithArgs(Protocol):
    """Protocol of an object with kernel arguments, such as a Task."""

    kernel: str
    args: TaskArgs


@dataclass_transform(frozen_default=True)
class TaskArgs:
    """The arguments of a kernel. A subclass declares them as fields and becomes a frozen dataclass:

        class EmbeddingArgs(TaskArgs):
            offset: int
            rows: int

    A field is an int, a bool, a float, a Slot (a float that changes every step), a tuple of ints of fixed length, or a
    group: another class of arguments. A tuple of any length, or a group that may be None, comes last.

    An operator passes an instance to `emit`. Python code that describes Triton launches reads the arguments by
    `EmbeddingArgs.of(task)`. C++ reads them by `const EmbeddingArgs args(t)`: setup.py generates a struct of this name
    in a header named after the Python file. A native task carries a tuple of ints and a tuple of floats, in the order
    of the fields.
    """

    _kinds: ClassVar[tuple[tuple[str, Kind], ...]] = ()

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        types = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        texts = {name: t if isinstance(t, str) else inspect.formatannotation(t) for name, t in types.items()}
        cls._kinds = tuple((name, kind_of(text)) for name, text in texts.items())

    @classmethod
    def of(cls, task: WithArgs) -> Self:
        """Return the task's arguments, which must be of this class."""
        assert isinstance(task.args, cls), (task.kernel, task.args)
        return task.args

    @cached_property
    def packed(self) -> tuple[tuple[int, ...], tuple[float | Slot, ...]]:
        """All fields as two flat tuples, of ints and of floats: the arguments of a native task."""
        ints: list[int] = []
        floats: list[float | Slot] = []
        for name, kind in self._kinds:
            value: Any = getattr(self, name)
            if kind.group:
                more = value.packed if value is not None else ((), ())
                ints += more[0]
                floats += more[1]
            elif kind.length is not None:
                assert kind.length in (-1, len(value)), (self, name)
                ints += map(int, value)
            elif kind.base in ("int", "bool"):
                ints.append(int(value))
            else:
                floats.append(value)
        return tuple(ints), tuple(floats)

    def named(self, floats: Iterator[float | Slot]) -> dict[str, Any]:
        """Return {field: value}. Floats and slots take their values from `floats`, in the order of the fields."""
        values: dict[str, Any] = {}
        for name, kind in self._kinds:
            value: Any = getattr(self, name)
            if kind.group and value is not None:
                value = replace(value, **value.named(floats))
            elif kind.base in ("float", "Slot"):
                value = next(floats)
            values[name] = value
        return values


NO_ARGS = TaskArgs()
