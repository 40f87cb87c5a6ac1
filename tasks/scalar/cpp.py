"""Generate a C++ function from a Definition. The function computes one task on a CPU core.

A row is a line of elements along the last axis. The function loops over rows; in each row it runs one or several
vectorised loops over the last axis. A loop ends where a sum or maximum over the row must be complete. Values that a
later loop needs are stored in a buffer of the length of a row.

Sums over rows are computed in separate memory and added to the outputs once, at the end. The results thus have the
same bits as if a separate task computed the sums. The function computes in fp32 or fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import expression as ex

ELEMENTS = {
    "fp32": "float", "fp64": "double", "bf16": "Bf16", "fp16": "_Float16", "int16": "int16_t", "int64": "int64_t",
}  # fmt: skip
# Name of the function: void (void* const* tiles, const int64_t* const* shapes, ints, floats, accumulates). Bit k of
# accumulates: the function adds to tile k instead of overwriting it.
SYMBOL = "nntile_made"
CHEAP = ("add", "subtract", "multiply", "negative")  # functions that are recomputed instead of stored in a buffer

PREAMBLE = """\
#include <new>
#include <stdint.h>
#include <stdlib.h>

#define VECTOR extern "C" __attribute__((simd("notinbranch")))
VECTOR float expf(float) noexcept;
VECTOR float logf(float) noexcept;
VECTOR float tanhf(float) noexcept;
VECTOR float erff(float) noexcept;
VECTOR double exp(double) noexcept;
VECTOR double log(double) noexcept;
VECTOR double tanh(double) noexcept;
VECTOR double erf(double) noexcept;

#define EITHER(name, narrow, wide) \\
  static inline float name(float x) { return narrow(x); } \\
  static inline double name(double x) { return wide(x); }
EITHER(exp_of, expf, exp)
EITHER(log_of, logf, log)
EITHER(tanh_of, tanhf, tanh)
EITHER(erf_of, erff, erf)
EITHER(root_of, __builtin_sqrtf, __builtin_sqrt)
static inline T larger(T a, T b) { return a > b ? a : b; }

struct Bf16 { uint16_t bits; };
union Word { uint32_t bits; float value; };
template <class E> static inline T load(const E* p) { return T(*p); }
static inline T load(const Bf16* p) { Word w; w.bits = uint32_t(p->bits) << 16; return T(w.value); }
template <class E> static inline void store(E* p, T x) { *p = E(x); }
static inline void store(Bf16* p, T x) {
  Word w;
  w.value = float(x);
  const uint32_t rounded = (w.bits + 0x7FFF + ((w.bits >> 16) & 1)) >> 16;
  p->bits = uint16_t(x != x ? 0x7FC0 : rounded);
}

static inline uint32_t hash_of(uint64_t index, uint64_t start) {
  uint32_t h = uint32_t(index >> 1) * 0x9E3779B1u + uint32_t(start);
  h = (h ^ (h >> 16)) * 0x7FEB352Du + uint32_t(start >> 32) + uint32_t(index >> 33) * 0x85EBCA77u;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return index & 1 ? h : h + (h << 16);
}
"""

TRIGONOMETRY = """\
VECTOR float sinf(float) noexcept;
VECTOR float cosf(float) noexcept;
VECTOR double sin(double) noexcept;
VECTOR double cos(double) noexcept;
EITHER(sin_of, sinf, sin)
EITHER(cos_of, cosf, cos)
"""


def source(definition: ex.Definition, tiles: Sequence[ex.TileType], outputs: int, width: int | None = None) -> str:
    """Return the text of the C++ file with the function.

    Args:
        tiles: types of the task's tiles: outputs, then inputs.
        outputs: number of outputs among the tiles.
        width: elements per vector; None: the compiler chooses.
    """
    return _Writer(definition, tiles, outputs, width).text()


@dataclass
class _Loop:
    """A loop over the last axis within a row, with the statements before it."""

    once: list[str] = field(default_factory=list)  # statements before the loop, once per row
    each: list[str] = field(default_factory=list)  # statements of the loop
    reductions: list[tuple[str, str]] = field(default_factory=list)  # variable and operation ("+", "max")


class _Writer:
    """Writer of the C++ text of one Definition; `text` returns it."""

    def __init__(
        self, definition: ex.Definition, tiles: Sequence[ex.TileType], outputs: int, width: int | None
    ) -> None:
        self.definition, self.tiles, self.outputs, self.width = definition, tiles, outputs, width
        self.axes, self.column = definition.axes, definition.axes[-1]
        self.accumulator = "double" if any(tile.dtype == "fp64" for tile in tiles) else "float"
        self.varies: dict[ex.Expression, frozenset[str]] = {}  # axes along which a value differs
        self.level: dict[ex.Expression, int] = {}  # number of loops that must end before the value can be computed
        self.results = [self._summed(out) for out in definition.outputs]
        for out in self.results:
            self._measure(out.value)
        loops = 1 + max(self.level[out.value] for out in self.results)
        self.loops = [_Loop() for _ in range(loops)]
        self.names: dict[tuple[ex.Expression, int, bool], str] = {}  # variables by value, loop, whether inside the loop
        self.pointers: dict[tuple[int, ex.Access], str] = {}  # variables by tile and access
        self.buffers: dict[ex.Expression, str] = {}  # variables by value
        self.keys = list(dict.fromkeys(node.key for node in ex.nodes_of(definition, ex.Keep)))
        self.drawn = False  # True: the function uses indices in the whole tensor

    def _summed(self, out: ex.Output) -> ex.Output:
        """Return the output. If it sums over the last axis, its value becomes a reduction over the row.

        The function adds this row sum to the output. Tasks on other tiles of the same row may add to the output too.
        """
        if not out.total or self.column in out.at:
            return out
        return ex.Output(out.number, out.at, ex.Reduce("sum", self.column, out.value), total=True)

    def _measure(self, node: ex.Expression) -> None:
        """Compute `varies` and `level` of the node and of its operands."""
        if node in self.level:
            return
        for part in node.parts:
            self._measure(part)
        varies = frozenset[str]().union(*(self.varies[part] for part in node.parts))
        level = max((self.level[part] for part in node.parts), default=0)
        match node:
            case ex.Element(_, at):
                varies = frozenset(axis for axis in at if isinstance(axis, str))
            case ex.AxisIndex(axis):
                varies = frozenset([axis])
            case ex.Keep():
                varies = frozenset(self.axes)
            case ex.Reduce(_, axis, _):
                assert axis == self.column, "only the last axis is reduced"
                varies, level = varies - {axis}, level + 1
        self.varies[node], self.level[node] = varies, level

    def inside(self, node: ex.Expression) -> bool:
        """Return True if the value differs along a row."""
        return self.column in self.varies[node]

    # -- values

    def value(self, node: ex.Expression, loop: int, inside: bool) -> str:
        """Return C++ text for a value, usually a variable. Its statements are added to the loop if they are missing.

        Args:
            loop: number of the loop that needs the value.
            inside: True: needed in the loop; False: needed once per row, before the loop.
        """
        inside = inside and self.inside(node)
        if isinstance(node, ex.ScalarConstant):
            return self._literal(node.value)
        for earlier in range(loop if inside else 0, loop + 1):
            if (node, earlier, inside) in self.names:
                return self.names[node, earlier, inside]
        if inside and self.level[node] < loop and not self._cheap(node):
            text = f"{self._buffer(node)}[c]"
        elif isinstance(node, ex.Reduce):
            return self._reduce(node)
        else:
            text = self._text(node, loop, inside)
        if isinstance(node, ex.Keep) or (isinstance(node, ex.Call) and ex.FUNCTIONS[node.name].truth):
            return text
        name = f"v{len(self.names)}"
        lines = self.loops[loop].each if inside else self.loops[loop].once
        lines.append(f"const T {name} = {text};")
        self.names[node, loop, inside] = name
        return name

    def _text(self, node: ex.Expression, loop: int, inside: bool) -> str:
        """Return the C++ expression of a node, with variables for its operands."""
        match node:
            case ex.Element(number, at):
                return f"load({self._element(self.outputs + number, at)})"
            case ex.Call():
                return ex.FUNCTIONS[node.name].cpp.format(*(self.value(part, loop, inside) for part in node.parts))
            case ex.Extent(axis):
                return f"T(n{self.axes.index(axis)})"
            case ex.AxisIndex(axis):
                self.drawn = True
                k = self.axes.index(axis)
                return f"T(ints[{k}] + i{k})" if k < len(self.axes) - 1 else f"T(ints[{k}] + c)"
            case ex.Keep():
                return self._keep(node)
        raise TypeError(f"no C++ of {node!r}")

    def _keep(self, node: ex.Keep) -> str:
        """Return a C++ condition that is true if dropout keeps the value at the current point."""
        self.drawn = True
        row, last, start = "row", len(self.axes) - 1, f"start{self.keys.index(node.key)}"
        if node.row_numbers:
            number = f"{self._element(self.outputs + node.row_numbers.number, node.row_numbers.at)}[0]"
            row = f"{number} * ints[{2 * last + 1}] + ints[{last}]"
        return f"(hash_of(uint64_t({row} + c), {start}) >= {node.limit}ULL)"

    def _reduce(self, node: ex.Reduce) -> str:
        """Append a reduction to the loop that computes it and return its variable."""
        loop = self.level[node] - 1
        name = f"r{len(self.names)}"
        self.names[node, loop + 1, False] = name
        here, x = self.loops[loop], self.value(node.x, loop, True)
        here.once.append(f"T {name} = {'0' if node.kind == 'sum' else '-T(__builtin_inf())'};")
        here.each.append(f"{name} += {x};" if node.kind == "sum" else f"{name} = larger({name}, {x});")
        here.reductions.append((name, "+" if node.kind == "sum" else "max"))
        return name

    def _cheap(self, node: ex.Expression) -> bool:
        """Return True if computing the value again in a later loop costs less than storing it in a buffer."""
        leaf = [isinstance(part, ex.Element) or not self.inside(part) for part in node.parts]
        plain = isinstance(node, ex.Call) and (ex.FUNCTIONS[node.name].truth or (node.name in CHEAP and all(leaf)))
        return plain or isinstance(node, ex.Element | ex.AxisIndex | ex.Keep)

    def _buffer(self, node: ex.Expression) -> str:
        """Return the buffer of a value; the first call appends the code that fills it."""
        if node not in self.buffers:
            self.buffers[node] = name = f"b{len(self.buffers)}"
            loop = self.level[node]
            self.loops[loop].each.append(f"{name}[c] = {self.value(node, loop, True)};")
        return self.buffers[node]

    def _literal(self, value: float) -> str:
        infinite = value in (float("inf"), float("-inf"))
        return f"T({'-' if value < 0 else ''}__builtin_inf())" if infinite else f"T({value!r})"

    def _element(self, tile: int, at: ex.Access) -> str:
        """Return C++ text for a pointer to a tile's element in the current row (and column c, if it has columns)."""
        if (tile, at) not in self.pointers:
            self.pointers[tile, at] = f"p{len(self.pointers)}"
        name = self.pointers[tile, at]
        if self.column not in at:
            return name
        axis = at.index(self.column)
        return f"({name} + c)" if axis == len(at) - 1 else f"({name} + c * s{tile}_{axis})"

    # -- the file

    def _store(self, out: ex.Output) -> None:
        """Append the code that stores an output."""
        loop, inside = self.level[out.value], self.column in out.at
        value, element = self.value(out.value, loop, inside), self._element(out.number, out.at)
        lines = self.loops[loop].each if inside else self.loops[loop].once
        lines.append(f"*{element} += {value};" if out.total else f"store({element}, {value});")

    def text(self) -> str:
        """Return the text of the C++ file."""
        for out in self.results:
            self._store(out)
        body: list[str] = []
        for loop in self.loops:
            body += loop.once
            if loop.each:
                signs = f" simdlen({self.width})" if self.width else ""
                signs += "".join(f" reduction({sign}:{name})" for name, sign in loop.reductions)
                body += [f"#pragma omp simd{signs}", f"for (int64_t c = 0; c < n{len(self.axes) - 1}; ++c) {{"]
                body += [f"  {line}" for line in loop.each] + ["}"]
        starts = [
            f"const uint64_t start{k} = seed ^ (uint64_t(ints[{2 * len(self.axes) + k}]) * 0xD1B54A32D192ED03ULL);"
            for k in range(len(self.keys))
        ]
        seed = ["const uint64_t seed = uint64_t(floats[0]) * 0x9E3779B97F4A7C15ULL;"] if self.keys else []
        cleared, added = self._sums()
        lines = [*self._sizes(), *seed, *starts, *self._allocated(), *cleared, *self._rows(body), *added]
        lines += ["free(buffer);"] if self.buffers else []
        parameters = "void* const* tiles, const int64_t* const* shapes, const int64_t* ints, const double* floats"
        calls = {node.name for node in self.definition.nodes() if isinstance(node, ex.Call)}
        preamble = PREAMBLE + TRIGONOMETRY * (not calls.isdisjoint(("sin", "cos")))
        head = [f"typedef {self.accumulator} T;", preamble, f'extern "C" void {SYMBOL}(', f"    {parameters},"]
        head.append("    uint64_t accumulates) {")
        return "\n".join([*head, *(f"  {line}" for line in lines), "}", ""])

    def _sizes(self) -> list[str]:
        """Return declarations of the sizes of the axes and of the strides of the tiles."""
        lines = []
        for k, axis in enumerate(self.axes):
            tile = next(number for number, one in enumerate(self.tiles) if axis in one.at)
            lines.append(f"const int64_t n{k} = shapes[{tile}][{self.tiles[tile].at.index(axis)}];")
        for tile in dict.fromkeys(tile for tile, _ in self.pointers):
            rank = len(self.tiles[tile].at)
            for k in range(rank):
                after = " * ".join(f"shapes[{tile}][{j}]" for j in range(k + 1, rank)) or "1"
                lines.append(f"const int64_t s{tile}_{k} = {after};")
        return lines

    def _allocated(self) -> list[str]:
        """Return code that allocates the buffers."""
        if not self.buffers:
            return []
        width = f"((n{len(self.axes) - 1} + 15) / 16 * 16)"
        size = f"sizeof(T) * {len(self.buffers)} * size_t{width}"
        lines = [f"T* const buffer = static_cast<T*>(aligned_alloc(64, {size}));"]
        lines += ["if (!buffer) throw std::bad_alloc();"]
        return lines + [f"T* const {name} = buffer + {k} * {width};" for k, name in enumerate(self.buffers.values())]

    def _sums(self) -> tuple[list[str], list[str]]:
        """Return code that sets the memory of sums over rows to 0, and code that adds the sums to their outputs."""
        cleared, added = [], []
        for number in dict.fromkeys(out.number for out in self.results if out.total):
            tile, element = self.tiles[number], ELEMENTS[self.tiles[number].dtype]
            count = " * ".join(f"shapes[{number}][{k}]" for k in range(len(tile.at))) or "1"
            into, adds = f"into{number}", f"accumulates >> {number} & 1"
            each = f"for (int64_t k = 0; k < m{number}; ++k)"
            cleared += [
                f"const int64_t m{number} = {count};",
                f"{element}* const {into} = static_cast<{element}*>(tiles[{number}]);",
                f"{element}* const sum{number} = {adds} ? new {element}[size_t(m{number})] : {into};",
                f"{each} sum{number}[k] = 0;",
            ]
            added += [f"if ({adds}) {{", f"  {each} {into}[k] += sum{number}[k];", f"  delete[] sum{number};", "}"]
        return cleared, added

    def _rows(self, body: list[str]) -> list[str]:
        """Return the loops over rows around the body."""
        outer, last = self.axes[:-1], len(self.axes) - 1
        lines = [f"for (int64_t i{k} = 0; i{k} < n{k}; ++i{k})" for k in range(len(outer))] + ["{"]
        if self.drawn:
            index = f"ints[{last}]"
            for k in range(len(outer)):
                whole_sizes = " * ".join(f"ints[{len(self.axes) + j}]" for j in range(k + 1, len(self.axes)))
                index += f" + (ints[{k}] + i{k}) * {whole_sizes}"
            lines.append(f"  const int64_t row = {index};")
        for (tile, at), name in self.pointers.items():
            base = f"sum{tile}" if any(out.total and out.number == tile for out in self.results) else f"tiles[{tile}]"
            steps = [f"{base})"]
            for k, axis in enumerate(at):
                if axis != self.column:
                    where = f"i{self.axes.index(axis)}" if isinstance(axis, str) else str(axis)
                    steps.append(f"{where} * s{tile}_{k}")
            kind = ELEMENTS[self.tiles[tile].dtype] + ("*" if tile < self.outputs else " const*")
            lines.append(f"  {kind} const {name} = static_cast<{kind}>({' + '.join(steps)};")
        return [*lines, *(f"  {line}" for line in body), "}"]
