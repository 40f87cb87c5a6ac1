"""Rank and number of ranks, from environment variables of mpirun and srun; exit of failed ranks. MPI is not loaded."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# {variable with the number of ranks: variable with the rank}, set by Open MPI; by MPICH and Intel MPI; by srun.
# (SLURM_NTASKS does not serve here, because it is also set in a job script, which is a single process.)
_STARTERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK", "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}  # fmt: skip
_JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")  # variables whose values are equal on all ranks of a job
OTHERS_WAIT = 3.0  # seconds that a failing rank other than 0 waits, so that rank 0 reports a failure of all ranks

failed = 0  # exit status of this process after an error; 0: no error so far


def started(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) for a process that neither mpirun nor srun started."""
    size, rank = _variables(environment)
    return (int(environment.get(rank, 0)), int(environment[size])) if size else (0, 1)


def _variables(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the environment variables with the number of ranks and the rank; "" for a single process."""
    for size, rank in _STARTERS.items():
        if (count := environment.get(size, "")).isdigit() and int(count) > 1:
            return size, rank
    return "", ""


def apart(library: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun started several processes that MPI cannot connect to each other, as with --mpi=none.

    library: Name of the MPI library. Only Open MPI is checked; for other libraries the result is False."""
    known = any(name == "PMIX_RANK" or name.startswith("PMI_") for name in environment)
    return library.startswith("Open MPI") and by_srun(environment) and not known


def by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun, and not mpirun, started this process and other ranks."""
    return _variables(environment)[0] == "SLURM_STEP_NUM_TASKS"


def seen(sign: str) -> dict[int, str]:
    """Return {rank: state} for the ranks of this job on this machine.

    The state is `stopped` (suspended by a signal or a debugger), `waits` (the rank has loaded the library whose path
    contains `sign`) or `comes` (it has not loaded the library yet).
    """
    states: dict[int, set[str]] = {}  # {rank: states of its processes}
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
    """Return True on rank 0. Only rank 0 prints and writes files."""
    return started()[0] == 0


def who() -> str:
    """Return the beginning of an error message: "rank 1 of 4: ", or "" for a single process."""
    rank, size = started()
    return f"rank {rank} of {size}: " if size > 1 else ""


def failing(status: int = 1) -> None:
    """Record the exit status of a fatal error, before its message is printed and all ranks end.

    Ranks other than 0 wait OTHERS_WAIT seconds first. If all ranks fail, rank 0 thus prints the only message."""
    global failed
    if not failed and started()[0]:
        time.sleep(OTHERS_WAIT)
    failed = failed or status
