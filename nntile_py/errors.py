"""Error classes of nntile_py, whose base is NNTileError; exit statuses of commands; helpers for messages."""

import errno
import functools
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from nntile_py.system import launcher


class NNTileError(Exception):
    """Base class of all errors of nntile_py. The message is written for the user."""


class ConfigError(NNTileError):
    """A configuration is wrong. The message names the key and the allowed values; commands end with status 2."""


class MissingWeight(ConfigError):
    """A checkpoint lacks a weight of the model. The message names the weight."""


class ExtensionError(NNTileError, ImportError):
    """The compiled extension cannot run on this CPU or with this version of torch. The message says what to install."""


class TaskError(NNTileError):
    """A task failed. The message has the operator's name and the kernel's error."""


class NotFinite(NNTileError):
    """A loss or a gradient norm is not finite. The message names the step, with `debug.nonfinite` the operator."""


@contextmanager
def operators_refuse() -> Iterator[None]:
    """Context manager and decorator: a ValueError, such as an operator's error about sizes, becomes a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def as_options(*names: str) -> Iterator[None]:
    """If the block raises a ConfigError about an argument in `names`, raise it with the command-line option's name."""
    try:
        yield
    except ConfigError as error:
        key, _, wrong = str(error).partition(":")
        name, _, part = key.removeprefix("runtime.").partition(".")
        if name not in names:
            raise
        part = f" {part}:" if part else ""
        raise ConfigError(f"--{name.replace('_', '-')}:{part}{wrong.replace('runtime.', '--')}") from None


LIMITS = ": the limits of memory (ulimit -v) and of processes (ulimit -u) leave no room"  # end of a message
MOST = 2000  # longest message, in characters
# OSErrors that another path would avoid: they are the user's mistake, unlike other errors such as a full disk.
_OF_PATHS = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def exit_status(error: BaseException) -> int:
    """Return 2 for wrong input of the user (options, configs, paths, files, folders), 1 for any other error."""
    of_path = isinstance(error, OSError) and error.filename and error.errno in _OF_PATHS
    return 2 if of_path or isinstance(error, ConfigError) else 1


def shown(text: str) -> str:
    """Return a message for a terminal: with control characters escaped, and shortened in the middle if too long."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return plain if len(plain) <= MOST else f"{plain[: MOST - 600]} ... {plain[-500:]}"


@functools.cache
def say_once(text: str) -> None:
    """Issue a Python warning on rank 0. A repeated call with an equal text does nothing."""
    if launcher.leads():
        warnings.warn(text, stacklevel=3)


def raised(error: BaseException, file: str | None) -> str:
    """Return a text about an error in a user's file, with the line: "ZeroDivisionError in line 7: division by zero"."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}{f' in line {lines[-1]}' if lines else ''}: {error}"
