"""Clear error messages if a user passes an argument of a wrong type to the Python interface."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import numpy as np

from nntile_py.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_NUMBERS: dict[Any, Any] = {int: Integral, float: Real}  # numbers of numpy also fit these annotations


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of public functions: turns an unclear error into a TypeError that names the argument of the wrong type.

    Arguments are checked against their annotations only after an error, so a correct call costs nothing."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ConfigError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
            if isinstance(error, ConfigError) and "allowed" in str(error):
                raise
            given = inspect.signature(function)
            try:
                bound = given.bind(*args, **kwargs).arguments
            except TypeError:
                raise error from None
            for name, value, kind in _annotated(function, given, bound):
                if not fits(value, kind) and name not in str(error):
                    allowed = getattr(kind, "__name__", kind) if isinstance(kind, type) else kind
                    got = f"{name}: got {short(value)}; allowed: {allowed}"
                    raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}: {got}") from error
            raise

    return call


def typed_fields(cls: type[R]) -> type[R]:
    """Decorator of dataclasses: applies `typed` to the constructor."""
    changed = cast(Any, cls)
    changed.__init__ = typed(changed.__init__)
    return cls


def _annotated(
    function: Callable[..., Any], given: inspect.Signature, bound: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, annotated type) of each argument.

    Arguments are left out if their annotation cannot be evaluated, such as a type that only type checkers import.
    """
    names = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {}
    for name, value in bound.items():
        parameter = given.parameters[name]
        kind = parameter.annotation
        if isinstance(kind, str):
            try:
                kind = eval(kind, dict(names))
            except (NameError, AttributeError, TypeError):
                continue
        if kind is parameter.empty or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        for one, of in value.items() if parameter.kind is parameter.VAR_KEYWORD else ((name, value),):
            yield one, of, kind


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value has the type `kind` of an annotation, or if the annotation is of an unsupported form."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, kind) for kind in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if kind is None:
        return value is None
    if kind in (int, float):
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    base = origin or kind
    protocol = getattr(base, "_is_protocol", False) and not issubclass(base, Collection)
    if base is Any or not isinstance(base, type) or protocol:
        return True
    if base in (Sequence, Collection) and isinstance(value, str | bytes):
        return False
    if not isinstance(value, base):
        return False
    if issubclass(base, Mapping) and arguments:
        return all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in cast(Mapping[Any, Any], value).items())
    if issubclass(base, Collection) and arguments and isinstance(value, list | tuple | set | frozenset):
        kinds = arguments if base is tuple and arguments[-1] is not Ellipsis else (arguments[0],) * len(value)
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    return True


def plain(value: Any) -> Any:
    """Return a number of numpy or another library, or a Fraction, as Python int or float; other values unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def short(value: Any) -> str:
    """Return repr(value) for a message, cut to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
