"""Arrays of a Python task on a worker: numpy, cupy or torch views of tiles' memory. Also the task's exceptions."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


@contextlib.contextmanager
def arrays_on_worker(library: str, device: int, stream: int, parts: list[Any]) -> Iterator[list[Any]]:
    """Yield the arrays that a task's function gets: views of the tiles' memory, which C++ passes.

    With cupy, the worker's device and stream are current inside the block.

    Args:
        library: "numpy" or "torch".
        device: number of the GPU; below 0 on a CPU worker.
        stream: address of the worker's CUDA stream.
        parts: the tiles' memory.
    """
    if library == "torch":  # torch's device and stream are set already
        import torch

        yield [torch.utils.dlpack.from_dlpack(part) for part in parts]
    elif device < 0:
        yield parts
    else:
        import cupy

        with cupy.cuda.Device(device), _stream(device, stream):
            yield [cupy.asarray(_CudaMemory(*part)) for part in parts]


class _CudaMemory:
    """Memory of a tile on a CUDA device, as an object with the CUDA array interface (version 3)."""

    def __init__(self, pointer: int, shape: list[int], dtype: Any, read_only: bool) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": tuple(shape), "typestr": dtype.str, "data": (pointer, read_only), "strides": None,
        }  # fmt: skip


class _CudaStream:
    """A CUDA stream, as an object with the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@functools.cache  # kept forever: in CuPy 14 a deleted Stream destroys the stream that it wraps
def _stream(device: int, pointer: int) -> Any:
    """Return cupy's object for a CUDA stream of StarPU. pointer: address of the stream."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # returns a stream of the current device
        return cupy.cuda.Stream.from_external(_CudaStream(pointer))
    return cupy.cuda.ExternalStream(pointer, device)  # before CuPy 14


def failure(error: BaseException) -> tuple[str, BaseException]:
    """Return the text of an exception, and the exception, for C++.

    The variables in the exception's frames are cleared, because they may be arrays on memory that StarPU frees.
    """
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # from the user's function on
    error.__traceback__ = trace
    earlier: BaseException | None = error
    while earlier:
        traceback.clear_frames(earlier.__traceback__)
        earlier = earlier.__cause__ or earlier.__context__
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # str() of the exception fails
        text = type(error).__name__
    if trace:
        text += f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
    return text, error


def is_view(value: Any, arrays: Sequence[Any]) -> bool:
    """Return whether `value` is an array that lies, or may lie, in the memory of one of `arrays`."""
    if isinstance(value, np.ndarray):
        return any(isinstance(array, np.ndarray) and np.may_share_memory(value, array) for array in arrays)
    if hasattr(value, "untyped_storage"):  # a torch tensor
        memory = value.untyped_storage().data_ptr()
        return any(memory and array.untyped_storage().data_ptr() == memory for array in arrays)
    return any(value is array for array in arrays)
