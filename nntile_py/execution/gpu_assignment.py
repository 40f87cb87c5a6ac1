"""Which GPUs each of several ranks takes: no two ranks the same one, unless they are told to share."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from nntile_py.errors import ConfigError

SHARE = "NNTILE_SHARE_GPUS"  # 1: ranks may share GPUs where there are too few
VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 60.0  # seconds until CUDA has told its GPUs: where none keeps the driver awake it starts for each

# CUDA reads VISIBLE when a process starts it, so another one has to ask.
_ASK = """
import ctypes
cuda, count, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
if not cuda.cuInit(0) and not cuda.cuDeviceGetCount(ctypes.byref(count)):
    for device in range(count.value):
        if not cuda.cuDeviceGetUuid_v2(uuid, device):
            print(bytes(uuid).hex())
"""


def seen() -> list[str]:
    """The UUID of each GPU that this process may use, in CUDA's order; CUDA is not started here.

    Raises ConfigError where CUDA does not answer."""
    asked = subprocess.Popen([sys.executable, "-c", _ASK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        return asked.communicate(timeout=PATIENCE)[0].split()
    except subprocess.TimeoutExpired:
        asked.kill()
        if asked.stdout:
            asked.stdout.close()
        with suppress(subprocess.TimeoutExpired):  # it does not end while the driver holds it
            asked.wait(1)
    need = f"GPUs whose driver answers, as nvidia-smi shows, or {VISIBLE} without those that do not"
    raise ConfigError(f"runtime.cuda: CUDA has not told its GPUs in {PATIENCE:g} s; allowed: {need}")


def started() -> bool:
    """Whether this process uses CUDA: what is changed of VISIBLE has no effect then."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


def shared_out(seen_by: Sequence[Sequence[str]], wanted: int) -> list[list[int]]:
    """For each rank the numbers of the `wanted` GPUs that it takes, among those that it sees; ranks see GPUs of their
    own machine, perhaps not all of them. Where there are enough, none has two ranks.

    Raises ConfigError where there are too few, and SHARE is not 1."""
    taken: dict[str, int] = {}  # the rank that has a GPU

    def finds(rank: int, tried: set[str]) -> bool:
        """Whether the rank gets one more: a free one, or one whose rank can take another."""
        for card in sorted(seen_by[rank], key=lambda card: card in taken):
            if card in tried or taken.get(card) == rank:
                continue
            tried.add(card)
            if card not in taken or finds(taken[card], tried):
                taken[card] = rank
                return True
        return False

    tried: set[str] = set()
    for rank in (rank for rank in range(len(seen_by)) for _ in range(wanted)):
        tried.clear()
        if not finds(rank, tried):
            break
    else:
        return [[k for k, card in enumerate(cards) if taken.get(card) == rank] for rank, cards in enumerate(seen_by)]
    if (least := min(map(len, seen_by))) < wanted:
        rank = [*map(len, seen_by)].index(least)
        few = f"{least} GPU{'s' * (least != 1)}"
        raise ConfigError(f"runtime.cuda: got {wanted}, and rank {rank} sees {few}; allowed: as many as it sees")
    if os.environ.get(SHARE) != "1":
        holders = {rank, *(taken[card] for card in tried)}
        too_few = tried | {card for card, holder in taken.items() if holder in holders}
        beside = [other for other, cards in enumerate(seen_by) if {*cards} <= too_few]
        raise ConfigError(
            f"runtime.cuda: got {wanted} for each rank, and {len(beside)} ranks (rank {rank} is one) have"
            f" {len(too_few)} GPU{'s' * (len(too_few) > 1)}; allowed: fewer ranks a machine, or {SHARE}=1, with which"
            " ranks share GPUs"
        )
    return _together(seen_by, wanted)


def _together(seen_by: Sequence[Sequence[str]], wanted: int) -> list[list[int]]:
    """Each rank takes those that the fewest before it have taken."""
    users: dict[str, int] = {}
    found = []
    for cards in seen_by:
        by_users = sorted(range(len(cards)), key=[users.get(card, 0) for card in cards].__getitem__)
        found.append(sorted(by_users[:wanted]))
        for k in found[-1]:
            users[cards[k]] = users.get(cards[k], 0) + 1
    return found


def use(own: Sequence[int], count: int) -> None:
    """Have this process see only these of the `count` GPUs that it sees. Raises ConfigError where it is too late."""
    if [*own] == [*range(count)]:
        return
    if started():
        need = f"{VISIBLE} set for each rank, or nt.Runtime(mpi=True) before anything else uses CUDA"
        raise ConfigError(f"runtime.cuda: this process has started CUDA with all GPUs of its machine; allowed: {need}")
    names = os.environ[VISIBLE].split(",") if VISIBLE in os.environ else [str(k) for k in range(count)]
    os.environ[VISIBLE] = ",".join(names[k] for k in own)
