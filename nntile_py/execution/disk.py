"""The disk folder to which StarPU writes tiles that do not fit into main memory, and from which it reads them."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.schema import DISK_SIZES, LEAST_DISK, disk_bytes
from nntile_py.system.folders import is_marked, mark, replace_file
from nntile_py.tiles.eviction import OFFLOADED, check_disk
from nntile_py.typed import plain

PREFIX = "nntile-swap-"  # prefix of the processes' folders; each process locks its folder
# {name allowed in `kinds`: kind of tile}. Activations are not listed: they may always go to the disk.
KINDS: dict[str, str] = {name: kind for name, kind in OFFLOADED.items() if name != "activations"}
RESERVED = ".size"  # file in each folder, with the largest number of bytes that the process may write
_SWAP = "tiles"  # mark of these folders; only folders with this mark are removed


def kept_kinds(kinds: Collection[str] | None) -> frozenset[str]:
    """Return the kinds of tiles that stay in main memory. StarPU moves all other tiles to the disk if memory is short.

    kinds: the value of `runtime.disk.kinds`.
    """
    return frozenset() if kinds is None else frozenset(kind for name, kind in KINDS.items() if name not in kinds)


class SwapDisk:
    """The checked key `runtime.disk`: a folder, and how many bytes tiles may take there.

    Args:
        given: {path, size}, and `kinds` if not all kinds of tensors may go to the disk.
        memory: runtime.memory, which this key requires.

    Raises:
        ConfigError: a wrong path or size, or no `memory`.
    """

    def __init__(self, given: Mapping[str, Any], memory: int | None) -> None:
        if not isinstance(given, Mapping) or set(given) - {"kinds"} != {"path", "size"}:
            raise ConfigError(
                f"runtime.disk: got {given!r}; allowed: {{path: of a folder, size: bytes, kinds: of tensors}}"
            )
        path, size, kinds = given["path"], disk_bytes(plain(given["size"])), given.get("kinds")
        if kinds is not None and not (isinstance(kinds, list | tuple) and all(kind in [*KINDS] for kind in kinds)):
            raise ConfigError(f"runtime.disk.kinds: got {kinds!r}; allowed: null, or a list of {', '.join(KINDS)}")
        self.kept = kept_kinds(kinds)
        if not isinstance(path, str | Path):
            raise ConfigError(f"runtime.disk.path: got {path!r}; allowed: the path of a folder")
        self.path = Path(os.path.expanduser(path))
        if not self.path.is_dir() or not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(f"runtime.disk.path: {self.path} is not a writable folder")
        if size is None:
            raise ConfigError(f"runtime.disk.size: got {given['size']!r}; allowed: {DISK_SIZES}")
        self.size = size
        check_disk(given, memory)
        with _locked(self.path, wait=True):
            self._check_size()
        self._folder: str | None = None
        self._lock = -1

    def open(self) -> tuple[dict[str, str], int]:
        """Create a folder for this process.

        Returns:
            StarPU's environment variables for the folder, and a number of bytes. The size of each tile must be a
            multiple of this number.
        """
        with _locked(self.path, wait=True):
            self._check_size()  # again, because other runs may have started
            self._folder = tempfile.mkdtemp(prefix=PREFIX, dir=self.path)
            self._lock = os.open(self._folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            mark(Path(self._folder), _SWAP)
            replace_file(Path(self._folder) / RESERVED, str(self.size))
        direct = _direct(self._folder)
        names = {
            "STARPU_DISK_SWAP": self._folder,
            "STARPU_DISK_SWAP_SIZE": str(self.size >> 20),
            "STARPU_DISK_SWAP_BACKEND": "unistd_o_direct" if direct else "unistd",
        }
        return names, mmap.PAGESIZE if direct else 1

    def _check_size(self) -> None:
        """Raise ConfigError if the folder `path` has no room for `size` bytes. The caller has locked `path`."""
        _remove_left_behind(self.path)
        reserved, free = _reserved(self.path), shutil.disk_usage(self.path).free
        if self.size > free - reserved:  # StarPU does not survive a full disk
            others = f", of which other runs have reserved {-(-reserved >> 20)} MiB" if reserved else ""
            raise ConfigError(
                f"runtime.disk.size: got {self.size >> 20} MiB; allowed: {LEAST_DISK >> 20} MiB to what is free in "
                f"{self.path}, {free >> 20} MiB{others}"
            )

    def close(self) -> None:
        """Remove the folder of this process."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Lock a folder inside the block. The lock also ends with the process.

    If another process holds the lock, wait for it, or raise OSError if `wait` is False.
    """
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(file)


def _remove_left_behind(path: Path) -> None:
    """Remove the folders in `path` that killed processes left behind: marked, and locked by no process."""
    for folder in path.glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(folder, wait=False):
            if is_marked(folder, _SWAP):
                shutil.rmtree(folder, ignore_errors=True)


def _reserved(path: Path) -> int:
    """Return the bytes that other processes may still write into their folders in `path`."""
    total = 0
    for folder in path.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):  # the folder was just removed, or has no valid RESERVED
            if is_marked(folder, _SWAP):
                total += max(0, int((folder / RESERVED).read_text()) - _written(folder))
    return total


def _written(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):  # removed meanwhile
                total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total


def _direct(folder: str) -> bool:
    """Return whether files in the folder can bypass the system's page cache (O_DIRECT).

    The cache would take main memory from the tiles.
    """
    path = os.path.join(folder, "probe")
    try:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        try:
            os.write(file, mmap.mmap(-1, mmap.PAGESIZE))  # aligned as O_DIRECT requires
        finally:
            os.close(file)
        return True
    except OSError:
        return False
    finally:
        Path(path).unlink(missing_ok=True)
