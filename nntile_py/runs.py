"""Chooses the folder of a run: a new folder for a new run, the newest folder to resume a run."""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from nntile_py.errors import ConfigError
from nntile_py.system import launcher


def run_folder(name: str, configured: str | None, option: Path | None, overwrite: bool, trains: bool = False) -> Path:
    """Return the folder of a new run: --out, else `out` of the config, else the first free of runs/NAME, runs/NAME-2.

    Args:
        name: The config's name, NAME.
        configured: The value of `out` in the config.
        option: The value of --out.
        overwrite: Whether --overwrite allows a folder that is not empty.
        trains: Whether the command is `nntile train`, so that the message may suggest --resume.

    Raises:
        ConfigError: The folder of --out or `out` is a file, or not empty, and --overwrite is not given."""
    asked = option or (Path(configured) if configured else None)
    folder = asked or Path("runs") / name
    if (asked or overwrite) and os.path.lexists(folder) and not folder.is_dir():
        what = "a file" if folder.is_file() else "no folder"
        raise ConfigError(f"--out: {folder} is {what}; allowed: a new or empty folder")
    if overwrite or not taken(folder):
        return folder
    if asked:
        on = ", --resume to go on with the run in it" if trains and (folder / "checkpoints").is_dir() else ""
        raise ConfigError(f"--out: {folder} is not an empty folder; allowed: a new or empty one{on}, or --overwrite")
    free = next(f for f in _numbered(folder) if not taken(f))
    if launcher.leads():
        print(f"{folder} holds an earlier run; this run goes to {free} (--overwrite: to {folder})", file=sys.stderr)
    return free


def newest_run(name: str, configured: str | None, option: Path | None) -> Path:
    """Return the folder of the run to resume: --out (`option`), else the config's `out`, else the newest run of NAME.

    NAME's runs are in runs/NAME, runs/NAME-2, ...; the last of these folders that is not empty is the newest.
    """
    if asked := option or (Path(configured) if configured else None):
        return asked
    first = Path("runs") / name
    return [first, *itertools.takewhile(taken, _numbered(first))][-1]


def _numbered(folder: Path) -> Iterator[Path]:
    """Yield FOLDER-2, FOLDER-3, ... without end."""
    return (Path(f"{folder}-{n}") for n in itertools.count(2))


def run_of(folder: Path) -> Path:
    """Return the folder of the run to which a checkpoint's folder belongs. Any other folder is returned unchanged."""
    real = Path(os.path.realpath(folder))
    return real.parents[1] if real.parent.name == "checkpoints" else folder


def taken(folder: Path) -> bool:
    """Return True if the path exists and is not an empty folder."""
    return os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
