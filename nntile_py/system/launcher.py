"""Which of several processes this one is, as whoever started it says; how they end where one fails. Needs no MPI."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# How Open MPI, MPICH (and Intel's) and Slurm tell a process how many they started, and which it is. Slurm sets
# SLURM_NTASKS in a job script too, which is one process; what srun starts knows of its step.
_STARTERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK", "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}  # fmt: skip
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")  # what tells one job's ranks from another's
OTHERS_WAIT = 3.0  # seconds that the others let rank 0 tell of what has failed on all of them

failed = 0  # the exit status of a process that ends with an error


def started(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, number of ranks) as mpirun or srun has told this process; (0, 1) where none has started it."""
    size, rank = _told(environment)
    return (int(environment.get(rank, 0)), int(environment[size])) if size else (0, 1)


def _told(environment: Mapping[str, str]) -> tuple[str, str]:
    """The names of the variables that say so; empty ones where none does."""
    for size, rank in _STARTERS.items():
        if (count := environment.get(size, "")).isdigit() and int(count) > 1:
            return size, rank
    return "", ""


def apart(library: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started several processes that MPI cannot bring together, as with --mpi=none.

    library: MPI's name. Of Open MPI it shows before it starts; others may ask Slurm in ways of their own."""
    known = any(name == "PMIX_RANK" or name.startswith("PMI_") for name in environment)
    return library.startswith("Open MPI") and by_srun(environment) and not known


def by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started several of this process, and not mpirun."""
    return _told(environment)[0] == "SLURM_STEP_NUM_TASKS"


def seen(sign: str) -> dict[int, str]:
    """What the ranks on this machine do: `stopped`; `waits`, if they have loaded the library `sign`; else `comes`."""
    found: dict[int, set[str]] = {}  # of a rank's processes
    mine = [os.environ.get(name) for name in _JOB]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has ended
            lines = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(line.split("=", 1) for line in lines if "=" in line)
            if started(environment)[1] == 1 or [environment.get(name) for name in _JOB] != mine:
                continue
            stopped = (process / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
            loaded = sign in (process / "maps").read_text()
            state = "stopped" if stopped else "waits" if loaded else "comes"
            found.setdefault(started(environment)[0], set()).add(state)
    return {rank: next(s for s in ("stopped", "waits", "comes") if s in found[rank]) for rank in sorted(found)}


def leads() -> bool:
    """Whether this process is the first: it alone tells and writes what all know."""
    return started()[0] == 0


def who() -> str:
    """In front of an error: "rank 1 of 4: "; nothing where there is one process."""
    rank, size = started()
    return f"rank {rank} of {size}: " if size > 1 else ""


def failing(status: int = 1) -> None:
    """To be called before an error is told that ends this process, and with it all ranks.

    Rank 0 tells it at once, so that what fails on all of them is told once."""
    global failed
    if not failed and started()[0]:
        time.sleep(OTHERS_WAIT)
    failed = failed or status
