"""`nntile train` end to end on a tiny model: what it leaves behind, how it ends, what it says."""

import errno
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import forks
import numpy as np
import pytest
import yaml
from rich.console import Console

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint import writer
from nntile_py.checkpoint.run_folder import Metrics
from nntile_py.config.builders import step_spec
from nntile_py.config.optimizer_section import optimizer_section
from nntile_py.config.run_config import load
from nntile_py.config.schedules import learning_rate
from nntile_py.config.sections import CheckpointSection
from nntile_py.data import corpus as data
from nntile_py.data import text_dataset
from nntile_py.data.collators import CausalCollator
from nntile_py.data.token_files import Tokens
from nntile_py.data.tokenization import train_tokenizer
from nntile_py.data.tokenizer import load_tokenizer
from nntile_py.errors import ConfigError, MissingWeight, NNTileError, NotFinite, exit_status
from nntile_py.inference import generate
from nntile_py.runs import run_folder
from nntile_py.system import folders
from nntile_py.system.folders import append, link_or_copy, remove_leftovers, replace_file, replaced, write_new
from nntile_py.training import collectives
from nntile_py.training.datasets import build_dataset
from nntile_py.training.display import Display
from nntile_py.training.loop import run_steps
from nntile_py.training.step_handle import StepResult

TREE: dict[str, Any] = {
    "model": {"layers": 1, "embed": 16, "heads": 2},
    "data": {"max_bytes": 200_000},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 12, "batch": 4, "seq": 12, "eval_every": 5, "eval_batches": 2, "log_every": 4},
    "optimizer": {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 2, "clip_grad_norm": 1.0},
    "tiles": {"batch": 2, "seq": 5, "embed": 7, "heads": 1, "ffn": 50, "vocab": 130},
    "runtime": {"cpus": 2},
    "sample": {"prompt": "import ", "tokens": 5},
}


def nntile(tmp_path: Path, *overrides: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `nntile train tiny.yaml` in `tmp_path`, in a process of its own as StarPU wants."""
    return forks.run(command(tmp_path, *overrides, arguments=arguments), **HOW, cwd=tmp_path, check=False)


HOW: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}


def command(tmp_path: Path, *overrides: str, arguments: tuple[str, ...] = ()) -> list[str]:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    sets = [part for item in overrides for part in ("--set", item)]
    return [sys.executable, "-m", "nntile_py.cli", "train", "tiny.yaml", *sets, *arguments]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of one finished run, and what it printed."""
    path = tmp_path_factory.mktemp("run")
    done = nntile(path, "train.grad_accumulation=2")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return path / "runs" / "tiny", done.stdout


def test_metrics_have_a_line_a_step(run: tuple[Path, str]) -> None:
    lines = metrics(run[0])
    assert [line["step"] for line in lines] == list(range(1, 13))
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "tflop_per_s", "step_time_s"}
    assert all(keys <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "held_out_loss" in line] == [5, 10, 12]
    assert lines[0]["held_out_loss_before"] == pytest.approx(np.log(300), abs=0.1)  # knows nothing yet
    assert lines[-1]["held_out_loss"] < lines[0]["held_out_loss_before"] - 0.3
    for line in lines:
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(4 * 12 * 2)
    rates = load(run[0] / "config.yaml").optimizer
    assert [line["lr"] for line in lines] == [learning_rate(rates, step, 12) for step in range(1, 13)]


def test_what_is_printed(run: tuple[Path, str]) -> None:
    text = run[1]
    assert [n for n in range(1, 13) if f"step {n}/12 " in text] == [1, 4, 5, 8, 10, 12]
    for fact in ("loss ", "grad norm ", "lr ", " tokens/s", " TFLOP/s", "  memory ", " MiB", "held-out loss "):
        assert fact in text
    assert "sample:\nimport " in text
    assert "\x1b" not in text  # no colours and no live display where nobody watches


def test_the_weights_are_those_of_a_transformers_model(run: tuple[Path, str]) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model, found = transformers.GPT2LMHeadModel.from_pretrained(run[0], output_loading_info=True)
    assert {key: list(value) for key, value in found.items() if value} == {}
    config = load(run[0] / "config.yaml")
    dataset = build_dataset(config, step_spec(config))
    assert isinstance(dataset, text_dataset.TextDataset)
    batches = [batch["input_ids"] for batch in dataset.held_out()]  # type: ignore[index]
    with torch.no_grad():
        losses = [model(torch.tensor(ids), labels=torch.tensor(ids)).loss.item() for ids in batches]
    assert np.mean(losses) == pytest.approx(metrics(run[0])[-1]["held_out_loss"], rel=1e-5)


def test_config_and_tokenizer_are_saved(run: tuple[Path, str]) -> None:
    config = load(run[0] / "config.yaml")
    assert config.train.grad_accumulation == 2
    assert config.out == "runs/tiny"
    tokenizer = load_tokenizer(run[0] / "tokenizer.json")
    assert tokenizer.get_vocab_size() == 300
    assert {path.name for path in run[0].iterdir()} == {
        "checkpoints",
        "config.json",
        "config.yaml",
        "metrics.jsonl",
        "model.safetensors",
        "sample.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_training_goes_on_from_a_saved_run(run: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE | {"model": {"from": str(run[0])}, "tokenizer": {}}))
    arguments = [sys.executable, "-m", "nntile_py.cli", "train", "tiny.yaml", "--set", "train.steps=1"]
    done = forks.run(arguments, **HOW, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    before = metrics(tmp_path / "runs" / "tiny")[0]["held_out_loss_before"]
    assert before == pytest.approx(metrics(run[0])[-1]["held_out_loss"], rel=1e-5)


def test_the_same_seed_gives_the_same_losses(tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert nntile(tmp_path, "train.steps=4", "sample.tokens=0", arguments=("--out", out)).returncode == 0
    first, second = ([line["loss"] for line in metrics(tmp_path / out)] for out in ("a", "b"))
    assert first == second


def test_a_run_that_is_there_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    note = tmp_path / "runs" / "tiny" / "note.txt"
    note.write_text("mine")
    refused = nntile(tmp_path, arguments=("--out", "runs/tiny"))
    assert refused.returncode == 2
    assert "--out: runs/tiny" in refused.stderr
    assert "--overwrite" in refused.stderr and "--resume" not in refused.stderr  # no run that could go on
    short = ("train.steps=1", "sample.tokens=0")
    done = nntile(tmp_path, *short)
    assert done.returncode == 0  # no folder was named: the next free number
    assert "note: optimizer.warmup_steps = 2 is more than train.steps = 1: " in done.stdout
    assert len(metrics(tmp_path / "runs" / "tiny-2")) == 1
    assert [path.name for path in (tmp_path / "runs" / "tiny").iterdir()] == ["note.txt"]
    assert nntile(tmp_path, *short, arguments=("--out", "runs/tiny", "--overwrite")).returncode == 0
    assert len(metrics(tmp_path / "runs" / "tiny")) == 1
    assert note.read_text() == "mine"
    assert "--resume to go on" in nntile(tmp_path, *short, arguments=("--out", "runs/tiny")).stderr


def test_the_earlier_run_stays_until_there_is_a_checkpoint(run: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(run[0], out)
    weights, note = (out / "model.safetensors").read_bytes(), out / "note.txt"
    note.write_text("mine")
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    arguments = ("--out", str(out), "--overwrite")
    process = subprocess.Popen(command(tmp_path, "train.steps=1000000", arguments=arguments), cwd=tmp_path)
    new = tmp_path / "out.new" / "metrics.jsonl"
    try:
        while not (new.exists() and new.read_text().count("\n") > 3):
            time.sleep(0.05)
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert (out / "model.safetensors").read_bytes() == weights and len(metrics(out)) == 12
    assert nntile(tmp_path, "train.steps=1", "sample.tokens=0", arguments=arguments).returncode == 0
    assert (out / "model.safetensors").read_bytes() != weights and len(metrics(out)) == 1
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000001"]
    assert note.read_text() == "mine" and not new.parent.exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_cleanly_with_weights_saved(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "train.steps=1000000"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    try:
        end = time.monotonic() + 120
        while not (lines.exists() and lines.read_text().count("\n") > 3) and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        if number == signal.SIGTERM:  # Slurm sends two
            time.sleep(0.01)
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert err == ""
    done = metrics(lines.parent)
    assert f"stopped by {number.name} after step {len(done)} of 1000000; all trained steps are saved" in out
    assert "; to continue: nntile train --resume runs/tiny" in out
    assert [line["step"] for line in done] == list(range(1, len(done) + 1))
    from safetensors.numpy import load_file

    weights = load_file(lines.parent / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (300, 16)
    assert list(lines.parent.glob("*.tmp*")) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("both", [False, True])
def test_a_closed_output_ends_no_run(both: bool, tmp_path: Path) -> None:
    """As of `| head -1`, of stdout alone or with stderr in it."""
    with (tmp_path / "err").open("w+") as file:
        process = subprocess.Popen(
            command(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if both else file
        )
        assert process.stdout and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 0
    told = "" if both else "the output is closed; training goes on, Ctrl-C stops it\n"
    assert (tmp_path / "err").read_text() == told
    assert len(metrics(tmp_path / "runs/tiny")) == 12 and (tmp_path / "runs/tiny/model.safetensors").is_file()


def test_a_full_disk_under_the_log_ends_no_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        how = HOW | {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        short = command(tmp_path, "train.steps=2", arguments=("--out", "run"))
        done = subprocess.run(short, **how, cwd=tmp_path, check=False)
    assert done.stderr == "the output fails (No space left on device); training goes on, Ctrl-C stops it\n"
    assert done.returncode == 0 and (tmp_path / "run/model.safetensors").is_file()


@pytest.mark.long
def test_a_full_disk_under_another_commands_output(tmp_path: Path) -> None:
    """One message, also if the text reaches the disk only at the end; a closed standard error changes nothing."""
    begin = [*command(tmp_path)[:3], "config", "tiny.yaml"]
    for redirected, status, told in (
        (">/dev/full", 1, "error: standard output: No space left on device\n"), (">&- 2>/dev/full", 0, ""),
        ("--set tiles.embed=0 2>/dev/full", 2, ""),
    ):  # fmt: skip
        line = f"exec {shlex.join(begin)} {redirected}"
        done = subprocess.run(["bash", "-c", line], **HOW, cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_a_loss_that_is_no_number_stops_without_weights(tmp_path: Path) -> None:
    done = nntile(tmp_path, "optimizer.lr=1e30", "optimizer.clip_grad_norm=null", "optimizer.warmup_steps=0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "optimizer.lr" in done.stderr
    assert metrics(tmp_path / "runs" / "tiny")[-1]["loss"] is None
    assert not (tmp_path / "runs" / "tiny" / "model.safetensors").exists()


def test_a_last_update_to_no_numbers_leaves_the_weights_of_before(tmp_path: Path) -> None:
    """No loss of a step sees it; the held-out loss does."""
    assert nntile(tmp_path).returncode == 0
    run = tmp_path / "runs" / "tiny"
    before = (run / "model.safetensors").read_bytes()
    sets = ["optimizer.lr=1e39", "optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.steps=1"]
    done = nntile(tmp_path, *sets, arguments=("--overwrite",))
    assert done.returncode == 1 and "optimizer.lr" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "runs/tiny stays" in done.stdout and metrics(tmp_path / "runs/tiny.new")[-1]["held_out_loss"] is None
    assert (run / "model.safetensors").read_bytes() == before and len(metrics(run)) == 12


def test_what_goes_along_from_the_folder_of_a_model(run: tuple[Path, str], tmp_path: Path) -> None:
    """Settings of generate() and of the tokenizer; and a tokenizer's ids count, which may have gaps."""
    source = tmp_path / "saved"
    shutil.copytree(run[0], source)
    (source / "generation_config.json").write_text('{"top_k": 7}')
    (source / "tokenizer_config.json").write_text('{"chat_template": "none"}')
    sets = (f"model={{from: {source}}}", "train.steps=1", "train.eval_every=100", "tokenizer={}")
    assert (done := nntile(tmp_path, *sets)).returncode == 0, done.stderr
    assert (tmp_path / "runs/tiny/generation_config.json").read_text() == '{"top_k": 7}'
    assert (tmp_path / "runs/tiny/tokenizer_config.json").read_text() == '{"chat_template": "none"}'
    tree = json.loads((source / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 5000
    (source / "tokenizer.json").write_text(json.dumps(tree))
    done = nntile(tmp_path, *sets)
    assert done.returncode == 2 and "model.vocab: got 300; allowed: at least the tokenizer's size, 5001" in done.stderr


def test_too_many_workers_leave_no_folder_behind(tmp_path: Path) -> None:
    done = nntile(tmp_path, "runtime.cpus=100000")
    assert done.returncode == 2
    assert "runtime.cpus" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_wrong_product_is_refused_at_the_start(tmp_path: Path) -> None:
    env = os.environ | {"NNTILE_PRODUCT": "nonsense"}
    done = forks.run(command(tmp_path), **HOW, cwd=tmp_path, check=False, env=env)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: NNTILE_PRODUCT: got nonsense; allowed: own or blas"
    assert not (tmp_path / "runs").exists()


def test_the_status_of_an_error(tmp_path: Path) -> None:
    """2 where other input mends it, such as a path; 1 where the disk, the machine or the run is what failed."""
    (tmp_path / "file").touch()
    done = nntile(tmp_path, arguments=("--out", "file/run"))
    assert done.returncode == 2 and f"error: --out: {tmp_path}/file is a file; allowed:" in done.stderr, done.stderr
    for status, errors in {
        1: (OSError(errno.ENOSPC, "", "x"), OSError(errno.EIO, "", "x"), OSError(errno.ENOENT, ""), MemoryError(),
            NNTileError("x"), NotFinite("x")),
        2: (FileNotFoundError(errno.ENOENT, "", "x"), PermissionError(errno.EACCES, "", "x"), ConfigError("x"),
            OSError(errno.EROFS, "", "x"), checkpoint.DamagedCheckpoint("x"), MissingWeight("x")),
    }.items():  # fmt: skip
        assert [exit_status(error) for error in errors] == [status] * 6


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    how = HOW | {"env": os.environ | {"NNTILE_DEBUG": "1"}}
    done = forks.run(command(tmp_path, "tiles.embed=0"), **how, cwd=tmp_path, check=False)
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_the_folder_of_a_run_is_named_as_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder("my.v2-profile", None, None, False) == Path("runs/my.v2-profile")
    (tmp_path / "runs" / "my.v2").mkdir(parents=True)
    (tmp_path / "runs" / "my.v2" / "x").touch()
    assert run_folder("my.v2", None, None, False) == Path("runs/my.v2-2")
    with pytest.raises(ConfigError, match="--overwrite"):
        run_folder("my", None, tmp_path / "runs" / "my.v2", False)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"--out: runs/my\.v2/x is a file; allowed: a new or empty folder$"):
            run_folder("my", None, Path("runs/my.v2/x"), overwrite)


def test_warm_up_and_cosine() -> None:
    how = optimizer_section("adamw")(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(how, step, 24) for step in range(1, 25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[13] == pytest.approx(0.55)  # half way down
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    constant = how.model_copy(update={"schedule": "constant"})
    assert [learning_rate(constant, step, 24) for step in (2, 5, 24)] == [0.5, 1.0, 1.0]
    assert learning_rate(how, 2, 2) == 0.5  # a run that ends within the warm-up


class Trainer:
    """Stands in for nt.Trainer: counts what is in flight, and predicts token + 1."""

    def __init__(self, losses: list[float], vocab: int = 300) -> None:
        self.losses, self.vocab = losses, vocab
        self.steps = self.submitted = self.finished = self.most = 0

    def submit(self, inputs: dict[str, np.ndarray], lr: float) -> Any:
        assert inputs.keys() == {"input_ids", "labels"} and (inputs["input_ids"] == inputs["labels"]).all()
        self.submitted += 1
        self.most = max(self.most, self.submitted - self.finished)
        return SimpleNamespace(step=self.submitted, result=self.finish, tokens=48, flop=1e9)

    def finish(self) -> Any:
        self.finished += 1
        return StepResult(self.finished, self.losses[self.finished - 1], 1.0)

    def evaluate(self, inputs: dict[str, np.ndarray], return_logits: bool = False) -> Any:
        ids = inputs["input_ids"]
        logits = np.zeros((*ids.shape, self.vocab), np.float32)
        np.put_along_axis(logits, (ids[..., None] + 1) % self.vocab, 50.0, axis=-1)
        assert return_logits == ("labels" not in inputs)
        return (float("nan"), logits) if return_logits else 3.0

    def gather(self) -> None: ...

    def memory_bytes(self) -> int:
        return 0


def fake_run(tmp_path: Path, trainer: Trainer, stop: list[str], steps: int) -> Any:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    config = load(tmp_path / "tiny.yaml", [f"train.steps={steps}"])
    tokens = np.arange(100, dtype=np.uint16)
    part = [Tokens(tokens, np.array([100]))]
    corpus = data.Corpus(None, part, part)  # type: ignore[arg-type]
    how = config.train
    dataset = text_dataset.TextDataset(
        corpus, CausalCollator(how.seq), seq=how.seq, batch=how.batch, passes=how.grad_accumulation,
        eval_batches=how.eval_batches,
    )  # fmt: skip
    fake: Any = trainer
    never = MagicMock(**{"due.return_value": False, "needs_report": False})
    display, lines = Display(Console(file=io.StringIO()), config, fake), Metrics(tmp_path, 0, pytest.fail)
    try:
        return run_steps(config, dataset, fake, lines, display, never, stop)
    finally:
        lines.close()


@contextmanager
def shown(tmp_path: Path, *steps: int) -> Iterator[io.StringIO]:
    """Show lines of steps on a terminal of 80 columns. The display ends after the body of `with`."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    screen = io.StringIO()
    trainer: Any = SimpleNamespace(memory_bytes=lambda: 2**20)
    with Display(Console(file=screen, force_terminal=True, width=80), load(tmp_path / "tiny.yaml"), trainer) as display:
        for step in steps:
            line = {"step": step, "loss": 5.0, "grad_norm": 1.0, "lr": 0.01}
            display.show(line | {"tokens_per_s": 96.0, "tflop_per_s": 0.002, "step_time_s": 0.5})
        yield screen


def test_a_terminal_of_80_columns_shows_the_last_step_once_with_its_speed(tmp_path: Path) -> None:
    """The live display is gone at the end; the speed, which only it had, is then printed."""
    with shown(tmp_path, 1, 12) as screen:
        screen.truncate(0)
        screen.seek(0)
    erased, _, left = screen.getvalue().rpartition("\x1b[2K")
    assert left == "96 tokens/s  0.002 TFLOP/s  memory 1.0 MiB\n"
    assert erased.count("\x1b[2K") >= 2  # the lines of the live display


def test_one_step_is_in_the_singular(tmp_path: Path) -> None:
    with shown(tmp_path, 1, 4) as screen:
        pass
    assert "mean loss of 1 step 5.0" in screen.getvalue() and "mean loss of 2 steps 5.0" in screen.getvalue()


def test_the_live_display_is_at_the_step_of_the_printed_line(tmp_path: Path) -> None:
    """At the last step no time is left."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    screen = io.StringIO()
    trainer: Any = SimpleNamespace(memory_bytes=lambda: 2**20)
    config = load(tmp_path / "tiny.yaml", ["train.steps=12"])
    with Display(Console(file=screen, force_terminal=True, width=80), config, trainer) as display:
        for step in (1, 12):
            screen.seek(screen.truncate(0))
            line = {"step": step, "loss": 5.0 + step, "grad_norm": 1.0, "lr": 0.01}
            display.show(line | {"tokens_per_s": 96.0, "tflop_per_s": 0.002, "step_time_s": 0.5})
            _, printed, live = screen.getvalue().partition(f"\x1b[2Kstep {step}/12  loss {5 + step:.4f}")
            assert printed and f"step {step}/12 " in live and f"\nloss {5 + step:.4f}" in live, live
            assert ("0:00:06 left" in live) == (step == 1) and "0:00:00 left" not in screen.getvalue()
    plain = io.StringIO()
    with Display(Console(file=plain, width=80), config, trainer) as display:
        display.show(line | {"tokens_per_s": 96.0, "tflop_per_s": 0.002, "step_time_s": 0.5})
    assert plain.getvalue().endswith("memory 1.0 MiB\n")


def test_two_steps_are_in_flight_and_no_more(tmp_path: Path) -> None:
    trainer = Trainer([1.0] * 9)
    assert fake_run(tmp_path, trainer, [], 9) == ((0, 3.0), {"held_out_loss": 3.0})
    assert (trainer.submitted, trainer.finished, trainer.most) == (9, 9, 2)


def test_a_checkpoint_interrupted_as_its_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there may be no thread to wait for: the interrupt is what ends the run, no other error."""

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "trainer_facts", lambda trainer: {})
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    trainer = MagicMock(steps=1)
    trainer.live.return_value.ranks = None
    trainer.live.return_value.state.return_value.bytes = 1
    made = writer.CheckpointWriter(CheckpointSection(every=1), trainer, MagicMock(), {}, {}, pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        made.begin(1)
    made.abandon()


def test_a_signal_while_other_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told at the next step: the others do not know of it, and would make one more."""
    stop: list[str] = []

    def gathered(mine: np.ndarray) -> np.ndarray:
        stop[:] = ["SIGTERM"]
        return np.stack([mine, np.zeros_like(mine)])

    monkeypatch.setattr(collectives, "ranks_of_run", lambda: SimpleNamespace(gathered=gathered))
    assert collectives.agree(stop, True) == (False, True)
    assert collectives.agree(stop) == (True, False)


def test_a_nan_stops_at_its_step(tmp_path: Path) -> None:
    trainer = Trainer([1.0, 2.0, float("nan"), 1.0, 1.0])
    with pytest.raises(NNTileError, match="step 3: the loss is nan"):
        fake_run(tmp_path, trainer, [], 5)
    assert [line["loss"] for line in metrics(tmp_path)] == [1.0, 2.0, None]


def test_a_sample_follows_the_model(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["import this\n" * 10], 300)
    size = tokenizer.get_vocab_size()
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    for temperature in (0.0, 1.0):  # 50 above the others: drawn with near certainty
        config = load(tmp_path / "tiny.yaml", [f"sample={{prompt: '!', tokens: 20, temperature: {temperature}}}"])
        first = tokenizer.encode("!").ids[0]
        expected = tokenizer.decode([(first + n) % size for n in range(21)])  # longer than seq: the window slides
        assert generate.generate(Trainer([], size), tokenizer, config, []) == expected
        assert generate.generate(Trainer([], size), tokenizer, config, ["SIGINT"]) == "!"


def test_what_killed_processes_have_left_goes(tmp_path: Path) -> None:
    """Of this file alone, and nothing that a process writes to."""
    of = "0123456789abcdef.tmp"
    stay = {"a[1]", ".a[1].tmp1", f".a[1].x{of}", f"a[1].{of}", f".a1.{of}", f".b.a[1].{of}"}
    for name in {*stay, f".a[1].{of}"}:
        (tmp_path / name).touch()
    (tmp_path / f".a[1].f{of[1:]}").mkdir()
    (tmp_path / f".a[1].e{of[1:]}").symlink_to("a[1]")
    with replaced(tmp_path / "a[1]"):
        remove_leftovers(tmp_path / "a[1]")
        left = {path.name for path in tmp_path.iterdir()} - stay - {f".a[1].f{of[1:]}", f".a[1].e{of[1:]}"}
        assert len(left) == 1 and f".a[1].{of}" not in left


def test_a_link_that_others_planted_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the name of the temporary file is guessed; the file itself is replaced, if it is a link."""
    monkeypatch.setattr(folders.secrets, "token_hex", lambda count: "0" * 2 * count)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".x.{'0' * 16}.tmp").symlink_to("mine")
    for write in (replace_file, lambda path, text: write_new(path.with_name(f".x.{'0' * 16}.tmp"), text)):
        with pytest.raises(FileExistsError):
            write(tmp_path / "x", "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        append(tmp_path / f".x.{'0' * 16}.tmp")
    (tmp_path / "link").symlink_to("mine")
    replace_file(tmp_path / "link", "new")
    link_or_copy(tmp_path / "link", tmp_path / "other")
    assert mine.read_text() == "mine" and (tmp_path / "other").read_text() == "new"
    link_or_copy(tmp_path / "link", tmp_path / "other")  # which is the same file already
    assert len([*tmp_path.iterdir()]) == 4


def test_a_new_file_on_a_full_disk_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folders.create

    def full(path: Path) -> Any:
        real(path).close()
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(folders, "create", full)
    with pytest.raises(OSError, match=r"No space left on device: .*x\.yaml") as error:
        write_new(tmp_path / "x.yaml", "text")
    assert exit_status(error.value) == 1 and not [*tmp_path.iterdir()]
    (tmp_path / "kept").mkdir()
    for name in ("kept/x.yaml", "kept/new/x.yaml", "m/p/x.yaml"):  # without the folders made for the file
        with pytest.raises(OSError, match="No space left on device"):
            replace_file(tmp_path / name, "text")
        assert [*tmp_path.rglob("*")] == [tmp_path / "kept"]


def test_a_disk_without_hard_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "a").write_text("1")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "1" and not (tmp_path / "b").samefile(tmp_path / "a")
    assert len([*tmp_path.iterdir()]) == 2


def test_a_file_is_whole_or_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="half way"), replaced(path) as file:
        file.write(b"ne")
        raise ValueError("half way")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
