"""Imports the compiled extension nntile_py._core. A wheel has one extension for AVX2 and another one for AVX-512."""

import platform
import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from nntile_py.errors import ExtensionError
from nntile_py.system import launcher
from nntile_py.system.folders import build_info
from nntile_py.system.sources import REBUILD, changed_sources

PACKAGE = Path(__file__).parent
# {folder of an extension in a wheel: CPU flags in /proc/cpuinfo that it needs}, the fastest first. The AVX-512 flags
# are what x86-64-v4 adds to x86-64-v3; the AVX2 flags belong to x86-64-v3.
VARIANTS = {
    "_avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "_avx2": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}


def load_core() -> ModuleType:
    """Import and return nntile_py._core. Print a warning if the clone's C++ sources are newer than the extension.

    Raises:
        ExtensionError: nntile_py was installed from a wheel that does not fit this CPU or the installed torch.
    """
    info = build_info()
    if "nntile_py._core" not in sys.modules and launcher.leads() and (message := changed_sources(PACKAGE.parent)):
        print(f"warning: {message}: {REBUILD}", file=sys.stderr, flush=True)
    if "wheel" in info:
        check_torch(info["torch"])
        folder = str(PACKAGE / variant(_cpu_flags()))
        if folder not in (path := import_module("nntile_py").__path__):
            path.append(folder)
    # Two cases in which the extension cannot find torch's libraries unless torch is imported first: with CUDA, whose
    # libraries are in wheels of their own; and if a wheel of nntile_py is not in the same site-packages as torch.
    if info.get("cuda") or ("wheel" in info and not (PACKAGE.parent / "torch" / "lib").is_dir()):
        import_module("torch")
    try:
        return import_module("nntile_py._core")
    except ImportError as error:
        if "libc10" not in str(error):
            raise
        import_module("torch")  # the extension was built beside another torch, as `pip install -e .` builds it
        return import_module("nntile_py._core")


def check_torch(built: str) -> None:
    """Raise ExtensionError unless the installed torch has the version `built`. CPU and CUDA builds count as equal."""
    wanted = built.split("+")[0]
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed.split("+")[0] != wanted:
        raise ExtensionError(
            f"this wheel of nntile_py was compiled for torch {wanted}, and the installed torch is {installed}: "
            f"pip install torch=={wanted}, or compile nntile_py for your torch (make setup in a clone)"
        )


def variant(flags: set[str]) -> str:
    """Return the folder of the fastest extension for a CPU with these flags. Raises ExtensionError if none fits."""
    for name, needed in VARIANTS.items():
        if (PACKAGE / name).is_dir() and needed <= flags:
            return name
    lacking = ", ".join(sorted(VARIANTS["_avx2"] - flags)) or "AVX-512"
    raise ExtensionError(
        "this wheel of nntile_py needs a CPU with AVX2 (x86-64-v3: Intel since Haswell of 2013, AMD since Excavator of "
        f"2015), and this CPU ({platform.machine()}) lacks {lacking}: compile nntile_py on it (make setup in a clone)"
    )


def _cpu_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()
