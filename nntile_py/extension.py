"""Loading of the compiled extension nntile_py._core. A wheel has one extension for each of several instruction sets."""

import platform
import re
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from nntile_py.errors import ExtensionError
from nntile_py.system.folders import build_info

PACKAGE = Path(__file__).parent
# Folders of the extensions in a wheel, the preferred first, with the CPU flags (/proc/cpuinfo) that each needs beside
# those of the next: x86-64-v4 and x86-64-v3 of the x86-64 psABI.
VARIANTS = {
    "_avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "_avx2": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}


def load_core() -> ModuleType:
    """Import nntile_py._core. Raises ExtensionError if this machine or its torch is not the one that a wheel is for."""
    info = build_info()
    if "wheel" in info:
        check_torch(info["torch"])
        _add_to_path(variant(_cpu_flags()))
    # Torch loads CUDA's libraries from where its wheels keep them. If the extension was compiled for CPUs, it finds
    # ATen's libraries itself, except those of a torch in another folder than this package's wheel.
    if info.get("cuda") or ("wheel" in info and not (PACKAGE.parent / "torch" / "lib").is_dir()):
        import_module("torch")
    return import_module("nntile_py._core")


def check_torch(built: str) -> None:
    """Raise ExtensionError unless the installed torch has the version `built`; CPU or CUDA build does not matter."""
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
    """Return the folder of the best extension in this wheel for a CPU with these flags. Raises ExtensionError."""
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


def _add_to_path(folder: str) -> None:
    path = import_module("nntile_py").__path__
    if (where := str(PACKAGE / folder)) not in path:
        path.append(where)
