"""Ranks started by mpirun: the same numbers as one process, and all ranks end if one fails."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from traces import check_format

import nntile_py

SCRIPT = Path(__file__).with_name("mpi_script.py")
BUILT = json.loads((Path(nntile_py.__file__).parent / "_build_info.json").read_text()).get("mpi")
LACKS = [
    name
    for name, there in (
        ("mpirun", shutil.which("mpirun")),
        ("mpi4py", importlib.util.find_spec("mpi4py")),
        ("an extension with MPI", BUILT),
    )
    if not there
]
pytestmark = pytest.mark.skipif(bool(LACKS), reason=f"no {', no '.join(LACKS)}")
END = 120  # seconds until all ranks have ended after one failed
PATIENCE = 6  # of a rank with another: less than END, more than a busy machine keeps a thread waiting


# The ranks share the cores, which Open MPI must be allowed to do.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_mpi_yield_when_idle": "1",
}  # fmt: skip


def start(
    ranks: int, *command: Any, cwd: Path | None = None, always: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """Run Python on this number of ranks; one rank runs without mpirun."""
    started = ["mpirun", "-n", str(ranks)] if ranks > 1 or always else []
    return subprocess.Popen(
        [*started, sys.executable, *map(str, command)], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | OPEN_MPI | {"STARPU_WORKERS_NOBIND": "1"} | variables,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout: float = 280) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, errors = process.communicate()
        raise AssertionError(f"did not end in {timeout} s: {out}\n{errors}") from None
    return process.returncode, out, errors


Trained = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function of the number of ranks, which returns the results of each rank."""

    @functools.cache
    def results(ranks: int) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp("mpi") / "found"
        window = "3" if ranks == 2 else ""  # so few tasks and messages under way that each rank waits again and again
        shard = "shard" if ranks > 2 else ""
        status, _, errors = ended(start(ranks, SCRIPT, "train", out, window, shard))
        assert status == 0, errors
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]

    return results


RANKS = [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_train_what_one_process_does(trained: Trained, ranks: int) -> None:
    (alone,) = trained(1)
    for rank in trained(ranks):
        assert rank.keys() == alone.keys()
        for case, found in rank.items():
            if "chain" in case:
                assert all(found[key] == alone[case][key] for key in ("losses", "logits", "weights")), case
            else:
                np.testing.assert_allclose(found["losses"], alone[case]["losses"], rtol=1e-6, err_msg=case)
                np.testing.assert_allclose(found["logits"], alone[case]["logits"], rtol=2e-5, err_msg=case)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", ["wide gpt2 parts chain", "wide bert parts chain"])
def test_ranks_send_tiles_of_8_bits(trained: Trained, ranks: int, case: str) -> None:
    assert "e4m3" in {dtype for rank in trained(ranks) for dtype in rank[case]["dtypes"]}


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_send_what_is_planned(trained: Trained, ranks: int) -> None:
    """Besides, loss and norm go to all; in a tree gradients travel once a step, in a chain in each micro-batch."""
    sent = {case: sum(rank[case]["sent"] for rank in trained(ranks)) for case in trained(1)[0]}
    for case, found in trained(ranks)[0].items():
        assert sent[case] == sum(found["planned"]) + 2 * 8 * (ranks - 1), case
        for rank, planned in zip(trained(ranks), found["planned"], strict=True):
            assert 0 <= rank[case]["sent"] - planned <= 2 * 8 * (ranks - 1), case
    assert 1.3 * sent["gpt2 rows tree"] < sent["gpt2 rows chain"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("exception", ["rank 1 of 2", "ArithmeticError: on purpose"]),
        ("other plan", ["the plan is not the same on all ranks, see task 0 of list 0 (", ": rank 1 has for rank 0: "]),
        ("other database", ["the plan is not the same on all ranks, see the database of layouts drawn.jsonl: rank 1"]),
        (
            "other compiler",
            ["see the C++ compiler (with fusion.found: false none is needed): rank 1 has none, rank 0 has one"],
        ),
        ("other data", ["the input of step 1 is not the same on all ranks, see input_ids of rank 1"]),
    ],
)
def test_an_error_on_one_rank_ends_all(what: str, told: list[str], tmp_path: Path) -> None:
    status, _, errors = ended(start(2, SCRIPT, what, tmp_path / "out"))
    assert status not in (0, None)
    assert all(text in errors for text in told), errors
    assert errors.count("Traceback") == 1, errors


def running(process: subprocess.Popen[str], file: Path) -> int:
    """The process that has written its number into a file."""
    end = time.monotonic() + 200
    while not (file.exists() and file.read_text()):
        assert process.poll() is None and time.monotonic() < end, ended(process)
        time.sleep(0.1)
    return int(file.read_text())


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    process = start(2, SCRIPT, "run", tmp_path / "out")
    os.kill(running(process, tmp_path / "out.1"), signal.SIGKILL)
    status, _, errors = ended(process, END)
    assert status != 0
    assert "rank 1" in errors and "signal 9" in errors, errors


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stopped_rank_ends_all(rank: int, tmp_path: Path) -> None:
    process = start(2, SCRIPT, "run", tmp_path / "out", NNTILE_PATIENCE=str(PATIENCE))
    os.kill(running(process, tmp_path / f"out.{rank}"), signal.SIGSTOP)
    status, _, errors = ended(process, END)
    assert status not in (0, None)
    other = 1 - rank
    told = rf"rank {other} of 2: error: rank {rank} has given no sign of life for {PATIENCE} s: "
    told += rf".* Rank {other} waits for .+"
    # No tile: the rank waits for the other rank's description of its inputs.
    assert re.search(rf"{told}( from| to) rank {rank}\n|{told[:-2]}no tile\n", errors), errors


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("what", "told"), [("stopped", "its process is stopped"), ("late", "it does not come to where")]
)
def test_a_rank_that_does_not_start_ends_all(what: str, told: str, tmp_path: Path) -> None:
    status, _, errors = ended(start(3, SCRIPT, what, tmp_path / "out", NNTILE_PATIENCE="1"), END)
    assert status not in (0, None)
    assert errors.count("error: ") == errors.count("of 3: error: rank 1 has not started in 3 s: " + told) == 1, errors


CAUGHT = """
import contextlib, time
from nntile_py.execution.mpi import _starting
with contextlib.suppress(OSError), _starting("no library"):
    raise OSError
time.sleep(1)
"""


@pytest.mark.long
def test_a_start_that_has_failed_ends_nothing_later(python: Any) -> None:
    """A script may go on without MPI."""
    done = python(CAUGHT, NNTILE_PATIENCE="0.1")
    assert done.returncode == 0, done.stderr


def test_a_wrong_patience_is_told(tmp_path: Path) -> None:
    status, _, errors = ended(start(2, SCRIPT, "run", tmp_path / "out", NNTILE_PATIENCE="long"))
    assert status not in (0, None) and "NNTILE_PATIENCE: got 'long'; allowed: seconds" in errors, errors


# -- profiles, measurements, checkpoints


def found_by(ranks: int, what: str, folder: Path) -> list[dict[str, Any]]:
    status, _, errors = ended(start(ranks, SCRIPT, what, folder / "out"))
    assert status == 0, errors
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.long
def test_tasks_of_all_ranks_on_one_clock(tmp_path: Path) -> None:
    every = found_by(3, "profile", tmp_path)
    first = every[0]
    assert first["tasks"] == [one["own"] for one in every] and first["steps"] == [1, 2] and not first["light"]
    assert first["across"] and first["messages"] >= first["across"] / 10
    assert first["early"] <= first["clock"]["error_s"] * 2 and first["clock"]["error_s"] < 0.5
    summary = json.loads((tmp_path / "out-block/summary.json").read_text())
    assert summary["tasks"] == first["block"] == sum(first["tasks"]) // 2 and len(summary["ranks"]) == 3
    check_format(tmp_path / "out-block/trace.json")


@pytest.mark.long
def test_a_profile_of_ranks(tmp_path: Path) -> None:
    tree = TREE | {"profile": {"peak_flop": 5e10, "peak_bytes": 1e10, "warmup": 1}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    command = ["-m", "nntile_py.cli", "profile", "tiny.yaml", "--steps", "2", "--out", "p"]
    status, out, errors = ended(start(2, *command, cwd=tmp_path))
    assert status == 0, errors
    assert out.count("ms a step; open p/report.html") == 1
    summary, found = json.loads((tmp_path / "p/summary.json").read_text()), check_format(tmp_path / "p/trace.json")
    one, two = summary["ranks"]
    assert one["tasks"] + two["tasks"] == summary["tasks"] and summary["steps"] == 2
    assert one["sent_bytes"] == two["received_bytes"] > 0 and two["sent_messages"] == one["received_messages"] > 0
    assert all(0 <= row[key] <= 1 for row in (one, two) for key in ("communicating", "hidden", "waiting"))
    status, _, errors = ended(start(2, *command[:-1], "f", "--work", "inference", cwd=tmp_path))
    assert status == 0 and json.loads((tmp_path / "f/summary.json").read_text())["steps"] == 2, errors
    sent = [e for e in found if e["ph"] == "X" and e["cat"] == "message" and e["name"].startswith("to rank")]
    assert len(sent) == one["sent_messages"] + two["sent_messages"]
    assert sum(e["ph"] == "s" and e["name"] == "message" for e in found) == len(sent)
    if summary["light"]:  # on the system's clock, which is one for both
        assert abs(summary["clock"]["offsets_s"][1]) <= summary["clock"]["error_s"]


@pytest.mark.long
def test_a_step_of_ranks_is_measured(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    command = ["-m", "nntile_py.cli", "bench", "step", "tiny.yaml", "--rounds", "2", "--steps", "1", "--json"]
    status, out, errors = ended(start(2, *command, cwd=tmp_path))
    assert status == 0, errors
    row = json.loads(out)["nntile"]
    assert row["ranks"] == 2 and 0 < row["seconds"]["min"] <= row["seconds"]["median"]
    status, _, errors = ended(start(2, *command, "--peer", "torch", cwd=tmp_path))
    assert status == 2 and errors.count("allowed on several ranks: a CONFIG without --peer") == 1, errors


@pytest.mark.long
def test_messages_are_measured() -> None:
    command = ["-m", "nntile_py.cli", "bench", "messages"]
    sizes = "--sizes", "4,1000003"
    status, out, errors = ended(start(2, *command, *sizes, "--seconds", "0", "--repeats", "2", "--json"))
    assert status == 0, errors
    found = json.loads(out)
    assert [(row["bytes"], row["at_a_time"]) for row in found["rows"]] == [(4, 200), (1_000_000, 67)]
    assert all(row[key]["min"] > 0 for row in found["rows"] for key in ("message_us", "hop_us"))
    assert all(row["gb_per_s"] == row["bytes"] / row["message_us"]["median"] / 1e3 for row in found["rows"])
    assert 0 <= found["progress_thread"]["idle"] < 1 and found["ranks"] == 2
    status, _, errors = ended(start(1, *command))
    assert status == 2 and "nntile bench messages: got one process; allowed: several, such as mpirun -n 2" in errors


@pytest.mark.long
def test_points_of_a_sweep_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    sweep = {"config": "tiny.yaml", "grid": {"runtime.nodes": [None, 2]}, "measure": {"repeats": 1}, "together": True}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    command = ["-m", "nntile_py.cli", "sweep", "sweep.yaml", "--out", "s", "--json"]
    status, out, errors = ended(start(1, *command, cwd=tmp_path))
    assert status == 0, errors
    rows = json.loads(out)["rows"]
    assert [(row["sets"]["runtime.nodes"], row["status"]) for row in rows] == [(None, "ok"), (2, "ok")], rows
    status, out, errors = ended(start(1, *command[:-2], "t", "--json", cwd=tmp_path, NNTILE_MPIRUN="no-such-mpirun -x"))
    assert status == 2 and "runtime.nodes: got 2, which needs no-such-mpirun, which is not installed" in errors, errors


def test_a_checkpoint_brings_no_tiles_to_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (alone,), every = found_by(1, "save", tmp_path / "one"), found_by(2, "save", tmp_path)
    for rank in every:
        assert rank["after"] == rank["before"] and 0 < rank["pieces"] < alone["pieces"]
        assert rank["loss"] == alone["loss"]
    assert sum(rank["pieces"] for rank in every) == alone["pieces"]
    assert "could not write" in every[1]["error"] and "/proc" in every[0]["error"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [(folder / "out-checkpoint" / name).read_bytes() for folder in (tmp_path, tmp_path / "one")]
        assert files[0] == files[1], name


# -- nntile train

TREE: dict[str, Any] = {
    "model": {"layers": 1, "embed": 16, "heads": 2},
    "data": {"max_bytes": 200_000},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 8, "batch": 4, "seq": 12, "eval_every": 3, "eval_batches": 2},
    "optimizer": {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 2, "clip_grad_norm": 1.0},
    "tiles": {"batch": 2, "seq": 5, "embed": 7, "heads": 1, "ffn": 50, "vocab": 130},
    "runtime": {"cpus": 1},
    "sample": {"prompt": "import ", "tokens": 3},
    "checkpoint": {"every": 3},
}


def train(ranks: int, folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    command = ["-m", "nntile_py.cli", "train", "tiny.yaml", "--out", "run", *arguments]
    return ended(start(ranks, *command, cwd=folder, **variables))


def left(run: Path, steps: int = 8) -> dict[str, Any]:
    """What two runs have to leave alike."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_process = ("step_time_s", "tokens_per_s", "tflop_per_s", "data_wait_s", "time", "memory_bytes", "machine")
    told = [{k: v for k, v in line.items() if k not in of_process} for line in lines]
    files = ("model.safetensors", f"checkpoints/step-{steps:06}/optimizer.safetensors")
    return {"metrics": told} | {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in files}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, str]]:
    """By number of ranks: the folder of a run, and its output."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("run")
        status, out, errors = train(ranks, folder)
        assert status == 0, errors
        found[ranks] = folder / "run", out
    return found


def test_a_run_leaves_the_same_behind_whatever_the_ranks(runs: dict[int, tuple[Path, str]]) -> None:
    (one, alone), (two, several) = runs[1], runs[2]
    assert left(two) == left(one)
    assert "2 ranks" in several and "rank" not in alone
    assert several.count("weights saved in") == several.count("sample:") == 1
    assert alone.partition("sample:")[2] == several.partition("sample:")[2]


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_goes_on_on_other_ranks(
    before: int, after: int, runs: dict[int, tuple[Path, str]], tmp_path: Path
) -> None:
    shutil.copytree(runs[before][0], tmp_path / "run")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06}")
    status, out, errors = train(after, tmp_path, "--resume")
    assert status == 0, errors
    assert "going on after step 3" in out
    assert left(tmp_path / "run") == left(runs[before][0])


def test_ranks_with_different_configs_end_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    one = ["-m", "nntile_py.cli", "train", "tiny.yaml", "--out", "run"]
    other = [":", "-n", "1", sys.executable, *one, "--set", "train.steps=9"]
    status, _, errors = ended(start(1, *one, *other, cwd=tmp_path, always=True))
    assert status == 2
    assert errors.count("error: ") == 1
    assert "error: the config is not the same on all ranks, see train.steps: rank 1 has 9, rank 0 has 8;" in errors


def test_a_signal_to_one_rank_ends_all_with_weights_saved(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    long = ["--set", "train.steps=100000", "--set", "train.eval_every=100000"]
    process = start(2, "-m", "nntile_py.cli", "train", "tiny.yaml", "--out", "run", *long, cwd=tmp_path)
    file, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
    while not (file.exists() and file.read_text()):
        assert process.poll() is None and time.monotonic() < end, ended(process)
        time.sleep(0.1)
    os.kill(pid_of(1, tmp_path), signal.SIGTERM)
    status, out, errors = ended(process)
    assert status == 143, errors
    assert "stopped by SIGTERM after step" in out and "all trained steps are saved" in out
    assert (tmp_path / "run" / "model.safetensors").is_file()


def pid_of(rank: int, folder: Path) -> int:
    """Return the process of this rank among the processes that run in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            told = {f"{name}={rank}".encode() for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")}
            if (process / "cwd").resolve() == folder.resolve() and told & {*environment}:
                return int(process.name)
    raise AssertionError(f"no process is rank {rank}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("train", "--set", "runtime.nodes=3"), "runtime.nodes: got 3, but 2 of this process work together"),
        (("sweep",), "nntile sweep: mpirun or srun has started 2 processes; allowed: one process without"),
        (("profile", "--fxt"), "--fxt: got several ranks, "),
        (("train", "--set", "recompute=auto"), "recompute: got 'auto'; allowed on several ranks"),
        (("train", "--set", "train.grad_accumulation=auto"), "train.grad_accumulation: got 'auto'; allowed on several"),
    ],
)
def test_what_does_not_work_on_several_ranks_is_told_once(command: tuple[str, ...], told: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    what, *more = command
    status, _, errors = ended(start(2, "-m", "nntile_py.cli", what, "tiny.yaml", *more, cwd=tmp_path))
    assert status == 2
    assert errors.count("error: ") == errors.count(told) == 1, errors


def test_nodes_without_mpirun(tmp_path: Path) -> None:
    status, _, errors = train(1, tmp_path, "--set", "runtime.nodes=2")
    assert status == 2
    assert "runtime.nodes: got 2, but 1 of this process work together; allowed: the number that mpirun" in errors


def test_mpi_is_loaded_by_ranks_alone() -> None:
    text = "print('libmpi' in open('/proc/self/maps').read())"
    code = f"import nntile_py as nt\nwith nt.Runtime(cpus=1, mpi=True): {text}"
    status, out, errors = ended(start(1, "-c", code))
    assert (status, out) == (0, "False\n"), errors
