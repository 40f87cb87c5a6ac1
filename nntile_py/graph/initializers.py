"""Initial values of parameters: normal, uniform, constant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError


def _check_number(what: str, value: Any, least: float = -math.inf) -> None:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        allowed = "a number" if least else f"a number of at least {least}"
        raise ConfigError(f"{what}: got {value!r}; allowed: {allowed}")


@dataclass(frozen=True)
class Normal:
    """Initialisation by a normal distribution with mean 0."""

    std: float

    def __post_init__(self) -> None:
        _check_number("Normal", self.std, 0)


@dataclass(frozen=True)
class Constant:
    """Initialisation of all elements to one value."""

    value: float

    def __post_init__(self) -> None:
        _check_number("Constant", self.value)


@dataclass(frozen=True)
class Uniform:
    """Initialisation by a uniform distribution from -bound to bound."""

    bound: float

    def __post_init__(self) -> None:
        _check_number("Uniform", self.bound, 0)


Init = Normal | Constant | Uniform
ZEROS = Constant(0.0)
ONES = Constant(1.0)
