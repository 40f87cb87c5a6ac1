"""The ranks that mpirun or srun started: agreement between ranks, transfers of tiles, and a common end after a failure.

Python calls MPI through mpi4py. StarPU-MPI uses a separate communicator, because it treats every message on its
communicator as a message of StarPU.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution import gpu_assignment
from nntile_py.system import launcher as system
from nntile_py.system.load import cores
from nntile_py.system.version import VERSION

MESSAGES = 1000  # largest number of messages in transit at a time if runtime.window is not set
SHORT, LONG = 20e-6, 1e-3  # shortest and longest pause between two polls, in seconds
TRIPS = 200  # number of round trips to another rank; the shortest round trip compares the two clocks
NO_MORE, LAST = -1, -2  # rank 0 sends these instead of the number of an array: its requests end for now, or for good
PATIENCE = 20.0  # seconds after which all ranks end if a rank gives no sign of life
STARTING = 3  # factor on PATIENCE while ranks start, as their disks may be slow


class Ranks:
    """All ranks of a run; this process is number `rank` of `size`. Every rank calls the methods in the same order."""

    def __init__(self) -> None:
        sys.excepthook = functools.partial(_uncaught, sys.excepthook)
        try:
            from nntile_py import _mpi
        except ImportError as error:
            need = "one rank, or apt-get install libopenmpi-dev, then make setup"
            raise ConfigError(f"MPI: this build of nntile_py has none ({error}); allowed: {need}") from None
        with _starting(Path(str(_mpi.__file__)).name):
            self._join(_mpi)
        if patience := _patience():
            _mpi.watch(self._signs.py2f(), patience, _core.waited_for())
        atexit.register(self._end)
        self.cores = int(self.gathered(np.array([cores()])).min())
        self.gpus, self.sharers = 0, 1  # number of GPUs of each rank; number of ranks on this rank's most shared GPU
        self.library = _mpi.library().partition(",")[0].strip()
        versions = {"nntile_py": VERSION, "StarPU": _core.starpu_version(), "MPI": self._mpi.Get_version()}
        self.same("the version", versions)

    def _join(self, native: Any) -> None:
        """Initialise MPI, which waits for the other ranks. native: the C++ module nntile_py._mpi."""
        if system.apart(native.library()):
            _refuse_srun()
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            native.init()
            from mpi4py import MPI
        except ImportError as error:
            raise ConfigError(f"MPI: mpi4py does not load ({error}); pip install 'nntile_py[mpi]'") from None
        except RuntimeError as error:  # mpi4py found no MPI library
            raise ConfigError(f"MPI: mpi4py finds no MPI library ({error}); apt-get install libopenmpi-dev") from None
        if not MPI.Is_initialized():
            raise ConfigError("MPI: mpi4py uses another MPI library than StarPU; allowed: mpi4py built for that")
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ConfigError("MPI: the library lacks MPI_THREAD_MULTIPLE; allowed: one that has it, such as Open MPI")
        self._mpi, self._world, self._native = MPI, MPI.COMM_WORLD.Dup(), native
        self._pieces, self._signs = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
        self._tiles: Any = None
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        if self.size != system.started()[1]:
            if system.by_srun():
                _refuse_srun()
            sizes = f"it says {self.size} ranks, and {system.started()[1]} were started"
            raise ConfigError(f"MPI: mpi4py uses another MPI than mpirun: {sizes}; allowed: mpi4py built for this MPI")
        self.tags = itertools.count()  # tags of tiles

    # -- agreement between ranks

    def gathered(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the arrays [n] that all ranks pass as one array [ranks, n], on every rank.

        Waits for all ranks without keeping a core busy.
        """
        out = np.empty((self.size, len(values)), values.dtype)
        request, wait = self._world.Iallgather(np.ascontiguousarray(values), out), SHORT
        while not request.Test():
            time.sleep(wait)
            wait = min(2 * wait, LONG)
        return out

    def of_first(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        return float(self.gathered(np.array([value], np.float64))[0, 0])

    def any(self, flag: bool) -> bool:
        """Return, on every rank, whether the flag is set on any rank."""
        return bool(self.gathered(np.array([flag], np.uint8)).any())

    def all_to_all(self, value: Any) -> list[Any]:
        """Return the list of the values that all ranks pass, on every rank."""
        self.barrier()
        values: list[Any] = self._world.allgather(value)
        return values

    def take_gpus(self, count: int) -> None:
        """Assign `count` GPUs to each rank. Other GPUs stay invisible to this process until it ends.

        Raises:
            ConfigError: there are too few GPUs; raised on every rank.
        """
        self.same("the runtime", {"runtime.cuda": count})
        if count <= 0 or count == self.gpus:
            return
        if self.gpus:
            raise ConfigError(f"runtime.cuda: got {count}; allowed on several ranks: {self.gpus}, as before")
        seen_by = self.all_to_all(gpu_assignment.seen())
        taken = gpu_assignment.shared_out(seen_by, count)
        gpu_assignment.use(taken[self.rank], len(seen_by[self.rank]))
        users = Counter(seen_by[rank][k] for rank, own in enumerate(taken) for k in own)
        self.gpus, self.sharers = count, max(users[seen_by[self.rank][k]] for k in taken[self.rank])

    def barrier(self) -> None:
        """Wait until all ranks call this."""
        self.any(False)

    def same(self, what: str, parts: Mapping[str, Any], causes: Mapping[str, Any] | None = None) -> None:
        """Check that all ranks have the same values.

        Args:
            what: what the values describe together, for the error message.
            parts: {name: value}; arrays are compared by their bytes.
            causes: {name: value} of possible causes. A difference only in these is no error. If `parts` differ, the
                message names a cause that differs rather than a part.

        Raises:
            ConfigError: the ranks have different values. Every rank raises it; the message names a value that differs.
        """
        hashed = [_hash(value) for value in parts.values()]
        hashes = self.gathered(np.frombuffer(_hash(b"".join(hashed)), np.uint8))
        if (hashes == hashes[0]).all():
            return
        every = {**(causes or {}), **parts}
        described = self.all_to_all([(name, _hash(value), _shown(value)) for name, value in every.items()])
        for rank, other in enumerate(described):
            for (name, mine, shown), (_, theirs, there) in zip(described[0], other, strict=False):
                if mine != theirs:
                    values = f": rank {rank} has {there}, rank 0 has {shown}" if there != shown else f" of rank {rank}"
                    raise ConfigError(f"{what} is not the same on all ranks, see {name}{values}; allowed: the same")
        raise ConfigError(f"{what} is not the same on all ranks; allowed: the same")

    def from_first(self, value: Any) -> Any:
        """Return rank 0's object on every rank."""
        self.barrier()
        return self._world.bcast(value)

    def to_first(self, value: Any) -> list[Any] | None:
        """Return the list of the objects that all ranks pass on rank 0, and None on the other ranks."""
        self.barrier()
        values: list[Any] | None = self._world.gather(value)
        return values

    def clocks(self, now: Callable[[], int]) -> np.ndarray[Any, Any]:
        """Compare the clocks of the other ranks with rank 0's clock. `now` returns a rank's time in ns.

        Returns:
            On rank 0, an array [ranks, 3] in ns. A row has rank 0's time, the rank's own time at that moment, and the
            largest error of the comparison: half the round trip. On the other ranks, the array has no meaning.
        """
        result = np.zeros((self.size, 3), np.int64)
        result[0, :2] = now()
        mine, theirs = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for other in range(1, self.size):
            self.barrier()  # ranks sleep until their turn
            if self.rank == other:
                for _ in range(TRIPS):
                    self._world.Recv(theirs, 0)
                    mine[0] = now()
                    self._world.Send(mine, 0)
            elif self.rank == 0:
                trips = []
                for _ in range(TRIPS):
                    sent = now()
                    self._world.Send(mine, other)
                    self._world.Recv(theirs, other)
                    back = now()
                    trips.append((back - sent, sent, int(theirs[0])))
                took, sent, there = min(trips)
                result[other] = sent + took // 2, there, -(-took // 2)
        self.barrier()
        return result

    # -- arrays that rank 0 requests from the others, in one thread of each rank

    def ask(self, rank: int, number: int) -> Any:
        """Request array `number` from a rank that runs `give`, and return the array. Call it on rank 0."""
        self._pieces.send(number, rank)
        return self._received(rank)

    def end_giving(self, last: bool) -> None:
        """Make `give` end and return `last` on all other ranks. Call it on rank 0."""
        for rank in range(1, self.size):
            self._pieces.send(LAST if last else NO_MORE, rank)

    def give(self, array: Callable[[int], Any]) -> bool:
        """Send rank 0 the arrays that it requests with `ask`, until rank 0 calls `end_giving(last)`. Returns `last`.

        array: takes the number of an array and returns the array.
        """
        while (number := self._received(0)) >= 0:
            self._pieces.send(array(number), 0)
        return bool(number == LAST)

    def _received(self, rank: int) -> Any:
        """Return the next message from a rank. Waits without keeping a core busy."""
        wait = SHORT
        while (message := self._pieces.improbe(rank)) is None:
            time.sleep(wait)
            wait = min(2 * wait, LONG)
        return message.recv()

    def abort(self) -> None:
        """End all ranks now: a thread of this rank failed, which other ranks cannot know."""
        self._mpi.COMM_WORLD.Abort(system.failed or 1)

    # -- tiles

    def start(self, window: int) -> None:
        """Let StarPU, which must be running, send and receive tiles. window: as in Runtime; 0: not set."""
        self._tiles = self._mpi.COMM_WORLD.Dup()
        self._native.start(self._tiles.py2f())
        _core.use_transport(self._native.transport(), window or MESSAGES)

    def stop(self) -> None:
        """Stop transfers of tiles, after all tasks and messages of all ranks have ended and before StarPU stops."""
        if self._tiles is None:
            return
        self.barrier()
        _core.use_transport(None)
        self._native.stop()
        self._tiles.Free()
        self._tiles = None

    def _end(self) -> None:
        """End MPI when the process ends. After a failure, end all other ranks too: MPI cannot tell them otherwise."""
        self._native.leave()
        if system.failed:
            sys.stdout.flush()
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(system.failed)
        self._mpi.Finalize()


@functools.cache
def ranks() -> Ranks:
    """Return the Ranks object of this process. The first call creates it and waits for the other ranks."""
    return Ranks()


def _refuse_srun() -> NoReturn:
    """End all processes that srun started without a common MPI: rank 0 raises ConfigError, the other ranks exit."""
    if not system.leads():
        system.failing(2)
        raise SystemExit(2)
    need = "srun --mpi=pmix, or another of `srun --mpi=list` that MPI was built for, or mpirun in the job"
    raise ConfigError(
        f"MPI: srun has started {system.started()[1]} of this process, which do not find each other; allowed: {need}"
    )


def _patience() -> float:
    """Return the environment variable NNTILE_PATIENCE in seconds, by default PATIENCE. 0: wait forever (debugger)."""
    text = os.environ.get("NNTILE_PATIENCE", str(PATIENCE))
    try:
        if not 0 <= (value := float(text)) < 1e9:
            raise ValueError
    except ValueError:
        raise ConfigError(f"NNTILE_PATIENCE: got {text!r}; allowed: seconds, 0 for no end") from None
    return value


@contextmanager
def _starting(sign: str) -> Iterator[None]:
    """End this process if the block, in which it waits for the other ranks, lasts too long.

    sign: file name of a library. A rank that has loaded the library waits for the other ranks too.
    """
    done, seconds = threading.Event(), STARTING * _patience()
    if seconds:
        threading.Thread(target=_give_up, args=(done, seconds, sign), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _give_up(done: threading.Event, seconds: float, sign: str) -> None:
    """End this process, and thereby all ranks, if the other ranks do not start in time. One of the ranks prints why.

    Args:
        done: is set as soon as all ranks have started.
        sign: file name of a library. A rank that has loaded the library waits for the other ranks too.
    """
    if done.wait(seconds):
        return
    rank, size = system.started()
    states = system.seen(sign)
    lost = [other for other, state in states.items() if state != "waits"]
    # Ranks wait for different times, so usually only one rank prints the message: a rank that has found the cause, and
    # that has few lower ranks.
    if done.wait(system.OTHERS_WAIT * min(4, len(set(range(rank)) - {*lost}) + (not lost))):
        return
    if lost:
        where = "it does not come to where MPI starts, nntile_py.Runtime(mpi=True)"
        named, why = str(lost[0]), "its process is stopped" if states[lost[0]] == "stopped" else where
    else:
        named = " or ".join(str(other) for other in range(size) if other not in states)
        why = "on another machine it is stopped, or cannot be reached"
    message = f"rank {named} has not started in {seconds:g} s: {why}; NNTILE_PATIENCE is a third of that"
    print(f"{system.who()}error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _uncaught(before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an uncaught exception, which ends this process and thereby all ranks. before: the previous hook."""
    system.failing()
    print(system.who().rstrip(": "), file=sys.stderr)
    before(kind, error, trace)


def _hash(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        value = value.tobytes()
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def _shown(value: Any) -> str:
    return "an array" if isinstance(value, np.ndarray) else str(value)[:80]
