"""C++ sources compiled on this machine, once, into libraries that stay in the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from nntile_py.errors import NNTileError
from nntile_py.system.folders import build_info, cache_folder

from .cpp import SYMBOL, source
from .expression import Call, Definition, Load, Output, TileType

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared", "-w")
LIBRARIES = ("-lmvec", "-lm")  # glibc's functions of vectors
SECONDS = 120.0  # that a compiler may take


class NoCompiler(NNTileError):
    """Why there is no library."""


@functools.cache
def command() -> tuple[str, ...]:
    """The compiler with its flags: for the instruction set that the extension was compiled for. Raises NoCompiler."""
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    if not cxx or not shutil.which(cxx[0]):
        raise NoCompiler(f"there is no C++ compiler {' '.join(cxx)}; get one (Debian: apt-get install g++), or set CXX")
    built = build_info().get("arch", "-march=native")
    wide = ["-mprefer-vector-width=512"] if "AVX512" in built else []
    return (*cxx, *FLAGS, *(flag for flag in built.split() if flag.startswith("-m")), *wide)


def compiled(text: str) -> Path:
    """The library of a source. It may be another process's, or of a run before. Raises NoCompiler."""
    key = hashlib.sha256("\0".join([*command(), _version(), text]).encode()).hexdigest()[:32]
    path = cache_folder() / "kernels" / f"{key}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # two processes may compile the same at once
            source_file, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            source_file.write_text(text)
            how = [*command(), str(source_file), "-o", str(made), *LIBRARIES]
            told = subprocess.run(how, capture_output=True, text=True, check=False, timeout=SECONDS)
            if told.returncode:
                raise NoCompiler(f"{command()[0]} failed on a generated kernel: {told.stderr.strip()[-1000:]}")
            made.replace(path)  # whole or not at all
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"a generated kernel could not be compiled: {error}") from None
    return path


@functools.cache
def address(text: str) -> int:
    """Where the function of a source is in this process. Raises NoCompiler."""
    path = compiled(text)
    try:
        return ctypes.cast(ctypes.CDLL(str(path))[SYMBOL], ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"a generated kernel could not be loaded: {error}") from None


@functools.cache
def _version() -> str:
    """Of the compiler, and what `-march=native` means here: the cache folder may be shared by machines."""
    asked = [*command(), "-Q", "--help=target"] if _gcc() else [command()[0], "--version"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return told.stdout + told.stderr


def _gcc() -> bool:
    told = subprocess.run([command()[0], "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in told.stdout


@functools.cache
def why_not() -> str | None:
    """Why generated kernels cannot be had on this machine's CPUs; None: they can. Asked once, by a small one.

    It is loaded, too, which a cache folder on a file system without execution (noexec) does not allow."""
    x = Load(0, ("x",))
    value = Call("add", Call("add", Call("exp", x), Call("log", x)), Call("add", Call("tanh", x), Call("erf", x)))
    tile = TileType("fp32", ("x",))
    try:
        address(source(Definition({"x": 1}, (Output(0, ("x",), value),)), [tile, tile], 1))
    except NoCompiler as error:
        return str(error)
    return None
