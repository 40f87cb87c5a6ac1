"""What this installation has, what it lacks, and how to get what it lacks. Works where the extension does not load."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import torch
from rich.markup import escape
from rich.table import Column, Table

from nntile_py.errors import ConfigError
from nntile_py.extension import load_core
from nntile_py.system import launcher as system
from nntile_py.system.folders import build_info, cache_folder
from nntile_py.system.load import cores


class Check(TypedDict):
    """One line of the report, fit for JSON; `hint` is one line on how to get what is missing, empty where `ok`."""

    name: str
    ok: bool
    value: str
    hint: str


def _check(name: str, ok: bool, value: str, hint: str = "") -> Check:
    return Check(name=name, ok=ok, value=value, hint="" if ok else hint)


def report() -> list[Check]:
    checks = [_extension(), _extension_cuda(), _extension_mpi(), *_starpu(), *_torch(), *_machine(), *_optional()]
    return [*_ranks(), *checks]


def render(checks: list[Check]) -> Table:
    table = Table("", "", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)  # paths are long words
    for check in checks:
        mark = "[green]ok[/]" if check["ok"] else "[yellow]no[/]"
        table.add_row(mark, check["name"], escape(check["value"]))
        if check["hint"]:
            table.add_row("", "", f"[dim]to get it: {escape(check['hint'])}[/]")
    return table


def _extension() -> Check:
    try:
        core = load_core()
    except ImportError as error:
        return _check("extension", False, str(error), "make setup")
    built_with = build_info().get("torch", torch.__version__)
    if "wheel" not in build_info() and built_with != torch.__version__:
        return _check("extension", False, f"compiled against torch {built_with}, not {torch.__version__}", "make setup")
    return _check("extension", True, str(core.__file__))


def _extension_cuda() -> Check:
    cuda = build_info().get("cuda")
    how = "needs a torch with CUDA and a StarPU with CUDA (see those rows), then make setup"
    return _check("  CUDA", bool(cuda), cuda or "compiled without", how)


def _extension_mpi() -> Check:
    there = bool(build_info().get("mpi"))
    how = "apt-get install libopenmpi-dev, a StarPU with MPI (see that row), then make setup"
    return _check("  MPI", there, "yes" if there else "compiled without", how)


def _ranks() -> list[Check]:
    """Of those that mpirun or srun has started: where each is, the cores that it may use, the GPU that it takes.

    Called on all of them; it takes no GPU."""
    if system.started()[1] == 1:
        return []
    try:
        from nntile_py.execution import gpu_assignment
        from nntile_py.execution.mpi import ranks

        joined = ranks()
    except (ImportError, ConfigError) as error:
        return [_check("ranks", False, str(error), "see the rows of MPI")]
    seen, silent = list[str](), ""
    try:
        seen = gpu_assignment.seen()
    except ConfigError as error:
        silent = str(error)
    hosts = joined.all_to_all((platform.node(), spans(os.sched_getaffinity(0)), seen, silent))
    having = [rank for rank, (_, _, seen, _) in enumerate(hosts) if seen]
    taken, few = dict[int, list[int]](), ""
    try:
        taken = dict(zip(having, gpu_assignment.shared_out([hosts[rank][2] for rank in having], 1), strict=True))
    except ConfigError as error:
        few = str(error)
    none = f"runtime.cuda: 0, or a GPU for each rank: {len(having)} of {len(hosts)} see one" if having else ""
    checks = [_check("MPI of ranks", True, f"{joined.library}; GPUs' tiles go through main memory")]
    for rank, (host, where, seen, silent) in enumerate(hosts):
        own, lacks = taken.get(rank), silent or (few if seen else none)
        gpu = f"GPU {own[0]} of {len(seen)} with runtime.cuda: 1" if own else "no GPU of its own" if seen else "no GPU"
        checks.append(_check(f"  rank {rank}", not lacks, f"{host}, cores {where}, {gpu}", lacks))
    return checks


def spans(numbers: Iterable[int]) -> str:
    """0-3,8"""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def _config_header() -> Path | None:
    """The configuration of the StarPU that the extension is linked with, else of the one that would be."""
    info = build_info()
    flags = info.get("starpu_cflags", "")
    if not info:
        try:
            asked = subprocess.run(["pkg-config", "--cflags-only-I", "starpu-1.4"], capture_output=True, text=True)
            flags = asked.stdout
        except OSError:
            pass
    folders = [Path(flag.removeprefix("-I")) for flag in flags.split()]
    built = cache_folder().glob("starpu-1.4*/include/starpu/1.4")
    folders += sorted(built, key=lambda at: at.stat().st_mtime, reverse=True)
    return next((file for folder in folders if (file := folder / "starpu_config.h").is_file()), None)


def _starpu() -> list[Check]:
    header = _config_header()
    if header is None:
        return [_check("StarPU", False, "not found", "make setup builds it, or name yours: PKG_CONFIG_PATH")]
    defined = dict(re.findall(r"^#define STARPU_(\w+) (.*)$", header.read_text(), re.MULTILINE))
    version = ".".join(defined.get(f"{part}_VERSION", "?") for part in ("MAJOR", "MINOR", "RELEASE"))
    prefix = header.parents[3]
    libdir = Path(build_info().get("starpu_libdir", prefix / "lib"))
    lost = _unresolved(libdir / "libstarpu-1.4.so")
    mpi = (libdir / "libstarpumpi-1.4.so").exists()
    rebuild = "then scripts/build_starpu.sh --force && make setup"

    def has(name: str, macro: str, how: str) -> Check:
        found = macro in defined
        return _check(f"  {name}", found, "yes" if found else "not in this build of StarPU", how)

    toolkit = "install the CUDA toolkit with cuBLAS, cuSPARSE, cuSOLVER and NVML headers"
    return [
        _check("StarPU", not lost, f"{version} in {prefix}{lost}", "install the library's package, or make setup"),
        has("CUDA", "USE_CUDA", f"{toolkit}, then make setup"),
        has("NVML header", "HAVE_NVML_H", f"{toolkit}, {rebuild}"),
        has("FxT (traces)", "USE_FXT", f"apt-get install libfxt-dev, {rebuild}"),
        _check("  MPI", mpi, "yes" if mpi else "no libstarpumpi", f"apt-get install libopenmpi-dev, {rebuild}"),
        has("hwloc", "HAVE_HWLOC", f"apt-get install libhwloc-dev, {rebuild}"),
    ]


def _unresolved(library: Path) -> str:
    try:
        listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True).stdout
    except OSError:
        return ""
    missing = re.findall(r"(\S+) => not found", listed)
    return f", lacks {', '.join(missing)}" if missing else ""


def _torch() -> list[Check]:
    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    if torch.version.cuda:
        why, how = f"CUDA {torch.version.cuda}, but no device", "a GPU and its driver (nvidia-smi shows both)"
    else:
        why, how = "torch is built without CUDA", "TORCH=... make setup, naming a build of torch with CUDA"
    try:
        nvml = bool(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        nvml = False
    mkl = torch.backends.mkl.is_available()
    return [
        _check("torch", True, torch.__version__),
        _check("  MKL", mkl, "yes" if mkl else "no", "a torch from PyPI for x86-64; others do GEMM with OpenBLAS"),
        _check("  threads", True, f"{torch.get_num_threads()} ({torch.backends.cpu.get_cpu_capability()})"),
        _check("  CUDA devices", cuda, ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or why, how),
        _check("  NVML", nvml, "loads" if nvml else "no libnvidia-ml.so.1", "comes with the driver"),
    ]


def _machine() -> list[Check]:
    cpu = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = dict(re.findall(r"^(\w+): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    total, free = (int(memory.get(key, 0)) / 2**20 for key in ("MemTotal", "MemAvailable"))
    return [
        _check("CPU", True, cpu[1] if cpu else "unknown"),
        _check("  cores", True, f"{cores()} of {os.cpu_count()} usable"),
        _check("  memory", True, f"{total:.1f} GiB, {free:.1f} GiB available"),
    ]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _optional() -> list[Check]:
    hints = {
        "triton": "comes with a CUDA build of torch; pip install triton",
        "cupy": "pip install cupy-cuda13x (or the one for your CUDA)",
        "mpi4py": "pip install mpi4py (with libopenmpi-dev installed)",
    }
    owners = importlib.metadata.packages_distributions()
    checks = []
    for name, hint in hints.items():
        found = importlib.util.find_spec(name) is not None
        version = importlib.metadata.version(owners[name][0]) if found and name in owners else "found"
        checks.append(_check(name, found, version if found else "not installed", hint))
    dot = shutil.which("dot")
    checks.append(_check("graphviz's dot", dot is not None, dot or "not found", "apt-get install graphviz"))
    return checks
