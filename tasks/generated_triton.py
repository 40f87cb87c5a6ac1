"""Launches of generated kernels on CUDA, from the text that scalar/tl.py generates."""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .activation_triton import tanh
from .dropout_rng_triton import kept_columns
from .elementwise_triton import mixed_key
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
from .layer_norm_triton import WIDEST
from .scalar.tl import BlockSizes, Text, Writer


@triton.jit
def sum_parts(OUT, PART, per, n, ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partial sums of each group in the order of programs."""
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
    """Return the Triton kernel of a text, for Triton's interpreter if the other kernels use it.

    Triton reads the text from linecache.
    """
    file = f"<generated {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {
        "tl": tl, "kept_columns": kept_columns, "tanh": tanh, "sum_parts": sum_parts, "__name__": __name__,
    }  # fmt: skip
    exec(compile(source, file, "exec"), names)
    return type(kept_columns)(names["made"])


@launches(GENERATED)
def describe(task: Task) -> Launches:
    return in_cut(task, None)


def in_cut(task: Task, cut: BlockSizes | None) -> Launches:
    """Describe the launches of a task with these block sizes; None: the usual sizes."""
    kernel = KERNELS[task.kernel]
    shapes = [shape(task, k) for k in range(len(task.accesses))]
    adds = [access.accumulate for access in task.accesses]
    axes = len(kernel.definition.axes)
    firsts, whole_sizes = task.ints[:axes] or [0] * axes, task.ints[axes : 2 * axes]
    even = bool(whole_sizes) and whole_sizes[-1] % 2 == firsts[-1] % 2 == 0
    text = Writer(kernel.definition, kernel.tiles, shapes, kernel.outputs, adds, whole_sizes, even, cut).text()
    if text.cut.block > WIDEST:
        raise ValueError(f"{task.op}: rows of {text.cut.block} are not allowed on CUDA; cut them into at most {WIDEST}")
    dropout = task.args if isinstance(task.args, GeneratedDropoutArgs) else None
    numbers = [*firsts, *map(mixed_key, task.ints[2 * axes :])]
    programs, n, scratch = text.groups * text.per, text.n, Scratch()
    dtype = task.accesses[text.sums[0].output].tile.dtype if text.sums else "fp32"
    parts = [scratch.take(programs * n, dtype) for _ in text.sums]
    seed: Parameter = slot(task, dropout.seed, "int64") if dropout else Int(0, 64)
    args = [*(tile(task, k) for k in range(len(shapes))), text.filled, *(Int(k, 64) for k in numbers), seed, *parts]
    warps = text.cut.warps
    if kernel.width:
        warps = min(16, max(1, text.cut.rows * text.cut.block // (32 * kernel.width)))
    blocks = programs if text.sums or text.groups > 1 else ceil_div(text.filled, text.cut.rows)
    sizes = {"ROWS": text.cut.rows, "BLOCK": text.cut.block}
    first = launch(kernel_of(text.source), (blocks, text.columns), *args, warps=warps, **sizes)
    return Launches((first, *_of_parts(task, text, parts)), scratch.bytes)


def _of_parts(task: Task, text: Text, parts: Sequence[Parameter]) -> list[Launch]:
    """Return the launches that add up partial sums; sums with equal numbers of groups share one launch."""
    added: list[Launch] = []
    for groups in dict.fromkeys(one.groups for one in text.sums):
        some = [k for k, one in enumerate(text.sums) if one.groups == groups]
        per = text.groups * text.per // groups
        at_once = min(power_of_two(per), 512)
        columns = max(16, min(8192 // at_once, power_of_two(text.n), 1024))
        lines = ["def made(" + ", ".join([*(f"T{k}" for k in some), *(f"PART{k}" for k in some)]) + "):"]
        for number, k in enumerate(some):
            sizes = f"{per}, {text.n}, {task.accesses[text.sums[k].output].accumulate}, {at_once}, {columns}"
            lines.append(f"    if tl.program_id(2) == {number}:")
            lines.append(f"        sum_parts(T{k}, PART{k}, {sizes})")
        outs = [tile(task, text.sums[k].output) for k in some]
        grid = ceil_div(text.n, columns), groups, len(some)
        warps = max(1, at_once * columns // 1024)
        kernel = kernel_of("\n".join([*lines, ""]))
        added.append(launch(kernel, grid, *outs, *(parts[k] for k in some), warps=warps))
    return added
