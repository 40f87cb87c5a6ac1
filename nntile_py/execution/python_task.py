"""Tasks in plain Python: by themselves on arrays held by StarPU, and as kernels of a user's own operators."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import marshal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError, TaskError
from nntile_py.tiles import Access, Slot, TaskArgs
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.tiles.tasklist import Task

_MODES = ("R", "W", "RW", "ACC")
_LIBRARIES = ("numpy", "torch")

Function = Callable[..., None]
# What C++ calls on a worker: (device or -1, stream, what the arrays are made of, the task's floats).
Call = Callable[[int, int, list[Any], list[float]], None]
# (call, torch tensors?, can run on CUDA workers, which arrays are only read, number of floats)
Spec = tuple[Call, bool, bool, list[bool], int]


class Array:
    """A numpy array held by StarPU as one tile, for tasks in Python: `nt.array(x)`, then `.numpy()` to read it."""

    def __init__(self, value: Any) -> None:
        from nntile_py import _core

        value = np.asarray(value)
        names = {dtype.numpy: dtype.name for dtype in DTYPES.values() if dtype.numpy == dtype.torch}
        if value.dtype.name not in names:
            raise TypeError(f"dtype {value.dtype} is not allowed; use {', '.join(names)}")
        self.tile = _core.Tile(list(value.shape), names[value.dtype.name])
        self.tile.write(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tile.shape)

    @property
    def dtype(self) -> Any:
        return self.tile.dtype

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy, after the tasks that write it. Raises TaskError if a task failed."""
        return np.asarray(self.tile.read())


def array(value: Any) -> Array:
    """Give a numpy array (float32, float64 or ints of 16, 32 or 64 bits) to StarPU."""
    return Array(value)


class PythonTask:
    """What `nt.task` makes of a function: called, it submits; emitted by an operator, it is the kernel of tasks."""

    def __init__(self, function: Function, library: str, modes: dict[str, str]) -> None:
        functools.update_wrapper(self, function)
        self.library, self.modes, self._on_cpu = library, modes, function
        self._on_cuda: Function | None = function if library == "torch" else None
        self._signature = inspect.signature(function)
        if unknown := set(modes) - set(self._signature.parameters):
            raise ValueError(f"task {function.__name__}: has no argument {', '.join(sorted(unknown))}")

    def cuda(self, variant: Function) -> PythonTask:
        """Take another function on CUDA workers."""
        self._on_cuda = variant
        return self

    @functools.cached_property
    def name(self) -> str:
        """What task lists and their digests know it by: its module and name, and a hash of its source."""
        functions = dict.fromkeys(f for f in (self._on_cpu, self._on_cuda) if f)
        digest = hashlib.sha256(b"".join(map(_source, functions))).hexdigest()[:8]
        name = f"{self._on_cpu.__module__}.{self._on_cpu.__qualname__}-{digest}"
        while name in _named and not all(map(_plain, functions)):
            name += "'"
        _named[name] = self
        return name

    # -- by itself

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from nntile_py import _core

        name = self._on_cpu.__name__
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arrays = {argument: bound.arguments.pop(argument) for argument in self.modes}
        for argument, value in arrays.items():
            if not isinstance(value, Array):
                raise TypeError(f"task {name}: {argument} is no nt.array but {type(value).__name__}")
        if len({id(value) for value in arrays.values()}) < len(arrays):
            raise ValueError(f"task {name}: one array was given for two arguments")
        constants = dict(bound.arguments)
        spec = self._spec(lambda floats: constants)
        modes = [mode.replace("ACC", "RW") for mode in self.modes.values()]
        _core.submit_python(name, [value.tile for value in arrays.values()], modes, spec)

    # -- in programs

    def emitted(self, accesses: Sequence[Access], args: TaskArgs) -> str:
        """The name that tasks carry. Raises ValueError where accesses or arguments are not those of the function."""
        got = [access.mode for access in accesses]
        if got != list(self.modes.values()):
            declared = ", ".join(f"{argument} {mode}" for argument, mode in self.modes.items())
            raise ValueError(f"task {self.name}: is emitted with {', '.join(got)}, but declared with {declared}")
        try:
            self._signature.bind(**self.modes, **args.named(iter(args.packed[1])))
        except TypeError as error:
            raise ValueError(f"task {self.name}: {error}; emitted with {args}") from None
        if self.library == "numpy" and any(access.tile.dtype == "bf16" for access in accesses):
            raise ConfigError(
                f"precision: bf16 is not allowed with {self.name}, which is given arrays of numpy or cupy, neither of"
                ' which has it; use fp32, or write it with @nt.task("torch", ...)'
            )
        return self.name

    def bound(self, task: Task) -> Spec:
        """For a task of a resolved list. Raises TaskError where no worker can run it."""
        from nntile_py import _core

        if not self._on_cuda and not _core.cpu_workers():
            raise TaskError(f"{task.op}: {self.name} has no CUDA variant, and this runtime has no CPU workers")
        floats = task.args.packed[1]
        fixed = None if any(isinstance(x, Slot) for x in floats) else task.args.named(iter(floats))
        parts = zip(self.modes.items(), task.accesses, strict=True)
        first = [name for (name, mode), access in parts if mode == "ACC" and not access.accumulate]
        return self._spec(lambda now: task.args.named(iter(now)) if fixed is None else fixed, first, len(floats))

    # -- on a worker

    def _spec(
        self, constants: Callable[[list[float]], Mapping[str, Any]], zeroed: Collection[str] = (), floats: int = 0
    ) -> Spec:
        """constants: the arguments that are no arrays, from the task's floats. zeroed: arrays that hold nothing yet."""

        def call(device: int, stream: int, parts: list[Any], now: list[float]) -> None:
            function = self._on_cpu if device < 0 else self._on_cuda
            assert function is not None
            with _arrays(self.library, device, stream, parts) as arrays:
                named = dict(zip(self.modes, arrays, strict=True))
                for name in zeroed:
                    named[name][...] = 0
                function(**named, **constants(now))

        read_only = [mode == "R" for mode in self.modes.values()]
        return call, self.library == "torch", self._on_cuda is not None, read_only, floats


_named: dict[str, PythonTask] = {}


def bound(task: Task) -> Spec | None:
    """What C++ needs to run a task of a kernel in Python; None for a task of another kernel."""
    kernel = _named.get(task.kernel)
    return kernel.bound(task) if kernel else None


def task(library: str = "numpy", /, **modes: str) -> Callable[[Function], PythonTask]:
    """Make a Python function a task: `@nt.task(x="R", y="RW")`, mode R, W, RW or ACC for each array argument.

    The call submits and returns at once. On a worker the function gets numpy views of the tiles' memory, read-only
    for R; they must not be kept. Other arguments are passed on as they are. What the function raises comes out as
    TaskError, naming it, at the next wait, read or submission. `@NAME.cuda` above another function makes that the
    variant for CUDA workers: it gets cupy arrays on the tiles' memory, with the worker's stream current, and must
    enqueue its work there, without waiting: what wrote its tiles may still be running on that stream.

    `@nt.task("torch", ...)`: the function gets torch tensors, of any dtype (numpy and cupy have no bf16), on CPU and
    CUDA workers, on the latter with the worker's stream as torch's current one: Triton kernels may be launched. It must
    not write to what it declares as R.

    An operator's `lower` may emit it: `low.emit(NAME, [R(x), RW(y)], args)`, accesses in the order in which the modes
    were declared, with these modes. The fields of `args`, a TaskArgs, become keyword arguments, each Slot the number
    that it is in this step. To an ACC array the function adds its part (`y += ...`), whatever the accumulation policy:
    where there is nothing to add to yet, it finds zeros.
    """
    if library not in _LIBRARIES:
        raise ValueError(f"task: library {library!r} is not allowed; use {' or '.join(_LIBRARIES)}")
    for name, mode in modes.items():
        if mode not in _MODES:
            raise ValueError(f"task: mode {mode!r} of {name} is not allowed; use {', '.join(_MODES)}")
    return lambda function: PythonTask(function, library, modes)


@contextlib.contextmanager
def _arrays(library: str, device: int, stream: int, parts: list[Any]) -> Iterator[list[Any]]:
    """The arrays that a function gets, of parts as C++ makes them; with cupy, device and stream are current inside."""
    if library == "torch":  # its own device and stream are set already
        import torch

        yield [torch.utils.dlpack.from_dlpack(part) for part in parts]
    elif device < 0:
        yield parts
    else:
        import cupy

        with cupy.cuda.Device(device), _stream(device, stream):
            yield [cupy.asarray(_Device(*part)) for part in parts]


class _Device:
    """Memory of a tile on a CUDA device, for whoever knows the CUDA array interface (version 3)."""

    def __init__(self, pointer: int, shape: list[int], dtype: Any, read_only: bool) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": tuple(shape), "typestr": dtype.str, "data": (pointer, read_only), "strides": None,
        }  # fmt: skip


class _Foreign:
    """A CUDA stream, for whoever knows the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@functools.cache  # for good: in CuPy 14 a Stream destroys what it wraps when it goes
def _stream(device: int, pointer: int) -> Any:
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # of the current device
        return cupy.cuda.Stream.from_external(_Foreign(pointer))
    return cupy.cuda.ExternalStream(pointer, device)  # before CuPy 14


def _plain(function: Function) -> bool:
    """Whether its source says all that it does: a module that is loaded again has the same kernels."""
    return not any(getattr(function, f"__{what}__", None) for what in ("closure", "defaults", "kwdefaults"))


def _source(function: Function) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # typed in, or made by exec
        return marshal.dumps(function.__code__, 2) if hasattr(function, "__code__") else repr(function).encode()
