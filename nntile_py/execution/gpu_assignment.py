"""Assignment of GPUs to ranks: no two ranks use the same GPU unless sharing is allowed."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from nntile_py.errors import ConfigError
from nntile_py.system.units import counted

SHARE = "NNTILE_SHARE_GPUS"  # environment variable; 1: ranks may share GPUs if there are too few
VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 60.0  # seconds allowed to list the GPUs: without persistence mode, the driver has to start first

# CUDA reads VISIBLE once, when a process initialises CUDA. This process may set VISIBLE later, so a child process lists
# the GPUs.
_ASK = """
import ctypes
cuda, count, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
if not cuda.cuInit(0) and not cuda.cuDeviceGetCount(ctypes.byref(count)):
    for device in range(count.value):
        if not cuda.cuDeviceGetUuid_v2(uuid, device):
            print(bytes(uuid).hex())
"""


def seen() -> list[str]:
    """Return the UUID of each GPU that this process may use, in CUDA's order, without initialising CUDA here.

    Raises:
        ConfigError: CUDA does not answer.
    """
    asked = subprocess.Popen([sys.executable, "-c", _ASK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        return asked.communicate(timeout=PATIENCE)[0].split()
    except subprocess.TimeoutExpired:
        asked.kill()
        if asked.stdout:
            asked.stdout.close()
        with suppress(subprocess.TimeoutExpired):  # a killed process does not end while it waits for the driver
            asked.wait(1)
    need = f"GPUs whose driver answers, as nvidia-smi shows, or {VISIBLE} without those that do not"
    raise ConfigError(f"runtime.cuda: CUDA did not list its GPUs in {PATIENCE:g} s; allowed: {need}")


def started() -> bool:
    """Return whether this process has initialised CUDA. A change of CUDA_VISIBLE_DEVICES then has no effect."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


def shared_out(seen_by: Sequence[Sequence[str]], wanted: int) -> list[list[int]]:
    """Assign `wanted` GPUs to each rank, by a maximum bipartite matching.

    Ranks see GPUs of their own machine, perhaps not all of them. If there are enough GPUs, no two ranks share a GPU.

    Args:
        seen_by: for each rank, the UUIDs of the GPUs that it sees.

    Returns:
        For each rank, the indices of its GPUs in `seen_by[rank]`.

    Raises:
        ConfigError: there are too few GPUs, and SHARE is not 1.
    """
    taken: dict[str, int] = {}  # the rank of each assigned GPU

    def assign(rank: int, tried: set[str]) -> bool:
        """Give the rank a further GPU: a free GPU, or a GPU whose rank can take another GPU. False: impossible.

        tried: GPUs that this search has considered; extended here.
        """
        for gpu in sorted(seen_by[rank], key=lambda gpu: gpu in taken):
            if gpu in tried or taken.get(gpu) == rank:
                continue
            tried.add(gpu)
            if gpu not in taken or assign(taken[gpu], tried):
                taken[gpu] = rank
                return True
        return False

    tried: set[str] = set()
    for rank in (rank for rank in range(len(seen_by)) for _ in range(wanted)):
        tried.clear()
        if not assign(rank, tried):
            break
    else:
        return [[k for k, gpu in enumerate(gpus) if taken.get(gpu) == rank] for rank, gpus in enumerate(seen_by)]
    if (least := min(map(len, seen_by))) < wanted:
        rank = [*map(len, seen_by)].index(least)
        few = counted(least, "GPU")
        raise ConfigError(f"runtime.cuda: got {wanted}, and rank {rank} sees {few}; allowed: as many as it sees")
    if os.environ.get(SHARE) != "1":
        holders = {rank, *(taken[gpu] for gpu in tried)}
        too_few = tried | {gpu for gpu, holder in taken.items() if holder in holders}
        beside = [other for other, gpus in enumerate(seen_by) if {*gpus} <= too_few]
        raise ConfigError(
            f"runtime.cuda: got {wanted} for each rank, and {len(beside)} ranks (rank {rank} is one) have"
            f" {len(too_few)} GPU{'s' * (len(too_few) > 1)}; allowed: fewer ranks a machine, or {SHARE}=1, with which"
            " ranks share GPUs"
        )
    return _shared(seen_by, wanted)


def _shared(seen_by: Sequence[Sequence[str]], wanted: int) -> list[list[int]]:
    """Return what `shared_out` returns if ranks share GPUs: each rank takes the GPUs with the fewest ranks so far."""
    users: dict[str, int] = {}
    assigned = []
    for gpus in seen_by:
        by_users = sorted(range(len(gpus)), key=[users.get(gpu, 0) for gpu in gpus].__getitem__)
        assigned.append(sorted(by_users[:wanted]))
        for k in assigned[-1]:
            users[gpus[k]] = users.get(gpus[k], 0) + 1
    return assigned


def use(own: Sequence[int], count: int) -> None:
    """Make only the GPUs `own` visible to this process. own: indices among the `count` GPUs that are visible now.

    Raises:
        ConfigError: this process has already initialised CUDA.
    """
    if [*own] == [*range(count)]:
        return
    if started():
        need = f"{VISIBLE} set for each rank, or nt.Runtime(mpi=True) before anything else uses CUDA"
        raise ConfigError(f"runtime.cuda: this process has started CUDA with all GPUs of its machine; allowed: {need}")
    names = os.environ[VISIBLE].split(",") if VISIBLE in os.environ else [str(k) for k in range(count)]
    os.environ[VISIBLE] = ",".join(names[k] for k in own)
