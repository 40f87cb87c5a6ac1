"""Tensors in main memory: copies of tiles, and arrays that join the tiles of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.errors import TaskError
from nntile_py.tasks.op import Tensor
from nntile_py.tiles.dtypes import host_dtype


def assembled(tensor: Tensor, parts: Sequence[tuple[Any, np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """Return a tensor as one array from the (slices, contents) of its tiles. bf16 and fp16 become float32."""
    dtype = host_dtype(tensor.dtype)
    if len(parts) == 1:
        return np.asarray(parts[0][1].reshape(tensor.shape), dtype)
    out = np.zeros(tensor.shape, dtype)  # 0 outside of an attention mask's band, where there are no tiles
    for where, part in parts:
        out[where] = part
    return out


class HostCopy:
    """Copies of tiles in main memory. Once `done` returns True, any thread may read the copies."""

    def __init__(self, handles: Sequence[_core.Tile]) -> None:
        self._native = _core.Copies(handles)

    def done(self) -> bool:
        return bool(self._native.done())

    def wait(self) -> None:
        """Wait for the copies. Raises TaskError if a task failed."""
        self._native.wait()

    def array(self, number: int) -> np.ndarray[Any, Any]:
        """Return the copy of tile `number`. Raises TaskError if a task failed before the tile was copied."""
        if self._native.dropped():
            raise TaskError("a task had failed before the tiles were copied")
        copy: np.ndarray[Any, Any] = self._native.array(number)
        return copy
