"""Compile generated C++ kernels on this machine. The user's cache folder keeps the compiled libraries."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nntile_py.errors import NNTileError, say_once
from nntile_py.system.folders import build_info, cache_folder, remove_leftovers, replace_file

from .cpp import SYMBOL, source
from .expression import Call, Definition, Element, Output, TileType

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared", "-w")
LIBRARIES = ("-lmvec", "-lm")  # glibc's vector functions
FULL = os.strerror(errno.ENOSPC)
SECONDS, VERSION_SECONDS = 120.0, 20.0  # time limits of the compiler: to compile a kernel, to print its version
CHECK = hashlib.sha256().digest_size  # bytes of the checksum at the end of a library file, see _check


class NoCompiler(NNTileError):
    """A generated kernel could not be compiled or loaded. The message says why."""


def _compiler() -> list[str]:
    """Return the command of the C++ compiler as words: the environment variable CXX, or c++. Raises NoCompiler."""
    try:
        cxx = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise NoCompiler(f"CXX is {os.environ['CXX']!r} ({error}); allowed: a C++ compiler, its options") from None
    if not shutil.which(cxx[0]):
        raise NoCompiler(f"there is no C++ compiler {' '.join(cxx)}; get one (Debian: apt-get install g++), or set CXX")
    return cxx


@functools.cache
def command() -> tuple[str, ...]:
    """Return the command that compiles kernels, with flags for the CPU instructions that the extension was built for.

    Raises NoCompiler.
    """
    built = build_info().get("arch", "-march=native")
    vectors = ["-mprefer-vector-width=512"] if "AVX512" in built else []
    return (*_compiler(), *FLAGS, *(flag for flag in built.split() if flag.startswith("-m")), *vectors)


def path_of(text: str) -> Path:
    """Return the path in the cache folder for the library of a C++ source. Raises NoCompiler.

    The name is a hash of the source, the command and the compiler's version.
    """
    named = "\0".join([*command(), _version(), text])
    return cache_folder() / "kernels" / f"{hashlib.sha256(os.fsencode(named)).hexdigest()[:32]}.so"


@functools.cache
def address(text: str) -> int:
    """Return the address of the function in a C++ source. Raises NoCompiler.

    The library comes from the cache folder, or is compiled and stored there.
    """
    kept = path_of(text)
    try:
        return _loaded(kept)
    except (OSError, AttributeError):
        pass  # the library is missing or damaged: compile it
    try:
        with _watched_folder() as (folder, group):
            library = _compiled(text, folder, group)
            try:
                content = library.read_bytes()
                remove_leftovers(kept)
                replace_file(kept, content + _check(kept, content))  # atomic
                return _loaded(kept)
            except (OSError, AttributeError) as error:
                function = _function(library)  # before the message: if this fails, its error is reported instead
                why = getattr(error, "strerror", None) or str(error).removeprefix(f"{kept}: ")
                say_once(f"fusion: kernels are compiled at each start, as {kept.parent} cannot keep them: {why}")
                return function
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"a generated kernel could not be compiled or loaded: {error}") from None


def _loaded(path: Path) -> int:
    """Return the address of the function in a cached library. Raises OSError, AttributeError.

    Owner, permissions and checksum are checked first: loading a damaged library would crash the process, and a library
    from another user could execute anything.
    """
    for place in (path.parent, path):
        kept = place.stat()
        if kept.st_uid not in (0, os.geteuid()) or kept.st_mode & stat.S_IWOTH:
            raise OSError(f"{path}: the folder or a file in it belongs to another user, or all may write to it")
    content = path.read_bytes()
    if _check(path, content[:-CHECK]) != content[-CHECK:]:
        raise OSError(f"{path} is damaged, or another kernel's")
    return _function(path)


def _check(path: Path, content: bytes) -> bytes:
    """Return the checksum of a library, over its file name and content. It is stored at the end of the file."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _function(library: Path) -> int:
    """Return the address of the function in a library. Raises OSError, AttributeError."""
    return ctypes.cast(ctypes.CDLL(str(library))[SYMBOL], ctypes.c_void_p).value or 0


# Shell script that reads a pipe whose other end this process holds: reading ends when this process ends. The script
# then ends its process group, which contains the compiler, and removes the folder $1.
_WATCHER = 'trap "" TERM; read -r nothing; kill -TERM 0; rm -rf -- "$1"; kill -KILL 0'


@contextmanager
def _watched_folder() -> Iterator[tuple[Path, int]]:
    """Context manager: yield a temporary folder, and the process group of a watcher process (_WATCHER).

    If a signal kills this process, the watcher ends the group's processes and removes the folder. This process cannot
    do so itself: only its main thread can handle signals, and kernels are also compiled in other threads. Raises
    OSError.
    """
    folder = tempfile.mkdtemp(prefix="nntile_py")
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "sh", folder], stdin=subprocess.PIPE, process_group=0, cwd="/", **quiet
        ) as watcher:
            yield Path(folder), watcher.pid
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compiled(text: str, folder: Path, group: int) -> Path:
    """Compile a C++ source and return the path of the library. Raises NoCompiler, OSError.

    Args:
        text: The source.
        folder: Folder for the files of the compiler.
        group: Process group of the compiler.
    """
    cpp_file, library = folder / "kernel.cpp", folder / "kernel.so"
    cpp_file.write_text(text)
    asked = [*command(), str(cpp_file), "-o", str(library), *LIBRARIES]
    status, output = _run_compiler(asked, SECONDS, group, {"TMPDIR": str(folder)})
    if status or not library.exists():
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for sign in (FULL, "error") for line in lines if sign in line]  # a linker writes the cause first
        why = [*errors, *lines[-1:], f"exit status {status}, and no library"][0]
        raise NoCompiler(f"{command()[0]} failed on a generated kernel: {why[:500]}")
    return library


def _run_compiler(
    asked: Sequence[str], seconds: float, group: int = 0, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a compiler and return its exit status and output.

    The output goes to a file in memory, because the disk may be full. A pipe would stay open as long as any child
    process of a compiler wrapper runs.

    Args:
        asked: The command.
        seconds: Time limit. If the command exceeds it, all processes of the group are killed.
        group: Process group to run in; 0: a new one.
        env: Environment variables to change.

    Raises:
        NoCompiler: the compiler does not start, or does not end within `seconds`.
    """
    try:
        with open(os.memfd_create("compiler-output"), "w+b") as out:
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(asked, process_group=group, env={**os.environ, **(env or {})}, **how)
            try:
                status = process.wait(seconds)
            finally:
                if process.returncode is None:
                    os.killpg(group or process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(0)
            return status, out.read().decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise NoCompiler(f"the C++ compiler {asked[0]} did not end in {seconds:g} s; see CXX") from None
    except OSError as error:
        raise NoCompiler(f"the C++ compiler {asked[0]} does not run ({error}); see CXX") from None


@functools.cache
def _version() -> str:
    """Return the compiler's version and the options that `-march=native` means on this machine, as text.

    The text is hashed into a library's name, because machines with other compilers or CPUs may share the cache folder.
    """
    every = [*_compiler(), "--version"], [*command(), "-Q", "--help=target"]  # only GCC knows the second command
    return "".join(_run_compiler(asked, VERSION_SECONDS)[1] for asked in every)


@functools.cache
def why_not() -> str | None:
    """Return the reason why this machine cannot run generated kernels on its CPUs; None if it can.

    The function compiles and loads a small kernel, once per process. Loading fails, for example, if the cache folder is
    mounted with noexec.
    """
    x = Element(0, ("x",))
    value = Call("add", Call("add", Call("exp", x), Call("log", x)), Call("add", Call("tanh", x), Call("erf", x)))
    tile = TileType("fp32", ("x",))
    try:
        address(source(Definition({"x": 1}, (Output(0, ("x",), value),)), [tile, tile], 1))
    except NoCompiler as error:
        return str(error)
    return None
