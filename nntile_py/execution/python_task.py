"""Tasks in plain Python: by themselves on arrays held by StarPU, and as kernels of a user's own operators."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import marshal
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution.array import Array, Tiles, submit
from nntile_py.tiles import Access, Slot, TaskArgs
from nntile_py.tiles.tasklist import Task
from nntile_py.typed import typed

_MODES = ("R", "W", "RW", "ACC", "COMMUTE", "REDUX")
_LIBRARIES = ("numpy", "torch")

Function = Callable[..., Any]
# What C++ calls on a worker: (device or -1, stream, what the arrays are made of, the task's floats). It returns None,
# or what the function raised: its text and itself.
Call = Callable[[int, int, list[Any], list[float]], tuple[str, BaseException] | None]
# (call, torch tensors?, can run on CUDA workers, which arrays are only read, number of floats)
Spec = tuple[Call, bool, bool, list[bool], int]


class Submitted:
    """A call of a task: `result()` waits for it and gives what the function returned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._native: Any = None  # what C++ knows of it
        self._returned: list[Any] = []
        self._error: BaseException | None = None
        self._view = False  # it returned an array that it was given, or a part of one

    def done(self) -> bool:
        return bool(self._native.done())

    def result(self) -> Any:
        """Raises TaskError if the task, or one before it, failed; TypeError if it returned a view of its arrays."""
        self._native.wait()
        if self._error:
            raise TaskError(f"{self.name}: {type(self._error).__name__}, which was reported before") from self._error
        if self._view:
            raise TypeError(f"task {self.name}: returned a view of an array that it was given; return a copy")
        if not self._returned:
            raise TaskError(f"{self.name}: was not run, because a task before it had failed")
        return self._returned[0]

    def __repr__(self) -> str:
        return f"Submitted({self.name}, {'done' if self.done() else 'not yet done'})"

    def ended(self, value: Any, arrays: Sequence[Any]) -> None:
        """The function has returned this."""
        self._view = _is_view(value, arrays)
        if not self._view:
            self._returned.append(value)

    def failed(self, error: BaseException) -> None:
        self._error = error


class TaskArgument(NamedTuple):
    """An array that a call was given. `label`: its argument, with its place if that is a list."""

    label: str
    mode: str
    array: Array


class PythonTask:
    """What `nt.task` makes of a function: called, it submits; emitted by an operator, it is the kernel of tasks."""

    def __init__(self, function: Function, library: str, modes: dict[str, str]) -> None:
        self.__name__: str
        for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if kind(function):  # a call only makes something that would have to be run
                raise TypeError(f"task {function.__name__}: async functions and generators are not allowed")
        functools.update_wrapper(self, function)
        self.library, self.modes, self._on_cpu = library, modes, function
        self._on_cuda: Function | None = function if library == "torch" else None
        self._signature = inspect.signature(function)
        self._options: dict[str, Any] = {}
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

    @typed
    def options(self, *, priority: int = 0, where: str | None = None) -> PythonTask:
        """The same task, for calls that are more urgent or that only some workers may run: `f.options(priority=2)(x)`.

        priority: of ready tasks the greatest goes first, if the scheduler knows priorities (lws, prio, dmdas do).
        where: "cpu", "cuda", or one worker, "cpu:0", "cuda:1". Raises ValueError for others, and for CUDA without a
        variant.
        """
        name = self.__name__
        if not isinstance(priority, Integral):
            raise ValueError(f"task {name}: priority {priority!r} is not allowed; use an integer")
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", where or "cpu")
        if not match:
            raise ValueError(f'task {name}: where={where!r} is not allowed; use "cpu", "cuda", or one worker: "cuda:0"')
        kind, number = match.groups()
        if where and kind == "cuda" and not self._on_cuda:
            raise ValueError(f'task {name}: has no CUDA variant; use @{name}.cuda, or @nt.task("torch", ...)')
        made = copy.copy(self)
        made._options = {"priority": int(priority)}
        if where:
            made._options |= {"cpu": kind == "cpu", "cuda": kind == "cuda", "worker": int(number or -1)}
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Submitted:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        uses, lengths = self._uses({argument: bound.arguments.pop(argument) for argument in self.modes})
        tiles = self._tiles(uses)
        for use in tiles.values():
            if use.mode != "W" or use.array.shape != use.array.data.shape:  # else nothing of what was there stays
                use.array.data.bring(use.array.cut, f"task {self.__name__}: {use.label}")
        places = {key: place for place, key in enumerate(tiles)}
        at = [places[use.array.key] for use in uses]
        submitted, constants = Submitted(self.__name__), dict(bound.arguments)

        def arguments(arrays: Sequence[Any]) -> list[Any]:
            given = iter([arrays[place] for place in at])
            return [next(given) if n is None else [next(given) for _ in range(n)] for n in lengths]

        read_only = [use.mode == "R" for use in tiles.values()]
        call = self._call(lambda floats: constants, arguments, submitted=submitted)
        spec = (call, self.library == "torch", self._on_cuda is not None, read_only, 0)
        accesses = [(use.label, use.mode.replace("ACC", "RW"), use.array) for use in tiles.values()]
        submitted._native = submit(self.__name__, accesses, spec, **self._options)
        for use in tiles.values():
            if use.mode != "R":
                use.array.data.wrote(use.array.cut)
        return submitted

    def _uses(self, given: Mapping[str, Any]) -> tuple[list[TaskArgument], list[int | None]]:
        """Every array, and how many each argument has, None if it is no list. Raises TypeError for other values."""
        uses: list[TaskArgument] = []
        lengths: list[int | None] = []
        for argument, mode in self.modes.items():
            value = given[argument]
            many = isinstance(value, list | tuple)
            lengths.append(len(value) if many else None)
            for number, one in enumerate(value if many else [value]):
                label = f"{argument}[{number}]" if many else argument
                what = f"task {self.__name__}: {label}"
                if isinstance(one, Tiles):
                    raise TypeError(f"{what} is {one!r}; give one tile, a list, or the whole array")
                if not isinstance(one, Array):
                    raise TypeError(f"{what} is no nt.array but {type(one).__name__}")
                if self._lacks(one.data.dtype):
                    raise TypeError(f'{what} is of bfloat16, which numpy and cupy lack; use @nt.task("torch", ...)')
                uses.append(TaskArgument(label, mode, one))
        return uses, lengths

    def _tiles(self, uses: Sequence[TaskArgument]) -> dict[Any, TaskArgument]:
        """Each tile once. Raises ValueError for one that is written and given twice, or also given as cut otherwise."""
        tiles: dict[Any, TaskArgument] = {}
        writers: dict[int, TaskArgument] = {}
        for use in sorted(uses, key=lambda use: use.mode == "R"):
            writer = writers.get(id(use.array.data))
            if writer and writer.array.cut != use.array.cut:
                raise ValueError(
                    f"task {self.__name__}: {writer.label}, which is written, and {use.label} are of one array, but cut"
                    f" into {writer.array.cut} and {use.array.cut}"
                )
            same = tiles.setdefault(use.array.key, use)
            if same is not use and same.mode != "R":
                raise ValueError(f"task {self.__name__}: one array was given for two arguments")
            if use.mode != "R":
                writers.setdefault(id(use.array.data), use)
        return tiles

    def _lacks(self, dtype: str) -> bool:
        return self.library == "numpy" and dtype == "bf16"

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
        if any(self._lacks(access.tile.dtype) for access in accesses):
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
        call = self._call(lambda now: task.args.named(iter(now)) if fixed is None else fixed, list, first)
        read_only = [mode == "R" for mode in self.modes.values()]
        return call, self.library == "torch", self._on_cuda is not None, read_only, len(floats)

    # -- on a worker

    def _call(
        self,
        constants: Callable[[list[float]], Mapping[str, Any]],
        arguments: Callable[[list[Any]], list[Any]],
        zeroed: Collection[str] = (),
        submitted: Submitted | None = None,
    ) -> Call:
        """constants: the arguments that are no arrays, from the task's floats; arguments: those that are, from its
        tiles. zeroed: arrays that hold nothing yet."""

        def call(device: int, stream: int, parts: list[Any], now: list[float]) -> tuple[str, BaseException] | None:
            function = self._on_cpu if device < 0 else self._on_cuda
            assert function is not None
            try:
                with _arrays(self.library, device, stream, parts) as arrays:
                    named = dict(zip(self.modes, arguments(arrays), strict=True))
                    for name in zeroed:
                        named[name][...] = 0
                    value = function(**named, **constants(now))
                    if submitted:
                        submitted.ended(value, arrays)
                    elif value is not None and not any(value is array for array in arrays):
                        raise TypeError(
                            f"returned {type(value).__name__}, but nobody gets what an operator's kernel returns:"
                            " write it to an argument"
                        )
            except BaseException as error:
                if submitted:
                    submitted.failed(error)
                return _failure(error)
            return None

        return call


_named: dict[str, PythonTask] = {}


def bound(task: Task) -> Spec | None:
    """What C++ needs to run a task of a kernel in Python; None for a task of another kernel."""
    kernel = _named.get(task.kernel)
    return kernel.bound(task) if kernel else None


@typed
def task(library: str = "numpy", /, **modes: str) -> Callable[[Function], PythonTask]:
    """Make a Python function a task: `@nt.task(x="R", y="RW")`, a mode for each array argument.

    R: it reads the array. W: it writes all of it and finds nothing there. RW: both. In three it adds (`y += x`): ACC,
    in the order of submission; COMMUTE, one at a time in any order; REDUX, at once, each worker to zeros of its
    own, which StarPU sums at the next read. The last two round in another order at each run.

    The call submits and returns at once a Submitted, whose `result()` waits for what the function returns, copies of
    arrays only. An argument may be a list of arrays: the function gets a list. On a worker the function gets numpy
    views of the tiles' memory, read-only for R; they must not be kept. Other arguments are passed on as they are. What
    the function raises is the cause of a TaskError, naming it, at the next wait, read or submission. `NAME.options`
    says where and how urgently a call runs. `@NAME.cuda` above another function makes that the variant for CUDA
    workers: it gets cupy arrays on the tiles' memory, with the worker's stream current, and must enqueue its work
    there, without waiting: what wrote its tiles may still be running on that stream.

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


def _failure(error: BaseException) -> tuple[str, BaseException]:
    """What C++ is told of an exception. Its frames lose their variables: arrays on memory that StarPU may free."""
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # from the user's function on
    error.__traceback__ = trace
    earlier: BaseException | None = error
    while earlier:
        traceback.clear_frames(earlier.__traceback__)
        earlier = earlier.__cause__ or earlier.__context__
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own text fails
        text = type(error).__name__
    if trace:
        text += f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
    return text, error


def _is_view(value: Any, arrays: Sequence[Any]) -> bool:
    """Whether a returned array lies, or may lie, in the memory of one of these."""
    if isinstance(value, np.ndarray):
        return any(isinstance(array, np.ndarray) and np.may_share_memory(value, array) for array in arrays)
    if hasattr(value, "untyped_storage"):  # torch's
        memory = value.untyped_storage().data_ptr()
        return any(memory and array.untyped_storage().data_ptr() == memory for array in arrays)
    return any(value is array for array in arrays)


def _plain(function: Function) -> bool:
    """Whether its source says all that it does: a module that is loaded again has the same kernels."""
    return not any(getattr(function, f"__{what}__", None) for what in ("closure", "defaults", "kwdefaults"))


def _source(function: Function) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # typed in, or made by exec
        return marshal.dumps(function.__code__, 2) if hasattr(function, "__code__") else repr(function).encode()
