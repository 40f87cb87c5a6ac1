"""The checkpoint with the smallest held-out loss of a run: the link `best` in the run's folder names it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.checkpoint.format import STATE, checkpoint_folder, checkpoints_in, free_name
from nntile_py.system.folders import read, sync, temporary_name, temporary_names
from nntile_py.yaml_text import as_written

BEST = "best"  # name of the link
LOSS = "held_out_loss"  # entry of state.json: the loss that was measured with the checkpoint's weights
_TARGET = re.compile(r"checkpoints/step-(\d+)")
# Keys of a run that determine on which text, and how, the held-out loss is measured.
_CONDITIONS = ("batch", "seq", "eval_batches", "mask_probability")


def best_step(run: Path) -> int | None:
    """Return the step of the checkpoint that the link `best` of a run names; None if there is no such link."""
    try:
        match = _TARGET.fullmatch(os.readlink(run / BEST))
    except OSError:
        return None
    return int(match[1]) if match else None


def link_best(run: Path, step: int | None) -> None:
    """Let the link `best` name a checkpoint of the run, or remove the link if `step` is None.

    A user's file or folder of this name becomes best.old1. Readers see either the old or the new link."""
    link = run / BEST
    if os.path.lexists(link) and best_step(run) is None:
        if step is None:
            return
        link.rename(free_name(link))
    if step is None:
        link.unlink(missing_ok=True)
    else:
        beside = temporary_name(link)
        beside.symlink_to(checkpoint_folder(run, step).relative_to(run))
        try:
            beside.replace(link)
        finally:
            beside.unlink(missing_ok=True)
    sync(run)


def remove_unfinished_links(run: Path) -> None:
    """Remove links that killed processes have left beside `best`."""
    for beside in temporary_names(run / BEST):
        if beside.is_symlink():
            with suppress(OSError):
                beside.unlink()


class BestCheckpoint:
    """Keeps the link `best` of a run at its checkpoint with the smallest held-out loss.

    Args:
        run: The run's folder. A complete checkpoint is compared only if its loss was measured on the same text in the
            same way.
        key: The key `checkpoint.best`; None: the link stays as it is, unless its checkpoint is gone.
        facts: Entries `config` and `data` of the run's checkpoints.
        report: Shows a message.

    Attributes:
        best: Loss and step of the best complete checkpoint; None: there is none.
    """

    def __init__(self, run: Path, key: str | None, facts: Mapping[str, Any], report: Callable[[str], None]) -> None:
        self.best: tuple[float, int] | None = None
        self._enabled, self._report, self._losses = key is not None, report, dict[int, float]()
        if self._enabled:
            same = _conditions(facts)
            known = ((_read(folder), step) for step, folder in checkpoints_in(run))
            self.best = min(
                ((of[LOSS], step) for of, step in known if _is_loss(of.get(LOSS)) and _conditions(of) == same),
                default=None,
            )
            self._link(run)
        elif (step := best_step(run)) is not None and not (run / BEST).is_dir():
            link_best(run, None)
            report(f"the link {BEST} is removed: there is no checkpoint of step {step} any more")

    def improves(self, step: int, loss: float) -> bool:
        """Record a measured loss. Returns True if a checkpoint of this step would be the best."""
        self._losses[step] = loss
        return self._enabled and (self.best is None or loss < self.best[0])

    def facts(self, step: int) -> dict[str, Any]:
        """Return {LOSS: loss} for state.json of the step's checkpoint; {} if no loss was measured after this step."""
        return {LOSS: self._losses[step]} if step in self._losses else {}

    def written(self, run: Path, step: int) -> None:
        """After the checkpoint of a step is complete: if its loss is the smallest so far, let the link name it."""
        loss = self._losses.get(step)
        self._losses = {later: value for later, value in self._losses.items() if later > step}
        if self._enabled and loss is not None and (self.best is None or loss < self.best[0]):
            self.best = loss, step
            self._link(run)

    def moved(self) -> None:
        """Forget the best checkpoint: the run continues in another folder, which has no checkpoint yet."""
        self.best = None

    def _link(self, run: Path) -> None:
        step = self.best[1] if self.best else None
        if best_step(run) == step:
            return
        try:
            link_best(run, step)
        except OSError as error:  # training goes on; the link is made after the next resume or the next best checkpoint
            self._report(f"{run / BEST} is not made: {error.strerror}")


def _read(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json; {} if it cannot be read."""
    try:
        state = json.loads(read(folder / STATE))
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _is_loss(value: Any) -> bool:
    return isinstance(value, float)


def changed_conditions(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the changes of a run's config after which held-out losses cannot be compared with earlier ones, as text.

    Args:
        old, new: Entries of state.json of a checkpoint, and of the run that resumes from it. Both have the same data.

    Returns:
        Such as "train.seq was 64, is 128"; "" if there are no such changes.
    """
    (_, *before), (_, *after) = _conditions(old), _conditions(new)
    keys = "seed", *(f"train.{key}" for key in _CONDITIONS)
    values = zip(keys, (before[0], *before[1]), (after[0], *after[1]), strict=True)
    changes = [(key, as_written(first), as_written(now)) for key, first, now in values if first not in (None, now)]
    return ", ".join(f"{key} was {first}, is {now}" for key, first, now in changes)


def _conditions(facts: Mapping[str, Any]) -> Any:
    """Return what determines how a run measures its held-out loss: keys of its config, hashes of its data."""
    config = facts.get("config") or {}
    return facts.get("data"), config.get("seed"), [(config.get("train") or {}).get(key) for key in _CONDITIONS]
