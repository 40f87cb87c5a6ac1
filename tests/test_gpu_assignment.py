"""Assignment of GPUs to ranks: each rank gets its own GPUs among the visible ones."""

from __future__ import annotations

import itertools
import os
import sys
from types import SimpleNamespace

import forks
import pytest

from nntile_py import doctor
from nntile_py.errors import ConfigError
from nntile_py.execution import gpu_assignment, mpi
from nntile_py.execution.gpu_assignment import SHARE, VISIBLE, shared_out

CASES = {  # what ranks see, what each wants, what they take
    "a machine of four": ("abcd abcd abcd abcd", 1, [[0], [1], [2], [3]]),
    "two for each": ("abcd abcd", 2, [[0, 1], [2, 3]]),
    "some are left": ("abcd abcd", 1, [[0], [1]]),
    "two machines": ("ab ab cd cd", 1, [[0], [1], [0], [1]]),
    "Slurm has given each its own": ("a b c", 1, [[0], [0], [0]]),
    "another order": ("ab ba", 1, [[0], [0]]),
    "the first has to leave what the second alone can have": ("ab a", 1, [[1], [0]]),
    "and so in turn": ("abc ab a", 1, [[2], [1], [0]]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_takes_its_own(name: str) -> None:
    seen_by, wanted, taken = CASES[name]
    assert shared_out(seen_by.split(), wanted) == taken


def test_none_is_taken_twice_where_there_are_enough() -> None:
    """All visibilities of three GPUs to two and three ranks, against exhaustive search."""
    some = ["".join(gpus) for count in (1, 2, 3) for gpus in itertools.combinations("abc", count)]
    for ranks in (2, 3):
        for seen_by in itertools.product(some, repeat=ranks):
            possible = any(len({*way}) == ranks for way in itertools.product(*seen_by))
            if possible:
                taken = [seen_by[rank][k] for rank, (k,) in enumerate(shared_out(seen_by, 1))]
                assert len({*taken}) == ranks
            else:
                with pytest.raises(ConfigError, match=r"[23] ranks \(rank [12] is one\) have [12] GPUs?; allowed"):
                    shared_out(seen_by, 1)


def test_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"runtime.cuda: got 2 for each rank, and 3 ranks \(rank 2 is one\) have 4 GPUs; allowed: fewer ranks"
    with pytest.raises(ConfigError, match=told):
        shared_out(["abcd"] * 3 + ["efgh"], 2)
    monkeypatch.setenv(SHARE, "1")
    assert shared_out(["a", "a"], 1) == [[0], [0]]
    assert shared_out(["ab"] * 4, 1) == [[0], [1], [0], [1]]
    assert shared_out(["abcd"] * 3 + ["efgh"], 2) == [[0, 1], [2, 3], [0, 1], [0, 1]]
    assert shared_out(["ab", "ab"], 1) == [[0], [1]]  # not where there are enough
    with pytest.raises(ConfigError, match="got 2, and rank 1 sees 1 GPU; allowed: as many as it sees"):
        shared_out(["ab", "a"], 2)


@pytest.mark.parametrize(("visible", "left"), [(None, "1,3"), ("4,5,6,7", "5,7"), ("GPU-x,GPU-y,MIG-z,7", "GPU-y,7")])
def test_a_rank_sees_what_it_takes(visible: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")  # put back afterwards
    monkeypatch.delenv(VISIBLE) if visible is None else monkeypatch.setenv(VISIBLE, visible)
    gpu_assignment.use([0, 1, 2, 3], 4)
    assert os.environ.get(VISIBLE) == visible
    gpu_assignment.use([1, 3], 4)
    assert os.environ[VISIBLE] == left


def test_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_assignment, "started", lambda: True)
    with pytest.raises(ConfigError, match=f"has started CUDA with all GPUs of its machine; allowed: {VISIBLE} set for"):
        gpu_assignment.use([1], 2)


def test_asking_starts_nothing() -> None:
    code = "from nntile_py.execution import gpu_assignment as gpus; gpus.seen(); assert not gpus.started()"
    forks.run([sys.executable, "-c", code], check=True)
    assert all(len(card) == 32 for card in gpu_assignment.seen())


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_assignment, "_ASK", "import time; time.sleep(100)")
    monkeypatch.setattr(gpu_assignment, "PATIENCE", 0.2)
    with pytest.raises(ConfigError, match=r"runtime\.cuda: CUDA did not list its GPUs in 0\.2 s; allowed: GPUs"):
        gpu_assignment.seen()


SILENT = "runtime.cuda: CUDA has not told"
ROWS = {  # what ranks see, or why not; what doctor says of each, and how to get what it lacks
    "ab|ab": [("GPU 0 of 2", ""), ("GPU 1 of 2", "")],
    "a||b": [("GPU 0 of 1", ""), ("no GPU", "a GPU for each rank: 2 of 3 see one"), ("GPU 0 of 1", "")],
    "a|a|": [("no GPU of its own", "ranks (rank 1 is one) have 1 GPU;")] * 2 + [("no GPU", "2 of 3 see one")],
    "a|!": [("GPU 0 of 1", ""), ("no GPU", SILENT)],
    "|": [("no GPU", ""), ("no GPU", "")],
}


@pytest.mark.parametrize("case", ROWS)
def test_doctor_tells_of_each_rank_what_it_has(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [("host", "0", [] if seen == "!" else [*seen], SILENT * (seen == "!")) for seen in case.split("|")]
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(mpi, "ranks", lambda: SimpleNamespace(library="MPI", all_to_all=lambda mine: hosts))
    monkeypatch.setattr(gpu_assignment, "seen", list)
    rows = doctor._ranks()[1:]
    for row, (gpu, hint) in zip(rows, ROWS[case], strict=True):
        assert gpu in row["value"] and hint in row["hint"] and row["ok"] == (not hint), row
