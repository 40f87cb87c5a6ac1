"""Every error that nntile_py raises on purpose, so that a caller can catch them all as NNTileError."""

import errno
import functools
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from nntile_py.system import launcher


class NNTileError(Exception):
    """Base of all errors of nntile_py; its text is meant for the user."""


class ConfigError(NNTileError):
    """A configuration is wrong; the text names the key and what is allowed. Exit status 2."""


class MissingWeight(ConfigError):
    """A checkpoint lacks a weight that the model has; the text names it."""


class ExtensionError(NNTileError, ImportError):
    """The compiled extension does not fit this machine or its torch; the text says how to get one that does."""


class TaskError(NNTileError):
    """A task failed; the text names the operator and what its kernel said."""


class NotFinite(NNTileError):
    """A loss or a norm is no finite number; the text names the step, and the operator where that was looked for."""


@contextmanager
def operators_refuse() -> Iterator[None]:
    """What operators do not take, such as sizes, is told as a ConfigError. Around a block, or as a decorator."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


MOST = 2000  # characters of a message
# Of a path that is none, or may not be used; the others are of a disk or a machine, and another path may not help.
_OF_PATHS = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def exit_status(error: BaseException) -> int:
    """2 where what the user has given is wrong: options, configs, paths, files and folders; 1 for all else."""
    of_path = isinstance(error, OSError) and error.filename and error.errno in _OF_PATHS
    return 2 if of_path or isinstance(error, ConfigError) else 1


def shown(text: str) -> str:
    """A message as a terminal can show it: control characters as Python writes them, less of one without end."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return plain if len(plain) <= MOST else f"{plain[: MOST - 600]} ... {plain[-500:]}"


@functools.cache
def say_once(text: str) -> None:
    """Warn, of each text once in a process; of several ranks the first does."""
    if launcher.leads():
        warnings.warn(text, stacklevel=3)


def raised(error: BaseException, file: str | None) -> str:
    """What an error in a user's file is, and its line there: "ZeroDivisionError in line 7: division by zero"."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}{f' in line {lines[-1]}' if lines else ''}: {error}"
