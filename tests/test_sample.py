"""The sample at the end of training: by a cache where the model allows it, else by evaluations; the same text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import yaml

import nntile_py as nt
from nntile_py.analysis.plan import plan
from nntile_py.config.run_config import RunConfig, load
from nntile_py.data.tokenization import train_tokenizer
from nntile_py.errors import ConfigError, NotFinite
from nntile_py.inference.generate import generate
from nntile_py.inference.generator import Generator
from nntile_py.training.run_start import build_trainer

SIZES = {"layers": 2, "embed": 32, "heads": 4, "ffn": 96}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["import this\n" * 10], 300)


def config_of(folder: Path, kind: str, **tree: Any) -> RunConfig:
    whole = {
        "model": {"type": kind, **SIZES}, "train": {"steps": 4, "batch": 4, "seq": 48},
        "tokenizer": {"vocab_size": 300}, "sample": {"prompt": "import ", "tokens": 40, "temperature": 1.0}, **tree,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(whole))
    return load(folder / "run.yaml", [])


def trained(config: RunConfig) -> nt.Trainer:
    """A trainer after a few steps with a large rate, so that the weights are not the first ones."""
    trainer, rng = build_trainer(config), np.random.default_rng(0)
    for _ in range(3):
        ids = rng.integers(0, 260, (4, 48))
        trainer.step({"input_ids": ids, "labels": ids})
    return trainer


def present(trainer: nt.Trainer) -> Callable[[], Any]:
    return lambda: (trainer.state_dict(), trainer.model)[1]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("tiles", [{}, {"batch": 2, "seq": 24, "ffn": 50, "heads": 2, "vocab": 100}])
def test_both_ways_give_the_same_text(
    tmp_path: Path, kind: str, tiles: dict[str, int], tokenizer: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, kind, tiles=tiles)
    trainer = trained(config)
    slow = generate(trainer, tokenizer, config, [])
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", pytest.fail)
        texts = {generate(trainer, tokenizer, config, [], present(trainer)) for _ in range(2)}
    assert texts == {slow} and slow.startswith("import ") and len(slow) > 20
    other = generate(trainer, tokenizer, config.model_copy(update={"seed": 1}), [], present(trainer))
    assert other != slow
    assert generate(trainer, tokenizer, config, ["SIGINT"], present(trainer)) == "import "
    trainer.close()


def test_texts_longer_than_a_sequence_and_other_models_are_evaluated(
    tmp_path: Path, tokenizer: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = config_of(tmp_path, "gpt2", sample={"prompt": "import ", "tokens": 60})
    trainer = trained(long)
    assert generate(trainer, tokenizer, long, [], pytest.fail) == generate(trainer, tokenizer, long, [])
    short = config_of(tmp_path, "gpt2")

    def refuse(*_: Any) -> Any:
        raise ConfigError("generation: the operator combines tokens")

    monkeypatch.setattr(Generator, "engine", refuse)
    assert generate(trainer, tokenizer, short, [], present(trainer)) == generate(trainer, tokenizer, short, [])
    trainer.close()


NO_CHECK = """
from nntile_py import _core
from nntile_py.cli import main
from nntile_py.execution import memory_checks
memory_checks.has_room_for_copy = lambda *_: True
_core.be_patient(1, 5, 10)
main()
"""


@pytest.mark.parametrize("checked", [True, False])
def test_a_sample_for_which_memory_is_scarce(tmp_path: Path, checked: bool) -> None:
    """With no room for a second copy of the weights, the trainer's evaluations give the sample.

    A sample that gets no memory after all ends the runtime, but not the run: the training is complete.
    """
    (tmp_path / "a.txt").write_text("import this, or import that\n" * 500)
    tree = {
        "model": {"type": "gpt2", "layers": 4, "embed": 128, "heads": 4}, "tiles": {},
        "train": {"steps": 2, "batch": 1, "seq": 16}, "sample": {"prompt": "import ", "tokens": 6},
    }  # fmt: skip
    config = config_of(tmp_path, "gpt2", data={"source": str(tmp_path / "a.txt")}, runtime={"cpus": 1}, **tree)
    room = plan(config).peak_bytes + (1 << 20)
    code = ["-m", "nntile_py.cli"] if checked else ["-c", NO_CHECK]
    command = [sys.executable, *code, "train", tmp_path / "run.yaml", "--set", f"runtime.memory={room}"]
    done = forks.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "run" / "model.safetensors").is_file()
    sampled = "sample:" in done.stdout and "no sample" not in done.stdout
    assert sampled if checked else "no sample, but the training is complete and the weights" in done.stdout, done.stdout
    assert "error" not in done.stderr


class Broken:
    """An Evaluator whose logits are nan after some tokens."""

    def evaluate(self, inputs: Any, **_: Any) -> Any:
        logits = np.zeros((*inputs["input_ids"].shape, 300), np.float32)
        logits[..., 40] = 50
        logits[:, 9:] = np.nan
        return 0.0, logits


def test_logits_that_are_not_finite_give_no_sample(tmp_path: Path, tokenizer: Any) -> None:
    config = config_of(tmp_path, "gpt2", sample={"prompt": "import ", "tokens": 40, "top_k": 5})
    with pytest.raises(NotFinite, match="sample: the logits after 10 tokens are nan or infinite"):
        generate(Broken(), tokenizer, config, [])
