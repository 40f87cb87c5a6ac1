"""Chooses the folder of a run: a new folder for a new run, the newest folder to resume a run.

Checks that a folder can be written to."""

import errno
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nntile_py.errors import ConfigError
from nntile_py.system import launcher
from nntile_py.system.folders import NO_ROOM


def run_folder(name: str, configured: str | None, option: Path | None, overwrite: bool, trains: bool = False) -> Path:
    """Return the folder of a new run: --out, else `out` of the config, else the first free of runs/NAME, runs/NAME-2.

    Args:
        name: The config's name, NAME.
        configured: The value of `out` in the config.
        option: The value of --out.
        overwrite: Whether --overwrite allows a folder that is not empty.
        trains: Whether the command is `nntile train`, so that the message may suggest --resume.

    Raises:
        ConfigError: The folder of --out or `out` is a file or cannot be written to, or it is not empty and --overwrite
            is not given."""
    asked = option or (Path(configured) if configured else None)
    folder = asked or Path("runs") / name
    if (asked or overwrite) and os.path.lexists(folder) and not folder.is_dir():
        what = "a file" if folder.is_file() else "no folder"
        raise ConfigError(f"--out: {folder} is {what}; allowed: a new or empty folder")
    if overwrite or not taken(folder):
        check_writable("--out", folder)
        return folder
    if asked:
        on = ", --resume to go on with the run in it" if trains and (folder / "checkpoints").is_dir() else ""
        raise ConfigError(f"--out: {folder} is not an empty folder; allowed: a new or empty one{on}, or --overwrite")
    free = next(f for f in _numbered(folder) if not taken(f))
    check_writable("--out", free)
    if launcher.leads():
        print(f"{folder} holds an earlier run; this run goes to {free} (--overwrite: to {folder})", file=sys.stderr)
    return free


def check_writable(option: str, path: Path, folder: Path | None = None) -> None:
    """Raise ConfigError if the folder for a command's results cannot be written to. Commands call this before any work.

    The check writes a temporary file without a name into the folder, or into the nearest folder above it that exists.
    The root user may write into any folder by its permissions, but not into a read-only file system. A full disk is no
    error here, since it may have room at the end of the command; neither is a broken disk, which the command reports.

    Args:
        option: The option that names the path, for the message.
        path: A file or a folder, for the message.
        folder: The folder into which the command writes. None: `path` is this folder.
    """
    if not launcher.leads():  # only rank 0 writes
        return
    need = "a folder to write to" if folder is None else "a file in a folder to write to"
    folder = path if folder is None else folder
    nearest = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if nearest.is_file():
        raise ConfigError(f"{option}: {nearest} is a file; allowed: {need}")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EIO):
            raise ConfigError(f"{option}: {path}: {error.strerror}; allowed: {need}") from None


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
