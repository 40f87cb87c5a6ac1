"""The benches: what contestants compute, what comes of one that fails, how short tasks may be."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import Python
from test_sweep import alive

from nntile_py.config.builders import build_model
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure import capacity as bench_capacity
from nntile_py.measure import commands as bench
from nntile_py.measure import sweep_points as sweep
from nntile_py.measure import torch_contestant
from nntile_py.measure.capacity import NO_ANSWER, next_model
from nntile_py.measure.commands import measure_tasks, result_text
from nntile_py.measure.contest import Contestant, measure_in_turns
from nntile_py.measure.contestants import check_peer, parse_peers
from nntile_py.measure.metg import shortest
from nntile_py.measure.sweep_spec import Measure
from nntile_py.measure.torch_gpt2 import PlainGPT2, shifted, start_weights
from nntile_py.measure.worker import Session
from nntile_py.measure.workload_inputs import inputs_of

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SIZES = {"model.layers": 2, "model.embed": 24, "model.heads": 2, "train.seq": 16, "train.batch": 4,
         "tokenizer.vocab_size": 300, "tiles": "{batch: 2}", "runtime.cpus": 2}  # fmt: skip
SETS = [f"{key}={value}" for key, value in SIZES.items()]
LOSSES = 5
ONE_STEP = Measure(steps=1)


def config(*sets: str) -> RunConfig:
    return load(EXPERIMENTS / "gpt2_tiny.yaml", [*SETS, *sets])


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than all of the rest."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses in one process, by plain PyTorch."""
    run = config()
    model = PlainGPT2(run)
    model.load(start_weights(run))
    how = run.optimizer
    settings = {name: value for name, value in how.settings.items() if name not in ("decay", "groups")}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    part = shifted(run, inputs_of(run, "train"), 0, 1, torch.device("cpu"))
    losses = []
    for _ in range(LOSSES):
        loss = model(*part)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_offload"])
def test_peers_train_alike(expected: list[float], name: str) -> None:
    row = measure_in_turns(config(), ONE_STEP, [name], 1, losses=LOSSES, time_limit=120.0)[name]
    assert row.get("losses") == pytest.approx(expected, rel=1e-5), row
    assert row["processes"] == 2
    assert row["tokens_per_s"] > 0


def test_we_train_as_plain_pytorch_does(expected: list[float]) -> None:
    result = measure_in_turns(config(), ONE_STEP, ["nntile", "torch_eager"], 1, losses=LOSSES, time_limit=120.0)
    for name in ("nntile", "torch_eager"):
        assert result[name].get("losses") == pytest.approx(expected, rel=1e-5), result[name]


def test_the_weights_one_after_the_other_are_the_initial_ones() -> None:
    run = config()
    whole = build_model(run).weights
    each = dict(start_weights(run))
    assert each.keys() == whole.keys() and all((each[name] == whole[name]).all() for name in whole)


@pytest.mark.long
def test_a_contestant_that_fails_is_a_row() -> None:
    run = config("runtime.scheduler=modular-none")
    result = measure_in_turns(run, ONE_STEP, ["nntile", "torch_eager"], 1, time_limit=120.0)
    assert "StarPU has no policy 'modular-none'" in result["nntile"]["error"]
    assert result["torch_eager"]["tokens_per_s"] > 0


def test_losses_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contestant that is fast with wrong values is not fast."""
    losses = [1.5, math.nan, 1.5]
    monkeypatch.setattr(torch_contestant, "transformers_model", lambda *_: lambda n: losses[:n])
    request = {"config": config().model_dump(by_alias=True), "measure": Measure(warmup=3).model_dump()}
    with pytest.raises(NNTileError, match=r"the losses of the first steps are 1\.5, nan, 1\.5"), ExitStack() as running:
        Session(request | {"contestant": "torch_eager"}, running)


@pytest.mark.long
def test_a_rank_that_dies() -> None:
    """The other ranks wait for it in vain: they are ended."""
    side = Contestant("ddp", config(), Measure(warmup=3), 120.0)
    side.start()
    assert not side.error
    ranks = [worker.process.pid for worker in side.workers]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    start = time.monotonic()
    side.turn(1)
    assert side.error.startswith("rank ") and not side.times
    assert time.monotonic() - start < 60
    assert not side.workers and not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize(("error", "again"), [("CUDA out of memory", True), ("no such kernel", False)])
def test_memory_that_is_short_is_given_back(monkeypatch: pytest.MonkeyPatch, error: str, again: bool) -> None:
    """A peer that finds no room beside ours: both are timed again, each in memory only for its turn."""
    held: set[str] = set()
    starts: list[str] = []

    def start(self: Contestant) -> None:
        starts.append(self.name)
        if held - {self.name}:
            self.error = error
            return
        held.add(self.name)
        self.workers = [None]  # type: ignore[list-item]
        self.facts = {"losses": [1.0, 1.0, 1.0], "tokens": 8, "flop": 2e9, "tasks": 3}

    def turn(self: Contestant, steps: int) -> None:
        if not self.workers:
            self.start()
        self.times.append(1.0 if self.name == "nntile" else 2.0)
        self.last = {"peak_mib": 1.0, "host_mib": 1.0}

    def close(self: Contestant) -> None:
        held.discard(self.name)
        self.workers = []

    for method in (start, turn, close):
        monkeypatch.setattr(Contestant, method.__name__, method)
    said: list[str] = []
    names = ["nntile", "torch_compile"]
    result = measure_in_turns(config(), ONE_STEP, names, 2, tell=said.append)
    assert ("error" in result["torch_compile"]) is not again
    assert any("memory is short" in text for text in said) == again
    assert ("Memory was given back" in result_text(result, names)) == again
    if again:
        assert result["ratio_to_fastest_peer"]["median"] == 0.5
        assert starts == [*names, "nntile", "torch_compile", "torch_compile", "nntile"]
        with_option = measure_in_turns(config(), ONE_STEP, names, 1, hold=True)
        assert error in with_option["torch_compile"]["error"]


SMALL = " ".join(f"--set {item}" for item in SETS if "{" not in item) + " --set tiles={}"
STEP = f"bench step {EXPERIMENTS / 'gpt2_tiny.yaml'} {SMALL}"
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
    sets = "--set train.seq=16 --set train.batch=2 --set tokenizer.vocab_size=300 --set runtime.cpus=2"
    options = f"--cuda 0 {sets} --rounds 1 --out {tmp_path / 'c'}"
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
        bench_capacity, "measure_in_turns", lambda config, how, names, rounds, **_: {names[0]: {"error": error}}
    )
    monkeypatch.setattr(bench_capacity, "check_gpus", lambda *_: None)
    bench_capacity.capacity(contestants="nntile", cuda=1, cuda_memory=20.0, search=True, as_json=True)
    assert [row["model"] for row in json.loads(capsys.readouterr().out)["rows"]] == tried


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(ConfigError, match="--cuda: got 99; allowed: at most "):
        bench_capacity.capacity(cuda=99)
    with pytest.raises(ConfigError, match=r"runtime\.cuda: got 99; allowed: at most "):
        bench.step(str(EXPERIMENTS / "gpt2_124m.yaml"), sets=["runtime.cuda=99"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--time-limit nan", "--time-limit: got nan; allowed: a number from 0.1 to 1000000"),
        ("--time-limit 0", "--time-limit: got 0; allowed: a number from 0.1 to 1000000"),
        ("--set runtime.cpus=0", "runtime.cpus: got 0; allowed: at least 1"),
        ("--set runtime.cuda=-1", "runtime.cuda: got -1; allowed: "),
        ("--cuda-memory -1", "--cuda-memory: got -1; allowed: a number of at least 0"),
        ("--losses -1", "--losses: got -1; allowed: an integer of at least 0"),
        ("--set runtime.window=-1", "runtime.window: got -1; allowed: "),
        ("--set train.batch=0 --peer ddp", "train.batch: got 0; allowed: "),
        ("--set train.batch=3 --peer ddp", "train.batch: got 3; allowed with --peer ddp: a multiple of 2"),
        ("--set model.dropout=0.1 --peer fsdp2", "model.dropout: got 0.1; allowed with --peer fsdp2: 0.0"),
        ("--set precision=f32", "precision: got 'f32'; allowed: fp32"),
        ("--peer tensorflow", "--peer: got 'tensorflow'; allowed: torch (torch_eager and torch_compile), "),
    ],
)
def test_options_that_are_wrong(python: Python, arguments: str, message: str) -> None:
    made = python(CLI, *f"{STEP} --rounds 1 --steps 1 {arguments}".split())
    assert made.returncode == 2 and message in made.stderr and not made.stdout, made.stderr


def test_a_gpt2_of_other_parts_is_not_the_plain_one() -> None:
    with pytest.raises(ConfigError, match=r"model\.tie_embeddings: got false; allowed with --peer ddp: true"):
        check_peer(config("model.tie_embeddings=false"), "ddp")


def test_optimizers_of_peers() -> None:
    for sets, message in (
        ("optimizer.name=lion", r"optimizer\.name: got 'lion'; allowed with --peer torch_eager: adamw or sgd"),
        ("optimizer.groups=[{match: ['*']}]", r"optimizer\.groups: got .*; allowed with --peer torch_eager: \[\]"),
    ):
        check_peer(config(sets), "torch_eager", "inference")
        with pytest.raises(ConfigError, match=message):
            check_peer(config(sets), "torch_eager")


def test_cuda_graphs_of_torch_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"runtime.cuda: got 0; allowed with --peer torch_graphs: 1, as it uses CUDA"):
        check_peer(config(), "torch_graphs")
    check_peer(config("runtime.cuda=1"), "torch_graphs")


def test_no_peer_twice() -> None:
    assert parse_peers("torch,torch_eager,ddp") == ["torch_eager", "torch_compile", "ddp"]


def test_ctrl_c(tmp_path: Path) -> None:
    """A terminal sends it to all that its job has started: contestants, which end with the command, say nothing."""
    command = [sys.executable, "-c", CLI, *f"{STEP} --rounds 9999 --peer torch_eager".split()]
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
    while any(alive(int(pid)) for pid in found):
        assert time.monotonic() - start < 180
        time.sleep(0.1)


def test_policies() -> None:
    found = sweep.points(sweep.load_sweep(EXPERIMENTS / "policies.yaml"))
    assert len(found) == 12
    assert not any(point.error for point in found)


def test_empty_tasks_with_profiles() -> None:
    found = measure_tasks(300, 1, 1, "lws", 3, profiled=True)
    assert list(found["profiled"]) == ["light", "full"] and found["tasks"] == 300
    for spread in (found["us_per_task"], *found["profiled"].values()):
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert measure_tasks(300, 0, 1, "lws", 1)["profiled"] == {}
