"""Arrays that take long to make and are the same each time, kept as files in the cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.system.folders import cache_folder, replaced

MOST = 4 * 2**30  # bytes of all files; those that were not used for longest go first

Arrays = dict[str, np.ndarray[Any, Any]]


def kept(kind: str, key: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returned for this key before, else what it returns now, which is kept.

    A file is whole or not there, whoever else writes it; one that was damaged since is made again (zip's CRC-32). Where
    nothing can be written, nothing is kept."""
    path = cache_folder() / kind / f"{key}.npz"
    try:
        if not path.is_file():  # nor is it a pipe, which would be waited for
            raise FileNotFoundError
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        os.utime(path)  # used now
        return arrays
    except Exception:  # not there, or damaged in whatever way
        arrays = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as beside, beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        _trim(path.parent)
    except OSError:  # a full or read-only disk
        pass
    return arrays


def _trim(folder: Path) -> None:
    """Remove what was used longest ago, until MOST bytes are left; the latest always stays."""
    found = sorted(((s.st_mtime, s.st_size, p) for p in folder.glob("*.npz") if (s := p.stat())), reverse=True)
    total = 0
    for _, size, path in found:
        if total and total + size > MOST:
            path.unlink(missing_ok=True)
        total += size
