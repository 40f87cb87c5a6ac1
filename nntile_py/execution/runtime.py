"""The runtime: starts and stops StarPU."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn, ParamSpec, TypeVar

from nntile_py import _core
from nntile_py.errors import ConfigError, TaskError, exit_status
from nntile_py.execution.disk import SwapDisk
from nntile_py.execution.mpi import Ranks, ranks
from nntile_py.execution.starpu_settings import (
    check_devices,
    check_limits,
    convolutions_in_fp32,
    cpu_workers,
    create_model_folder,
    default_cuda_memory,
    prepare_cuda,
)
from nntile_py.graph.recompute_choice import OF_MACHINE
from nntile_py.schema import MEMORY_SIZES, memory_bytes
from nntile_py.system import launcher as system
from nntile_py.system.cgroup import within_machine
from nntile_py.system.interrupts import end_at_once, uninterrupted
from nntile_py.tasks.pdl import VARIABLE as OVERLAP
from nntile_py.tiles import TaskList
from nntile_py.tiles.placement import PLACEMENTS
from nntile_py.tiles.worker_kinds import check_workers
from nntile_py.typed import plain, typed

# Number of tasks that a GPU gets ahead of the task that StarPU waits for, if no other worker could take them.
# AHEAD is for one GPU: packed BERT base takes 27.8 ms a step with 4 tasks, and 27.0 ms with 16 or 40.
# AHEAD_OF_ANOTHER is for two GPUs: packed BERT base takes 31.4 ms a step with 2 tasks, 29.8 ms with 4, and 29.9 ms with
# 8. GPT-2 124M takes 56.3 ms with 2 tasks, and 55.8 ms with 4.
# AHEAD_OF_OTHERS is for more GPUs, and for several ranks: GPT-2 XL on 4 GPUs takes 0.330 s a step with 0 tasks, 0.322 s
# with 2, and 0.360 s with 4.
AHEAD, AHEAD_OF_ANOTHER, AHEAD_OF_OTHERS = 16, 4, 2


DEFAULT_SCHEDULER = "lws"
P = ParamSpec("P")
R = TypeVar("R")


def in_turns(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calls from several threads take turns, also with the start and the stop of a Runtime.

    Programs, their inputs and StarPU's start belong to all threads of the process. A step that two threads submit at a
    time would read mixed inputs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with Runtime.turn:
            return function(*args, **kwargs)

    return call


class Runtime:
    """StarPU with CPU and CUDA workers and a scheduling policy, as a context manager. A process has one at a time.

    Args:
        cpus: Number of CPU workers. Default: all cores, or none if there are CUDA workers.
        scheduler: A scheduling policy of StarPU: lws, dmdas, dmdar, eager, ...
        cuda: Number of GPUs to use, with one worker each.
        memory: Main memory that tiles may take: a number of bytes, or a text such as "16MiB" or "20GB".
        cuda_memory: Memory of each GPU that tiles may take. Default: 85 % of it.
        disk: {path, size}: a folder for tiles that do not fit into `memory`, and the bytes that tiles may take in this
            folder. Optional: `kinds`, the kinds of tensors that may go there; see DiskSection.
        window: Largest number of tasks that are submitted and have not ended. Default: no limit, or 32 on a GPU if
            memory is nearly full.
        calibrate: Measure the performance models of StarPU's dm* policies again.
        placement: "planned": a plan chooses the worker of each task, and `scheduler` has no effect (the default on
            several GPUs without CPU workers); "scheduler": the policy chooses.
        on_cpu: With GPUs and CPU workers: patterns, such as "adamw" or "*.attn.*", for names of operators or kernels.
            CPU workers run all matching tasks, and GPUs run all other tasks. Default: `scheduler` chooses for every
            task.
        mpi: True: one program on all ranks that mpirun or srun started. Every rank runs the same script. Its workers
            are its own cores, and GPUs that no other rank takes. A single process needs no MPI. False: this process
            works alone, even if mpirun or srun started others. Default: as False, but an error if they started others.
        nodes: The required number of ranks. Default: any number.
        shard_weights: True: with several ranks, the rank that updates a weight keeps it. Other ranks borrow the weight
            before each use and then free their copy. `window` bounds how many weights are borrowed ahead.

    Raises:
        ConfigError: A value is out of range.
        TaskError: StarPU does not start.
    """

    current: Runtime | None = None
    turn = threading.RLock()  # held by the thread that starts, stops or submits, see in_turns
    lent = False  # a runtime started implicitly; it stops when the user starts another one
    # During a profile: for every submission of a program or a single task, its number and its tasks. None: no profile.
    watched: list[tuple[int, TaskList]] | None = None

    @typed
    def __init__(
        self,
        cpus: int | None = None,
        scheduler: str = DEFAULT_SCHEDULER,
        *,
        cuda: int = 0,
        memory: int | str | None = None,
        cuda_memory: int | str | None = None,
        disk: Mapping[str, Any] | None = None,
        window: int | None = None,
        calibrate: bool = False,
        placement: str | None = None,
        on_cpu: Sequence[str] | None = None,
        mpi: bool | None = None,
        nodes: int | None = None,
        shard_weights: bool = False,
    ) -> None:
        for name, count in {"cpus": cpus, "cuda": cuda, "window": window, "nodes": nodes}.items():
            if count is not None and not isinstance(count, Integral):
                raise ConfigError(f"runtime.{name}: got {count!r}; allowed: an integer")
        memory, cuda_memory = _size("memory", memory), _size("cuda_memory", cuda_memory)
        self.cpus = cpu_workers(cpus, cuda)
        self.cuda, self.cuda_memory = cuda, cuda_memory
        if scheduler not in _core.schedulers():
            raise ConfigError(
                f"runtime.scheduler: StarPU has no policy {scheduler!r}; allowed: {', '.join(_core.schedulers())}"
            )
        if window is not None and window < 1:
            raise ConfigError(f"runtime.window: got {window}; allowed: a positive number of tasks")
        if placement not in (None, *PLACEMENTS):
            raise ConfigError(f"runtime.placement: got {placement!r}; allowed: {' or '.join(PLACEMENTS)}")
        self.placement = placement or PLACEMENTS[cuda > 1 and not self.cpus]
        if isinstance(on_cpu, str) or not all(isinstance(pattern, str) for pattern in on_cpu or ()):
            raise ConfigError(f"runtime.on_cpu: got {on_cpu!r}; allowed: a list of names, such as ['adamw']")
        check_workers(on_cpu, self.cpus, cuda, self.placement)
        self.on_cpu = tuple(on_cpu) if cuda and on_cpu is not None else None  # without GPUs it has no meaning
        _check_environment(self.placement)
        self.scheduler, self.memory, self.window, self.calibrate = scheduler, memory, window or 0, calibrate
        self.disk = SwapDisk(disk, memory) if disk else None
        self.ranks, self.shard_weights = joined(mpi, nodes), shard_weights
        if self.ranks:
            self.ranks.take_gpus(cuda)
        check_devices(cuda)
        only_first = {"memory": memory, "cuda_memory": cuda_memory, "disk": disk, "mpi": self.ranks}
        self._only_first = [name for name, value in only_first.items() if value]
        self._wanted_cpus = cpus
        self._users: list[Any] = []
        self._settings = contextlib.ExitStack()  # changes of PyTorch's settings, undone when the runtime stops
        self._process = os.getpid()

    def __repr__(self) -> str:
        memory = f", memory={self.memory}" if self.memory else ""
        state = "running" if Runtime.current is self else "not running"
        return f"<Runtime cpus={self.cpus}, cuda={self.cuda}, scheduler={self.scheduler!r}{memory}: {state}>"

    def start(self) -> Runtime:
        """Start the workers and return the runtime, which runs until `stop`. For notebooks, instead of `with`."""
        return self.__enter__()

    def stop(self) -> None:
        """Wait for all tasks and stop the workers. Nothing happens if the runtime is not running."""
        if Runtime.current is self:
            self.__exit__()

    @in_turns
    def __enter__(self) -> Runtime:
        if Runtime.current and Runtime.current.lent:
            Runtime.current.__exit__()
        if Runtime.current is None and _core.running():
            self._stop()  # an interrupt ended an earlier `with` block before it stopped StarPU
        try:
            with uninterrupted():
                self._start()
        except KeyboardInterrupt as error:  # Python will not call __exit__
            if Runtime.current is self:
                self.__exit__(None, error)
            raise
        return self

    def _start(self) -> None:
        """Set StarPU's environment variables and start StarPU."""
        os.environ.setdefault("STARPU_SILENT", "1")
        if not _core.running() and (workers := _core.starpu_workers()):
            self._join(*workers)
        create_model_folder()
        check_limits(self.cpus + self.cuda)
        variables: dict[str, str] = {}
        try:
            page = 1
            if self.disk:
                variables, page = self.disk.open()
                # No prefetch: tiles in transfer to a device occupy main memory that a fetch from disk may wait for.
                variables["STARPU_PREFETCH"] = "0"
            if self.memory:
                variables["STARPU_LIMIT_CPU_MEM"] = str(max(1, self.memory >> 20))
            if self.cuda:
                self.cuda_memory = self.cuda_memory or default_cuda_memory(self.ranks.sharers if self.ranks else 1)
                variables["STARPU_LIMIT_CUDA_MEM"] = str(max(1, self.cuda_memory >> 20))
                prepare_cuda(self.cuda, self.memory)
                self._settings.enter_context(convolutions_in_fp32())
            # MPI must not read tiles on a GPU: StarPU regards up to `_ahead()` tasks per GPU as ended while their
            # kernels still run.
            if self.ranks:
                variables["STARPU_MPI_GPUDIRECT"] = "0"
            os.environ.update(variables)
            policy = "planned" if self.placement == "planned" else self.scheduler
            _core.start(
                self.cpus, policy, self.window, self.calibrate, within_machine(self.memory), self.cuda,
                self.disk is not None, page, self._ahead(), self._pinned(),
            )  # fmt: skip
            if self.ranks:
                self.ranks.start(self.window)
        except BaseException:
            self._settings.close()
            self._close_disk()
            raise
        finally:
            for name in variables:
                os.environ.pop(name, None)
        Runtime.current, self._process = self, os.getpid()
        atexit.register(self._stop)  # if the process ends inside the block: workers must not outlive the interpreter

    def _join(self, cpus: int, cuda: int, policy: str) -> None:
        """Take the workers and the policy of a StarPU that `starpu.init()` has started in this process.

        Raises:
            ConfigError: A setting differs, or is allowed only if this runtime itself starts StarPU.
        """
        begun = "starpu.init() has started StarPU"
        if cuda or self.cuda:
            need = "STARPU_NCUDA=0, or the Runtime first and starpu.init() inside of it"
            raise ConfigError(f"runtime.cuda: {begun}, with {cuda} CUDA workers; allowed: {need}")
        for name in self._only_first:
            raise ConfigError(f"runtime.{name}: {begun}; allowed: the Runtime first and starpu.init() inside of it")
        wanted = {"cpus": (self._wanted_cpus, cpus), "scheduler": (self.scheduler, policy)}
        for name, (asked, runs) in wanted.items():
            if asked not in (None, DEFAULT_SCHEDULER, runs):
                raise ConfigError(f"runtime.{name}: got {asked}; allowed: {runs}, as {begun} with {runs}")
        self.cpus, self.scheduler, self.placement = cpus, policy, "scheduler"

    def _ahead(self) -> int:
        """Return the number of tasks that a GPU gets ahead of the task that StarPU waits for."""
        if self.cuda == 1 and not self.cpus:
            return AHEAD_OF_OTHERS if self.ranks else AHEAD
        if self.placement != "planned":
            return 0
        return AHEAD_OF_ANOTHER if self.cuda == 2 and not self.ranks else AHEAD_OF_OTHERS

    def _pinned(self) -> int:
        """Return the bytes of main memory for tiles and for buffers that are kept for later tiles.

        Without a surplus over runtime.memory, if main memory is full, half of the bytes that leave a GPU need newly
        pinned memory; with it, one byte in fifty does (simulated evictions of a Llama's tiles).
        """
        return within_machine(self.memory * 33 // 32) if self.memory else int(OF_MACHINE * within_machine(None))

    def _stop(self, interrupted: bool = False) -> None:
        """Stop StarPU. interrupted: a first signal has ended the `with` block."""
        if self.ranks and system.failed:
            return  # the process ends, and all ranks with it
        with uninterrupted(self.end_process, interrupted):
            try:
                if self.ranks:
                    self.ranks.stop()
                _core.stop()
            finally:
                self._settings.close()
                self._close_disk()

    def end_process(self, number: int) -> NoReturn:
        """End the process at once, without waiting for tasks. number: the signal that asks for the end."""
        self._close_disk()
        end_at_once(number)

    def _close_disk(self) -> None:
        if self.disk:
            self.disk.close()

    @in_turns
    def __exit__(self, kind: object = None, error: BaseException | None = None, *where: object) -> None:
        if Runtime.current is not self:  # `stop` was called in the block, or this is a forked child
            if error is None and self._process != os.getpid():
                _core.wait_all()  # raises TaskError: the block's tasks belong to the parent process
            return
        with uninterrupted(self.end_process, isinstance(error, KeyboardInterrupt | SystemExit)):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Leave the `with` block. After an error on several ranks, end the process without waiting for other ranks."""
        if self.ranks is None:
            return self._end_alone(None if error is None else type(error))
        try:
            if error is None:
                self._end_alone(None)
        except BaseException as other:
            error = other
            raise
        finally:
            if error is not None:  # messages of other ranks may never come
                Runtime.current = None
                atexit.unregister(self._stop)
                system.failing(exit_status(error))

    def _end_alone(self, kind: type[BaseException] | None) -> None:
        """Close the objects registered by `at_exit`, wait for all tasks, and stop StarPU.

        kind: type of the exception that ended the `with` block; None: no exception.
        """
        users, self._users = self._users, []
        if kind and issubclass(kind, KeyboardInterrupt):
            _core.drop_python_tasks()
        try:
            if kind is None or not issubclass(kind, TaskError):  # after a TaskError weights are not valid
                for user in users:
                    user.close()
            if kind is None:
                _core.wait_all()
        finally:
            Runtime.current = None
            self._stop(kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit))
            atexit.unregister(self._stop)

    @property
    def users(self) -> tuple[Any, ...]:
        """The objects registered by `at_exit`."""
        return tuple(self._users)

    def at_exit(self, user: Any) -> None:
        """Keep `user` alive, and call `user.close()` before StarPU stops."""
        self._users.append(user)

    def forget(self, user: Any) -> None:
        """Undo `at_exit(user)`."""
        self._users = [u for u in self._users if u is not user]

    @staticmethod
    def wait() -> None:
        """Wait until every submitted task has ended; raises TaskError if one failed."""
        _core.wait_all()


def _size(name: str, given: int | str | None) -> int | None:
    """Return a size in bytes. given: bytes, or a text with a unit as in a YAML; None returns None."""
    if given is None:
        return None
    if (size := memory_bytes(plain(given))) is None:
        raise ConfigError(f"runtime.{name}: got {given!r}; allowed: {MEMORY_SIZES}")
    return size


def _check_environment(placement: str) -> None:
    """Raise ConfigError if an environment variable that the runtime reads has a value that is not allowed."""
    if placement == "planned" and "STARPU_SCHED" in os.environ:
        need = "no STARPU_SCHED, or runtime.placement: scheduler"
        got = f"{os.environ['STARPU_SCHED']} with runtime.placement: planned"
        raise ConfigError(f"STARPU_SCHED: got {got}; allowed: {need}")
    for variable, allowed in (("NNTILE_PRODUCT", ("own", "blas")), (OVERLAP, ("0", "1"))):
        if (value := os.environ.get(variable, "")) not in ("", *allowed):
            raise ConfigError(f"{variable}: got {value}; allowed: {' or '.join(allowed)}")


def joined(mpi: bool | None, nodes: int | None) -> Ranks | None:
    """Return this process's Ranks object; None if the process works alone. mpi, nodes: as in Runtime.

    Raises:
        ConfigError: other processes were started and `mpi` is None, or the number of ranks is not `nodes`.
    """
    size = system.started()[1]
    if size > 1 and mpi is None:
        raise ConfigError(
            f"mpirun or srun has started {size} of this process; allowed on several ranks: nntile train,"
            " nntile profile, nntile bench step CONFIG, and nt.Runtime(mpi=True) in a script of your own"
        )
    if nodes is not None and nodes != (size if mpi else 1):
        raise ConfigError(
            f"runtime.nodes: got {nodes}, but {size if mpi else 1} of this process work together; allowed: the number"
            " that mpirun or srun starts, or null"
        )
    return ranks() if mpi and size > 1 else None


def _forked() -> None:
    """Forget the runtime in a forked child process: workers, disk and users belong to the parent."""
    Runtime.turn = threading.RLock()  # a thread that only the parent has may hold the old lock
    if running := Runtime.current:
        atexit.unregister(running._stop)
        running._users, running.disk, Runtime.current = [], None, None


os.register_at_fork(after_in_child=_forked)
