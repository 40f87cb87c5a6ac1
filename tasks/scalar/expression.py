"""Formulas of operators for one point of their iteration space, as trees of expressions.

An iteration space is a list of named axes with sizes: the loops of an operator. A Definition has an expression for each
output. Expressions read elements of inputs, combine them with the functions of FUNCTIONS, and reduce over an axis by
sum or maximum. An access lists the axes of the space that index a tensor. Reads convert values to the accumulation
dtype: fp64 for operators with fp64 tensors, else fp32. Stores convert them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import erf as _erf
from typing import Any, Literal, NamedTuple

import numpy as np

Access = tuple[str | int, ...]  # for each axis of a tensor: the axis of the space that indexes it, or a fixed index
Number = Any  # expression or array; functions of Numbers return an expression if an argument is an expression


class Function(NamedTuple):
    """A function of numbers: in numpy, and as text of C++ and of Triton with {0}, {1}, ... for the operands.

    Args:
        truth: True: the result is a boolean.
    """

    numpy: Any
    cpp: str
    triton: str
    truth: bool = False


def _infix(function: Any, sign: str, truth: bool = False) -> Function:
    """Return a Function that C++ and Triton write with an operator between its two operands."""
    return Function(function, f"({{0}} {sign} {{1}})", f"({{0}} {sign} {{1}})", truth)


FUNCTIONS: dict[str, Function] = {
    "add": _infix(np.add, "+"),
    "subtract": _infix(np.subtract, "-"),
    "multiply": _infix(np.multiply, "*"),
    "divide": _infix(np.divide, "/"),
    "negative": Function(np.negative, "(-{0})", "(-{0})"),
    "maximum": Function(np.maximum, "larger({0}, {1})", "tl.maximum({0}, {1})"),
    "exp": Function(np.exp, "exp_of({0})", "tl.exp({0})"),
    "log": Function(np.log, "log_of({0})", "tl.log({0})"),
    "sqrt": Function(np.sqrt, "root_of({0})", "tl.sqrt({0})"),
    "tanh": Function(np.tanh, "tanh_of({0})", "tanh({0})"),
    "sin": Function(np.sin, "sin_of({0})", "tl.sin({0})"),
    "cos": Function(np.cos, "cos_of({0})", "tl.cos({0})"),
    "erf": Function(np.vectorize(_erf, otypes=[float]), "erf_of({0})", "tl.erf({0})"),
    "greater": _infix(np.greater, ">", truth=True),
    "less": _infix(np.less, "<", truth=True),
    "unequal": _infix(np.not_equal, "!=", truth=True),
    "both": Function(np.logical_and, "({0} & {1})", "({0} & {1})", truth=True),
    "select": Function(np.where, "({0} ? {1} : {2})", "tl.where({0}, {1}, {2})"),
}


class Expression:
    """A value for each point of the iteration space. Two expressions are equal only if they are the same object."""

    @property
    def parts(self) -> tuple[Expression, ...]:
        """The operands of the expression."""
        return ()

    def __add__(self, other: Expression | float) -> Expression:
        return Call("add", self, other)

    def __radd__(self, other: float) -> Expression:
        return Call("add", other, self)

    def __sub__(self, other: Expression | float) -> Expression:
        return Call("subtract", self, other)

    def __rsub__(self, other: float) -> Expression:
        return Call("subtract", other, self)

    def __mul__(self, other: Expression | float) -> Expression:
        return Call("multiply", self, other)

    def __rmul__(self, other: float) -> Expression:
        return Call("multiply", other, self)

    def __truediv__(self, other: Expression | float) -> Expression:
        return Call("divide", self, other)

    def __rtruediv__(self, other: float) -> Expression:
        return Call("divide", other, self)

    def __neg__(self) -> Expression:
        return Call("negative", self)

    def __gt__(self, other: Expression | float) -> Expression:
        return Call("greater", self, other)

    def __lt__(self, other: Expression | float) -> Expression:
        return Call("less", self, other)

    def __and__(self, other: Expression) -> Expression:
        return Call("both", self, other)


@dataclass(frozen=True, eq=False)
class Element(Expression):
    """The element of input `number` at the current point; at: the axes of the space that index the input."""

    number: int
    at: Access


@dataclass(frozen=True, eq=False)
class ScalarConstant(Expression):
    """A constant number."""

    value: float


@dataclass(frozen=True, eq=False)
class Extent(Expression):
    """The number of points along an axis of the space."""

    axis: str


@dataclass(frozen=True, eq=False)
class AxisIndex(Expression):
    """The index of the current point along an axis, counted in the whole tensor rather than in a tile."""

    axis: str


class Call(Expression):
    """A call of a function of FUNCTIONS. Plain numbers among the operands become a ScalarConstant."""

    def __init__(self, name: str, *parts: Expression | float) -> None:
        self.name = name
        self._parts = tuple(p if isinstance(p, Expression) else ScalarConstant(float(p)) for p in parts)

    @property
    def parts(self) -> tuple[Expression, ...]:
        return self._parts


@dataclass(frozen=True, eq=False)
class Keep(Expression):
    """True if dropout keeps the current point. See Dropout in elementwise.py.

    A hash of (slot dropout_seed, key, index of the point in the whole tensor) decides.

    Args:
        key: number of the dropout in the model.
        p: probability that dropout drops a point.
        row_numbers: for packed sequences: reads the row number, which replaces the row's position in the index of the
            point. None: the index uses the position.
    """

    key: int
    p: float
    row_numbers: Element | None = None

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.row_numbers,) if self.row_numbers else ()

    @property
    def limit(self) -> int:
        """Dropout keeps a point if its hash of 32 bits is at least this number."""
        return int(self.p * 2**32)


@dataclass(frozen=True, eq=False)
class Reduce(Expression):
    """The sum or maximum of x over an axis. It is the same value at all points along the axis."""

    kind: Literal["sum", "max"]
    axis: str
    x: Expression

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Output:
    """One value that an operator stores.

    Args:
        number: number of the output tensor. Several values may be stored in one tensor, at different fixed indices.
        at: for each axis of the output tensor: the axis of the space that indexes it, or a fixed index.
        value: the expression that is stored.
        total: True: the sum of the value over all axes of the space that `at` lacks is stored.
    """

    number: int
    at: Access
    value: Expression
    total: bool = False


@dataclass(frozen=True)
class TileType:
    """Type of a kernel's tile.

    Args:
        at: the axes of the space that index the tile.
        total: True: the tile is an output that is a sum over other axes (see Output).
    """

    dtype: str
    at: Access
    total: bool = False


@dataclass(frozen=True)
class Definition:
    """The formula of an operator: its iteration space as {axis: size}, in order, and its outputs."""

    sizes: Mapping[str, int]
    outputs: tuple[Output, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def reduces(self) -> bool:
        """Whether an output needs a sum or maximum over an axis; sums of outputs with `total` do not count."""
        return has(self, Reduce)

    def nodes(self) -> list[Expression]:
        """Return all expressions of the outputs, each once, operands before the expressions that use them."""
        return walk(*(out.value for out in self.outputs))

    @property
    def reduced(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each reduction, without repetition: first those of Reduce, then those of outputs with `total`."""
        axes: dict[tuple[str, ...], None] = {(n.axis,): None for n in self.nodes() if isinstance(n, Reduce)}
        for out in self.outputs:
            if out.total:
                axes[tuple(axis for axis in self.sizes if axis not in out.at)] = None
        return tuple(axes)


def walk(*roots: Expression) -> list[Expression]:
    """Return the roots and all expressions below them, each once, operands before the expressions that use them."""
    visited: dict[Expression, None] = {}

    def visit(node: Expression) -> None:
        if node not in visited:
            for part in node.parts:
                visit(part)
            visited[node] = None

    for root in roots:
        visit(root)
    return list(visited)


def replaced(
    root: Expression, known: dict[Expression, Expression], change: Callable[[Element], Expression | None]
) -> Expression:
    """Return a copy of an expression with each Element replaced by change(element), unless change returns None.

    Args:
        known: cache {expression: its copy}, shared by calls so that common operands stay common.
    """
    if root in known:
        return known[root]
    if isinstance(root, Element):
        result: Expression = change(root) or root
    elif isinstance(root, Call):
        result = Call(root.name, *(replaced(part, known, change) for part in root.parts))
    elif isinstance(root, Reduce):
        result = replace(root, x=replaced(root.x, known, change))
    elif isinstance(root, Keep) and root.row_numbers:
        row_numbers = replaced(root.row_numbers, known, change)
        assert isinstance(row_numbers, Element), "the result of another operator"
        result = replace(root, row_numbers=row_numbers)
    else:
        result = root
    known[root] = result
    return result


def nodes_of(definition: Definition, kind: type[Any]) -> Iterator[Any]:
    """Return the expressions of a definition that are instances of `kind`."""
    return (node for node in definition.nodes() if isinstance(node, kind))


def has(definition: Definition, kind: type[Any]) -> bool:
    """Return True if the definition has an expression that is an instance of `kind`."""
    return any(isinstance(node, kind) for node in definition.nodes())


# -- functions of expressions and of arrays


def _apply(name: str, *parts: Any) -> Any:
    """Apply the function `name`: return an expression if an operand is an expression, else compute it in numpy."""
    if any(isinstance(part, Expression) for part in parts):
        return Call(name, *parts)
    return np.asarray(FUNCTIONS[name].numpy(*parts))


def exp(x: Number) -> Number:
    return _apply("exp", x)


def sqrt(x: Number) -> Number:
    return _apply("sqrt", x)


def tanh(x: Number) -> Number:
    return _apply("tanh", x)


def sin(x: Number) -> Number:
    return _apply("sin", x)


def cos(x: Number) -> Number:
    return _apply("cos", x)


def log(x: Number) -> Number:
    return _apply("log", x)


def erf(x: Number) -> Number:
    return _apply("erf", x)


def maximum(x: Number, y: Any) -> Number:
    return _apply("maximum", x, y)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where the condition is true and `no` elsewhere, as an expression or as an array."""
    return _apply("select", condition, yes, no)


def total(x: Expression, axis: str) -> Expression:
    """Return the sum of x over an axis."""
    return Reduce("sum", axis, x)


def mean(x: Expression, axis: str) -> Expression:
    """Return the mean of x over an axis."""
    return Reduce("sum", axis, x) / Extent(axis)


def largest(x: Expression, axis: str) -> Expression:
    """Return the maximum of x over an axis."""
    return Reduce("max", axis, x)
