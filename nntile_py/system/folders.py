"""Where a user's machine keeps what is made or measured once, and how files are written whole or not at all."""

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
    """What was measured of this machine, and StarPU as `make setup` builds it."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # nobody's home
        home = Path(tempfile.gettempdir())
    return home / "nntile_py"


def installed(name: str) -> Path:
    """A folder of the repository that installs inside the package."""
    return next((d for p in Path(__file__).parents[1:3] if (d := p / name).is_dir()), Path(name))


def build_info() -> dict[str, str]:
    """What setup.py noted when it compiled the extension: StarPU's place, versions, compiler flags."""
    try:
        package = Path(__file__).parents[1]
        info = json.loads((package / "_build_info.json").read_text())
        # A wheel's paths begin with {package}, the folder that the wheel is installed in.
        return {key: str(value).replace("{package}", str(package)) for key, value in info.items()}
    except (OSError, ValueError):
        return {}


# Of the standard library: tests repeat themselves, `encodings` is tables, installed packages differ between machines.
_NO_SOURCES = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
STDLIB = "python-stdlib"  # what a config calls the sources of Python's standard library


def files_in(root: Path, extensions: Sequence[str], skipped: AbstractSet[str] = frozenset()) -> Iterator[Path]:
    """Files under `root` in the order of their names; hidden folders and linked ones are left out."""
    for path in sorted(root.iterdir(), key=lambda p: p.name):
        if path.is_dir() and not path.is_symlink() and path.name not in skipped and not path.name.startswith("."):
            yield from files_in(path, extensions, skipped)
        elif path.is_file() and path.name.lower().endswith(tuple(extensions)):
            yield path


def stdlib() -> Path:
    """The folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """The sources of Python's standard library."""
    # _sysconfigdata* says how this Python was built, with paths of this machine.
    return [path for path in files_in(stdlib(), [".py"], _NO_SOURCES) if not path.name.startswith("_sysconfigdata")]


def read(path: Path, most: int | None = None) -> bytes:
    """The content of a file, or the first `most` bytes of it. Raises OSError.

    Also for a pipe or a device, which may have no end, and for what no file can be called."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a null byte
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
    """Of a file or a folder: what was written is on the disk when this returns."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to; afterwards it is synced and takes the place of `path`."""
    beside = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with beside.open("ab") as held:
            with suppress(OSError):  # not everywhere possible: what is killed then stays
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield beside
            sync(beside)
            beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """What processes that were killed in `replaced` have left beside `path`."""
    for beside in path.parent.glob(f".{glob.escape(path.name)}.tmp*"):
        if beside.suffix.removeprefix(".tmp").isdecimal() and beside.is_file():
            with suppress(OSError), beside.open("ab") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not of a process that writes to it
                beside.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def exchange(one: Path, other: Path) -> None:
    """Two folders take each other's names, on Linux at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(libc, "renameat2") and libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return
    aside = one.with_name(f"{one.name}.old{os.getpid()}")  # a file system that cannot
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
