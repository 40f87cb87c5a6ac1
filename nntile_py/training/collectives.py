"""What the ranks of a run do together, and what those do not that are not the first."""

import sys
import threading
from typing import Any

import numpy as np

from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime
from nntile_py.system import launcher as system
from nntile_py.system.cgroup import free_memory
from nntile_py.training.state import Snapshot
from nntile_py.training.trainer import Trainer


def ranks_of_run() -> Ranks | None:
    """All of them; None where there is one."""
    return Runtime.current.ranks if Runtime.current else None


def agree(stop: list[str], due: bool = False) -> tuple[bool, bool]:
    """Whether a signal has come to one of the ranks, and so to all; whether one of them says that something is due.

    A signal that comes while the others are waited for is told by the next call: all act at the same step."""
    if not (ranks := ranks_of_run()):
        return bool(stop), due
    asked, due = (bool(column.any()) for column in ranks.gathered(np.array([bool(stop), due], np.uint8)).T)
    if asked and not stop:
        stop.append("SIGTERM")
    return asked, due


def told_by_first(value: float) -> float:
    """What the first rank says, who knows more than the others."""
    ranks = ranks_of_run()
    return ranks.of_first(value) if ranks else value


def room_for_copies(trainer: Trainer) -> tuple[int, int]:
    """Bytes that a copy of weights and averages takes, and bytes that are free; of the rank that has least to spare.

    Every rank calls it."""
    if not (ranks := ranks_of_run()):
        return trainer.live().state().bytes, free_memory()
    live = trainer.live()
    need = sum(live.pieces[number].tile.bytes for number in live.mine)
    found = ranks.gathered(np.array([need, free_memory()], np.int64))
    worst = found[(found[:, 1] - found[:, 0]).argmin()]
    return int(worst[0]), int(worst[1])


class Silent:
    """In the place of metrics and display on all ranks but the first: that one writes and shows for all."""

    lines: tuple[dict[str, Any], ...] = ()

    def write(self, line: dict[str, Any]) -> None: ...

    def show(self, line: dict[str, Any]) -> None: ...


class Giver:
    """In the place of the saver there: gives the first rank, which writes checkpoints, the tiles that it has not.

    async_: copies of them, while the next steps run, as the Saver does where there is room for them."""

    def __init__(self, trainer: Trainer, async_: bool) -> None:
        self._trainer, self._async = trainer, async_
        self._thread: threading.Thread | None = None
        self._waits: bool | None = None

    @property
    def needs_report(self) -> bool:
        """As the Saver finds, which asks all ranks at the same moment."""
        if self._waits is None:
            need, free = room_for_copies(self._trainer)
            self._waits = not (self._async and need < free)
        return self._waits

    def due(self, step: int) -> bool:
        return False

    def begin(self, step: int) -> None:
        self._join()
        if self.needs_report:
            self._trainer.live().give()
            return
        copied = self._trainer.snapshot()
        # A daemon: where this rank fails, nobody will ask any more.
        self._thread = threading.Thread(target=self._give, args=(copied,), name="checkpoint", daemon=True)
        self._thread.start()

    def reported(self, step: int, good: bool) -> None: ...

    def finish(self) -> None:
        """Training has ended: give what is live until the first rank has saved it."""
        self._join()
        live = self._trainer.live()
        while not live.give():
            pass

    def _give(self, copied: Snapshot) -> None:
        try:
            copied.give()
        except BaseException as error:
            system.failing()
            print(f"{system.who()}error: checkpoint: {error}", file=sys.stderr, flush=True)
            if ranks := ranks_of_run():
                ranks.abort()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
