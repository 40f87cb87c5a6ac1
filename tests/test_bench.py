"""The benches: what contestants compute, what comes of one that fails, how short tasks may be."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Python

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure import capacity as bench_capacity
from nntile_py.measure import commands as bench
from nntile_py.measure import step_worker as bench_step
from nntile_py.measure import sweep_spec as sweep
from nntile_py.measure.capacity import next_model
from nntile_py.measure.commands import measure_tasks
from nntile_py.measure.metg import shortest
from nntile_py.measure.peer_process import NO_ANSWER, Side, measure_step
from nntile_py.measure.step_worker import CLIP, GPU_LR, WEIGHT_DECAY, batch, weights
from nntile_py.measure.torch_gpt2 import Model

OPTIONS: dict[str, Any] = {
    "layers": 2, "embed": 24, "heads": 2, "seq": 16, "batch": 4, "vocab": 101, "cpus": 2, "scheduler": "lws",
    "tiles": {"batch": 2}, "attention": "vendor", "accumulate": "chain", "fusion": True, "cuda": 0, "dtype": "bf16",
    "window": None, "cuda_memory": 0.0, "losses": 5, "time_limit": 120.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than all of the rest."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses in one process."""
    model = Model(OPTIONS)
    model.load(weights(OPTIONS, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), GPU_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    ids = torch.from_numpy(batch(OPTIONS))
    losses = []
    for _ in range(OPTIONS["losses"]):
        loss = model(ids, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_offload"])
def test_peers_train_alike(expected: list[float], name: str) -> None:
    row = measure_step(OPTIONS, [name], 1, 1)[name]
    assert row.get("losses") == pytest.approx(expected, rel=1e-5), row
    assert row["processes"] == 2
    assert row["tokens_per_s"] > 0


def test_a_contestant_that_fails_is_a_row() -> None:
    result = measure_step(OPTIONS | {"scheduler": "none such"}, ["nntile", "torch_eager"], 1, 1)
    assert "StarPU has no policy 'none such'" in result["nntile"]["error"]
    assert result["torch_eager"]["tokens_per_s"] > 0


def test_losses_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is fast with wrong values is not fast."""
    monkeypatch.setattr(bench_step, "torch_side", lambda o, compiled: (lambda n: [1.5, math.nan, 1.5][:n], {}))
    with pytest.raises(NNTileError, match=r"the losses of the first steps are 1\.5, nan, 1\.5"):
        bench_step.serve("torch_eager", OPTIONS | {"losses": 0})


def test_a_rank_that_dies() -> None:
    """The others wait for it in vain: they are ended."""
    side = Side("ddp", OPTIONS)
    assert not side.error
    leader = side.child.process.pid
    ranks = [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    start = time.monotonic()
    assert side.run(1) == {}
    assert side.error.startswith("rank ")
    assert time.monotonic() - start < 60
    side.close()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() - start < 60
        time.sleep(0.1)


SMALL = "--layers 1 --embed 16 --heads 2 --seq 8 --vocab 30 --batch 2"
CLI = "import sys; from nntile_py.cli import main; sys.argv[0] = 'nntile'; main()"


def test_metg(python: Python) -> None:
    arguments = "bench metg --cpus 1 --us 5,500 --seconds 0.01 --repeats 2 --json"
    made = python(CLI, *arguments.split())
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    assert len(result["rows"]) == 2
    for row in result["rows"]:
        assert 0 < row["efficiency"]["max"] <= 1 + 1e-9
        assert 0 < row["in_stream"] <= 1 + 1e-9
    assert set(result["metg_us"]) == {"50", "95"}


def test_shortest() -> None:
    rows = [{"us": us, "efficiency": {"median": e}} for us, e in ((1.0, 0.2), (10.0, 0.4), (100.0, 0.6), (1000.0, 0.9))]
    assert shortest(rows, 0.5) == pytest.approx(10**1.5)
    assert shortest(rows, 0.1) == 1.0
    assert shortest(rows, 0.95) is None


def test_capacity(python: Python, tmp_path: Path) -> None:
    """One that trains, one that is left out, one that takes too long."""
    options = f"--cuda 0 --seq 16 --batch 2 --vocab 101 --rounds 1 --out {tmp_path / 'c'}"
    ours = f"bench capacity --models tiny --contestants nntile,fsdp2_offload --host-memory 1e-6 {options}"
    made = python(CLI, *ours.split())
    assert made.returncode == 0, made.stderr
    assert "| tiny | nntile | no: not tried: may need" in made.stdout
    slow = f"bench capacity --models tiny,124M --contestants torch_eager --time-limit 0.1 {options}"
    made = python(CLI, *slow.split())
    assert made.returncode == 0, made.stderr
    assert "| tiny | torch_eager | no: no answer within 0.1 s" in made.stdout
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [row["error"] for row in rows] == ["no answer within 0.1 s"]  # what is larger is not tried
    good = f"bench capacity --models tiny --contestants nntile {options}"
    made = python(CLI, *good.split())
    assert "| tiny | nntile | yes |" in (tmp_path / "c.md").read_text()


@pytest.mark.parametrize(
    ("first", "largest", "tried"),
    [(0, "c", "abcd"), (2, "c", "cd"), (3, "b", "dcb"), (1, "e", "bcde"), (1, "", "ba"), (4, "e", "e")],
)
def test_search_for_capacity(first: int, largest: str, tried: str) -> None:
    trains: dict[str, bool] = {}
    while model := next_model("abcde", first, trains):
        trains[model] = model <= largest
    assert "".join(trains) == tried


@pytest.mark.parametrize(
    ("error", "tried"),
    [("CUDA out of memory", ["774M", "355M"]), (f"{NO_ANSWER} 60 s", ["774M"])],
)
def test_who_was_too_slow_is_not_taken_for_too_large(
    error: str, tried: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--search begins at 774M, which fills 20 GiB, and goes down only from what found no room."""
    monkeypatch.setattr(
        bench_capacity, "measure_step", lambda options, names, rounds, steps: {names[0]: {"error": error}}
    )
    monkeypatch.setattr(bench_capacity, "check_gpus", lambda cuda: None)
    bench_capacity.capacity(contestants="nntile", cuda=1, cuda_memory=20.0, search=True, as_json=True)
    assert [row["model"] for row in json.loads(capsys.readouterr().out)["rows"]] == tried


def test_more_gpus_than_there_are() -> None:
    for command in (bench.step, bench_capacity.capacity):
        with pytest.raises(ConfigError, match="--cuda: 99 is not allowed; this machine has"):
            command(cuda=99)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--time-limit nan", "'--time-limit'"),
        ("--time-limit 0", "'--time-limit': Input should be greater than or equal to 0.1"),
        ("--cpus 0", "'--cpus': Input should be greater than or equal to 1"),
        ("--cuda -1", "'--cuda': Input should be greater than or equal to 0"),
        ("--cuda-memory -1", "'--cuda-memory': Input should be greater than or equal to 0"),
        ("--losses -1", "'--losses': Input should be greater than or equal to 0"),
        ("--window -1", "'--window': Input should be greater than or equal to 0"),
        ("--batch 0 --peer ddp", "'--batch': Input should be greater than or equal to 1"),
        ("--dtype f32", "--dtype: 'f32' is not allowed; use fp32, bf16, fp16, tf32"),
        ("--set train.batch=2", "--set: train.batch=2 is allowed only with CONFIG"),
    ],
)
def test_options_that_are_wrong(python: Python, arguments: str, told: str) -> None:
    made = python(CLI, *f"bench step --rounds 1 --steps 1 {SMALL} {arguments}".split())
    assert made.returncode == 2 and told in made.stderr and not made.stdout, made.stderr


def test_no_peer_twice() -> None:
    assert bench.parse_peers("torch,torch_eager,ddp") == ["torch_eager", "torch_compile", "ddp"]


def test_ctrl_c(tmp_path: Path) -> None:
    """A terminal sends it to all that its job has started: contestants, which end with the command, say nothing."""
    command = [sys.executable, "-c", CLI, *f"bench step --rounds 9999 --peer torch_eager {SMALL}".split()]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    start, found = time.monotonic(), list[str]()
    while len(found) < 2:
        assert process.poll() is None and time.monotonic() - start < 120
        time.sleep(0.1)
        found = children.read_text().split()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in (tmp_path / "said").read_text()
    while any(_runs(pid) for pid in found):
        assert time.monotonic() - start < 180
        time.sleep(0.1)


def _runs(pid: str) -> bool:
    """Not one that has ended, which nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_policies() -> None:
    found = sweep.points(sweep.load_sweep(Path(__file__).parent.parent / "experiments" / "policies.yaml"))
    assert len(found) == 12
    assert not any(point.error for point in found)


def test_empty_tasks_with_profiles() -> None:
    found = measure_tasks(300, 1, 1, "lws", 3, profiled=True)
    assert list(found["profiled"]) == ["light", "full"] and found["tasks"] == 300
    for spread in (found["us_per_task"], *found["profiled"].values()):
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert measure_tasks(300, 0, 1, "lws", 1)["profiled"] == {}
