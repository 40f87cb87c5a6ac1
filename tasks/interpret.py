"""Run launches of Triton kernels on torch tensors without StarPU; on the CPU in Triton's interpreter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from nntile_py.tiles import Slot
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.task import Task

from .dynamic_size import DynamicSize, with_live_sizes
from .launch import Argument, Float, Int, Matrix, ScratchAddress, TaskFloat, TileAddress, describer


@functools.cache
def _mend_interpreter() -> None:
    """Patch Triton's interpreter for numpy 2.4, and make the interpreter faster.

    Triton 3.6 converts a loop bound from an array of one element by int(), which numpy 2.4 refuses. At each call of a
    function, the interpreter searches Triton's language for names to replace. For each value, the interpreter builds a
    table of numpy's types. Both together take a third of its time, so the patch computes each result only once.
    """
    import numpy as np
    import torch
    from triton.language import core
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @functools.cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            if getattr(package, name) is member:  # else the call of an outer function has replaced the member
                interpreter._patch_attr(package, name, member, builder, scope)

    original = interpreter._get_np_dtype
    of_number = functools.cache(original)

    def numpy_dtype(of: Any) -> Any:
        return original(of.scalar) if of.scalar.is_ptr() else of_number(of.scalar)  # pointers are not hashable

    convert = interpreter._convert_float
    eight_bits = {d.triton: getattr(torch, d.torch) for d in DTYPES.values() if d.largest}

    def rounded(value: Any, from_dtype: Any, to_dtype: Any, mode: Any) -> Any:
        """Convert fp32 to 8 bits as a GPU does; the interpreter loses the carry of a mantissa that is rounded up."""
        if str(to_dtype) not in eight_bits or str(from_dtype) != "fp32":
            return convert(value, from_dtype, to_dtype, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(value, np.float32)).to(eight_bits[str(to_dtype)])
        return numbers.view(torch.uint8).numpy().reshape(np.shape(value))

    interpreter._convert_float = rounded
    interpreter._patch_lang_tensor, interpreter._patch_builtin = patched, patch_builtin
    interpreter._get_np_dtype = numpy_dtype


def interpret(
    tasks: Sequence[Task], tensors: Sequence[Any], slots: dict[str, float] | None = None, *, way: int = 0,
    lives: Sequence[tuple[int, int, Slot]] = (),
) -> None:  # fmt: skip
    """Run the launches of a task, or of several tasks together, on torch tensors, one per tile.

    On the CPU this uses Triton's interpreter: TRITON_INTERPRET=1 must be set before triton is imported.

    Args:
        way: number in Launches.ways of the launches to run.
        lives: axes whose size a slot gives, as for `with_live_sizes`.
    """
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not tensors[0].is_cuda:
        _mend_interpreter()
    floats = [*tasks[0].floats, *(name for *_, name in lives)]
    describe = describer(tasks[0].kernel)
    assert describe, tasks[0].kernel
    described = describe([with_live_sizes(tasks[0], lives)] if lives else tasks)
    scratch = torch.empty(described.scratch, dtype=torch.uint8, device=tensors[0].device)
    if not scratch.is_cuda:
        scratch.fill_(0xFF)  # NaN, so that reading before writing is visible
    table = [tensors[w.tile].data_ptr() if isinstance(w, TileAddress) else w.value for w in described.table]
    if table:
        scratch[: 8 * len(table)].view(torch.int64)[:] = torch.tensor(table, dtype=torch.int64)

    def task_float(position: int) -> float:
        at = floats[position]
        return (slots or {})[at.name] if isinstance(at, Slot) else at

    def filled(size: int) -> int:
        return size.filled(int(task_float(size.position))) if isinstance(size, DynamicSize) else size

    def value(arg: Argument) -> Any:
        match arg:
            case DynamicSize():
                return filled(arg)
            case TileAddress(number):
                return tensors[number]
            case Matrix(TileAddress(number), rows, columns, block):
                return TensorDescriptor(tensors[number], [filled(rows), columns], [columns, 1], list(block))
            case ScratchAddress(offset, dtype):
                return scratch[offset:].view(getattr(torch, DTYPES[dtype].torch))
            case Int(number) | Float(number):
                return number
            case TaskFloat(position, dtype):
                return task_float(position) if dtype == "fp32" else int(task_float(position))

    for one in described.ways[way]:
        grid = tuple(map(filled, one.grid))
        one.kernel[grid](*map(value, one.args), **dict(one.constexprs), num_warps=one.warps)
