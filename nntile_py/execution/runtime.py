"""StarPU for Python: start and stop."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from nntile_py import _core
from nntile_py.errors import ConfigError, TaskError, exit_status
from nntile_py.execution.disk import SwapDisk
from nntile_py.execution.mpi import Ranks, ranks
from nntile_py.system import launcher as system
from nntile_py.system.cgroup import within_machine
from nntile_py.system.folders import cache_folder
from nntile_py.system.load import cores
from nntile_py.tasks.pdl import VARIABLE as OVERLAP
from nntile_py.tiles import TaskList
from nntile_py.tiles.placement import PLACEMENTS
from nntile_py.typed import typed

# Tasks that a GPU is given beyond the one that StarPU waits for, where no other worker could have taken them: where it
# is alone (packed BERT base: 27.8 ms a step with 4, 27.0 with 16 and with 40), and where it waits for others (XL on 4
# GPUs: 0.330 s a step with 0, 0.322 with 2, 0.360 with 4).
AHEAD, AHEAD_OF_OTHERS = 16, 2


class Runtime:
    """StarPU with CPU and CUDA workers and a scheduling policy, as a context manager; one at a time in a process.

    Args:
        cpus: CPU workers. Default: all cores, or none beside CUDA workers.
        scheduler: A scheduling policy of StarPU: lws, dmdas, dmdar, eager, ...
        cuda: GPUs to use, a worker each.
        memory: Bytes of main memory that tiles may take.
        cuda_memory: Bytes of each GPU that tiles may take. Default: 85 % of it.
        disk: {path, size}: a folder, and how many bytes may lie there of tiles that find no place in `memory`.
        window: Most tasks that are submitted and have not ended.
        calibrate: Measure anew the performance models that the dm* policies use.
        placement: "planned": a plan says which worker runs a task, and `scheduler` has no say (the default on several
            GPUs without CPU workers); "scheduler": the policy chooses.
        mpi: True: one program on all ranks that mpirun or srun has started, each with its own cores as workers; every
            rank runs the same script, and takes GPUs that no other has. One that was started alone has no need of MPI.
            False: on its own, whoever else was started. Default: on its own, and an error where others were started.
        nodes: How many ranks there have to be. Default: any number.
        shard_weights: Of several ranks, the one that updates a weight keeps it; others borrow it before each use, and
            let go of it. `window` bounds how many are borrowed ahead.

    Raises:
        ConfigError: A value is out of range.
        TaskError: StarPU does not start.
    """

    current: Runtime | None = None
    lent = False  # one that stands in where a user has started none: it stops when another is to start
    # While a profile is taken: the number and the tasks of whatever was submitted, a program or a task of its own.
    watched: list[tuple[int, TaskList]] | None = None

    @typed
    def __init__(
        self,
        cpus: int | None = None,
        scheduler: str = "lws",
        *,
        cuda: int = 0,
        memory: int | None = None,
        cuda_memory: int | None = None,
        disk: Mapping[str, Any] | None = None,
        window: int | None = None,
        calibrate: bool = False,
        placement: str | None = None,
        mpi: bool | None = None,
        nodes: int | None = None,
        shard_weights: bool = False,
    ) -> None:
        counts = {
            "cpus": cpus, "cuda": cuda, "memory": memory, "cuda_memory": cuda_memory, "window": window, "nodes": nodes,
        }  # fmt: skip
        for name, count in counts.items():
            if count is not None and (not isinstance(count, Integral) or ("memory" in name and count < 1)):
                raise ConfigError(f"runtime.{name}: {count!r} is not allowed; use an integer (memory: bytes)")
        usable = cores()
        self.cpus = (0 if cuda else usable) if cpus is None else cpus
        least = 0 if cuda else 1
        if not least <= self.cpus <= usable:
            raise ConfigError(f"runtime.cpus: {cpus} is not allowed; this machine has {least} to {usable}")
        if cuda and not _core.has_cuda:
            raise ConfigError("runtime.cuda: this build of nntile_py has no CUDA workers; use 0")
        self.cuda, self.cuda_memory = cuda, cuda_memory
        if scheduler not in _core.schedulers():
            raise ConfigError(
                f"runtime.scheduler: StarPU has no policy {scheduler!r}; allowed are {', '.join(_core.schedulers())}"
            )
        if window is not None and window < 1:
            raise ConfigError(f"runtime.window: {window} is not allowed; use a positive number of tasks")
        if placement not in (None, *PLACEMENTS):
            raise ConfigError(f"runtime.placement: {placement!r} is not allowed; use {' or '.join(PLACEMENTS)}")
        self.placement = placement or PLACEMENTS[cuda > 1 and not self.cpus]
        if self.placement == "planned" and "STARPU_SCHED" in os.environ:
            raise ConfigError(
                "STARPU_SCHED is not allowed with runtime.placement: planned; unset it, or use placement: scheduler"
            )
        for variable, allowed in (("NNTILE_PRODUCT", ("own", "blas")), (OVERLAP, ("0", "1"))):
            if (value := os.environ.get(variable, "")) not in ("", *allowed):
                raise ConfigError(f"{variable}: {value} is not allowed; {' or '.join(allowed)}")
        self.scheduler, self.memory, self.window, self.calibrate = scheduler, memory, window or 0, calibrate
        self.disk = SwapDisk(disk, memory) if disk else None
        self.ranks, self.shard_weights = joined(mpi, nodes), shard_weights
        if self.ranks:
            self.ranks.take_gpus(cuda)
        devices = cuda_devices() if cuda else 0
        if not 0 <= cuda <= devices:
            raise ConfigError(f"runtime.cuda: {cuda} is not allowed; this machine has {devices} CUDA devices")
        self._users: list[Any] = []

    def __repr__(self) -> str:
        memory = f", memory={self.memory}" if self.memory else ""
        state = "running" if Runtime.current is self else "not running"
        return f"<Runtime cpus={self.cpus}, cuda={self.cuda}, scheduler={self.scheduler!r}{memory}: {state}>"

    def start(self) -> Runtime:
        """Start the workers and return the runtime, which runs until `stop`: in a notebook, instead of `with`."""
        return self.__enter__()

    def stop(self) -> None:
        """Wait for all tasks and stop the workers. Nothing happens if the runtime is not running."""
        if Runtime.current is self:
            self.__exit__()

    def __enter__(self) -> Runtime:
        if Runtime.current and Runtime.current.lent:
            Runtime.current.__exit__()
        if Runtime.current is None and _core.running():
            self._stop()  # of a block that an interrupt has ended between two of its lines
        try:
            with uninterrupted():
                self._start()
        except KeyboardInterrupt as error:  # the block will not be entered, nor left
            if Runtime.current is self:
                self.__exit__(None, error)
            raise
        return self

    def _start(self) -> None:
        os.environ.setdefault("STARPU_SILENT", "1")
        _make_room_for_models()
        variables: dict[str, str] = {}
        try:
            page = 1
            if self.disk:
                variables, page = self.disk.open()
                # What is on its way to a device holds main memory for so long; fetching into that may wait for room.
                variables["STARPU_PREFETCH"] = "0"
            if self.memory:
                variables["STARPU_LIMIT_CPU_MEM"] = str(max(1, self.memory >> 20))
            if self.cuda:
                self.cuda_memory = self.cuda_memory or default_cuda_memory(self.ranks.sharers if self.ranks else 1)
                variables["STARPU_LIMIT_CUDA_MEM"] = str(max(1, self.cuda_memory >> 20))
                _prepare_cuda(self.cuda, self.memory)
            if self.ranks:  # MPI would read on a GPU what kernels have not written yet: StarPU goes on AHEAD of those
                variables["STARPU_MPI_GPUDIRECT"] = "0"
            os.environ.update(variables)
            policy = "planned" if self.placement == "planned" else self.scheduler
            _core.start(
                self.cpus, policy, self.window, self.calibrate, within_machine(self.memory), self.cuda,
                self.disk is not None, page, self._ahead(),
            )  # fmt: skip
            if self.ranks:
                self.ranks.start(self.window)
        except BaseException:
            self._close_disk()
            raise
        finally:
            for name in variables:
                os.environ.pop(name, None)
        Runtime.current = self
        atexit.register(self._stop)  # a process that ends inside the block: workers must not outlive the interpreter

    def _ahead(self) -> int:
        if self.cuda == 1 and not self.cpus:
            return AHEAD_OF_OTHERS if self.ranks else AHEAD
        return AHEAD_OF_OTHERS if self.placement == "planned" else 0

    def _stop(self) -> None:
        if self.ranks and system.failed:
            return  # the process ends, and all ranks with it: none of them is waited for
        with uninterrupted():
            try:
                if self.ranks:
                    self.ranks.stop()
                _core.stop()
            finally:
                self._close_disk()

    def _close_disk(self) -> None:
        if self.disk:
            self.disk.close()

    def __exit__(self, kind: object = None, error: BaseException | None = None, *where: object) -> None:
        with uninterrupted():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.ranks is None:
            return self._end_alone(None if error is None else type(error))
        try:
            if error is None:
                self._end_alone(None)
        except BaseException as other:
            error = other
            raise
        finally:
            if error is not None:  # nothing is waited for: what others would have sent may never come
                Runtime.current = None
                atexit.unregister(self._stop)
                system.failing(exit_status(error))

    def _end_alone(self, kind: type[BaseException] | None) -> None:
        users, self._users = self._users, []
        if kind and issubclass(kind, KeyboardInterrupt):
            _core.drop_python_tasks()
        try:
            if kind is None or not issubclass(kind, TaskError):  # after which weights may be anything
                for user in users:
                    user.close()
            if kind is None:
                _core.wait_all()
        finally:
            Runtime.current = None
            self._stop()
            atexit.unregister(self._stop)

    @property
    def users(self) -> tuple[Any, ...]:
        """Those that `at_exit` was told of."""
        return tuple(self._users)

    def at_exit(self, user: Any) -> None:
        """Keep `user` alive, and have `user.close()` called before StarPU stops."""
        self._users.append(user)

    def forget(self, user: Any) -> None:
        """Undo at_exit."""
        self._users = [u for u in self._users if u is not user]

    @staticmethod
    def wait() -> None:
        """Wait until every submitted task has ended; raises TaskError if one failed."""
        _core.wait_all()


def joined(mpi: bool | None, nodes: int | None) -> Ranks | None:
    """All ranks, if this process is to work with others."""
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
    """In the child of a fork: workers, disk and whoever would want to read tiles at the end are the parent's."""
    if running := Runtime.current:
        atexit.unregister(running._stop)
        running._users, running.disk, Runtime.current = [], None, None


os.register_at_fork(after_in_child=_forked)


def _make_room_for_models() -> None:
    """The folder where StarPU keeps what it measures. It would abort where it cannot make it."""
    if "STARPU_PERF_MODEL_DIR" in os.environ:
        return
    home = next((os.environ[name] for name in ("XDG_CACHE_HOME", "STARPU_HOME", "HOME") if name in os.environ), None)
    try:
        if home:
            buses = Path(home, ".starpu", "sampling", "bus")
            buses.mkdir(parents=True, exist_ok=True)
            if not os.access(buses, os.W_OK) and not any(buses.iterdir()):  # else it reads what is there
                raise PermissionError(errno.EACCES, "it cannot be written")
    except OSError as error:
        need = "XDG_CACHE_HOME, or STARPU_PERF_MODEL_DIR, with a folder that can be written"
        raise ConfigError(
            f"StarPU cannot keep its performance models in {home}: {error.strerror}; allowed: {need}"
        ) from None


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT waits until the block has ended: half started or half stopped StarPU is of no use to anyone.

    It takes no longer than the tasks that run. In the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before) and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            before(came[0], None)


def cuda_devices() -> int:
    """Those that this process may use; none is started by asking."""
    import torch

    return int(torch.cuda.device_count())


def default_cuda_memory(sharers: int = 1) -> int:
    """What tiles may take: the rest is for kernels' workspaces, and for what ATen's allocator cuts off. sharers:
    processes that use the GPU."""
    import torch

    return int(0.85 * torch.cuda.get_device_properties(0).total_memory) // sharers


CHUNKS_FROM = 4 << 30  # bytes

_OURS: set[str] = set()  # StarPU's settings that are not the user's


def _prepare_cuda(devices: int, memory: int | None) -> None:
    """StarPU's settings for CUDA where the user has none, and its measurement of the buses, once a machine.

    memory: bytes that tiles may take of main memory; None: all."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, "").replace(" ", ""):  # unmapped under kernels
            raise ConfigError(f"{name}: expandable_segments:True is not allowed with CUDA workers; leave it out")
    # Nothing is written back to main memory before there is need of the room. Tasks that wait on a device's stream
    # cannot be stolen by another device: fewer where there are several (XL on 4 GPUs: 0.52 s a step, then 0.43).
    pipeline = "4" if devices == 1 else "2"
    # It puts pinned tiles of up to 4 MiB together in chunks of 32 MiB and keeps four empty ones. Where memory is short
    # none finds its place, or what is evicted makes no room for larger tiles.
    chunks = "0" if memory and memory < CHUNKS_FROM else "1"
    settings = {
        "MINIMUM_CLEAN_BUFFERS": "0", "TARGET_CLEAN_BUFFERS": "0", "CUDA_PIPELINE": pipeline, "SUBALLOCATOR": chunks,
    }  # fmt: skip
    for name, value in settings.items():
        if f"STARPU_{name}" not in os.environ or name in _OURS:  # another runtime of this process may differ
            os.environ[f"STARPU_{name}"] = value
            _OURS.add(name)
    os.environ.setdefault("STARPU_PERF_MODEL_HOMOGENEOUS_CUDA", "1")
    _core.keep_choices(str(cache_folder()))
    # It resets the devices under whoever uses them in the same process: in one of its own, then. It measures all that
    # are visible, whatever number is used, and anew where its file is of more or fewer (perfmodel_bus.c of 1.4.10).
    kind, file = str(cuda_devices()), cache_folder() / f"bus-{platform.node()}"
    code = "from nntile_py import _core; _core.start(0, 'eager', 0, False, 0, 1); _core.stop()"
    with _locked(file):
        with contextlib.suppress(OSError):
            if file.read_text() == kind:
                return
        if subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode:
            return  # what is wrong is said when the runtime itself starts
        with contextlib.suppress(OSError):  # measured anew next time
            file.write_text(kind)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Other ranks on this machine wait, where the file can be made."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield
