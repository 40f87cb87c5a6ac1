"""The file with this machine's rates and with the tilings of `tiles: auto`, in the cache folder.

There is one file for each kind and number of workers. Its tilings were chosen by estimates, or measured by `nntile
sweep --auto`. A later run of the same config gets the same tiling.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from nntile_py.system.folders import cache_folder, read, replace_file
from nntile_py.tiles import AXES
from nntile_py.tiles.tiling import is_tile_size

ESTIMATED, MEASURED = "estimated", "measured"
MOST_BYTES = 1 << 24  # largest size of the file; a larger file counts as damaged
PATIENCE = 5.0  # seconds to wait for another process that changes the file
SLOWEST, FASTEST = 1e6, 1e18  # flop/s or bytes/s of a worker; stored rates outside of this range count as damaged


@dataclass(frozen=True)
class KeptTiling:
    """A tiling in the file.

    Attributes:
        tiles: {axis: tile size}.
        how: `estimated` or `measured`.
    """

    tiles: dict[str, int]
    how: str


class KeptTiles:
    """The file of one kind and number of workers.

    A file that cannot be read counts as empty. Nothing is stored if the file cannot be written, or if another process
    holds its lock for more than PATIENCE seconds.

    Args:
        workers: text that names the workers, such as "2 x Intel(R) Xeon(R) Processor".
    """

    def __init__(self, workers: str) -> None:
        self.path = cache_folder() / "tilings" / f"{re.sub(r'[^A-Za-z0-9.]+', '_', workers)}.json"

    def tiling(self, program: str) -> KeptTiling | None:
        """Return the tiling of a program (see tile_choice.program_of); None if the file has none."""
        return _tiling(self._read()["tilings"].get(program))

    def keep(self, program: str, tiles: Mapping[str, int], how: str) -> KeptTiling:
        """Store the tiling of a program and return it.

        If the file has a tiling, an estimated tiling does not replace it: the file's tiling is returned. `how`: see
        KeptTiling.
        """
        with self._changed() as content:
            kept = _tiling(content["tilings"].get(program))
            if how == MEASURED or not kept:
                kept = KeptTiling(dict(tiles), how)
                content["tilings"][program] = vars(kept)
        return kept

    def rates(self, dtype: str, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """Return flop/s and bytes/s of one worker for a dtype: stored rates, else the rates that `measure` returns."""
        if (kept := _rates(self._read()["rates"].get(dtype))) is None:
            measured = measure()
            with self._changed() as content:  # rates that another process stored during the measurement stay
                if (kept := _rates(content["rates"].get(dtype))) is None:
                    kept, content["rates"][dtype] = measured, list(measured)
        return kept

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the valid entries of the file."""
        try:
            content = json.loads(read(self.path, MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            content = {}
        sections = content if isinstance(content, dict) else {}
        valid = {"rates": _rates, "tilings": _tiling}
        return {
            name: {key: entry for key, entry in section.items() if is_valid(entry)}
            if isinstance(section := sections.get(name), dict) else {}
            for name, is_valid in valid.items()
        }  # fmt: skip

    @contextmanager
    def _changed(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Context manager: lock the file, return its content, and write the changed content at the end."""
        lock = self.path.with_suffix(".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(lock, flags, 0o644)
        except OSError:
            yield self._read()
            return
        try:
            locked = _locked(file)
            content = self._read()
            yield content
            if locked:
                with suppress(OSError):
                    replace_file(self.path, json.dumps(content, indent=1) + "\n")
        finally:
            os.close(file)


def _locked(file: int) -> bool:
    """Lock a file; return False if another process still holds the lock after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        except OSError:  # not all file systems have locks
            return True


def _tiling(kept: Any) -> KeptTiling | None:
    """Return an entry of the file as a tiling; None if the entry is not valid."""
    tiles = kept.get("tiles") if isinstance(kept, dict) else None
    if not isinstance(tiles, dict) or kept.get("how") not in (ESTIMATED, MEASURED):
        return None
    valid = all(axis in AXES and is_tile_size(size) for axis, size in tiles.items())
    return KeptTiling(tiles, kept["how"]) if valid else None


def _rates(kept: Any) -> tuple[float, float] | None:
    """Return an entry of the file as flop/s and bytes/s; None if the entry is no pair of possible rates."""
    if not isinstance(kept, list) or len(kept) != 2 or any(type(rate) not in (int, float) for rate in kept):
        return None
    flop_s, bytes_s = kept
    return (flop_s, bytes_s) if SLOWEST <= flop_s <= FASTEST and SLOWEST <= bytes_s <= FASTEST else None
