"""The computation of an operator for one point of its iteration space, as data.

An iteration space is a list of named axes. A Definition has an expression for each output. Expressions read elements of
inputs, combine them with the functions of FUNCTIONS, and reduce over an axis by sum or maximum. An access lists the
axes of the space that index a tensor. Reads convert to the accumulation dtype (fp32, or fp64 for fp64), stores convert
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import erf as _erf
from typing import Any, Literal, NamedTuple

import numpy as np

Access = tuple[str | int, ...]  # for each axis of a tensor: an axis of the space, or a fixed index
Number = Any  # an expression or an array: the functions below accept and return both


class Function(NamedTuple):
    """A function of numbers, in numpy, C++ and Triton; truth: the result is a boolean."""

    numpy: Any
    cpp: str
    triton: str
    truth: bool = False


def _infix(function: Any, sign: str, truth: bool = False) -> Function:
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
    "erf": Function(np.vectorize(_erf, otypes=[float]), "erf_of({0})", "tl.erf({0})"),
    "greater": _infix(np.greater, ">", truth=True),
    "less": _infix(np.less, "<", truth=True),
    "unequal": _infix(np.not_equal, "!=", truth=True),
    "both": Function(np.logical_and, "({0} & {1})", "({0} & {1})", truth=True),
    "select": Function(np.where, "({0} ? {1} : {2})", "tl.where({0}, {1}, {2})"),
}


class Expression:
    """A value for each point of the space. Equality is identity of objects."""

    @property
    def parts(self) -> tuple[Expression, ...]:
        """The operands."""
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
    """The element of input `number` at this point."""

    number: int
    at: Access


@dataclass(frozen=True, eq=False)
class ScalarConstant(Expression):
    value: float


@dataclass(frozen=True, eq=False)
class Extent(Expression):
    """The number of points along the axis."""

    axis: str


@dataclass(frozen=True, eq=False)
class AxisIndex(Expression):
    """The index of the point along the axis, in the whole tensor."""

    axis: str


class Call(Expression):
    """A call of a function of FUNCTIONS; plain numbers become constants."""

    def __init__(self, name: str, *parts: Expression | float) -> None:
        self.name = name
        self._parts = tuple(p if isinstance(p, Expression) else ScalarConstant(float(p)) for p in parts)

    @property
    def parts(self) -> tuple[Expression, ...]:
        return self._parts


@dataclass(frozen=True, eq=False)
class Keep(Expression):
    """Whether dropout keeps the point: a hash of (the slot dropout_seed, key, index of the point in the whole tensor).

    row_numbers: numbers of the rows in that index; None: their positions. See Dropout in elementwise.py.
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
    """The sum or maximum of x over an axis, the same number for all points along the axis."""

    kind: Literal["sum", "max"]
    axis: str
    x: Expression

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Output:
    """A value and its output; total: stores the sum over the axes missing in `at`."""

    number: int
    at: Access
    value: Expression
    total: bool = False


@dataclass(frozen=True)
class TileType:
    """Type of a tile: dtype, axes of the space; total: the kernel adds to the tile."""

    dtype: str
    at: Access
    total: bool = False


@dataclass(frozen=True)
class Definition:
    """The computation of an operator: its space, {axis: size} in order, and its outputs."""

    sizes: Mapping[str, int]
    outputs: tuple[Output, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def nodes(self) -> list[Expression]:
        """Return all expressions once, operands first."""
        return walk(*(out.value for out in self.outputs))

    @property
    def reduced(self) -> tuple[tuple[str, ...], ...]:
        """Axes of each reduction: reductions within rows first, then sums of outputs."""
        axes: dict[tuple[str, ...], None] = {(n.axis,): None for n in self.nodes() if isinstance(n, Reduce)}
        for out in self.outputs:
            if out.total:
                axes[tuple(axis for axis in self.sizes if axis not in out.at)] = None
        return tuple(axes)


def walk(*roots: Expression) -> list[Expression]:
    """Return all expressions below the roots once, operands first."""
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
    """Replace each Element by change(element), unless that is None; `known` caches results."""
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
    """Return the definition's expressions of a class."""
    return (node for node in definition.nodes() if isinstance(node, kind))


def has(definition: Definition, kind: type[Any]) -> bool:
    """Return whether the definition has an expression of a class."""
    return any(isinstance(node, kind) for node in definition.nodes())


# -- functions of expressions and of arrays


def _apply(name: str, *parts: Any) -> Any:
    if any(isinstance(part, Expression) for part in parts):
        return Call(name, *parts)
    return np.asarray(FUNCTIONS[name].numpy(*parts))


def exp(x: Number) -> Number:
    return _apply("exp", x)


def sqrt(x: Number) -> Number:
    return _apply("sqrt", x)


def tanh(x: Number) -> Number:
    return _apply("tanh", x)


def erf(x: Number) -> Number:
    return _apply("erf", x)


def maximum(x: Number, y: Any) -> Number:
    return _apply("maximum", x, y)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Return yes where the condition holds, no elsewhere."""
    return _apply("select", condition, yes, no)


def total(x: Expression, axis: str) -> Expression:
    return Reduce("sum", axis, x)


def mean(x: Expression, axis: str) -> Expression:
    return Reduce("sum", axis, x) / Extent(axis)


def largest(x: Expression, axis: str) -> Expression:
    return Reduce("max", axis, x)
