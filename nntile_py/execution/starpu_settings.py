"""Settings made before StarPU starts: environment variables, the folder of performance models, and bus measurement."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from nntile_py import _core
from nntile_py.errors import LIMITS, ConfigError, TaskError
from nntile_py.system.folders import append, cache_folder, replace_file
from nntile_py.system.load import cores
from nntile_py.system.units import counted

CHUNKS_FROM = 4 << 30  # StarPU allocates tiles in chunks if tiles may take at least this many bytes of main memory
START_BYTES = 8 << 20  # address space that StarPU takes when it starts
MORE_THREADS = 2  # number of threads that StarPU starts beside the workers
_OURS: set[str] = set()  # names of the settings that this module, not the user, has set


def create_model_folder() -> None:
    """Create the folder for StarPU's performance models; without it StarPU would abort."""
    if "STARPU_PERF_MODEL_DIR" in os.environ:
        return
    home = next((os.environ[name] for name in ("XDG_CACHE_HOME", "STARPU_HOME", "HOME") if name in os.environ), None)
    try:
        if home:
            buses = Path(home, ".starpu", "sampling", "bus")
            buses.mkdir(parents=True, exist_ok=True)
            if not os.access(buses, os.W_OK) and not any(buses.iterdir()):  # StarPU can read existing models
                raise PermissionError(errno.EACCES, "it cannot be written")
    except OSError as error:
        need = "XDG_CACHE_HOME, or STARPU_PERF_MODEL_DIR, with a folder that can be written"
        raise ConfigError(
            f"StarPU cannot keep its performance models in {home}: {error.strerror}; allowed: {need}"
        ) from None


def check_limits(workers: int) -> None:
    """Raise TaskError if limits of memory or of processes leave no room for StarPU, which would abort.

    As a test, reserves the address space that StarPU needs, starts as many threads as StarPU will, and ends them."""
    ready, threads = threading.Event(), list[threading.Thread]()
    try:
        with mmap.mmap(-1, START_BYTES):
            for _ in range(workers + MORE_THREADS):
                threads.append(threading.Thread(target=ready.wait, daemon=True))
                threads[-1].start()
    except (OSError, RuntimeError, MemoryError):
        raise TaskError(f"StarPU cannot start {counted(workers, 'worker')}{LIMITS}") from None
    finally:
        ready.set()
        for thread in threads:
            if thread.ident is not None:  # it has started
                thread.join()


def cpu_workers(cpus: int | None, cuda: int) -> int:
    """Return the number of CPU workers: `cpus`; for None all cores, or none with GPUs.

    Raises:
        ConfigError: The machine has fewer cores, or this build has no CUDA workers and `cuda` is not 0.
    """
    usable, least = cores(), 0 if cuda else 1
    number = (0 if cuda else usable) if cpus is None else cpus
    if not least <= number <= usable:
        raise ConfigError(f"runtime.cpus: got {cpus}; allowed: {least} to {usable}, the number of cores")
    if cuda and not _core.has_cuda:
        raise ConfigError(f"runtime.cuda: got {cuda}, but this build of nntile_py has no CUDA workers; allowed: 0")
    return number


def check_devices(cuda: int) -> None:
    """Raise ConfigError if this process may use fewer than `cuda` GPUs."""
    if not 0 <= cuda <= (devices := cuda_devices() if cuda else 0):
        raise ConfigError(f"runtime.cuda: got {cuda}; allowed: at most {devices}, the number of CUDA devices")


def cuda_devices() -> int:
    """Return the number of GPUs that this process may use, without initialising CUDA."""
    import torch

    return int(torch.cuda.device_count())


def default_cuda_memory(sharers: int = 1) -> int:
    """Return the bytes of a GPU that the tiles of this process may take by default: 85 %, divided by `sharers`.

    The rest is for workspaces and for memory that ATen's allocator wastes. `sharers` is the number of processes that
    use the GPU.
    """
    import torch

    return int(0.85 * torch.cuda.get_device_properties(0).total_memory) // sharers


@contextlib.contextmanager
def convolutions_in_fp32() -> Iterator[None]:
    """Forbid PyTorch to round fp32 operands of cuDNN's convolutions to tf32, which is PyTorch's default."""
    import torch

    flags = torch.backends.cudnn
    try:
        before = flags.allow_tf32
    except RuntimeError:  # the program has set conv.fp32_precision, which allow_tf32 must not be mixed with
        yield
        return
    flags.allow_tf32 = False
    yield
    flags.allow_tf32 = before


def prepare_cuda(devices: int, memory: int | None) -> None:
    """Set StarPU's environment variables for CUDA that the user has not set, and measure the buses once per machine.

    Args:
        devices: number of GPUs in use.
        memory: bytes of main memory that tiles may take; None: no limit.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # Expandable segments unmap memory that running kernels still use.
        if "expandable_segments:True" in os.environ.get(name, "").replace(" ", ""):
            need = "allowed with CUDA workers: expandable_segments:False, the default"
            raise ConfigError(f"{name}: got expandable_segments:True; {need}")
    # CLEAN_BUFFERS of 0: tiles are written back to main memory only when their room is needed. CUDA_PIPELINE is the
    # number of tasks that wait on a GPU's stream. Another GPU cannot steal these tasks, so each of several GPUs gets
    # fewer (GPT-2 XL on 4 GPUs: 0.52 s a step with 4 tasks, 0.43 s with 2).
    pipeline = "4" if devices == 1 else "2"
    # SUBALLOCATOR: StarPU allocates pinned tiles of up to 4 MiB in chunks of 32 MiB and keeps four empty chunks. With
    # little memory there is no place for a chunk, or evictions free no contiguous room for larger tiles.
    chunks = "0" if memory and memory < CHUNKS_FROM else "1"
    settings = {
        "MINIMUM_CLEAN_BUFFERS": "0", "TARGET_CLEAN_BUFFERS": "0", "CUDA_PIPELINE": pipeline, "SUBALLOCATOR": chunks,
    }  # fmt: skip
    for name, value in settings.items():
        if (
            f"STARPU_{name}" not in os.environ or name in _OURS
        ):  # a later runtime of this process may need another value
            os.environ[f"STARPU_{name}"] = value
            _OURS.add(name)
    os.environ.setdefault("STARPU_PERF_MODEL_HOMOGENEOUS_CUDA", "1")
    _core.keep_choices(str(cache_folder()))
    # The measurement resets the devices, so it runs in a process of its own. StarPU measures all visible devices,
    # however many are used, and again if its file has another number of devices (perfmodel_bus.c of 1.4.10).
    kind, file = str(cuda_devices()), cache_folder() / f"bus-{platform.node()}"
    code = "from nntile_py import _core; _core.start(0, 'eager', 0, False, 0, 1); _core.stop()"
    with _locked(file):
        with contextlib.suppress(OSError):
            if file.read_text() == kind:
                return
        if subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode:
            return  # the runtime's own start will report the error
        with contextlib.suppress(OSError):  # without the file, the next start measures again
            replace_file(file, kind)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside the block, hold a lock that all ranks on this machine share. No lock if the file cannot be created."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(append(path)), fcntl.LOCK_EX)
        yield
