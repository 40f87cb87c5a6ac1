"""Paths of the package, the cache and Python's standard library; safe reading and atomic replacement of files."""

import ctypes
import errno
import fcntl
import filecmp
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from nntile_py.system.units import room

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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


def is_name(text: str) -> bool:
    """Return True if a text can be the name of an entry of a folder: not a path, and neither "." nor ".."."""
    return bool(text) and text != ".." and Path(text).name == text


def stdlib() -> Path:
    """Return the folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library that serve as training text."""
    # Left out: _sysconfigdata*, which contains paths of the machine that built this Python.
    return [path for path in files_in(stdlib(), [".py"], _NO_SOURCES) if not path.name.startswith("_sysconfigdata")]


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: The file cannot be read, the path is invalid, or it is not a regular file (a pipe might never end).
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # the path contains a null byte
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is a folder" if stat.S_ISDIR(mode) else "not a regular file", str(path))
    return open(number, "rb")


def read(path: Path, most: int | None = None) -> bytes:
    """Return a regular file's content, or its first `most` bytes. Raises OSError if the file cannot be read."""
    with open_regular(path) as file:
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


def create(path: Path) -> IO[bytes]:
    """Open a new file for writing. Raises FileExistsError if the name is taken, even by a symbolic link."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "w+b")


def append(path: Path) -> FileIO:
    """Open a file for appending without a buffer; create it if it is missing. Raises OSError for a symbolic link."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "ab", buffering=0)


def temporary_name(path: Path) -> Path:
    """Return a path beside `path` that nobody can predict: a link planted there would redirect what is written."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def temporary_names(path: Path) -> list[Path]:
    """Return the existing paths that `temporary_name(path)` may have returned."""
    form = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{16}[.]tmp")
    return [one for one in path.parent.iterdir() if form.fullmatch(one.name)] if path.parent.is_dir() else []


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Context manager: yield a new file to write to. At the end of the block this file replaces `path`.

    Readers see either the old or the complete new file. After an exception `path` stays unchanged.
    """
    beside = temporary_name(path)
    try:
        file = create(beside)
        try:
            with suppress(OSError):  # without file locks, `remove_leftovers` cannot tell leftovers from files in use
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
            with suppress(OSError):  # after an error, closing tries again to write the buffer
                file.close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Context manager: add the file name `path` to an OSError without a file name, as after a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename or not error.errno:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of `replaced(path)` that killed processes of this user have left behind."""
    for beside in temporary_names(path):
        with suppress(OSError):
            file = os.open(beside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a process still writes to this file
                facts = os.fstat(file)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                    beside.unlink()
            finally:
                os.close(file)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new content. Missing folders are created.

    After an error, the folders that were missing are removed again."""
    with new_folders(path.parent), replaced(path) as file:
        file.write(_encoded(content))


@contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """Context manager: create a folder and the folders above it that are missing.

    After an exception in the block, the folders that were missing are removed again if they are empty."""
    missing = list(itertools.takewhile(lambda one: not one.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # a folder that another process has put a file into stays
            for one in missing:
                one.rmdir()
        raise


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files from `folder`, and folders inside it that this leaves empty. Nothing is removed through a link.

    names: paths inside `folder`, at most one folder deep. A path that is a folder is not removed."""
    for name in names:
        path = folder / name
        if path.parent.is_symlink() and path.parent != folder:
            continue
        with suppress(OSError):
            path.unlink()
        if path.parent != folder:  # also if the file is missing: a killed process may have removed only the file
            with suppress(OSError):
                path.parent.rmdir()


def write_new(path: Path, content: str | bytes) -> None:
    """Write a file that does not exist yet. After an error no part of the file is left.

    Raises:
        FileExistsError: The name is taken.
    """
    file = create(path)
    try:
        file.write(_encoded(content))
        file.close()
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def link_or_copy(source: Path, path: Path) -> None:
    """Replace `path` by a hard link to the file `source`, or by a copy on disks without hard links.

    A missing folder of `path` is created."""
    path.parent.mkdir(exist_ok=True)
    beside = temporary_name(path)
    try:
        os.link(source, beside)
    except OSError:
        with source.open("rb") as original, replaced(path) as file:
            shutil.copyfileobj(original, file)
        return
    try:
        beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)  # rename keeps both names if `path` is a link to the same file already


def same_content(one: Path, other: Path) -> bool:
    """Return True if two files exist and have equal bytes."""
    if not (one.is_file() and other.is_file()):
        return False
    return one.samefile(other) or filecmp.cmp(one, other, shallow=False)


def reserve(file: IO[bytes], size: int) -> None:
    """Reserve `size` bytes of the disk for a new file. Raises OSError, with both sizes, if the disk is full."""
    try:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
    except OSError as error:
        if error.errno not in NO_ROOM:
            return  # the file system cannot reserve
        raise OSError(error.errno, f"{error.strerror}: {room(size)} needed") from None


# -- folders that this program made

MARK = ".nntile_py"  # file in a folder that nntile_py made and may remove


def mark(folder: Path, kind: str) -> None:
    """Mark a folder as made by this program. kind: the folder's purpose."""
    replace_file(folder / MARK, _mark_of(kind))


def unmark(folder: Path) -> None:
    """Remove the mark from a folder."""
    (folder / MARK).unlink(missing_ok=True)


def is_marked(folder: Path, kind: str) -> bool:
    """Return True if the folder has the mark of this purpose, written by `mark`. Such a folder may be removed."""
    try:
        return not folder.is_symlink() and read(folder / MARK, 1000) == _mark_of(kind).encode()
    except OSError:
        return False


def remove_marked(folder: Path) -> None:
    """Remove a marked folder with its content. The mark is removed last, so what a kill leaves is still marked."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != MARK:
            with suppress(OSError):
                entry.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _mark_of(kind: str) -> str:
    return f"{kind} of nntile_py: this folder is removed when it is not needed any more\n"


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
