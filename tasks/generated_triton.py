"""Launches of generated kernels on CUDA. scalar/tl.py generates the text of each kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import functools
import hashlib
import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles import Slot
from nntile_py.tiles.task import Task

from .activation_triton import tanh
from .dropout_rng_triton import kept_columns
from .elementwise import DropoutArgs
from .elementwise_triton import mixed_key, strides_of
from .generated import GENERATED, KERNELS, GeneratedDropoutArgs
from .launch import (
    Int,
    Launch,
    Launches,
    Parameter,
    Scratch,
    ceil_div,
    launch,
    launches,
    power_of_two,
    shape,
    slot,
    tile,
)
from .scalar.expression import Definition, Element, Output, TileType, nodes_of
from .scalar.tl import BlockSizes, Text, Writer

WIDEST = 16384  # most elements of a row, as a program holds a row in registers


@triton.jit
def sum_parts(OUT, PART, per, n, ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store in OUT, for each group, the sum of the group's `per` partial sums, added in a fixed order.

    ACC: add the sum to OUT instead.
    """
    group, col, k = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    total = tl.zeros([PARTS, BLOCK], OUT.dtype.element_ty)
    for first in range(0, per, PARTS):
        inside = (first + k < per)[:, None] & (col < n)[None, :]
        total += tl.load(PART + (group * per + first + k)[:, None] * n + col[None, :], inside, 0.0)
    out, at = tl.sum(total, 0), OUT + group * n + col
    if ACC:
        out += tl.load(at, col < n)
    tl.store(at, out, col < n)


@functools.cache
def kernel_of(source: str) -> Any:
    """Return the Triton kernel that a source text defines. It runs in Triton's interpreter if kept_columns does.

    Triton reads the source text from linecache.
    """
    file = f"<generated {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {
        "tl": tl, "kept_columns": kept_columns, "tanh": tanh, "sum_parts": sum_parts, "__name__": __name__,
    }  # fmt: skip
    exec(compile(source, file, "exec"), names)
    return type(kept_columns)(names["generated"])


@launches(GENERATED)
def describe(task: Task) -> Launches:
    return in_cut(task, None)


def in_cut(task: Task, cut: BlockSizes | None) -> Launches:
    """Return the launches of a task with a generated kernel. cut: block sizes; None: the default block sizes."""
    kernel, every = KERNELS[task.kernel], range(len(task.accesses))
    axes = len(kernel.definition.axes)
    sizes = task.ints[axes : 2 * axes]
    indices = Indices(task.ints[:axes], strides_of(sizes), math.prod(sizes), task.ints[2 * axes :])
    seed = task.args.seed if isinstance(task.args, GeneratedDropoutArgs) else None
    return _launches(task, kernel.definition, kernel.tiles, kernel.outputs, every, indices, seed, cut, kernel.width)


@dataclass(frozen=True)
class Indices:
    """The indices of a tile's elements in the whole tensor, which AxisIndex and dropout use.

    Args:
        first: first index along each axis; empty if no indices are needed.
        strides: stride of each axis in the whole tensor.
        numel: a number above the largest index.
        keys: the key of each dropout.
    """

    first: Sequence[int] = ()
    strides: Sequence[int] = ()
    numel: int = 0
    keys: Sequence[int] = ()


def axes_of(task: Task, number: int, last: str = "column") -> tuple[str, ...]:
    """Return names for the axes of the task's tile `number`: row0, row1, ..., and `last`."""
    return (*(f"row{k}" for k in range(len(shape(task, number)) - 1)), last)


def by_formula(
    task: Task, axes: tuple[str, ...], outputs: Sequence[Output], tiles: Sequence[int],
    dropout: DropoutArgs | None = None,
) -> Launches:  # fmt: skip
    """Return the launches of a task whose kernel is generated from the expressions in `outputs`.

    Args:
        tiles: numbers of the task's tiles: outputs, then inputs, as the expressions number them.
        dropout: arguments of the dropout in the expressions, of a tensor with the axes of the first output.
    """
    definition, count, indices = Definition(dict.fromkeys(axes, 0), tuple(outputs)), 1 + outputs[-1].number, Indices()
    at = {count + load.number: load.at for load in nodes_of(definition, Element)}
    at |= {out.number: out.at for out in outputs}
    sums = {out.number for out in outputs if out.total}
    plain = [tuple(a if isinstance(a, str) else 0 for a in at[k]) for k in range(len(tiles))]
    types = [TileType(task.accesses[k].tile.dtype, plain[n], n in sums) for n, k in enumerate(tiles)]
    if dropout:
        steps = zip(shape(task, tiles[0]), dropout.strides, strict=True)
        last = dropout.first + sum((int(size) - 1) * step for size, step in steps)
        indices = Indices([*[0] * (len(axes) - 1), dropout.first], dropout.strides, last + 1, [dropout.key])
    return _launches(task, definition, types, count, tiles, indices, dropout.seed if dropout else None)


def _launches(
    task: Task, definition: Definition, types: Sequence[TileType], outputs: int, tiles: Sequence[int], indices: Indices,
    seed: Slot | None, cut: BlockSizes | None = None, width: int | None = None,
) -> Launches:  # fmt: skip
    """Return the launches of a generated kernel on the task's tiles with the numbers `tiles`, outputs first."""
    shapes, adds = [shape(task, k) for k in tiles], [task.accesses[k].accumulate for k in tiles]
    first, strides = indices.first or [0] * len(definition.axes), indices.strides
    even = bool(strides) and all(step % 2 == 0 for step in (*strides[:-1], first[-1]))
    text = Writer(definition, types, shapes, outputs, adds, strides, even, indices.numel, cut).text()
    if text.cut.block > WIDEST:
        raise ValueError(f"{task.op}: got rows of {text.cut.block} on CUDA; allowed: tiles of at most {WIDEST}")
    numbers = [*first, *map(mixed_key, indices.keys)]
    programs, n, scratch = text.groups * text.per, text.n, Scratch()
    dtype = types[text.sums[0].output].dtype if text.sums else "fp32"
    parts = [scratch.take(programs * n, dtype) for _ in text.sums]
    seed_value: Parameter = slot(task, seed, "int64") if seed else Int(0, 64)
    args = [*(tile(task, k) for k in tiles), text.filled, *(Int(k, 64) for k in numbers), seed_value, *parts]
    warps = min(16, max(1, text.cut.rows * text.cut.block // (32 * width))) if width else text.cut.warps
    blocks = programs if text.sums or text.groups > 1 else ceil_div(text.filled, text.cut.rows)
    constants = {"ROWS": text.cut.rows, "BLOCK": text.cut.block}
    main = launch(kernel_of(text.source), (blocks, text.columns), *args, warps=warps, **constants)
    return Launches((main, *_of_parts(task, text, parts, tiles)), scratch.bytes)


def _of_parts(task: Task, text: Text, parts: Sequence[Parameter], tiles: Sequence[int]) -> list[Launch]:
    """Return the launches that add up partial sums; sums with equal numbers of groups share one launch."""
    added: list[Launch] = []
    for groups in dict.fromkeys(one.groups for one in text.sums):
        some = [k for k, one in enumerate(text.sums) if one.groups == groups]
        per = text.groups * text.per // groups
        at_once = min(power_of_two(per), 512)
        columns = max(16, min(8192 // at_once, power_of_two(text.n), 1024))
        lines = ["def generated(" + ", ".join([*(f"T{k}" for k in some), *(f"PART{k}" for k in some)]) + "):"]
        for number, k in enumerate(some):
            sizes = f"{per}, {text.n}, {task.accesses[tiles[text.sums[k].output]].accumulate}, {at_once}, {columns}"
            lines.append(f"    if tl.program_id(2) == {number}:")
            lines.append(f"        sum_parts(T{k}, PART{k}, {sizes})")
        outs = [tile(task, tiles[text.sums[k].output]) for k in some]
        grid = ceil_div(text.n, columns), groups, len(some)
        warps = max(1, at_once * columns // 1024)
        kernel = kernel_of("\n".join([*lines, ""]))
        added.append(launch(kernel, grid, *outs, *(parts[k] for k in some), warps=warps))
    return added
