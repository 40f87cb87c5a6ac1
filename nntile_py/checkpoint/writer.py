"""Write checkpoints: for `Trainer.save`, during a run, and at the end of a run."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.best import BestCheckpoint, best_step
from nntile_py.checkpoint.run_folder import METRICS, Metrics, RunFolder
from nntile_py.checkpoint.state import Checkpointable, LiveState, Snapshot, memory_for_copies
from nntile_py.config.run_config import RunConfig
from nntile_py.config.sections import CheckpointSection, seconds
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.execution.mpi import Ranks
from nntile_py.models.registry import type_of
from nntile_py.system import launcher
from nntile_py.system.folders import NO_ROOM, replace_file, sync

RETRY = 10.0  # seconds between two attempts to save on a full disk


def trainer_facts(trainer: Any) -> dict[str, Any]:
    """Return the entries of state.json from which `Trainer.load` creates the trainer again."""
    spec = trainer.spec
    config = getattr(spec.model, "config", None)
    model = config and config.model_dump(mode="json", by_alias=True, exclude={"from_"})
    return {
        "model": model and model | {"type": type_of(spec.model)},
        "trainer": {
            "batch": spec.batch, "seq": spec.seq, "tiles": spec.tiling.tiles, "precision": spec.precision,
            "optimizer": {"name": spec.optimizer.method.__name__, **spec.optimizer.settings},
            "clip_grad_norm": spec.clip_grad_norm, "skip_above_norm": spec.skip_above_norm,
            "accumulate": spec.accumulate,
            "fusion": vars(spec.fusion), "grad_accumulation": spec.grad_accumulation, "seed": trainer.seed,
            "shift_labels": trainer.shift_labels, "pack": spec.pack, "check_finite": trainer.nan_check.enabled,
            "loss_scale": spec.loss_scale, **({"freeze": [*spec.freeze]} if spec.freeze else {}),
            **({"recompute": spec.recompute} if spec.recompute != "none" else {}),
            **({"offload": [*spec.offload]} if spec.offload else {}),
            **({"fp8": spec.fp8.model_dump(mode="json")} if spec.precision == "fp8" else {}),
        },
    }  # fmt: skip


def save_trainer(trainer: Any, folder: Path, ranks: Ranks | None) -> None:
    """Write a trainer's checkpoint into `folder`; see Trainer.save. All ranks must call this function."""
    config = hasattr(trainer.model, "hf_config")
    files = {checkpoint.CONFIG: json.dumps(trainer.hf_config(), indent=2)} if config else {}
    live = trainer.live()
    if ranks and ranks.rank:
        live.serve()
        if ranks.any(False):
            raise NNTileError(f"{folder}: the first rank could not write it")
        return
    written = False
    try:
        checkpoint.write_checkpoint(folder, live.state(), files, trainer_facts(trainer))
        written = True
    finally:
        live.end()
        if ranks:
            ranks.any(not written)


class CheckpointWriter:
    """Writes the checkpoints of a run on rank 0, in a thread while the next steps run.

    If writing fails, the writer reports the failure and training continues. A checkpoint is written only when a later
    step was not skipped, which shows that the checkpoint's weights are good, or when training has ended.

    Args:
        settings: The section `checkpoint` of the run's config.
        trainer: The trainer to save.
        folder: The run's folder.
        files: Files of each checkpoint beside the arrays, by name.
        facts: Entries of state.json in addition to `trainer_facts`.
        report: Shows a message.

    Attributes:
        newest: Step of the newest checkpoint known to be complete; None: there is none.
    """

    def __init__(
        self, settings: CheckpointSection, trainer: Checkpointable, folder: RunFolder, files: Mapping[str, str | bytes],
        facts: Mapping[str, Any], report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.folder, self._settings, self._trainer, self._report = folder, settings, trainer, report
        self._files, self._facts = dict(files), trainer_facts(trainer) | dict(facts)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._step = 0  # of the checkpoint being written
        self._copies: bool | None = None  # True if checkpoints are written from copies; None: not decided yet
        self._reported = self._good = trainer.steps  # last step in the metrics; last step that was not skipped
        self._ended = self._abandoned = False
        self._removed: list[int] = []  # steps of checkpoints removed to make room, not reported yet
        self.newest: int | None = None
        self._best = BestCheckpoint(folder.path, settings.best, facts, report)
        self._last_time = time.monotonic()

    @property
    def waits(self) -> bool:
        """True if training waits while a checkpoint is written: by the config, or for lack of memory for a copy."""
        if self._copies is None:
            need, free = memory_for_copies(self._trainer)
            self._copies = self._settings.async_ and need < free
            if self._settings.async_ and not self._copies:
                text = f"{need / 2**30:.2f} GiB, of which {free / 2**30:.2f} are free"
                self._report(f"a copy of weights and averages would take {text}: training waits for its checkpoints")
        return not self._copies

    def due(self, step: int) -> bool:
        """Return True if the config asks for a checkpoint after this step.

        If `checkpoint.every` is a time, the answer is False while the previous checkpoint is being written.
        """
        self._report_failure()
        if (every := self._settings.every) is None or isinstance(every, int):
            return every is not None and step % every == 0
        return self._thread is None and time.monotonic() - self._last_time >= seconds(every)

    def improves(self, step: int, loss: float) -> bool:
        """Record the held-out loss after a step. Returns True if the checkpoint of this step would be the best one."""
        return self._best.improves(step, loss)

    @property
    def best(self) -> tuple[float, int] | None:
        """Held-out loss and step of the best checkpoint; None without a checkpoint, or if the config keeps no best."""
        return self._best.best

    @property
    def needs_report(self) -> bool:
        """True if `reported` must be called for all submitted steps before the next checkpoint begins."""
        return self.waits or self._in_doubt

    @property
    def _in_doubt(self) -> bool:
        """True if a copied checkpoint still waits for a later step to show that its weights are good."""
        return self._thread is not None and self._good <= self._step

    def begin(self, step: int) -> None:
        """Begin the checkpoint of step `step`. Call it after this step is submitted and before the next one is.

        `reported` must have been called for all earlier steps; if `needs_report`, for this step too."""
        if self._in_doubt:
            self._leave_out()
        self._join()  # wait for the earlier checkpoint: the disk may be slower than the steps, and ranks copy together
        self._report_failure()
        self._last_time, self._step, self._ended, self._abandoned = time.monotonic(), step, False, False
        if not self.waits:
            args = self._trainer.snapshot(), self.folder.path
            self._thread = threading.Thread(target=self._write_snapshot, args=args, name="checkpoint")
            self._thread.start()
        elif self._good < step:
            self._leave_out()
            self._trainer.live().end()
        else:
            self._write(self._trainer.live(), self.folder.path)
            self._join()
            self._report_failure()

    def reported(self, step: int, good: bool) -> None:
        """Record that this step's line is in metrics.jsonl. good: the step was not skipped."""
        self._reported = step
        if good:
            self._good = step

    def _leave_out(self) -> None:
        self.abandon()
        self._report(
            f"checkpoint of step {self._step} left out: every gradient norm since then was above "
            "train.skip_above_norm or not finite"
        )

    def abandon(self, patience: float | None = None) -> None:
        """Give up a checkpoint that is not written yet, because its step failed or will not be reported.

        Waits for the checkpoint's thread.

        Args:
            patience: Wait at most this number of seconds, because the process ends. Default: no limit.
        """
        self._abandoned = True
        if patience is not None and self._thread:
            with suppress(RuntimeError):  # as in _join
                self._thread.join(patience)
            if self._thread.is_alive():  # its copies may wait for tasks that stall
                return
        self._join()

    def write_last(self) -> int:
        """Write the checkpoint of the last step, if it is missing. Returns the step. Raises the error if this fails."""
        self.finish()
        step = self._trainer.steps
        if self.newest != step:
            self._step = step
            self._write(self._trainer.live(), self.folder.path)
            self._join()
            if self._error:
                error, self._error = self._error, None
                raise error
        assert self.newest == step
        return step

    def move(self, folder: RunFolder) -> None:
        """Write all further checkpoints into another folder, which has no checkpoint yet."""
        self.folder, self.newest = folder, None
        self._best.moved()

    def close(self) -> None:
        """Tell the other ranks that no further checkpoint follows."""
        self._trainer.live().end(last=True)

    def finish(self) -> None:
        """After the last step: wait until the checkpoint that was begun is written."""
        self._ended = True
        self._join()
        self._report_failure()

    def _write_snapshot(self, snapshot: Snapshot, run: Path) -> None:
        """Wait until the copy is complete and its weights are known to be good or training has ended, then write it."""
        while not (snapshot.done() and (self._good > snapshot.step or self._is_last(snapshot.step))):
            if self._abandoned:
                snapshot.end()
                return
            time.sleep(0.001)
        self._write(snapshot, run)

    def _is_last(self, step: int) -> bool:
        return self._ended and self._reported >= step

    def _write(self, live: LiveState, run: Path) -> None:
        try:
            if (run / METRICS).is_file():
                sync(run / METRICS)
            self._write_making_room(live, run)
            self.newest = live.step
            self._best.written(run, live.step)
            checkpoint.prune(run, self._settings.keep, self._settings.keep_every, best_step(run))
        except Exception as error:  # the main thread reports it; training continues
            self._error = error
        finally:
            live.end()

    def _write_making_room(self, live: LiveState, run: Path) -> None:
        """Write a checkpoint. On a full disk remove older checkpoints, the oldest first, if that frees enough bytes."""
        state = live.state()
        removable = checkpoint.removable(run, self.newest, self._settings.keep_every, best_step(run))
        freed = sum(checkpoint.freed_bytes(folder) for _, folder in removable)
        checkpoint.check_free_space(run, state.bytes - freed)
        while True:
            try:
                checkpoint.check_free_space(run, state.bytes)
                folder = checkpoint.checkpoint_folder(run, live.step)
                checkpoint.write_checkpoint(folder, state, self._files, self._facts | self._best.facts(live.step))
                return
            except OSError as error:
                if error.errno not in NO_ROOM or not removable:
                    raise
            step, folder = removable.pop(0)
            checkpoint.remove_checkpoint(folder)
            self._removed.append(step)

    def _join(self) -> None:
        if self._thread:
            with suppress(RuntimeError):  # Ctrl-C came while the thread started: it is not joinable, and ends by itself
                self._thread.join()
            self._thread = None
        while self._removed:
            step = self._removed.pop(0)
            self._report(f"checkpoint of step {step} removed: the disk had no room for that of {self._step}")
        if self.newest is not None:
            self.folder.settle()

    def _report_failure(self) -> None:
        """Report an error of the last checkpoint, unless it was reported already."""
        if self._thread and not self._thread.is_alive():
            self._join()
        if self._error and not self._thread:
            error, self._error = self._error, None
            kept = f"the one of step {self.newest} stays" if self.newest is not None else "there is none yet"
            self._report(f"checkpoint of step {self._step} not written ({error_text(error)}); {kept}")


class TileSender:
    """Replaces CheckpointWriter on ranks other than 0: sends rank 0 the tiles that rank 0 lacks.

    async_: send copies of tiles while the next steps run, if all ranks have the memory for copies."""

    def __init__(self, trainer: Checkpointable, async_: bool) -> None:
        self._trainer, self._async = trainer, async_
        self._thread: threading.Thread | None = None
        self._waits: bool | None = None

    @property
    def needs_report(self) -> bool:
        """See CheckpointWriter.needs_report. All ranks must read this property at the same point of the run."""
        if self._waits is None:
            need, free = memory_for_copies(self._trainer)
            self._waits = not (self._async and need < free)
        return self._waits

    def due(self, step: int) -> bool:
        return False

    def improves(self, step: int, loss: float) -> bool:
        return False

    def begin(self, step: int) -> None:
        self._join()
        if self.needs_report:
            self._trainer.live().serve()
            return
        snapshot = self._trainer.snapshot()
        # A daemon thread: if this rank fails, no request will come.
        self._thread = threading.Thread(target=self._serve, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def reported(self, step: int, good: bool) -> None: ...

    def finish(self) -> None:
        """After the last step: send tiles to rank 0 until rank 0 has saved the run."""
        self._join()
        live = self._trainer.live()
        while not live.serve():
            pass

    def _serve(self, snapshot: Snapshot) -> None:
        try:
            snapshot.serve()
        except BaseException as error:
            launcher.failing()
            print(f"{launcher.who()}error: checkpoint: {error}", file=sys.stderr, flush=True)
            if snapshot.ranks:
                snapshot.ranks.abort()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None


def save_final(
    writer: CheckpointWriter, metrics: Metrics, config: RunConfig, rescue: Path | None, stop: list[str],
    report: Callable[[str], None],
) -> Path:  # fmt: skip
    """Write the run's last checkpoint and put its weights into the run's folder. Returns this folder.

    If that fails by an error that a user can correct, such as a full disk, save the run in the folder `rescue`. Without
    `rescue`, try again every RETRY seconds until another signal comes. If the checkpoint is written, and only the copy
    of its weights fails, raise NNTileError instead of trying again.

    stop: Names of the signals received so far; a signal appends its name."""
    waits, signals, saved = False, len(stop), None
    while True:
        try:
            step = writer.write_last()
            saved = checkpoint.checkpoint_folder(writer.folder.path, step)
            writer.folder.publish(step)
            return writer.folder.out
        except (OSError, ConfigError) as error:
            if rescue:
                report(f"not saved ({error_text(error)}): saving in {rescue} instead")
                where, rescue = rescue, None
                try:
                    folder = RunFolder(where, new=True)
                    replace_file(folder.path / "config.yaml", config.to_yaml())
                    metrics.move(folder.path)
                    writer.folder.close()
                    writer.move(folder)
                    continue
                except (OSError, NNTileError) as other:
                    report(f"nor there ({error_text(other)})")
            if saved:  # no need to try again: nothing is lost
                again = f"nntile train --resume {saved.parents[1]} puts the weights into this folder"
                raise NNTileError(f"{error_text(error)}; what was trained is in {saved}; {again}") from None
            if not waits:
                again = f"trying again every {RETRY:g} s; Ctrl-C gives up what was trained"
                report(f"not saved ({error_text(error)}): {again}")
            waits = True
            end = time.monotonic() + RETRY
            while time.monotonic() < end:
                time.sleep(0.1)
                if len(stop) > signals:
                    report(f"stopped by {stop[-1]}; nothing more is saved")
                    raise SystemExit(128 + signal.Signals[stop[-1]].value) from None


def error_text(error: Exception) -> str:
    """Return an error as text for a message. For an OSError, the text names the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, NNTileError) else f"{type(error).__name__}: {error}"
