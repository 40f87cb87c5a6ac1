"""What srun tells the processes that it starts, as far as it shows without Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_mpi import LACKS, train

from nntile_py.system.launcher import apart, by_srun, started

SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}


@pytest.mark.few(1)
@pytest.mark.skipif(bool(LACKS), reason=f"no {', no '.join(LACKS)}")
@pytest.mark.parametrize("variables", [SRUN, SRUN | {"PMI_RANK": "0"}, SRUN | {"SLURM_PROCID": "1"}])
def test_srun_without_pmi_is_told_by_the_first(variables: dict[str, str], tmp_path: Path) -> None:
    """Of Open MPI before it starts; with some PMI after it has started as if it were alone."""
    status, _, errors = train(1, tmp_path, **variables)
    told = "rank 0 of 2: error: MPI: srun has started 2 of this process, which do not find each other; allowed: srun"
    assert status == 2 and errors.count("error: ") == errors.count(told) == (variables["SLURM_PROCID"] == "0"), errors


def test_what_srun_and_mpirun_say() -> None:
    """Variables as Slurm 22.05 and Open MPI 4.1 set them."""
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}  # a job script: one process
    assert started(job) == (0, 1) and not by_srun(job)
    pmi2 = {"PMI_FD": "11", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "4.0"}
    steps = {how: job | SRUN | {"SLURM_PROCID": "1"} | more
             for how, more in {"none": {}, "pmix": {"PMIX_RANK": "1"}, "pmi2": pmi2}.items()}  # fmt: skip
    assert all(started(step) == (1, 2) for step in steps.values())
    assert [how for how, step in steps.items() if apart("Open MPI v4.1.4, package: Debian", step)] == ["none"]
    assert not any(apart("MPICH Version:      4.0.2", step) for step in steps.values())
    # mpirun in a job has srun start its daemons, one on each machine, whose ranks have their variables, too.
    inside = steps["none"] | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    assert started(inside) == (3, 4) and not by_srun(inside) and not apart("Open MPI v4.1.4", inside)
