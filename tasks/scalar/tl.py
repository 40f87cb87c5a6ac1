"""Generate the text of a Triton kernel from a Definition, for tiles of known shapes.

The last axis of the iteration space is the columns of a matrix, all other axes together are its rows. A program holds
blocks [ROWS, BLOCK] of this matrix in registers. If the Definition reduces over columns, blocks have whole rows. A
value that does not depend on the row has shape [1, BLOCK]; a value that does not depend on the column has shape
[ROWS, 1].

For a sum over rows, each program stores the partial sum of its rows, and a second kernel adds the partial sums in a
fixed order. Such a sum may keep some axes of the rows. These axes are the outermost in the numbering of rows: rows with
equal indices along them form a group. The number of rows is an argument of the kernel, because with packed sequences a
step fills only the first rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nntile_py.tiles.dtypes import DTYPES

from . import expression as ex

AHEAD = 64 << 10  # maximum bytes of shared memory for prefetched rows; GPUs from 8.0 on have at least 99 KiB


@dataclass(frozen=True)
class PartialSum:
    """An output that a second kernel computes by adding partial sums.

    Args:
        output: number of the output.
        groups: rows of the output. Each row is the sum over the Text.per programs of one group; if there is only one
            row, it is the sum over all programs.
    """

    output: int
    groups: int


@dataclass(frozen=True)
class BlockSizes:
    """How the work is divided among programs.

    Args:
        rows: rows of the block that a program computes at a time (ROWS).
        block: columns of the block that a program computes at a time (BLOCK).
        warps: warps of a program.
        programs: maximum number of programs, if the kernel has sums over rows.
        stages: number of blocks that a program prefetches, plus 1, if the kernel has sums over rows.
    """

    rows: int
    block: int
    warps: int
    programs: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Text:
    """The text of a kernel, and the numbers that its launch needs.

    Args:
        source: Python text of the kernel.
        filled: rows of a group; for packed sequences, the rows that a step fills.
        cut: block sizes.
        groups: number of groups of rows. A program computes rows of one group only.
        per: programs for each group.
        columns: blocks in a row.
        n: elements of a row.
        sums: outputs whose partial sums a second kernel must add.
    """

    source: str
    filled: int
    cut: BlockSizes
    groups: int
    per: int
    columns: int
    n: int
    sums: tuple[PartialSum, ...]


def kept_axes(definition: ex.Definition) -> tuple[str, ...]:
    """Return the row axes of the outputs that are summed over rows. Each such output has these axes, or no row axis."""
    column = definition.axes[-1]
    kept = (out.at[:-1] for out in definition.outputs if out.total and column in out.at)
    return tuple(axis for axis in max(kept, key=len, default=()) if isinstance(axis, str))


@dataclass
class Writer:
    """Writer of a kernel's text; `text` returns it.

    Args:
        tiles: types of the task's tiles: outputs, then inputs.
        shapes: shapes of these tiles.
        outputs: number of outputs among the tiles.
        accumulates: for each tile: True if the kernel adds to the tile instead of overwriting it.
        strides: strides of the axes in the whole tensor. Only kernels with dropout use `strides`, `even` and `numel`.
        even: True if each row of the tile begins at an even index in the whole tensor.
        numel: a bound above all indices in the whole tensor.
        cut: block sizes; None: those of `usual_cut`.
    """

    definition: ex.Definition
    tiles: Sequence[ex.TileType]
    shapes: Sequence[tuple[int, ...]]
    outputs: int
    accumulates: Sequence[bool]
    strides: Sequence[int] = ()
    even: bool = False
    numel: int = 0
    cut: BlockSizes | None = None
    lines: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)  # statements before the loop over rows
    names: dict[ex.Expression, str] = field(default_factory=dict)
    offsets: dict[tuple[int, ex.Access], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes, self.column = self.definition.axes, self.definition.axes[-1]
        self.sizes = {}
        for axis in self.axes:
            number = next(k for k, tile in enumerate(self.tiles) if axis in tile.at)
            self.sizes[axis] = self.shapes[number][self.tiles[number].at.index(axis)]
        self.accumulator = "tl.float64" if any(tile.dtype == "fp64" for tile in self.tiles) else "tl.float32"
        self.keys = list(dict.fromkeys(node.key for node in ex.nodes_of(self.definition, ex.Keep)))
        self.sums = [out for out in self.definition.outputs if out.total and self.column in out.at]
        self.kept = kept_axes(self.definition)
        self.rest = [axis for axis in self.axes[:-1] if axis not in self.kept]
        self.exact = False, False  # whether blocks end exactly at the last column, at the last row

    def text(self) -> Text:
        """Return the kernel's text and the numbers for its launch."""
        groups, n, filled = math.prod(map(self._size, self.kept)), self._size(self.column), self._filled()
        cut = self.cut = self.cut or self.usual_cut()
        self.exact = n % cut.block == 0, type(filled) is int and filled % cut.rows == 0
        per = -(-int(filled) // cut.rows)
        if self.sums:
            per = min(per, max(1, cut.programs // groups))
        self._body()
        numbers = [*(f"I{k}" for k in range(len(self.axes))), *(f"K{k}" for k in range(len(self.keys)))]
        direct = per == 1 < groups  # one program sums all rows of a group: no partial sums
        parts = [k for k, out in enumerate(self.sums) if not (direct and len(out.at) > 1)]
        arguments = [*(f"T{k}" for k in range(len(self.tiles))), "rows", *numbers, "seed", *(f"PART{k}" for k in parts)]
        head = [
            f"def generated({', '.join(arguments)}, ROWS: tl.constexpr, BLOCK: tl.constexpr):",
            f"    group, part = tl.program_id(0).to(tl.int64) // {per}, tl.program_id(0).to(tl.int64) % {per}",
            "    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]",
            f"    valid_columns = col < {n}",
            *("    " + line for line in self.before),
            *(f"    sum{k} = tl.zeros([1, BLOCK], {self.accumulator})" for k in range(len(self.sums))),
        ]
        loop = f"    for start in tl.range(part * ROWS, rows, {per} * ROWS, num_stages={cut.stages}):"
        loop = loop if self.sums else "    start = part * ROWS"
        inner = "        " if self.sums else "    "
        last = "row" if self.exact[1] else "tl.minimum(row, tl.maximum(rows - 1, 0))"  # reads no row beyond the last
        body = ["row = start + tl.arange(0, ROWS)", "valid_rows = row[:, None] < rows", f"r = {last}[:, None]"]
        body += self.lines
        tail = [f"    {line}" for k in range(len(self.sums)) for line in self._summed(k, part=k in parts)]
        source = "\n".join([*head, loop, *(inner + line for line in body), *tail, ""])
        added = tuple(PartialSum(self.sums[k].number, groups if len(self.sums[k].at) > 1 else 1) for k in parts)
        return Text(source, filled, cut, groups, per, -(-n // cut.block), n, added)

    def _summed(self, k: int, *, part: bool) -> list[str]:
        """Return code that stores the program's sum number k. part: as a partial sum; else as the sum of its group."""
        n, mask, number = self._size(self.column), self._mask(rows=False), self.sums[k].number
        if part:
            return [f"tl.store(PART{k} + tl.program_id(0).to(tl.int64) * {n} + col, sum{k}{mask})"]
        at = f"T{number} + group * {n} + col"
        more = [f"sum{k} += tl.load({at}{mask})"] if self.accumulates[number] else []
        return [*more, f"tl.store({at}, sum{k}{mask})"]

    @property
    def whole_rows(self) -> bool:
        """True if blocks must have whole rows: the Definition reduces over columns or has an output without columns."""
        return ex.has(self.definition, ex.Reduce) or any(self.column not in out.at for out in self.definition.outputs)

    def usual_cut(self) -> BlockSizes:
        """Return the block sizes that were fastest on an H200 (experiments/results/2026-11-24-kernels-h200.md)."""
        n, rows = self._size(self.column), int(self._filled())
        block = 1 << (n - 1).bit_length()
        if not self.whole_rows:
            block = min(max(n & -n, 256), 1024 if self.sums else 4096, block)  # divides n if n is a multiple of 256
        most = 2048 if self.sums else 1024  # maximum elements of a block with several rows
        at_once = max(1, min(most // block, 1 << (rows - 1).bit_length()))
        each = 16 if self.whole_rows and n == block and not self.sums else 32  # elements per thread
        warps = min(16, max(1, at_once * block // (32 * each)))
        loaded = [tile for tile in self.tiles[self.outputs :] if self.column in tile.at and len(tile.at) > 1]
        ahead = 2 * at_once * block * sum(DTYPES[tile.dtype].bytes for tile in loaded)
        stages = 3 if self.sums and ahead <= AHEAD else 1
        return BlockSizes(at_once, block, warps, 528 * block // max(n, block), stages)

    def _size(self, axis: str) -> int:
        return int(self.sizes[axis])

    def _filled(self) -> int:
        """Return the number of rows of a group; for packed sequences as a DynamicSize, the rows that a step fills."""
        first = next((axis for axis in self.rest if self.sizes[axis] > 1), None)
        inner = math.prod(self._size(axis) for axis in self.rest if axis != first)
        return self.sizes[first] * inner if first else inner

    # -- the body

    def _body(self) -> None:
        """Append the code that computes a block and stores the outputs."""
        for some, number in ((self.kept, "group"), (self.rest, "r")):
            for k, axis in enumerate(some):
                after = math.prod(map(self._size, some[k + 1 :]))
                self.lines.append(f"i{self.axes.index(axis)} = {number} // {after} % {self._size(axis)}")
        for out in self.definition.outputs:
            value = self.value(out.value)
            if out in self.sums:
                inside = self._mask(columns=False)[2:]  # sums of columns beyond the last are not stored: no mask
                value = f"tl.where({inside}, {value}, 0.0)" if inside else value
                self.lines.append(f"sum{self.sums.index(out)} += tl.sum({value}, 0)[None, :]")
            elif out.total:
                self._add_row(out, value)
            else:
                mask = self._mask(columns=self.column in out.at)
                self.lines.append(f"tl.store(T{out.number} + {self._offset(out.number, out.at)}, {value}{mask})")

    def _mask(self, *, rows: bool = True, columns: bool = True) -> str:
        """Return the text of a mask argument that excludes rows and columns beyond the last.

        It is empty if all blocks end exactly at the last row and column.
        """
        masks = ["valid_rows"] * (rows and not self.exact[1]) + ["valid_columns"] * (columns and not self.exact[0])
        return ", " + " & ".join(masks) if masks else ""

    def _add_row(self, out: ex.Output, value: str) -> None:
        """Append code that stores the sum over columns of each row. Blocks have whole rows here."""
        at = f"T{out.number} + {self._offset(out.number, out.at)}"
        self.lines.append(f"row{out.number} = {self._reduced('sum', value)}")
        if self.accumulates[out.number]:
            self.lines.append(f"row{out.number} += tl.load({at})")
        self.lines.append(f"tl.store({at}, row{out.number}{self._mask(columns=False)})")

    def _reduced(self, kind: str, value: str) -> str:
        """Return Triton text that reduces a value of the block over columns; kind: sum or max."""
        lowest = "0.0" if kind == "sum" else 'float("-inf")'
        value = value if self.exact[0] else f"tl.where(valid_columns, {value}, {lowest})"
        return f"tl.{kind}({value}, 1)[:, None]"

    def value(self, node: ex.Expression) -> str:
        """Return Triton text for a value: a constant, or a variable whose statement the first call appends."""
        if isinstance(node, ex.ScalarConstant):
            return f'float("{node.value}")' if math.isinf(node.value) else repr(node.value)
        if node not in self.names:
            text = self._text(node)
            self.names[node] = name = f"v{len(self.names)}"
            lines = self.before if isinstance(node, ex.Element) and node.at == (self.column,) else self.lines
            lines.append(f"{name} = {text}")
        return self.names[node]

    def _text(self, node: ex.Expression) -> str:
        """Return the Triton expression of a node, with variables for its operands."""
        match node:
            case ex.Element(number, at):
                return f"{self._loaded(number, at)}.to({self.accumulator})"
            case ex.Call():
                return ex.FUNCTIONS[node.name].triton.format(*map(self.value, node.parts))
            case ex.Extent(axis):
                return f"{self._size(axis)}.0"
            case ex.AxisIndex(axis):
                k = self.axes.index(axis)
                return f"(I{k} + {'col' if axis == self.column else f'i{k}'}).to({self.accumulator})"
            case ex.Reduce(kind, _, x):
                return self._reduced(kind, self.value(x))
            case ex.Keep():
                return self._keep(node)
        raise TypeError(f"no Triton of {node!r}")

    def _loaded(self, number: int, at: ex.Access) -> str:
        """Return Triton text that loads elements of input `number` for the block."""
        tile = self.outputs + number
        mask = ", valid_columns, 0" if self.column in at and not self.exact[0] else ""
        return f"tl.load(T{tile} + {self._offset(tile, at)}{mask})"

    def _keep(self, node: ex.Keep) -> str:
        """Return Triton text that is true where dropout keeps an element of the block."""
        last, key = len(self.axes) - 1, f"K{self.keys.index(node.key)}"
        assert self.cut
        even, same = self.even and self.cut.block > 1, not node.row_numbers and self.numel <= 2**33
        how = f"tl.program_id(1) * BLOCK, seed, {key}, {node.limit}, BLOCK, {even}, {same}"
        if node.row_numbers:
            row = f"{self._loaded(node.row_numbers.number, node.row_numbers.at)} * {self.strides[-2]}"
            return f"kept_columns({row} + I{last}, {how})"
        steps = dict(zip(self.axes[:-1], self.strides, strict=False))
        first = " + ".join(f"I{k} * {step}" for k, step in enumerate(steps.values()))
        row = " + ".join([*([first] if first else []), f"I{last}", *self._places(steps)])
        return f"kept_columns({row}, {how})"

    def _places(self, steps: dict[str, int]) -> list[str]:
        """Return the terms of an element's offset that depend on the row.

        Axes that are contiguous in the tile share one term.

        Args:
            steps: strides of the tile along its axes other than columns.
        """
        terms = []
        for some, number in ((self.kept, "group"), (self.rest, "r")):
            own = {axis: steps[axis] for axis in some if axis in steps}
            inner, size = next(reversed(own.values()), 0), 1
            one = len(own) == len(some)
            for axis in reversed(some):
                one = one and (own[axis] == inner * size or self._size(axis) == 1)
                size *= self._size(axis)
            each = [f"i{self.axes.index(axis)} * {step}" for axis, step in own.items()]
            terms += [f"{number} * {inner}"] if own and one else each
        return terms

    def _offset(self, tile: int, at: ex.Access) -> str:
        """Return the name of the variable with the offsets of the current block's elements in a tile."""
        if (tile, at) not in self.offsets:
            steps = [math.prod(map(int, self.shapes[tile][k + 1 :])) for k in range(len(at))]
            rows = {axis: step for axis, step in zip(at, steps, strict=True) if isinstance(axis, str)}
            column = rows.pop(self.column, None)
            terms = self._places(rows)
            fixed = sum(axis * step for axis, step in zip(at, steps, strict=True) if not isinstance(axis, str))
            terms += [f"col * {column}"] if column else []
            terms += [str(fixed)] if fixed else []
            terms += [] if rows or column else ["r * 0"]
            self.offsets[tile, at] = name = f"at{len(self.offsets)}"
            (self.before if at == (self.column,) else self.lines).append(f"{name} = {' + '.join(terms)}")
        return self.offsets[tile, at]
