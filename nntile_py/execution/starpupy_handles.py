"""Tiles shared with StarPU's own Python package, starpupy (`import starpu`), in one StarPU with the same workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.errors import NNTileError, TaskError
from nntile_py.execution.array import Array, ArrayStorage, Handles, array_dtype
from nntile_py.execution.tile_grid import TileGrid
from nntile_py.typed import typed


class Handle:
    """An array or tile as an argument of `starpu.task_submit`. starpupy requires this class name."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def get_capsule(self) -> Any:
        """Return the StarPU handle. starpupy calls this method when it submits a task, which may write the tile.

        If elements of the array are missing or its runtime has stopped, the capsule is empty. starpupy refuses it.
        """
        try:
            self.array.data.bring(self.array.cut, "starpu.task_submit")
        except NNTileError:
            return _core.starpu_capsule(None)
        self.array.data.wrote(self.array.cut)
        return _core.starpu_capsule(self.array.tile)

    def __repr__(self) -> str:
        return f"Handle({self.array!r})"


@typed
def starpu_handle(array: Array) -> Handle:
    """Return an array or tile as an argument of `starpu.task_submit`; nothing is copied.

    The function of the task gets a numpy array: a view of the tile's memory. `@starpu.access(x="RW")` sets the access
    mode of the argument x; the default is "R". StarPU runs the task after earlier tasks of nntile_py that use the
    tile, and before later tasks.

    Raises:
        TypeError: the dtype is bfloat16, which numpy lacks.
        TaskError: no runtime is running, or no task has written the array.

    Source: StarPU Handbook, "StarPU Python Interface".
    """
    if array.data.dtype == "bf16":
        raise TypeError("array: got bfloat16, which numpy lacks; allowed: dtypes of numpy, such as float32")
    if not _core.running():
        raise TaskError("no runtime is running: use `with nntile_py.Runtime(...):`")
    _core.share_workers()
    array.data.bring(array.cut, "starpu_handle")
    if not array.tile.initialised:
        raise TaskError(f"{array!r} was shared before any task wrote it; allowed: nt.zeros, nt.array")
    return Handle(array)


class SharedStorage(ArrayStorage):
    """Storage of an array in the memory of a numpy handle of starpupy."""

    def __init__(self, handle: Any, dtype: str) -> None:
        super().__init__(handle.obj.shape, dtype)
        self.current.add(self.whole)
        self._owner = handle  # the reference keeps the memory alive
        tile = _core.adopt(handle.get_capsule(), list(self.shape), dtype, handle.obj.ctypes.data)
        self._handles = {self.whole: {(0,) * len(self.shape): tile}}

    def handles(self, cut: TileGrid) -> Handles:
        if cut != self.whole:
            raise TaskError(
                "an array of starpupy is not cut into tiles; allowed: the whole array, or a copy by nt.array"
            )
        return super().handles(cut)


def starpu_array(handle: Any) -> Array:
    """Return the numpy array of a `starpu.Handle` as an array for tasks of nntile_py; nothing is copied.

    StarPU orders tasks of both packages by their accesses. Read the elements by `handle.acquire()` and
    `handle.release()`, or by `numpy()` of the result. Unregister the handle after the last use of the result.

    Args:
        handle: `starpu.Handle(x)` of a contiguous numpy array, or `starpu.HandleNumpy(shape, dtype)` that a task has
            written.

    Raises:
        TypeError: another type of handle, or a dtype that tiles lack.
        TaskError: no runtime is running, the runtime has GPUs, or the handle is unregistered.
    """
    value = getattr(handle, "obj", None)
    if not hasattr(handle, "get_capsule") or not isinstance(value, np.ndarray):
        raise TypeError(f"handle: got {type(handle).__name__}; allowed: starpu.Handle(x) of a numpy array x")
    if not value.flags.c_contiguous:
        raise TypeError("handle: its array is not contiguous; allowed: starpu.Handle(numpy.ascontiguousarray(x))")
    if not _core.running():
        raise TaskError("no runtime is running: use `with nntile_py.Runtime(...):`")
    if _core.cuda_workers():
        raise TaskError("starpu_array: starpupy keeps arrays in main memory; allowed: a Runtime with cuda=0")
    _core.share_workers()
    data = SharedStorage(handle, array_dtype(value.dtype))
    return Array(data, data.whole, (0,) * value.ndim)
