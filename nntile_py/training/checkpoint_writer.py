"""When `nntile train` writes a checkpoint; a thread does so while the next steps run. A failure is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.config.sections import CheckpointSection, seconds
from nntile_py.errors import NNTileError
from nntile_py.system.folders import sync
from nntile_py.training import checkpoint
from nntile_py.training.collectives import room_for_copies
from nntile_py.training.run_folder import METRICS, RunFolder
from nntile_py.training.state import Live, Snapshot
from nntile_py.training.trainer import Trainer
from nntile_py.training.trainer_io import facts as trainer_facts


class Saver:
    """Writes the checkpoints of a run into its folder.

    files, facts: what each holds beside the arrays, see checkpoint.write; tell: shows a message."""

    def __init__(
        self, how: CheckpointSection, trainer: Trainer, folder: RunFolder, files: Mapping[str, str | bytes],
        facts: Mapping[str, Any], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.folder, self._how, self._trainer, self._tell = folder, how, trainer, tell
        self._files, self._facts = dict(files), trainer_facts(trainer) | dict(facts)
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._step = 0  # that is being written
        self._copies: bool | None = None  # of weights and averages are made; None: not known yet
        self._reported = self._good = trainer.steps  # the last in the metrics; the last that was not skipped
        self._ended = self._abandoned = False
        self._gone: list[int] = []  # steps whose checkpoints made room for this one, and it is not told yet
        self.newest: int | None = None  # the step of the newest whole checkpoint
        self._begun = time.monotonic()

    @property
    def waits(self) -> bool:
        """Whether training stands still while one is written."""
        if self._copies is None:
            need, free = room_for_copies(self._trainer)
            self._copies = self._how.async_ and need < free
            if self._how.async_ and not self._copies:
                text = f"{need / 2**30:.2f} GiB, of which {free / 2**30:.2f} are free"
                self._tell(f"a copy of weights and averages would take {text}: training waits for its checkpoints")
        return not self._copies

    def due(self, step: int) -> bool:
        """Whether one is to begin after this step."""
        self._look()
        if (every := self._how.every) is None or isinstance(every, int):
            return every is not None and step % every == 0
        return self._thread is None and time.monotonic() - self._begun >= seconds(every)

    @property
    def needs_report(self) -> bool:
        """Whether all steps are to be reported before the next checkpoint begins."""
        return self.waits or self._in_doubt

    @property
    def _in_doubt(self) -> bool:
        """Whether there is a copy of weights that no later step has shown to be good."""
        return self._thread is not None and self._good <= self._step

    def begin(self, step: int) -> None:
        """To be called when step `step` was submitted and no later one, and those before it were reported, with
        `needs_report` itself too."""
        if self._in_doubt:
            self._leave_out()
        self._join()  # the disk is slower than the steps; of several ranks none copies before
        self._look()
        self._begun, self._step, self._ended, self._abandoned = time.monotonic(), step, False, False
        if not self.waits:
            of = self._trainer.snapshot(), self.folder.path
            self._thread = threading.Thread(target=self._write_copied, args=of, name="checkpoint")
            self._thread.start()
        elif self._good < step:
            self._leave_out()
            self._trainer.live().end()
        else:
            self._write(self._trainer.live(), self.folder.path)
            self._join()
            self._look()

    def reported(self, step: int, good: bool) -> None:
        """The metrics have the line of this step; good: it was not skipped.

        A checkpoint is written when a later step has shown that its weights are good, or training has ended."""
        self._reported = step
        if good:
            self._good = step

    def _leave_out(self) -> None:
        self.abandon()
        self._tell(f"checkpoint of step {self._step} left out: no step since then had a gradient norm as it should be")

    def abandon(self) -> None:
        """The step of a checkpoint that is being written failed, or will not be reported."""
        self._abandoned = True
        self._join()

    def now(self) -> int:
        """Write one of the last step, unless there is one; the step. Raises OSError where it cannot be written."""
        self.finish()
        step = self._trainer.steps
        if self.newest != step:
            self._step = step
            self._write(self._trainer.live(), self.folder.path)
            self._join()
            if self._failed:
                error, self._failed = self._failed, None
                raise error
        assert self.newest == step
        return step

    def close(self) -> None:
        """No other checkpoint will be written: the other ranks may go on."""
        self._trainer.live().end(last=True)

    def finish(self) -> None:
        """Training has ended: wait for the one that is being written."""
        self._ended = True
        self._join()
        self._look()

    def _write_copied(self, snapshot: Snapshot, run: Path) -> None:
        """When the copy is there, the metrics have its step, and its weights are known to be good."""
        while not (snapshot.done() and (self._good > snapshot.step or self._last(snapshot.step))):
            if self._abandoned:
                snapshot.end()
                return
            time.sleep(0.001)
        self._write(snapshot, run)

    def _last(self, step: int) -> bool:
        return self._ended and self._reported >= step

    def _write(self, live: Live, run: Path) -> None:
        try:
            if (run / METRICS).is_file():
                sync(run / METRICS)
            self._put(live, run)
            self.newest = live.step
            checkpoint.prune(run, self._how.keep, self._how.keep_every)
        except Exception as error:  # told by the main thread; training goes on
            self._failed = error
        finally:
            live.end()

    def _put(self, live: Live, run: Path) -> None:
        """Where there is no room, older ones than the newest whole one go, the oldest first; none goes in vain."""
        state, spare = live.state(), checkpoint.spare(run, self.newest, self._how.keep_every)
        checkpoint.check_room(run, state.bytes - sum(checkpoint.room_of(folder) for _, folder in spare))
        while True:
            try:
                checkpoint.check_space(run, state)
                checkpoint.write(checkpoint.folder_of(run, live.step), state, self._files, self._facts)
                return
            except OSError as error:
                if error.errno not in checkpoint.NO_ROOM or not spare:
                    raise
            step, folder = spare.pop(0)
            checkpoint.remove(folder)
            self._gone.append(step)

    def _join(self) -> None:
        if self._thread:
            with suppress(RuntimeError):  # a Ctrl-C came as it was started; if it starts yet, it is told to end
                self._thread.join()
            self._thread = None
        while self._gone:
            self._tell(f"checkpoint of step {self._gone.pop(0)} removed: the disk had no room for that of {self._step}")
        if self.newest is not None:
            self.folder.settle()

    def _look(self) -> None:
        """Tell of a failure, once."""
        if self._thread and not self._thread.is_alive():
            self._join()
        if self._failed and not self._thread:
            error, self._failed = self._failed, None
            kept = f"the one of step {self.newest} stays" if self.newest is not None else "there is none yet"
            self._tell(f"checkpoint of step {self._step} not written ({told(error)}); {kept}")


def told(error: Exception) -> str:
    """An error of a disk in words, with its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, NNTileError) else f"{type(error).__name__}: {error}"
