"""Which of several processes this one is, as whoever started it says; how they end where one fails. Needs no MPI."""

import os
import time

# How Open MPI, MPICH (and Intel's) and Slurm tell a process how many they started, and which it is. Slurm sets
# SLURM_NTASKS in a job script too, which is one process; what srun starts knows of its step.
_STARTERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK", "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}  # fmt: skip
OTHERS_WAIT = 3.0  # seconds that the others let rank 0 tell of what has failed on all of them

failed = 0  # the exit status of a process that ends with an error


def started() -> tuple[int, int]:
    """(rank, number of ranks) as mpirun or srun has told this process; (0, 1) where none has started it."""
    for size, rank in _STARTERS.items():
        if (count := os.environ.get(size, "")).isdigit() and int(count) > 1:
            return int(os.environ.get(rank, 0)), int(count)
    return 0, 1


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
