"""The last checkpoint of a run, which is what was trained: where it goes when the disk is full."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from nntile_py.config.run_config import RunConfig
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.system.folders import replace_file
from nntile_py.training import checkpoint
from nntile_py.training.checkpoint_writer import Saver, told
from nntile_py.training.run_folder import Metrics, RunFolder

RETRY = 10.0  # seconds between two attempts to save what a full disk has no room for


def save(
    saver: Saver, metrics: Metrics, config: RunConfig, rescue: Path | None, stop: list[str], tell: Callable[[str], None]
) -> Path:
    """The last checkpoint, and its weights as those of the run; the folder that has them.

    What can be mended, such as a full disk, is waited for, or `rescue` takes its place."""
    waits, asked, step = False, len(stop), None
    while True:
        try:
            step = saver.now()
            saver.folder.publish(step)
            return saver.folder.out
        except (OSError, ConfigError) as error:
            if rescue:
                tell(f"not saved ({told(error)}): saving in {rescue} instead")
                where, rescue = rescue, None
                try:
                    elsewhere = RunFolder(where, new=True)
                    replace_file(elsewhere.path / "config.yaml", config.to_yaml())
                    metrics.move(elsewhere.path)
                    saver.folder.close()
                    saver.folder = elsewhere
                    continue
                except (OSError, NNTileError) as other:
                    tell(f"nor there ({told(other)})")
            if step is not None and not (isinstance(error, OSError) and error.errno in checkpoint.NO_ROOM):
                there = checkpoint.folder_of(saver.folder.path, step)
                raise NNTileError(f"{told(error)}; what was trained is in {there}") from None
            if not waits:
                tell(f"not saved ({told(error)}): trying again every {RETRY:g} s; Ctrl-C gives up what was trained")
            waits = True
            end = time.monotonic() + RETRY
            while time.monotonic() < end:
                time.sleep(0.1)
                if len(stop) > asked:
                    tell(f"stopped by {stop[-1]}; nothing more is saved")
                    raise SystemExit(128 + signal.Signals[stop[-1]].value) from None
