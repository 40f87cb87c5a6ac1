"""Derivatives of formulas, against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nntile_py.tasks.scalar import expression as ex
from nntile_py.tasks.scalar.derivative import derivative_of
from nntile_py.tasks.scalar.evaluate import evaluate

FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + 2 * b - a,
    "product": lambda a, b: a * b * a,
    "quotient": lambda a, b: a / (b * b + 1),
    "negative": lambda a, b: -a * b,
    "maximum": lambda a, b: ex.maximum(a, b) + ex.maximum(a, 0.3),
    "exponential": lambda a, b: ex.exp(a * b),
    "logarithm": lambda a, b: ex.log(a * a + b * b + 1),
    "root": lambda a, b: ex.sqrt(a * a + 1) * b,
    "tanh": lambda a, b: ex.tanh(a - b),
    "erf": lambda a, b: ex.erf(a) * b,
    "sine": lambda a, b: ex.sin(a) * ex.cos(b),
    "condition": lambda a, b: ex.select(a > b, a * b, b - a),
    "one value used twice": lambda a, b: (lambda t: t * t + t)(a * b),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_derivatives_are_those_of_differences(name: str) -> None:
    rng = np.random.default_rng(0)
    values = [rng.normal(size=40), rng.normal(size=40)]
    value = FORMULAS[name](ex.Element(0, ("d0",)), ex.Element(1, ("d0",)))

    def of(root: Any, inputs: list[Any]) -> Any:
        return evaluate(ex.Definition({"d0": 40}, (ex.Output(0, ("d0",), root),)), inputs, [(40,)])[0]

    for number in (0, 1):
        found = derivative_of(value, number)
        got = of(found, values) if found else np.zeros(40)
        step = np.where(np.arange(2) == number, 1e-6, 0.0)
        ahead, behind = ([x + sign * d for x, d in zip(values, step, strict=True)] for sign in (1, -1))
        np.testing.assert_allclose(got, (of(value, ahead) - of(value, behind)) / 2e-6, atol=1e-7)


def test_a_formula_without_the_input_has_no_derivative() -> None:
    assert derivative_of(ex.Element(0, ("d0",)) * 2, 1) is None
    assert derivative_of(ex.select(ex.Element(0, ("d0",)) > 0, 1.0, 0.0), 0) is None
