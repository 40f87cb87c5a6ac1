"""A run that goes on is the same to the bit as one that was never stopped."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from conftest import CPUS, Python
from test_loop import HOW, command, metrics, nntile

import nntile_py as nt
from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint import reader
from nntile_py.checkpoint.resume import newest_checkpoint
from nntile_py.checkpoint.run_folder import RunFolder
from nntile_py.errors import NNTileError
from nntile_py.training.run_start import publish_on_rank_0

TORTURE = bool(os.environ.get("NNTILE_TORTURE"))

CODE = """
import json, sys
import numpy as np
import nntile_py as nt
options, both, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
cls = getattr(nt.models, options.pop("model", "GPT2"))
optimizer = getattr(nt, options.pop("optimizer", "AdamW"))(**options.pop("optimizer_options", {}))
passes = options.get("grad_accumulation", 1)
rng = np.random.default_rng(0)
batches = [rng.integers(0, 101, (4 * passes, 19)) for _ in range(6)]
more = {"kv_heads": 2, "ffn": 60} if cls is nt.models.Llama else {"dropout": 0.1}
config = cls.Config(layers=2, embed=24, heads=4, vocab=101, positions=19, **more)
found = []
for runs in both:
    done, left = [], list(enumerate(batches))
    for number, (count, run) in enumerate(runs):
        with nt.Runtime(**run):
            if number:
                trainer = nt.Trainer.load(folder)
            else:
                model = cls(config, seed=3)
                trainer = nt.Trainer(model, 4, 19, seed=5, clip_grad_norm=1.0, optimizer=optimizer, **options)
            for step, ids in left[:count]:
                result = trainer.submit({"input_ids": ids, "labels": ids}, lr=1e-2 / (step + 1)).result()
                assert result.step == step + 1
                done += [result.loss.hex(), result.grad_norm.hex()]
            left = left[count:]
            trainer.save(folder)
            weights = trainer.state_dict()
    found.append(done + [w.tobytes().hex() for w in weights.values()])
print(json.dumps(found))
"""
TILES = {"batch": 2, "seq": 7, "embed": 10, "heads": 2, "ffn": 50, "vocab": 40}
CASES = {
    "accumulation": {"grad_accumulation": 2},
    "bert in fp64": {"model": "BERT", "precision": "fp64"},
    "llama by momentum": {"model": "Llama", "optimizer": "SGD", "optimizer_options": {"momentum": 0.9}},
    "sgd": {"optimizer": "SGD"},
    "lion": {"optimizer": "Lion"},
    "muon": {"optimizer": "Muon"},
    "naive": {"attention": "naive", "fusion": False},
    "whole rows": {"model": "BERT", "tiles": {"batch": 2, "seq": 7, "ffn": 50}},  # whose norms are in groups
    "rules": {"model": "BERT", "tiles": {"batch": 2, "seq": 7, "ffn": 50}, "fusion": {"found": False}},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_never_stopped(case: str, python: Python, tmp_path: Path) -> None:
    """With dropout; stopped twice, and another number of workers and another scheduler each time."""

    once = [[6, {"cpus": CPUS}]]
    parts = [[2, {"cpus": 1}], [3, {"cpus": CPUS, "scheduler": "eager"}], [1, {"cpus": CPUS, "scheduler": "dmdas"}]]
    options = {"tiles": TILES} | CASES[case]
    done = python(CODE, json.dumps(options), json.dumps([once, parts]), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    whole, stopped = json.loads(done.stdout)
    assert len(set(whole[:12])) == 12
    assert stopped == whole


SHORT = ("train.steps=12", "sample.tokens=0", "model.dropout=0.1", "train.grad_accumulation=2", "checkpoint.every=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped."""
    path = tmp_path_factory.mktemp("whole")
    done = nntile(path, *SHORT)
    assert done.returncode == 0, done.stderr
    return path / "runs" / "tiny"


def same(run: Path, whole: Path) -> None:
    """Losses, norms, weights and averages, to the bit."""
    both = [[(m["step"], m["loss"], m["grad_norm"]) for m in metrics(one)] for one in (run, whole)]
    assert both[0] == both[1]
    for name in ("model.safetensors", "checkpoints/step-000012/optimizer.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.few(1)
def test_the_newest_checkpoint(whole: Path, tmp_path: Path) -> None:
    """Also in a second folder, from a checkpoint in the middle, on another machine."""
    run = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    shutil.rmtree(run / "checkpoints" / "step-000012")
    (run / "model.safetensors").unlink()
    done = nntile(tmp_path, *SHORT, "runtime.cpus=1", arguments=("--resume",))
    assert done.returncode == 0, done.stderr
    assert "going on after step 8, from runs/tiny/checkpoints/step-000008" in done.stdout
    same(run, whole)
    folder = str(whole / "checkpoints" / "step-000004")
    done = nntile(tmp_path, *SHORT, "scheduler=cpu", arguments=(folder, "--resume", "--out", "other"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "other")[0]["step"] == 5
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


NO_ROOM = """
from nntile_py.cli import main
from nntile_py.system import folders
real = folders.create
folders.create = lambda path: open("/dev/full", "wb") if ".metrics.jsonl." in path.name else real(path)
main()
"""


def test_a_disk_without_room_leaves_all_as_it_was(whole: Path, tmp_path: Path) -> None:
    """The damaged newest checkpoint, too, keeps its name as long as the run cannot go on from the one before."""
    run = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    (run / "checkpoints" / "step-000012" / checkpoint.MODEL).write_bytes(b"")
    before, lines = {*(run / "checkpoints").iterdir()}, metrics(run)
    sets = command(tmp_path, *SHORT, arguments=("--resume",))[3:]
    done = forks.run([sys.executable, "-c", NO_ROOM, *sets], **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "metrics.jsonl: No space left on device" in done.stderr
    assert "trying the one before it" in done.stdout + done.stderr
    assert {*(run / "checkpoints").iterdir()} == before and metrics(run) == lines
    done = nntile(tmp_path, *SHORT, arguments=("--resume",))
    assert done.returncode == 0 and "is now step-000012.old1" in done.stdout
    same(run, whole)


def stopped(
    number: signal.Signals, sets: tuple[str, ...], arguments: tuple[str, ...], when: float, path: Path, times: int = 1
) -> tuple[int, float]:
    """The status of a run that gets a signal `when` seconds after its first checkpoint is whole, or ends before; where
    `when` is negative, that long after its start. And the seconds from the last signal to its end."""
    process = subprocess.Popen(command(path, *sets, arguments=arguments), cwd=path, stdout=subprocess.DEVNULL)
    folder = path / "runs" / "tiny" / "checkpoints"
    before = {*folder.glob("step-*")}
    try:
        while process.poll() is None and not {*folder.glob("step-*")} - before and when >= 0:
            time.sleep(0.01)
        time.sleep(abs(when))
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.02)
        begin = time.monotonic()
        return process.wait(60), time.monotonic() - begin
    finally:
        process.kill()


def test_written_while_training_stands_still(whole: Path, tmp_path: Path) -> None:
    done = nntile(tmp_path, *SHORT, "checkpoint.async=false", "checkpoint.every=1", "checkpoint.keep=20")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    same(run, whole)
    assert len([*(run / "checkpoints").iterdir()]) == 12


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_and_gone_on(number: signal.Signals, whole: Path, tmp_path: Path) -> None:
    sets = (*SHORT, "checkpoint.every=1")
    run = tmp_path / "runs" / "tiny"
    while stopped(number, sets, (), 0.02, tmp_path)[0] == 0:  # it was done before the signal came
        shutil.rmtree(run)
    done = nntile(tmp_path, *sets, arguments=("--resume",))
    assert done.returncode == 0, done.stderr
    same(run, whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-{n:06d}" for n in (10, 11, 12)]


@pytest.mark.skipif(not TORTURE, reason="minutes; `make torture` runs it")
@pytest.mark.timeout(7200)
def test_killed_at_200_moments(tmp_path: Path) -> None:
    """One run, killed and resumed again and again, another number of workers each time; a third of the kills come as it
    starts."""
    sets, moment = (*SHORT, "train.steps=2000", "checkpoint.every=1", "train.eval_every=2000"), random.Random(0)
    assert nntile(tmp_path, *sets, "checkpoint.every=null", arguments=("--out", "whole")).returncode == 0
    kills = 0
    arguments: tuple[str, ...] = ()
    while kills < 200:
        cpus = f"runtime.cpus={1 + kills % CPUS}"
        when = -moment.uniform(0, 3) if kills % 3 == 2 else moment.uniform(0, 0.15)
        if stopped(signal.SIGKILL, (*sets, cpus), arguments, when, tmp_path)[0] == 0:
            break
        kills, arguments = kills + 1, ("--resume",)
        shown = newest_checkpoint(tmp_path / "runs" / "tiny", pytest.fail)  # none damaged
    done = nntile(tmp_path, *sets, arguments=arguments)
    assert done.returncode == 0, done.stderr
    print(f"{kills} kills, the last at step {shown.step}")
    run, whole = tmp_path / "runs" / "tiny", tmp_path / "whole"
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [(m["step"], m["loss"]) for m in metrics(run)] == [(m["step"], m["loss"]) for m in metrics(whole)]


@pytest.mark.skipif(not TORTURE, reason="minutes; `make torture` runs it")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("runs", [1, 10])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_at_moments(number: signal.Signals, times: int, runs: int, tmp_path: Path) -> None:
    """Runs side by side, asked to stop once, twice or three times, 100 times in all, from their starts on: they end
    soon and can be gone on with."""
    sets = (*SHORT, "train.steps=2000", "checkpoint.every=1", "train.eval_every=2000")

    def asked(seed: int) -> list[tuple[int, float]]:
        moment, path, arguments, ends = random.Random(10 * times + seed), tmp_path / str(seed), (), []
        path.mkdir()
        for k in range(100 // runs):
            when = -moment.uniform(0, 3) if k % 3 == 2 else moment.uniform(0, 0.3)
            ends += [stopped(number, sets, arguments, when, path, times)]
            if checkpoint.checkpoints_in(path / "runs" / "tiny"):
                arguments = ("--resume",)
                newest_checkpoint(path / "runs" / "tiny", pytest.fail)  # none damaged
        return ends

    with ThreadPoolExecutor(runs) as pool:
        ends = [end for one in pool.map(asked, range(runs)) for end in one]
    statuses, longest = Counter(status for status, _ in ends), max(took for _, took in ends)
    print(f"{number.name} x{times}, {runs} runs at once: statuses {dict(statuses)}, the longest end {longest:.2f} s")
    assert {*statuses} <= {128 + number, 1, -number}


@pytest.mark.long
def test_going_on_without_the_folder_of_the_start_weights(whole: Path, tmp_path: Path) -> None:
    """Even when the checkpoint that took its place is gone as well."""
    start = shutil.copytree(whole, tmp_path / "start")
    sets = f"model={{from: {start}}}", "tokenizer={}", "train.steps=4", "sample.tokens=0", "checkpoint.keep=1"
    assert nntile(tmp_path, *sets).returncode == 0
    shutil.rmtree(start)
    for steps in (6, 8):
        done = nntile(tmp_path, *sets, f"train.steps={steps}", arguments=("--resume",))
        assert done.returncode == 0 and f"going on after step {steps - 2}" in done.stdout, done.stderr
    (tmp_path / "again.yaml").write_text((tmp_path / "runs/tiny/config.yaml").read_text())
    code = [sys.executable, "-m", "nntile_py.cli", "train", "again.yaml", "--resume", "--set", "train.steps=9"]
    done = forks.run(code, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "going on after step 8" in done.stdout, done.stderr


def test_a_run_resumes_with_its_own_settings(whole: Path, tmp_path: Path) -> None:
    """From its folder alone, and from its YAML without the --set options of the start; a new --set wins."""
    run = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    shutil.rmtree(run / "checkpoints" / "step-000012")
    done = nntile(tmp_path, arguments=("--resume",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resuming runs/tiny, the newest run of ")
    assert f"options of the run so far: {' '.join(f'--set {item}' for item in SHORT)}\n" in done.stdout
    same(run, whole)
    begin = [sys.executable, "-m", "nntile_py.cli", "train", "--resume"]
    command = [*begin, "runs/tiny", "--set", "train.steps=13"]
    done = forks.run(command, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "going on after step 12, from runs/tiny/checkpoints" in done.stdout, done.stderr
    assert "train.steps was 12, is 13" in done.stdout and "--set train.steps=12" not in done.stdout
    facts = reader.read_facts(run / "checkpoints" / "step-000013")
    assert facts["overrides"] == [*SHORT[1:], "train.steps=13"]
    done = forks.run([*begin, "."], **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 2 and "CONFIG: . is not the folder of a run: config.yaml does not exist" in done.stderr
    need = "a YAML file, or with --resume the folder of a run, or one of its checkpoints"
    done = forks.run([*begin, "nowhere.yaml"], **HOW, cwd=tmp_path, check=False)
    assert done.stderr == f"error: CONFIG: no such file or folder: nowhere.yaml; allowed: {need}\n"
    done = forks.run([*begin[:-1], "runs/tiny"], **HOW, cwd=tmp_path, check=False)
    need = "the path of a YAML file; to continue a run: nntile train --resume runs/tiny"
    assert done.stderr == f"error: CONFIG: is a folder: runs/tiny; allowed: {need}\n"


def test_another_run_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("another text\n" * 300)
    run = str(shutil.copytree(whole, tmp_path / "run"))
    for sets, told in {
        ("model.heads=4", "tiles.heads=1"): "model.heads was 2, is 4",
        ("optimizer.name=sgd",): "optimizer.name was adamw, is sgd",
        ("tokenizer.vocab_size=400",): "tokenizer.vocab_size was 300, is 400",
        ("data.source=my.txt",): "another training text; another held-out text; another tokenizer",
        ("train.steps=11",): "train.steps: got 11; allowed with --resume: more",
    }.items():
        done = nntile(tmp_path, *SHORT, "train.steps=15", *sets, arguments=(run, "--resume"))
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert ("reading" in done.stdout) == ("another" in told)  # keys are compared before the data is read
    for arguments, told in {
        ("--resume",): "no checkpoint in runs/tiny",
        (run,): "given without --resume",
        ("nowhere", "--resume"): "no checkpoint in nowhere",
    }.items():
        done = nntile(tmp_path, *SHORT, arguments=arguments)
        assert done.returncode == 2 and told in done.stderr, done.stderr
    changes = "train.steps=13", "seed=7", "model.attention=naive", "train.eval_every=6", "train.eval_batches=1"
    changes += ("train.skip_above_norm=9.5",)
    done = nntile(tmp_path, *SHORT, *changes, arguments=(run, "--resume"))
    told = "; model.attention was vendor, is naive, seed was 0, is 7, train.eval_batches was 2, is 1"
    told += ", train.eval_every was 5, is 6, train.skip_above_norm was null, is 9.5, train.steps was 12, is 13\n"
    assert done.returncode == 0 and told in done.stdout, done.stdout + done.stderr


def test_a_trainers_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
    with nt.Runtime(cpus=1):
        nt.Trainer(model, 2, 8).save(tmp_path / "saved")
        for call, told in (
            (lambda: nt.Trainer.load(tmp_path / "saved", foo=1), "foo: unknown argument; allowed: batch, seq"),
            (lambda: nt.Trainer.load(tmp_path), "no checkpoint"),
            (lambda: nt.Trainer.load(tmp_path / "saved", nt.models.GPT2), "allowed: a model"),
            (lambda: nt.Trainer.load(tmp_path / "saved", optimizer=nt.SGD()), "averages that were saved are m, v"),
        ):
            with pytest.raises(nt.ConfigError, match=told):
                call()
        state = tmp_path / "saved" / "state.json"
        right = json.loads(state.read_text())
        for wrong in ({"optimizer": None}, {"optimizer": {}}, {"optimizer": {"name": "Foo"}}, {"more": 1}):
            state.write_text(json.dumps(right | {"trainer": right["trainer"] | wrong}))
            with pytest.raises(nt.NNTileError, match=r"state\.json: trainer"):
                nt.Trainer.load(tmp_path / "saved")


FULL = """
import resource, sys
from nntile_py.checkpoint import format as checkpoint, writer
writer.RETRY = 0.2
real, left = checkpoint.write_tensors, int(sys.argv.pop(1))
def full(path, tensors, *check):
    global left
    left -= 1
    if left >= 0 and "saved" not in str(path):
        raise OSError(28, "No space left on device", str(path))
    return real(path, tensors, *check)
checkpoint.write_tensors = full
from nntile_py.cli import main
main()
"""


STOPPED = """
from contextlib import contextmanager
from nntile_py.training import run
@contextmanager
def signals(runtime):
    yield ["SIGTERM"]
run.signals_of_run = signals
from nntile_py.cli import main
main()
"""


def test_stopped_before_the_first_step(whole: Path, tmp_path: Path) -> None:
    """Weights that nobody trained take the place of no run."""
    run = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    made = [sys.executable, "-c", STOPPED, *command(tmp_path, *SHORT, arguments=("--overwrite",))[3:]]
    done = forks.run(made, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 143 and "before the first step: nothing is saved" in done.stdout, done.stderr
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert newest_checkpoint(run, pytest.fail).step == 12


@pytest.mark.long
def test_weights_that_cannot_be_put_into_the_runs_folder(whole: Path, tmp_path: Path) -> None:
    """Waiting would not help: it ends, and says where they are."""
    run = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    (run / "model.safetensors").unlink()
    (run / "model.safetensors").mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[3:]))
    done = nntile(tmp_path, *SHORT, "train.steps=13", arguments=("--resume",))
    told = "model.safetensors: Is a directory; what was trained is in "
    assert done.returncode == 1 and told in done.stderr and "checkpoints/step-000013" in done.stderr, done.stdout
    assert "metrics.jsonl lacks the lines of 3 of 12 earlier steps: they are lost" in done.stdout
    assert newest_checkpoint(run, pytest.fail).step == 13
    assert f"; nntile train --resume {run.resolve()} puts the weights into this folder" in done.stderr
    (run / "model.safetensors").rmdir()
    again = [sys.executable, "-m", "nntile_py.cli", "train", "--resume", str(run)]
    done = subprocess.run(again, **HOW, cwd=tmp_path, check=False)
    told = f"all 13 steps are trained; weights saved in {run}/model"
    assert done.returncode == 0 and told in done.stdout, done.stderr
    assert (run / "model.safetensors").samefile(run / "checkpoints/step-000013/model.safetensors")
    (run / "model.safetensors").unlink()
    (run / "model.safetensors").write_bytes(b"a user's")
    done = subprocess.run(again, **HOW, cwd=tmp_path, check=False)
    assert (run / "model.safetensors").read_bytes() == b"a user's"
    assert done.returncode == 0 and f"the weights are in {run}/checkpoints/step-000013/model" in done.stdout


def test_a_run_that_has_trained_all_steps(whole: Path, tmp_path: Path) -> None:
    """A loop that resumes a run until the status is 0 ends: no data is read, and the output has one line."""
    run = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    begin = [sys.executable, "-m", "nntile_py.cli", "train", "--resume"]
    where = [str(run / "model.safetensors"), str(run / "checkpoints" / "step-000012" / "model.safetensors")]
    for kept in where:
        done = forks.run([*begin, str(run)], **HOW, cwd=tmp_path, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
        more = "to train on, add --set train.steps=N with N above 12"
        assert done.stdout.startswith("options of the run so far: ") and done.stdout.count("\n") == 2
        assert done.stdout.endswith(f"\nall 12 steps are trained; the weights are in {kept}; {more}\n")
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")}.keys() == before.keys()
        (run / "model.safetensors").unlink()
        (run / "model.safetensors").write_text("a user's")
    done = forks.run([*begin, str(run), "--set", "optimizer.warmup_steps=99"], **HOW, cwd=tmp_path, check=False)
    assert "all 12 steps are trained" in done.stdout and "note:" not in done.stdout  # no warm-up takes place
    for arguments in ("--out", "other"), ("--set", "train.steps=11"):
        done = forks.run([*begin, str(run), *arguments], **HOW, cwd=tmp_path, check=False)
        assert done.returncode == 2 and "allowed with --resume: more" in done.stderr and "reading" not in done.stdout
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("rank", "first"), [(0, 0.0), (1, 1.0), (1, 0.0), (1, -1.0)])
def test_all_ranks_know_what_the_first_has_published(
    rank: int, first: float, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone puts the weights into the folder; another rank ends as rank 0 does."""
    told = []
    ranks: Any = SimpleNamespace(rank=rank, of_first=lambda value: told.append(value) or (first if rank else value))
    run = shutil.copytree(whole, tmp_path / "runs" / "tiny")
    (run / "model.safetensors").unlink()
    point = newest_checkpoint(run, pytest.fail)
    if first < 0:
        with pytest.raises(NNTileError, match="tiny: the first rank could not put the weights there"):
            publish_on_rank_0(point, run, ranks, pytest.fail)
    else:
        assert publish_on_rank_0(point, run, ranks, pytest.fail) == (first > 0 or rank == 0)
    assert (run / "model.safetensors").exists() == (rank == 0) and len(told) == 1
    if rank == 0:
        (run / "model.safetensors").unlink()
        monkeypatch.setattr(RunFolder, "publish", lambda *_: (run / "no" / "folder").write_text(""))
        with pytest.raises(OSError, match="No such file"):
            publish_on_rank_0(point, run, ranks, pytest.fail)
        assert told == [1.0, -1.0]


KILLED = """
import os, signal
from nntile_py.checkpoint import run_folder
run_folder.link_or_copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # only the weights are missing
from nntile_py.cli import main
main()
"""


@pytest.mark.parametrize("missing", [None, "model.safetensors", "config.json"])
def test_a_resume_finishes_the_save_of_a_killed_run(missing: str | None, whole: Path, tmp_path: Path) -> None:
    """None: no model file is in the run's folder. A kill within this resume leaves a folder that the next completes."""
    run = shutil.copytree(whole, tmp_path / "run")
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for name in {missing} if missing else names:
        (run / str(name)).unlink()
    if missing == "config.json":
        (run / "tokenizer_config.json").write_text("{}")  # edited by a user: stays
    arguments = ["train", "--resume", str(run)]
    if missing is None:
        killed = forks.run([sys.executable, "-c", KILLED, *arguments], **HOW, cwd=tmp_path, check=False)
        assert killed.returncode == -signal.SIGKILL and (run / "config.json").exists()
        assert not (run / "model.safetensors").exists()
    done = forks.run([sys.executable, "-m", "nntile_py.cli", *arguments], **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0 and f"weights saved in {run}/model.safetensors" in done.stdout, done.stderr
    edited = {"tokenizer_config.json"} if missing == "config.json" else set()
    assert all((run / name).read_bytes() == (whole / name).read_bytes() for name in names - edited)
    assert not edited or (run / "tokenizer_config.json").read_text() == "{}"
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}
    again = forks.run([sys.executable, "-m", "nntile_py.cli", *arguments], **HOW, cwd=tmp_path, check=False)
    assert again.returncode == 0 and f"the weights are in {run}/model.safetensors" in again.stdout, again.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(("failures", "arguments"), [(5, ()), (10**6, ("--rescue", "saved"))])
def test_a_full_disk(failures: int, arguments: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    """Checkpoints are left out, and told; at the end it is waited for room, or the rescue folder takes the run."""
    made = [sys.executable, "-c", FULL, str(failures), *command(tmp_path, *SHORT, arguments=arguments)[3:]]
    done = forks.run(made, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "checkpoint of step 4 not written (" in done.stdout and "No space left on device" in done.stdout
    assert ("trying again every 0.2 s" in done.stdout) == (not arguments)
    saved = tmp_path / (arguments[1] if arguments else "runs/tiny")
    assert f"weights saved in {saved}/model.safetensors" in done.stdout
    assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


NO_ROOM_FOR_WEIGHTS = """
import errno
from nntile_py.checkpoint.run_folder import RunFolder
publish = RunFolder.publish
def full(folder, step):
    if folder.path.name == "tiny":
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
    publish(folder, step)
RunFolder.publish = full
from nntile_py.cli import main
main()
"""


def test_the_rescue_folder_has_the_last_checkpoint_too(whole: Path, tmp_path: Path) -> None:
    """Also if the full disk has the last checkpoint, but no room for the weights in the run's folder."""
    run = [sys.executable, "-c", NO_ROOM_FOR_WEIGHTS, *command(tmp_path, *SHORT, arguments=("--rescue", "saved"))[3:]]
    done = forks.run(run, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "saving in saved instead" in done.stdout, done.stderr
    saved = tmp_path / "saved"
    assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (saved / "checkpoints" / "step-000012" / "state.json").is_file()


def test_the_weights_of_a_run_take_no_second_room(whole: Path) -> None:
    assert (whole / "model.safetensors").samefile(whole / "checkpoints" / "step-000012" / "model.safetensors")


SMALL_DISK = """
import shutil, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from types import SimpleNamespace
room = int(sys.argv.pop(1))
def usage(run):
    return SimpleNamespace(free=room - sum(file.stat().st_size for file in Path(run).glob("checkpoints/*/*")))
shutil.disk_usage = usage
from nntile_py.cli import main
main()
"""


@pytest.mark.parametrize("good", [False, True])
def test_older_checkpoints_make_room(good: bool, whole: Path, tmp_path: Path) -> None:
    """For two and a half: the oldest go, of those that are not kept for good; the newest whole one stays."""
    room = sum(file.stat().st_size for file in (whole / "checkpoints/step-000012").iterdir()) * 5 // 2
    sets = (*SHORT, "checkpoint.every=2", *(["checkpoint.keep_every=2"] * good))
    made = [sys.executable, "-c", SMALL_DISK, str(room), *command(tmp_path, *sets, arguments=("--rescue", "saved"))[3:]]
    done = forks.run(made, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    left = [step for step, _ in checkpoint.checkpoints_in(tmp_path / "runs/tiny")]
    assert left == ([4, 2] if good else [12, 10])
    told = [f"checkpoint of step {n} removed: the disk had no room for that of {n + 4}" in done.stdout for n in (2, 8)]
    assert told == 2 * [not good] and ("checkpoint of step 6 not written (" in done.stdout) == good, done.stdout
    saved = tmp_path / ("saved" if good else "runs/tiny")
    assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


FULL_FROM_THE_START = """
from nntile_py.training import rank_0
real = rank_0.replace_file
def full(path, content):
    if path.name == "tokenizer.json" and "saved" not in str(path):
        raise OSError(28, "No space left on device", str(path))
    real(path, content)
rank_0.replace_file = full
from nntile_py.cli import main
main()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["new", "--overwrite", "--resume"])
def test_a_disk_that_is_full_from_the_start(how: str, whole: Path, tmp_path: Path) -> None:
    """The rescue folder takes the run, with the metrics of what went before; without one that is an error."""
    if resumed := how == "--resume":
        shutil.copytree(whole, tmp_path / "runs" / "tiny")
    sets = (*SHORT, f"train.steps={13 if resumed else 2}")
    for rescue in ((), ("--rescue", "saved")):
        arguments = (*rescue, *([] if how == "new" else [how]))
        made = [sys.executable, "-c", FULL_FROM_THE_START, *command(tmp_path, *sets, arguments=arguments)[3:]]
        done = forks.run(made, **HOW, cwd=tmp_path, check=False)
        assert "Traceback" not in done.stderr and (tmp_path / "runs" / "tiny").exists() == resumed, done.stderr
        if not rescue:
            assert done.returncode == 1 and "No space left on device" in done.stderr, done.stderr
    assert done.returncode == 0 and "No space left on device): training into saved instead" in done.stdout, done.stderr
    assert "weights saved in " in done.stdout
    assert newest_checkpoint(tmp_path / "saved", pytest.fail).step == (13 if resumed else 2)
    assert [line["step"] for line in metrics(tmp_path / "saved")] == [*range(1, 14 if resumed else 3)]
    assert len(metrics(whole)) == 12


def test_a_run_among_the_checkpoints_of_another(whole: Path, tmp_path: Path) -> None:
    inside = whole / "checkpoints" / "mine"
    for option, more in (("--out", ()), ("--rescue", ("--out", str(tmp_path / "own")))):
        done = nntile(tmp_path, *SHORT, arguments=(option, str(inside), *more))
        told = f"error: {option}: {inside} lies in the checkpoints of the run {whole}; allowed: a folder outside"
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("error") == 1, done.stderr
    assert not inside.exists() and not (tmp_path / "own").exists()
