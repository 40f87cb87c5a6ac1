"""Rank and number of ranks, from the variables of mpirun and srun; the end of a failed rank. Needs no MPI."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Variables with the number of ranks and the rank, of Open MPI, of MPICH and Intel MPI, of srun. (SLURM_NTASKS is set in
# a job script too, which is one process.)
_STARTERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK", "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}  # fmt: skip
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")  # variables whose values are equal on all ranks of a job
OTHERS_WAIT = 3.0  # seconds that a failing rank waits, so that rank 0 can report a failure of all ranks

failed = 0  # the exit status of a process that ends with an error


def started(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return rank and number of ranks; (0, 1) for a process that neither mpirun nor srun started."""
    size, rank = _variables(environment)
    return (int(environment.get(rank, 0)), int(environment[size])) if size else (0, 1)


def _variables(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the variables with size and rank; empty names for a process without other ranks."""
    for size, rank in _STARTERS.items():
        if (count := environment.get(size, "")).isdigit() and int(count) > 1:
            return size, rank
    return "", ""


def apart(library: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun started several processes that MPI cannot connect, as with --mpi=none.

    library: MPI's name. The check is for Open MPI; other libraries have their own ways to reach Slurm."""
    known = any(name == "PMIX_RANK" or name.startswith("PMI_") for name in environment)
    return library.startswith("Open MPI") and by_srun(environment) and not known


def by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun, and not mpirun, started this process and other ranks."""
    return _variables(environment)[0] == "SLURM_STEP_NUM_TASKS"


def seen(sign: str) -> dict[int, str]:
    """Return the state of each rank on this machine: `stopped`, `waits` (has loaded the library `sign`) or `comes`."""
    states: dict[int, set[str]] = {}  # of each rank's processes
    mine = [os.environ.get(name) for name in _JOB]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended or is another user's
            lines = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(line.split("=", 1) for line in lines if "=" in line)
            if started(environment)[1] == 1 or [environment.get(name) for name in _JOB] != mine:
                continue
            stopped = (process / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
            loaded = sign in (process / "maps").read_text()
            state = "stopped" if stopped else "waits" if loaded else "comes"
            states.setdefault(started(environment)[0], set()).add(state)
    return {rank: next(s for s in ("stopped", "waits", "comes") if s in states[rank]) for rank in sorted(states)}


def leads() -> bool:
    """Return True on rank 0, which alone prints and writes files."""
    return started()[0] == 0


def who() -> str:
    """Return the beginning of an error message: "rank 1 of 4: ", or nothing for a single process."""
    rank, size = started()
    return f"rank {rank} of {size}: " if size > 1 else ""


def failing(status: int = 1) -> None:
    """Prepare the message of an error that ends this process and all other ranks.

    Other ranks than 0 wait first: if all ranks fail, the message of rank 0 is the only one."""
    global failed
    if not failed and started()[0]:
        time.sleep(OTHERS_WAIT)
    failed = failed or status
