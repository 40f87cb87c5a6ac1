"""A Definition as the text of a Triton kernel for tiles of given shapes: a program holds whole rows in registers.

Values are blocks [ROWS, BLOCK] of rows and columns, with 1 for what differs along one of them alone. Sums over rows are
added up by each program for its rows, into its part; another kernel adds these in their order, so that it is always the
same. Rows are numbered such that those axes come first that a sum keeps. How many there are is an argument: of packed
sequences a step fills the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .expression import (
    FUNCTIONS,
    Access,
    Call,
    Constant,
    Definition,
    Expression,
    Extent,
    Keep,
    Load,
    Output,
    Place,
    Reduce,
    TileType,
    nodes_of,
)


@dataclass(frozen=True)
class Sum:
    """An output that is added up of the programs' parts: `groups` rows of it, each of `per` programs' parts."""

    output: int
    groups: int


@dataclass(frozen=True)
class Text:
    """A kernel and how it is launched: each program of `groups` * `per` has rows of one group; `columns`: blocks.

    n: elements of a row."""

    source: str
    filled: int  # rows of a group
    rows: int  # of a program at a time
    block: int
    groups: int
    per: int
    columns: int
    n: int
    sums: tuple[Sum, ...]


def kept_axes(form: Definition) -> tuple[str, ...]:
    """The axes of rows that sums over rows keep: the same ones for all that keep any."""
    column = form.axes[-1]
    kept = (out.at[:-1] for out in form.outputs if out.total and column in out.at)
    return tuple(axis for axis in max(kept, key=len, default=()) if isinstance(axis, str))


@dataclass
class Writer:
    """Of a kernel on tiles of these shapes, outputs first; accumulates: which of them are added to.

    most: programs, where they have parts of sums; widest: columns of a row that is held whole."""

    form: Definition
    tiles: Sequence[TileType]
    shapes: Sequence[tuple[int, ...]]
    outputs: int
    accumulates: Sequence[bool]
    most: int
    lines: list[str] = field(default_factory=list)
    names: dict[Expression, str] = field(default_factory=dict)
    offsets: dict[tuple[int, Access], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes, self.column = self.form.axes, self.form.axes[-1]
        self.sizes = {}
        for axis in self.axes:
            number = next(k for k, tile in enumerate(self.tiles) if axis in tile.at)
            self.sizes[axis] = self.shapes[number][self.tiles[number].at.index(axis)]
        self.wide = "tl.float64" if any(tile.dtype == "fp64" for tile in self.tiles) else "tl.float32"
        self.keys = list(dict.fromkeys(node.key for node in nodes_of(self.form, Keep)))
        self.sums = [out for out in self.form.outputs if out.total and self.column in out.at]

    def text(self) -> Text:
        kept = kept_axes(self.form)
        rest = [axis for axis in self.axes[:-1] if axis not in kept]
        groups, n, filled = math.prod(map(self._size, kept)), self._size(self.column), self._filled(rest)
        rows = int(filled)
        whole = any(self.column not in out.at for out in self.form.outputs) or [*nodes_of(self.form, Reduce)]
        block = 1 << (n - 1).bit_length() if whole else min(1 << (n - 1).bit_length(), 4096)
        at_once = max(1, min((4096 if self.sums else 1024) // block, 1 << (rows - 1).bit_length()))
        per = -(-rows // at_once)
        if self.sums:
            per = min(per, max(1, self.most // groups))
        self._body(kept, rest)
        numbers = [f"I{k}" for k in range(2 * len(self.axes) + len(self.keys))]
        parts = [f"PART{k}" for k in range(len(self.sums))]
        arguments = ", ".join([*(f"T{k}" for k in range(len(self.tiles))), "rows", *numbers, "seed", *parts])
        head = [
            "def made(" + arguments + ", ROWS: tl.constexpr, BLOCK: tl.constexpr):",
            f"    group, part = tl.program_id(0).to(tl.int64) // {per}, tl.program_id(0).to(tl.int64) % {per}",
            "    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]",
            f"    there = col < {n}",
            *(f"    sum{k} = tl.zeros([ROWS, BLOCK], {self.wide})" for k in range(len(self.sums))),
        ]
        loop = f"    for start in range(part * ROWS, rows, {per} * ROWS):" if self.sums else "    start = part * ROWS"
        inner = "        " if self.sums else "    "
        body = [
            "row = start + tl.arange(0, ROWS)",
            "live = row[:, None] < rows",
            "r = tl.minimum(row, tl.maximum(rows - 1, 0))[:, None]",  # beyond the last: that one again
            "inside = live & there",
            *self.lines,
        ]
        tail = [
            f"    tl.store({part} + tl.program_id(0).to(tl.int64) * {n} + col, tl.sum(sum{k}, 0)[None, :], there)"
            for k, part in enumerate(parts)
        ]
        source = "\n".join([*head, loop, *(inner + line for line in body), *tail, ""])
        sums = tuple(Sum(out.number, groups if len(out.at) > 1 else 1) for out in self.sums)
        return Text(source, filled, at_once, block, groups, per, -(-n // block), n, sums)

    def _size(self, axis: str) -> int:
        return int(self.sizes[axis])

    def _filled(self, rest: Sequence[str]) -> int:
        """Rows of a group: of packed sequences, which are the first of them, those that a step fills."""
        first = next((axis for axis in rest if self.sizes[axis] > 1), None)
        inner = math.prod(self._size(axis) for axis in rest if axis != first)
        return self.sizes[first] * inner if first else inner

    # -- the body

    def _body(self, kept: Sequence[str], rest: Sequence[str]) -> None:
        for some, number in ((kept, "group"), (rest, "r")):
            for k, axis in enumerate(some):
                after = math.prod(map(self._size, some[k + 1 :]))
                self.lines.append(f"i{self.axes.index(axis)} = {number} // {after} % {self._size(axis)}")
        for out in self.form.outputs:
            value = self.value(out.value)
            if out in self.sums:
                self.lines.append(f"sum{self.sums.index(out)} += tl.where(inside, {value}, 0.0)")
            elif out.total:
                self._add_row(out, value)
            else:
                mask = "inside" if self.column in out.at else "live"
                self.lines.append(f"tl.store(T{out.number} + {self._offset(out.number, out.at)}, {value}, {mask})")

    def _add_row(self, out: Output, value: str) -> None:
        """A sum over columns: of each row, which is whole here."""
        at = f"T{out.number} + {self._offset(out.number, out.at)}"
        self.lines.append(f"row{out.number} = {self._reduced('sum', value)}")
        if self.accumulates[out.number]:
            self.lines.append(f"row{out.number} += tl.load({at})")
        self.lines.append(f"tl.store({at}, row{out.number}, live)")

    def _reduced(self, kind: str, value: str) -> str:
        lowest = "0.0" if kind == "sum" else 'float("-inf")'
        return f"tl.{kind}(tl.where(there, {value}, {lowest}), 1)[:, None]"

    def value(self, node: Expression) -> str:
        if isinstance(node, Constant):
            return f'float("{node.value}")' if math.isinf(node.value) else repr(node.value)
        if node not in self.names:
            text = self._text(node)
            self.names[node] = name = f"v{len(self.names)}"
            self.lines.append(f"{name} = {text}")
        return self.names[node]

    def _text(self, node: Expression) -> str:
        match node:
            case Load(number, at):
                return f"{self._loaded(number, at)}.to({self.wide})"
            case Call():
                return FUNCTIONS[node.name].triton.format(*map(self.value, node.parts))
            case Extent(axis):
                return f"{self._size(axis)}.0"
            case Place(axis):
                k = self.axes.index(axis)
                return f"(I{k} + {'col' if axis == self.column else f'i{k}'}).to({self.wide})"
            case Reduce(kind, _, x):
                return self._reduced(kind, self.value(x))
            case Keep():
                return self._keep(node)
        raise TypeError(f"no Triton of {node!r}")

    def _loaded(self, number: int, at: Access) -> str:
        tile = self.outputs + number
        mask = ", there, 0" if self.column in at else ""
        return f"tl.load(T{tile} + {self._offset(tile, at)}{mask})"

    def _keep(self, node: Keep) -> str:
        last = len(self.axes) - 1
        if node.draws:
            row = f"{self._loaded(node.draws.number, node.draws.at)} * I{2 * last + 1}"
        else:
            terms = []
            for k in range(last):
                wholes = " * ".join(f"I{len(self.axes) + j}" for j in range(k + 1, len(self.axes)))
                terms.append(f"(I{k} + i{k}) * {wholes}")
            row = " + ".join(terms) or "0"
        key = f"I{2 * len(self.axes) + self.keys.index(node.key)}"
        return f"kept({row} + I{last} + col, seed, {key}, {node.limit})"

    def _offset(self, tile: int, at: Access) -> str:
        """Of the block's elements in a tile."""
        if (tile, at) not in self.offsets:
            shape = self.shapes[tile]
            terms = []
            for k, axis in enumerate(at):
                step = math.prod(map(int, shape[k + 1 :]))
                place = f"i{self.axes.index(axis)}" if isinstance(axis, str) else str(axis)
                terms.append(f"{'col' if axis == self.column else place} * {step}")
            rows = any(axis != self.column and isinstance(axis, str) for axis in at)
            terms += [] if rows or self.column in at else ["r * 0"]
            self.offsets[tile, at] = name = f"at{len(self.offsets)}"
            self.lines.append(f"{name} = {' + '.join(terms)}")
        return self.offsets[tile, at]
