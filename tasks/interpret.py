"""Runs launches of Triton kernels on torch tensors, without StarPU: on the CPU by Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from nntile_py.tiles import Slot
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.tasklist import Task

from .launch import Argument, Float, Int, ScratchAddress, TaskFloat, TileAddress, describer
from .live import Live, with_live_sizes


@functools.cache
def _mend_interpreter() -> None:
    """Triton 3.6 makes a loop bound of an array of one element by int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def interpret(
    tasks: Sequence[Task], tensors: Sequence[Any], slots: dict[str, float] | None = None, *, way: int = 0,
    lives: Sequence[tuple[int, int, Slot]] = (),
) -> None:  # fmt: skip
    """Run the launches of a task, or of several together, on torch tensors, one a tile.

    On the CPU by Triton's interpreter: TRITON_INTERPRET=1 must be set when triton is imported first. way: which of
    several; lives: as of `with_live_sizes`.
    """
    import torch

    if not tensors[0].is_cuda:
        _mend_interpreter()
    floats = [*tasks[0].floats, *(name for *_, name in lives)]
    describe = describer(tasks[0].kernel)
    assert describe, tasks[0].kernel
    described = describe([with_live_sizes(tasks[0], lives)] if lives else tasks)
    scratch = torch.empty(described.scratch, dtype=torch.uint8, device=tensors[0].device)
    if not scratch.is_cuda:
        scratch.fill_(0xFF)  # NaN: what is read before it was written shows
    table = [tensors[w.tile].data_ptr() if isinstance(w, TileAddress) else w.value for w in described.table]
    if table:
        scratch[: 8 * len(table)].view(torch.int64)[:] = torch.tensor(table, dtype=torch.int64)

    def given(position: int) -> float:
        at = floats[position]
        return (slots or {})[at.name] if isinstance(at, Slot) else at

    def filled(size: int) -> int:
        return size.filled(int(given(size.position))) if isinstance(size, Live) else size

    def value(arg: Argument) -> Any:
        match arg:
            case Live():
                return filled(arg)
            case TileAddress(number):
                return tensors[number]
            case ScratchAddress(offset, dtype):
                return scratch[offset:].view(getattr(torch, DTYPES[dtype].torch))
            case Int(number) | Float(number):
                return number
            case TaskFloat(position, dtype):
                return given(position) if dtype == "fp32" else int(given(position))

    for one in described.ways[way]:
        grid = tuple(map(filled, one.grid))
        one.kernel[grid](*map(value, one.args), **dict(one.constexprs), num_warps=one.warps)
