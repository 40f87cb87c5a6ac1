"""Paths of the package, the cache and Python's standard library; safe reading and atomic replacement of files."""

import ctypes
import errno
import fcntl
import glob
import json
import os
import stat
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's folder of cached files: measurements of this machine, and StarPU as `make setup` builds it."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home folder
        home = Path(tempfile.gettempdir())
    return home / "nntile_py"


def installed(name: str) -> Path:
    """Return the path of a data folder such as `experiments`, in the installed package or in the repository."""
    return next((d for p in Path(__file__).parents[1:3] if (d := p / name).is_dir()), Path(name))


def build_info() -> dict[str, str]:
    """Return how setup.py compiled the extension: StarPU's folder, versions, compiler flags. Empty if unknown."""
    try:
        package = Path(__file__).parents[1]
        info = json.loads((package / "_build_info.json").read_text())
        # A wheel's paths begin with {package}, the folder that the wheel is installed in.
        return {key: str(value).replace("{package}", str(package)) for key, value in info.items()}
    except (OSError, ValueError):
        return {}


# Folders of the standard library that are left out of the training text: repetitive tests, the tables in `encodings`,
# and installed packages, which differ between machines.
_NO_SOURCES = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
STDLIB = "python-stdlib"  # the value of data.source for the sources of Python's standard library


def files_in(root: Path, extensions: Sequence[str], skipped: AbstractSet[str] = frozenset()) -> Iterator[Path]:
    """Yield files under `root` whose lower-case name ends with one of `extensions`, sorted by name in each folder.

    Hidden folders, symbolic links to folders, and folders named in `skipped` are left out.
    """
    for path in sorted(root.iterdir(), key=lambda p: p.name):
        if path.is_dir() and not path.is_symlink() and path.name not in skipped and not path.name.startswith("."):
            yield from files_in(path, extensions, skipped)
        elif path.is_file() and path.name.lower().endswith(tuple(extensions)):
            yield path


def stdlib() -> Path:
    """Return the folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library that serve as training text."""
    # Left out: _sysconfigdata*, which contains paths of the machine that built this Python.
    return [path for path in files_in(stdlib(), [".py"], _NO_SOURCES) if not path.name.startswith("_sysconfigdata")]


def read(path: Path, most: int | None = None) -> bytes:
    """Return a file's content, or its first `most` bytes.

    Raises:
        OSError: The file cannot be read, the path is invalid, or it is not a regular file (a pipe might never end)."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # the path contains a null byte
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is a folder" if stat.S_ISDIR(mode) else "not a regular file", str(path))
    with open(number, "rb") as file:
        try:
            return file.read(-1 if most is None else most)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def sync(path: Path) -> None:
    """Wait (fsync) until all data written to a file or a folder is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Context manager: yield a temporary path to write to. At the end of the block this file replaces `path`.

    Readers see either the old or the complete new file. After an exception `path` stays unchanged.
    """
    beside = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with beside.open("ab") as held:
            with suppress(OSError):  # without file locks, `remove_leftovers` cannot tell leftovers from files in use
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield beside
            sync(beside)
            beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of `replaced(path)` that killed processes have left behind."""
    for beside in path.parent.glob(f".{glob.escape(path.name)}.tmp*"):
        if beside.suffix.removeprefix(".tmp").isdecimal() and beside.is_file():
            with suppress(OSError), beside.open("ab") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a process still writes to this file
                beside.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new content. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders: in one step if the file system supports this, else by three renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(libc, "renameat2") and libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return
    aside = one.with_name(f"{one.name}.old{os.getpid()}")  # the file system does not support RENAME_EXCHANGE
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
