"""Choice of a run's folder: a new one for a new run, the newest one to resume."""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from nntile_py.errors import ConfigError
from nntile_py.system import launcher


def run_folder(name: str, configured: str | None, option: Path | None, overwrite: bool, trains: bool = False) -> Path:
    """Return the folder of a new run: --out, else `out` of the config, else runs/NAME or runs/NAME-2, ...

    Raises:
        ConfigError: --out or the config's `out` is not empty, without --overwrite."""
    asked = option or (Path(configured) if configured else None)
    folder = asked or Path("runs") / name
    if overwrite or not taken(folder):
        return folder
    if asked:
        on = ", --resume to go on with the run in it" if trains and (folder / "checkpoints").is_dir() else ""
        raise ConfigError(f"--out: {folder} is not an empty folder; allowed: a new or empty one{on}, or --overwrite")
    free = next(f for f in _numbered(folder) if not taken(f))
    if launcher.leads():
        print(f"{folder} holds an earlier run; this one goes to {free} (there with --overwrite)", file=sys.stderr)
    return free


def newest_run(name: str, configured: str | None, option: Path | None) -> Path:
    """Return the folder to resume: --out, else the config's `out`, else the last of runs/NAME, runs/NAME-2, ..."""
    if asked := option or (Path(configured) if configured else None):
        return asked
    first = Path("runs") / name
    return [first, *itertools.takewhile(taken, _numbered(first))][-1]


def _numbered(folder: Path) -> Iterator[Path]:
    """Yield runs/NAME-2, runs/NAME-3, ..."""
    return (Path(f"{folder}-{n}") for n in itertools.count(2))


def run_of(folder: Path) -> Path:
    """Return the run's folder of a checkpoint; another folder is returned unchanged."""
    real = Path(os.path.realpath(folder))
    return real.parents[1] if real.parent.name == "checkpoints" else folder


def taken(folder: Path) -> bool:
    """Return True if the path exists and is not an empty folder."""
    return os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
