"""C++ sources compiled on this machine, once, into libraries that stay in the user's cache folder."""

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
from collections.abc import Sequence
from pathlib import Path

from nntile_py.errors import NNTileError, say_once
from nntile_py.system.folders import build_info, cache_folder, replace_file

from .cpp import SYMBOL, source
from .expression import Call, Definition, Element, Output, TileType

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared", "-w")
LIBRARIES = ("-lmvec", "-lm")  # glibc's functions of vectors
FULL = os.strerror(errno.ENOSPC)
SECONDS, TELLING = 120.0, 20.0  # that a compiler may take: for a kernel, and to say what it is
CHECK = hashlib.sha256().digest_size  # bytes at a library's end, see _check


class NoCompiler(NNTileError):
    """Why there is no library."""


def _compiler() -> list[str]:
    """CXX, or c++. Raises NoCompiler."""
    try:
        cxx = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise NoCompiler(f"CXX is {os.environ['CXX']!r} ({error}); allowed: a C++ compiler, its options") from None
    if not shutil.which(cxx[0]):
        raise NoCompiler(f"there is no C++ compiler {' '.join(cxx)}; get one (Debian: apt-get install g++), or set CXX")
    return cxx


@functools.cache
def command() -> tuple[str, ...]:
    """The compiler with its flags: for the instruction set that the extension was compiled for. Raises NoCompiler."""
    built = build_info().get("arch", "-march=native")
    wide = ["-mprefer-vector-width=512"] if "AVX512" in built else []
    return (*_compiler(), *FLAGS, *(flag for flag in built.split() if flag.startswith("-m")), *wide)


def path_of(text: str) -> Path:
    """Where the library of a source is kept. Raises NoCompiler."""
    named = "\0".join([*command(), _version(), text])
    return cache_folder() / "kernels" / f"{hashlib.sha256(os.fsencode(named)).hexdigest()[:32]}.so"


@functools.cache
def address(text: str) -> int:
    """Where the function of a source is in this process: of a library that is kept, by another process or a run before,
    or that is compiled now. Raises NoCompiler."""
    kept = path_of(text)
    try:
        return _loaded(kept)
    except (OSError, AttributeError):
        pass  # there is none, or none that can be used
    try:
        with tempfile.TemporaryDirectory(prefix="nntile_py") as folder:
            made = _compiled(text, Path(folder))
            try:
                content = made.read_bytes()
                replace_file(kept, content + _check(kept, content))  # whole or not at all
                return _loaded(kept)
            except (OSError, AttributeError) as error:
                found = _function(made)  # else that is told
                why = getattr(error, "strerror", None) or str(error).removeprefix(f"{kept}: ")
                say_once(f"fusion: kernels are compiled at each start, as {kept.parent} cannot keep them: {why}")
                return found
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"a generated kernel could not be compiled or loaded: {error}") from None


def _loaded(path: Path) -> int:
    """The function of a library that is kept. Raises OSError, AttributeError.

    A damaged one would end the process, and one that another user has put there could do anything."""
    for place in (path.parent, path):
        kept = place.stat()
        if kept.st_uid not in (0, os.geteuid()) or kept.st_mode & stat.S_IWOTH:
            raise OSError(f"{path}: the folder or a file in it belongs to another user, or all may write to it")
    content = path.read_bytes()
    if _check(path, content[:-CHECK]) != content[-CHECK:]:
        raise OSError(f"{path} is damaged, or another kernel's")
    return _function(path)


def _check(path: Path, content: bytes) -> bytes:
    """What a library ends with: a digest of it, and of its name, which is one of its source."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _function(library: Path) -> int:
    return ctypes.cast(ctypes.CDLL(str(library))[SYMBOL], ctypes.c_void_p).value or 0


def _compiled(text: str, folder: Path) -> Path:
    """The library of a source, in a folder. Raises NoCompiler, OSError."""
    written, made = folder / "kernel.cpp", folder / "kernel.so"
    written.write_text(text)
    status, told = _told([*command(), str(written), "-o", str(made), *LIBRARIES], SECONDS)
    if status or not made.exists():
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        telling = [line for sign in (FULL, "error") for line in lines if sign in line]  # a linker says the cause first
        why = [*telling, *lines[-1:], f"exit status {status}, and no library"][0]
        raise NoCompiler(f"{command()[0]} failed on a generated kernel: {why[:500]}")
    return made


def _told(asked: Sequence[str], seconds: float) -> tuple[int, str]:
    """The exit status of a compiler, and what it wrote. Raises NoCompiler, where it does not start or end.

    Written to memory, as the disk may be full: of a pipe, what a wrapper has started would have to let go, too."""
    try:
        with open(os.memfd_create("told"), "w+b") as out:
            nothing, same = subprocess.DEVNULL, subprocess.STDOUT
            process = subprocess.Popen(asked, stdin=nothing, stdout=out, stderr=same, process_group=0)
            try:
                status = process.wait(seconds)
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(0)
            return status, out.read().decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise NoCompiler(f"the C++ compiler {asked[0]} did not end in {seconds:g} s; see CXX") from None
    except OSError as error:
        raise NoCompiler(f"the C++ compiler {asked[0]} does not run ({error}); see CXX") from None


@functools.cache
def _version() -> str:
    """Of the compiler, and what `-march=native` means here: the cache folder may be shared by machines."""
    every = [*_compiler(), "--version"], [*command(), "-Q", "--help=target"]  # the second of GCC
    return "".join(_told(asked, TELLING)[1] for asked in every)


@functools.cache
def why_not() -> str | None:
    """Why generated kernels cannot be had on this machine's CPUs; None: they can. Asked once, by a small one.

    It is loaded, too, which a cache folder on a file system without execution (noexec) does not allow."""
    x = Element(0, ("x",))
    value = Call("add", Call("add", Call("exp", x), Call("log", x)), Call("add", Call("tanh", x), Call("erf", x)))
    tile = TileType("fp32", ("x",))
    try:
        address(source(Definition({"x": 1}, (Output(0, ("x",), value),)), [tile, tile], 1))
    except NoCompiler as error:
        return str(error)
    return None
