"""Generated kernels on CUDA: their text (scalar/tl.py) as Triton kernels, and what tasks launch."""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .activation_triton import tanh
from .elementwise_triton import kept, mixed_key
from .generated import GENERATED, KERNELS, GeneratedDropoutArgs
from .launch import Int, Launches, Parameter, Scratch, ceil_div, launch, launches, shape, slot, tile
from .layer_norm_triton import PROGRAMS, WIDEST
from .scalar.tl import Writer


@triton.jit
def _sum_parts(OUT, PART, per, n, ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the programs' parts of each group in their order."""
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
    """The text as a kernel of Triton, or of its interpreter where the other kernels are. It is read from linecache."""
    file = f"<generated {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"tl": tl, "kept": kept, "tanh": tanh, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return type(kept)(names["made"])


@launches(GENERATED)
def describe(task: Task) -> Launches:
    made = KERNELS[task.kernel]
    shapes = [shape(task, k) for k in range(len(task.accesses))]
    adds = [access.accumulate for access in task.accesses]
    text = Writer(made.form, made.tiles, shapes, made.outputs, adds, PROGRAMS).text()
    if text.block > WIDEST:
        raise ValueError(f"{task.op}: rows of {text.block} are not allowed on CUDA; cut them into at most {WIDEST}")
    dropout = task.args if isinstance(task.args, GeneratedDropoutArgs) else None
    axes = len(made.form.axes)
    numbers = [mixed_key(k) if at >= 2 * axes else k for at, k in enumerate(task.ints)] or [0] * (2 * axes)
    programs, n, scratch, more = text.groups * text.per, text.n, Scratch(), []
    wide = task.accesses[text.sums[0].output].tile.dtype if text.sums else "fp32"
    parts = [scratch.take(programs * n, wide) for _ in text.sums]
    for part, one in zip(parts, text.sums, strict=True):
        args: list[Parameter] = [tile(task, one.output), part, programs // one.groups, n]
        grid = (ceil_div(n, 16), one.groups)
        more.append(launch(_sum_parts, grid, *args, ACC=adds[one.output], PARTS=64, BLOCK=16))
    seed: Parameter = slot(task, dropout.seed, "int64") if dropout else Int(0, 64)
    args = [*(tile(task, k) for k in range(len(shapes))), text.filled, *(Int(k, 64) for k in numbers), seed, *parts]
    warps = min(16, max(1, text.rows * text.block // (32 * (made.width or 32))))
    blocks = programs if text.sums or text.groups > 1 else ceil_div(text.filled, text.rows)
    grid = (blocks, text.columns)
    first = launch(kernel_of(text.source), grid, *args, warps=warps, ROWS=text.rows, BLOCK=text.block)
    return Launches((first, *more), scratch.bytes)
