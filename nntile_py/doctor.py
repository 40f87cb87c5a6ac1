"""Checks of `nntile doctor`: which parts are installed, how to install missing parts. Needs no compiled extension."""

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
from nntile_py.system import launcher
from nntile_py.system.cgroup import free_memory, machine_memory
from nntile_py.system.folders import build_info, cache_folder
from nntile_py.system.load import cores
from nntile_py.system.machine import processor
from nntile_py.system.sources import REBUILD, changed_sources
from nntile_py.system.units import counted

_USES = {  # what the parts of some rows are for
    "  MPI": "runs on several machines", "  NVML header": "bandwidths between GPUs", "  FxT": "`nntile profile --fxt`",
    "  hwloc": "binding workers to cores", "  MKL": "matrix products on CPUs", "starpu": "StarPU's Python interface",
    "triton": "fused kernels on GPUs", "cupy": "Python tasks on GPUs", "mpi4py": "runs on several machines",
    "graphviz's dot": "pictures of `nntile graph`",
}  # fmt: skip
# Rows about parts that only GPUs need.
_OF_GPUS = ("  CUDA", "  NVML header", "  CUDA devices", "  NVML", "triton", "cupy")


class Check(TypedDict):
    """One row of the report of `nntile doctor`. `hint` says how to install a missing part, and is empty if `ok`."""

    name: str
    ok: bool
    value: str
    hint: str


def _check(name: str, ok: bool, value: str, hint: str = "") -> Check:
    return Check(name=name, ok=ok, value=value, hint="" if ok else hint)


def _part(name: str, ok: bool, lacking: str, hint: str) -> Check:
    return _check(name, ok, "yes" if ok else lacking, hint)


def report() -> list[Check]:
    """Return the rows of the report of `nntile doctor`. All ranks must call it."""
    return [*_ranks(), *_extension(), *_starpu(), *_torch(), *_machine(), *_optional()]


def without_gpus(checks: list[Check]) -> list[Check]:
    """Return the checks with one row in place of all rows about GPUs, if this machine has no GPU."""
    if torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi"):
        return checks
    none = _check("GPUs", False, "none found; --json also has the rows about parts for GPUs")
    return [*(check for check in checks if check["name"] not in _OF_GPUS), none]


def summary(checks: list[Check]) -> str:
    """Return a line that says whether this machine can train, and on which workers."""
    wrong = {check["name"].strip() for check in checks if not check["ok"]}
    if missing := [name for name in ("extension", "StarPU") if name in wrong]:
        return f"not ready for training: {' and '.join(missing)}; see the rows above"
    gpus = next((check["value"] for check in checks if check["name"] == "  CUDA devices" and check["ok"]), "none found")
    if gpus != "none found" and "CUDA" in wrong:
        gpus += ", not usable; see the rows about CUDA"
    count = cores()
    return f"ready for training on {counted(count, 'CPU core')}; GPUs: {gpus}"


def render(checks: list[Check]) -> Table:
    """Return the report as a table for the terminal."""
    table = Table("", "", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)  # fold long paths
    for check in checks:
        mark = "[green]ok[/]" if check["ok"] else "[yellow]no[/]"
        use = f"; for {_USES[check['name']]}" if check["name"] in _USES else ""
        table.add_row(mark, check["name"], escape(check["value"] + use))
        if check["hint"]:
            table.add_row("", "", f"[dim]to get it: {escape(check['hint'])}[/]")
    return table


def _extension() -> list[Check]:
    info = build_info()
    built_with = info.get("torch", torch.__version__)
    try:
        ok, value = True, str(load_core().__file__)
        if "wheel" not in info and built_with != torch.__version__:
            ok, value = False, f"compiled against torch {built_with}, not {torch.__version__}"
    except ImportError as error:
        ok, value = False, str(error)
    cuda = info.get("cuda", "")
    how = "needs a torch and a StarPU with CUDA (see their rows below), then make setup"
    mpi = "apt-get install libopenmpi-dev, a StarPU with MPI (see its row below), then make setup"
    return [
        _check("extension", ok, value, "make setup"),
        *_sources(),
        _check("  CUDA", bool(cuda), cuda or "compiled without", how),
        _part("  MPI", bool(info.get("mpi")), "compiled without", mpi),
    ]


def _sources() -> list[Check]:
    """Return a row on the C++ sources of a clone; none for an extension whose build stored no hash, as in a wheel."""
    info = build_info()
    if "wheel" in info or "sources" not in info:
        return []
    message = changed_sources(Path(__file__).parents[1])
    return [_check("  sources", not message, message or "unchanged since the extension was compiled", REBUILD)]


def _ranks() -> list[Check]:
    """Return a row with host, cores and GPU for each rank that mpirun or srun started; no rows for a single process.

    All ranks must call it, because they exchange their values. No GPU is initialised.
    """
    if launcher.started()[1] == 1:
        return []
    try:
        from nntile_py.execution import gpu_assignment
        from nntile_py.execution.mpi import ranks

        joined = ranks()
    except (ImportError, ConfigError) as error:
        return [_check("ranks", False, str(error), "see the rows about MPI")]
    seen, no_answer = list[str](), ""
    try:
        seen = gpu_assignment.seen()
    except ConfigError as error:
        no_answer = str(error)
    hosts = joined.all_to_all((platform.node(), spans(os.sched_getaffinity(0)), seen, no_answer))
    with_gpus = [rank for rank, (_, _, seen, _) in enumerate(hosts) if seen]
    taken, too_few = dict[int, list[int]](), ""
    try:
        taken = dict(zip(with_gpus, gpu_assignment.shared_out([hosts[rank][2] for rank in with_gpus], 1), strict=True))
    except ConfigError as error:
        too_few = str(error)
    none = f"runtime.cuda: 0, or a GPU for each rank: {len(with_gpus)} of {len(hosts)} see one" if with_gpus else ""
    checks = [_check("MPI of ranks", True, f"{joined.library}; tiles travel between GPUs through main memory")]
    for rank, (host, core_numbers, seen, no_answer) in enumerate(hosts):
        own, lacks = taken.get(rank), no_answer or (too_few if seen else none)
        gpu = f"GPU {own[0]} of {len(seen)} with runtime.cuda: 1" if own else "no GPU of its own" if seen else "no GPU"
        checks.append(_check(f"  rank {rank}", not lacks, f"{host}, cores {core_numbers}, {gpu}", lacks))
    return checks


def spans(numbers: Iterable[int]) -> str:
    """Return a set of numbers as text with ranges, such as "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def _config_header() -> Path | None:
    """Return the path of StarPU's header starpu_config.h, or None if there is none.

    The header belongs to the StarPU that the extension was compiled with; without an extension, to the StarPU that a
    compilation would use.
    """
    info = build_info()
    flags = info.get("starpu_cflags", "")
    if not info:
        try:
            command = ["pkg-config", "--cflags-only-I", "starpu-1.4"]
            flags = subprocess.run(command, capture_output=True, text=True).stdout
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
    without = "not in this build of StarPU"
    toolkit = "install the CUDA toolkit with cuBLAS, cuSPARSE, cuSOLVER and NVML headers"
    return [
        _check("StarPU", not lost, f"{version} in {prefix}{lost}", "install the library's package, or make setup"),
        _part("  CUDA", "USE_CUDA" in defined, without, f"{toolkit}, then make setup"),
        _part("  NVML header", "HAVE_NVML_H" in defined, without, f"{toolkit}, {rebuild}"),
        _part("  FxT", "USE_FXT" in defined, without, f"apt-get install libfxt-dev, {rebuild}"),
        _part("  MPI", mpi, "no libstarpumpi", f"apt-get install libopenmpi-dev, {rebuild}"),
        _part("  hwloc", "HAVE_HWLOC" in defined, without, f"apt-get install libhwloc-dev, {rebuild}"),
    ]


def _unresolved(library: Path) -> str:
    """Return a text with the shared libraries that `library` needs and the system lacks; "" if there are none."""
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
        why, how = "this torch is built without CUDA", "TORCH=torch==VERSION make setup, with a CUDA build"
    try:
        nvml = bool(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        nvml = False
    mkl = torch.backends.mkl.is_available()
    return [
        _check("torch", True, torch.__version__),
        _part("  MKL", mkl, "no", "a torch from PyPI for x86-64; without MKL, OpenBLAS computes matrix products"),
        _check("  threads", True, f"{torch.get_num_threads()} ({torch.backends.cpu.get_cpu_capability()})"),
        _check("  CUDA devices", cuda, ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or why, how),
        _check("  NVML", nvml, "loads" if nvml else "no libnvidia-ml.so.1", "comes with the driver"),
    ]


def _machine() -> list[Check]:
    total, free = machine_memory() / 2**30, free_memory() / 2**30
    return [
        _check("CPU", True, processor() or "unknown"),
        _check("  cores", True, f"{cores()} of {os.cpu_count()} usable"),
        _check("  memory", True, f"{total:.1f} GiB, {free:.1f} GiB available"),
    ]


def _optional() -> list[Check]:
    hints = {
        "starpu": "make setup compiles StarPU's Python package, unless StarPU is the system's",
        "triton": "comes with a CUDA build of torch; pip install triton",
        "cupy": "pip install cupy-cuda13x (or the one for your CUDA)",
        "mpi4py": "pip install mpi4py (with libopenmpi-dev installed)",
    }
    owners = importlib.metadata.packages_distributions()
    checks = []
    for name, hint in hints.items():
        there = importlib.util.find_spec(name) is not None
        version = importlib.metadata.version(owners[name][0]) if there and name in owners else "installed"
        checks.append(_check(name, there, version if there else "not installed", hint))
    dot = shutil.which("dot")
    return [*checks, _check("graphviz's dot", dot is not None, dot or "not found", "apt-get install graphviz")]
