"""Arrays that take long to compute, cached as files in the cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.system.folders import cache_folder, replaced

MAX_BYTES = 4 * 2**30  # limit for all files of one kind together; the files used least recently are removed first

Arrays = dict[str, np.ndarray[Any, Any]]


def cached(kind: str, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Return the cached arrays of this key; compute and cache them if there are none.

    A cached file is complete or absent, even if several processes write it. The arrays of a damaged file (zip's CRC-32)
    are computed again. On a full or read-only disk nothing is cached.

    Args:
        kind: Name of the folder in the cache.
        key: Hash of everything that determines the arrays.
        make: Computes the arrays.
    """
    path = cache_folder() / kind / f"{key}.npz"
    try:
        if not path.is_file():  # opening a pipe of this name would wait for ever
            raise FileNotFoundError
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        os.utime(path)  # marks the file as used now
        return arrays
    except Exception:  # absent, or damaged in any way
        arrays = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            np.savez(file, allow_pickle=False, **arrays)
        _trim(path.parent)
    except OSError:  # a full or read-only disk
        pass
    return arrays


def _trim(folder: Path) -> None:
    """Remove the files used least recently until MAX_BYTES are left; the newest file always stays."""
    files = sorted(((s.st_mtime, s.st_size, p) for p in folder.glob("*.npz") if (s := p.stat())), reverse=True)
    total = 0
    for _, size, path in files:
        if total and total + size > MAX_BYTES:
            path.unlink(missing_ok=True)
        total += size
