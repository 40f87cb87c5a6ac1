"""Derivatives of formulas with respect to the elements that they read."""

from __future__ import annotations

import math
from collections.abc import Callable

from . import expression as ex
from .expression import Call, Expression, ScalarConstant

_ONE = ScalarConstant(1.0)

# {function: takes its call y and its operands, returns dy / d operand for each operand}; None: no derivative.
_FACTORS: dict[str, Callable[..., tuple[Expression | float | None, ...]]] = {
    "add": lambda y, a, b: (1.0, 1.0),
    "subtract": lambda y, a, b: (1.0, -1.0),
    "multiply": lambda y, a, b: (b, a),
    "divide": lambda y, a, b: (1.0 / b, -y / b),
    "negative": lambda y, a: (-1.0,),
    "maximum": lambda y, a, b: (_larger(a, b), _larger(b, a)),
    "exp": lambda y, a: (y,),
    "log": lambda y, a: (1.0 / a,),
    "sqrt": lambda y, a: (0.5 / y,),
    "tanh": lambda y, a: (1.0 - y * y,),
    "erf": lambda y, a: (ex.exp(-(a * a)) * (2 / math.sqrt(math.pi)),),
    "sin": lambda y, a: (ex.cos(a),),
    "cos": lambda y, a: (-ex.sin(a),),
    "select": lambda y, c, a, b: (None, ex.select(c, 1.0, 0.0), ex.select(c, 0.0, 1.0)),
}


def derivative_of(root: Expression, number: int) -> Expression | None:
    """Return the derivative of a formula with respect to input `number`; None if the formula does not depend on it.

    The formula must not reduce over an axis. A comparison has the derivative 0. If the operands of a maximum are equal,
    each operand gets half of the derivative, as in torch.
    """
    grads: dict[Expression, Expression] = {root: _ONE}
    found: Expression | None = None
    for node in reversed(ex.walk(root)):
        if (grad := grads.get(node)) is None:
            continue
        if isinstance(node, ex.Element) and node.number == number:
            found = grad if found is None else found + grad
        if not isinstance(node, Call) or ex.FUNCTIONS[node.name].truth:
            continue
        factors = _FACTORS[node.name](node, *node.parts)
        for part, factor in zip(node.parts, factors, strict=True):
            if factor is None or isinstance(part, ScalarConstant) or not _depends(part, number):
                continue
            term = _product(grad, factor)
            grads[part] = grads[part] + term if part in grads else term
    return found


def _larger(a: Expression, b: Expression) -> Expression:
    """Return 1 where a > b, 1/2 where a = b, else 0."""
    result: Expression = ex.select(a > b, 1.0, ex.select(a < b, 0.0, 0.5))
    return result


def _product(a: Expression, b: Expression | float) -> Expression:
    if isinstance(b, int | float):
        return a if b == 1.0 else ScalarConstant(a.value * b) if isinstance(a, ScalarConstant) else a * b
    return b if a is _ONE else a * b


def _depends(node: Expression, number: int) -> bool:
    return any(isinstance(one, ex.Element) and one.number == number for one in ex.walk(node))
