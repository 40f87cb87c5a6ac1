"""Tasks in plain Python: single tasks on arrays held by StarPU, and kernels of a user's own operators."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import marshal
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution.array import Array, Tiles, submit
from nntile_py.execution.worker_arrays import arrays_on_worker, failure, is_view
from nntile_py.tiles import Access, Slot, TaskArgs
from nntile_py.tiles.task import Task
from nntile_py.typed import typed

_MODES = ("R", "W", "RW", "ACC", "COMMUTE", "REDUX")
_LIBRARIES = ("numpy", "torch")

Function = Callable[..., Any]
# The function that C++ calls on a worker, with (GPU or -1 for a CPU worker, stream, the arrays' memory, the task's
# floats). It returns None, or the text of an exception and the exception.
Call = Callable[[int, int, list[Any], list[float]], tuple[str, BaseException] | None]
# What C++ needs to run a Python task: (the function to call, whether it takes torch tensors, whether it can run on CUDA
# workers, for each array whether it is only read, number of floats).
Spec = tuple[Call, bool, bool, list[bool], int]


class Submitted:
    """A submitted call of a task. `result()` waits for the task and returns the function's value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._native: Any = None  # the submission in C++
        self._returned: list[Any] = []
        self._error: BaseException | None = None
        self._view = False  # True: the function returned one of its arrays, or a view of such an array

    def done(self) -> bool:
        return bool(self._native.done())

    def result(self) -> Any:
        """Wait for the task and return the function's value.

        Raises:
            TaskError: the task, or a task before it, failed.
            TypeError: the function returned a view of its arrays.
        """
        self._native.wait()
        if self._error:
            raise TaskError(f"{self.name}: {type(self._error).__name__}, which was reported before") from self._error
        if self._view:
            raise TypeError(f"task {self.name}: returned a view of one of its arrays; return a copy")
        if not self._returned:
            raise TaskError(f"{self.name}: was not run, because a task before it had failed")
        return self._returned[0]

    def __repr__(self) -> str:
        return f"Submitted({self.name}, {'done' if self.done() else 'not yet done'})"

    def ended(self, value: Any, arrays: Sequence[Any]) -> None:
        """Record the value that the function returned. arrays: the arrays that the function got."""
        self._view = is_view(value, arrays)
        if not self._view:
            self._returned.append(value)

    def failed(self, error: BaseException) -> None:
        """Record the exception that the function raised."""
        self._error = error


class TaskArgument(NamedTuple):
    """An array argument of a call. `label` is the argument's name, with its index if the argument is a list."""

    label: str
    mode: str
    array: Array


class PythonTask:
    """A function decorated by `nt.task`. A call submits a task. An operator can emit the function as a kernel."""

    def __init__(self, function: Function, library: str, modes: dict[str, str]) -> None:
        self.__name__: str
        for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if kind(function):  # a call would return before the function runs
                kinds = "an async function or a generator"
                raise TypeError(f"task {function.__name__}: got {kinds}; allowed: a plain function")
        functools.update_wrapper(self, function)
        self.library, self.modes, self._on_cpu = library, modes, function
        self._on_cuda: Function | None = function if library == "torch" else None
        self._signature = inspect.signature(function)
        self._options: dict[str, Any] = {}
        if unknown := set(modes) - set(self._signature.parameters):
            raise ValueError(f"task {function.__name__}: has no argument {', '.join(sorted(unknown))}")

    def cuda(self, variant: Function) -> PythonTask:
        """Decorator: use the function `variant` on CUDA workers. Returns this task."""
        self._on_cuda = variant
        return self

    @functools.cached_property
    def name(self) -> str:
        """The name in task lists and their digests: module, function name, and a hash of the source."""
        functions = dict.fromkeys(f for f in (self._on_cpu, self._on_cuda) if f)
        digest = hashlib.sha256(b"".join(map(_source, functions))).hexdigest()[:8]
        name = f"{self._on_cpu.__module__}.{self._on_cpu.__qualname__}-{digest}"
        while name in _named and not all(map(_plain, functions)):
            name += "'"
        _named[name] = self
        return name

    # -- as a single task

    @typed
    def options(self, *, priority: int = 0, where: str | None = None) -> PythonTask:
        """Return the same task with other options for its calls: `f.options(priority=2)(x)`.

        Args:
            priority: the ready task with the greatest priority runs first, if the scheduler has priorities (lws, prio,
                dmdas).
            where: the workers that may run the task: "cpu", "cuda", or one worker, such as "cpu:0" or "cuda:1".

        Raises:
            ValueError: other values, or "cuda" for a task without a CUDA variant.
        """
        name = self.__name__
        if not isinstance(priority, Integral):
            raise ValueError(f"task {name}: got priority {priority!r}; allowed: an integer")
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", where or "cpu")
        if not match:
            raise ValueError(f'task {name}: got where={where!r}; allowed: "cpu", "cuda", or one worker: "cuda:0"')
        kind, number = match.groups()
        if where and kind == "cuda" and not self._on_cuda:
            need = f'a variant by @{name}.cuda, or a task of @nt.task("torch", ...)'
            raise ValueError(f"task {name}: got where={where!r} without a CUDA variant; allowed: {need}")
        changed = copy.copy(self)
        changed._options = {"priority": int(priority)}
        if where:
            changed._options |= {"cpu": kind == "cpu", "cuda": kind == "cuda", "worker": int(number or -1)}
        return changed

    def __call__(self, *args: Any, **kwargs: Any) -> Submitted:
        """Submit the task with these arguments and return at once, before the task runs."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        uses, lengths = self._uses({argument: bound.arguments.pop(argument) for argument in self.modes})
        tiles = self._tiles(uses)
        for use in tiles.values():
            if use.mode != "W" or use.array.shape != use.array.data.shape:  # a full overwrite needs no old contents
                use.array.data.bring(use.array.cut, f"task {self.__name__}: {use.label}")
        places = {key: place for place, key in enumerate(tiles)}
        used = [places[use.array.key] for use in uses]
        submitted, constants = Submitted(self.__name__), dict(bound.arguments)

        def arguments(arrays: Sequence[Any]) -> list[Any]:
            values = iter([arrays[place] for place in used])
            return [next(values) if n is None else [next(values) for _ in range(n)] for n in lengths]

        read_only = [use.mode == "R" for use in tiles.values()]
        call = self._call(lambda floats: constants, arguments, submitted=submitted)
        spec = (call, self.library == "torch", self._on_cuda is not None, read_only, 0)
        accesses = [(use.label, use.mode.replace("ACC", "RW"), use.array) for use in tiles.values()]
        submitted._native = submit(self.__name__, accesses, spec, **self._options)
        for use in tiles.values():
            if use.mode != "R":
                use.array.data.wrote(use.array.cut)
        return submitted

    def _uses(self, arguments: Mapping[str, Any]) -> tuple[list[TaskArgument], list[int | None]]:
        """Return every array of a call, and for each array argument the length of its list, None for a single array.

        Raises:
            TypeError: an argument is no array, or has a dtype that the task's library lacks.
        """
        uses: list[TaskArgument] = []
        lengths: list[int | None] = []
        for argument, mode in self.modes.items():
            value = arguments[argument]
            many = isinstance(value, list | tuple)
            lengths.append(len(value) if many else None)
            for number, array in enumerate(value if many else [value]):
                label = f"{argument}[{number}]" if many else argument
                what = f"task {self.__name__}: {label}"
                if isinstance(array, Tiles):
                    raise TypeError(f"{what} is {array!r}; allowed: one tile, a list, or the whole array")
                if not isinstance(array, Array):
                    raise TypeError(f"{what} is no nt.array but {type(array).__name__}")
                if self._lacks(array.data.dtype):
                    raise TypeError(f'{what} is bfloat16, which numpy and cupy lack; allowed: @nt.task("torch", ...)')
                uses.append(TaskArgument(label, mode, array))
        return uses, lengths

    def _tiles(self, uses: Sequence[TaskArgument]) -> dict[Any, TaskArgument]:
        """Return {key of the tile: argument}, with each tile once, even if several arguments are the same tile.

        Raises:
            ValueError: the task writes a tile that is given twice, or an array that is also given in another grid.
        """
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
                raise ValueError(f"task {self.__name__}: two arguments are the same array")
            if use.mode != "R":
                writers.setdefault(id(use.array.data), use)
        return tiles

    def _lacks(self, dtype: str) -> bool:
        """Return whether the task's library lacks this dtype: numpy and cupy have no bf16."""
        return self.library == "numpy" and dtype == "bf16"

    # -- in programs

    def emitted(self, accesses: Sequence[Access], args: TaskArgs) -> str:
        """Check a task that an operator emits with this kernel, and return the kernel's name.

        Raises:
            ValueError: the accesses or arguments differ from the function's declaration.
        """
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
                f"precision: got bf16 with {self.name}, whose libraries numpy and cupy lack bf16; allowed: fp32,"
                ' or a task of @nt.task("torch", ...)'
            )
        return self.name

    def bound(self, task: Task) -> Spec:
        """Return the Spec with which C++ runs a task of a resolved list. Raises TaskError if no worker can run it."""
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
        """Return the function that C++ calls on a worker.

        Args:
            constants: takes the task's floats and returns {name: value} of the arguments that are no arrays.
            arguments: takes the arrays of the task's tiles and returns the function's array arguments.
            zeroed: names of array arguments to fill with zeros before the call, because they have no contents yet.
            submitted: the object that gets the function's value or exception; None: a task of an operator.
        """

        def call(device: int, stream: int, parts: list[Any], now: list[float]) -> tuple[str, BaseException] | None:
            function = self._on_cpu if device < 0 else self._on_cuda
            assert function is not None
            try:
                with arrays_on_worker(self.library, device, stream, parts) as arrays:
                    named = dict(zip(self.modes, arguments(arrays), strict=True))
                    for name in zeroed:
                        named[name][...] = 0
                    value = function(**named, **constants(now))
                    if submitted:
                        submitted.ended(value, arrays)
                    elif value is not None and not any(value is array for array in arrays):
                        raise TypeError(
                            f"returned {type(value).__name__}, but the kernel of an operator must return None:"
                            " write the result to an argument"
                        )
            except BaseException as error:
                if submitted:
                    submitted.failed(error)
                return failure(error)
            return None

        return call


_named: dict[str, PythonTask] = {}


def bound(task: Task) -> Spec | None:
    """Return the Spec with which C++ runs a task if the task's kernel is in Python, None for any other kernel."""
    kernel = _named.get(task.kernel)
    return kernel.bound(task) if kernel else None


@typed
def task(library: str = "numpy", /, **modes: str) -> Callable[[Function], PythonTask]:
    """Decorate a Python function as a task: `@nt.task(x="R", y="RW")`, with a mode for each array argument.

    Modes: R reads the array. W writes the whole array, and the function must not read the old contents. RW reads and
    writes. Three modes add (`y += x`). ACC adds in the order of submission. COMMUTE adds one task at a time, in any
    order. REDUX adds in parallel: each worker adds to its own array of zeros, and StarPU sums these arrays at the next
    read. The order of additions under COMMUTE and REDUX, and so the rounding, differs from run to run.

    A call submits the task and returns a Submitted at once. `Submitted.result()` waits for the value that the function
    returns; arrays in the value must be copies. If an argument is a list of arrays, the function gets a list. On a
    worker the function gets numpy views of the tiles' memory, read-only for R, and must not keep them. All other
    arguments reach the function unchanged. An exception of the function is the cause of a TaskError at the next wait,
    read or submission. `NAME.options` sets the workers and the priority of a call.

    `@NAME.cuda` above another function makes that function the variant for CUDA workers. The variant gets cupy arrays
    on the tiles' memory, with the worker's stream current. It must enqueue its work on this stream without waiting: the
    tasks that wrote its tiles may still be running on the stream.

    `@nt.task("torch", ...)`: the function gets torch tensors of any dtype (numpy and cupy have no bf16) on CPU and CUDA
    workers. On CUDA workers the worker's stream is torch's current stream, so Triton kernels may be launched. The
    function must not write to arrays that it declares as R.

    The `lower` method of an operator may emit the task: `lowering.emit(NAME, [R(x), RW(y)], args)`, with the declared
    modes in the declared order. The fields of `args`, a TaskArgs, become keyword arguments. A Slot becomes the number
    that it has in this step. The function adds its contribution to an ACC array (`y += ...`) under every accumulation
    policy; the array holds zeros if there is nothing to add to yet.

    Raises:
        ValueError: an unknown library or mode.
    """
    if library not in _LIBRARIES:
        raise ValueError(f"task: got library {library!r}; allowed: {' or '.join(_LIBRARIES)}")
    for name, mode in modes.items():
        if mode not in _MODES:
            raise ValueError(f"task: got mode {mode!r} of {name}; allowed: {', '.join(_MODES)}")
    return lambda function: PythonTask(function, library, modes)


def _plain(function: Function) -> bool:
    """Return whether a function is determined by its source alone: it has no closure and no default values.

    A reloaded module then has the same kernels.
    """
    return not any(getattr(function, f"__{what}__", None) for what in ("closure", "defaults", "kwdefaults"))


def _source(function: Function) -> bytes:
    """Return the source text of a function, or its bytecode if the source is not available."""
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # typed into an interpreter, or from exec
        return marshal.dumps(function.__code__, 2) if hasattr(function, "__code__") else repr(function).encode()
