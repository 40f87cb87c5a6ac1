"""`train.grad_accumulation: auto`: the number of micro-batches whose step is estimated to be the fastest that fits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import yaml

from nntile_py.analysis.plan import plan
from nntile_py.config import builders
from nntile_py.config.run_config import load
from nntile_py.errors import ConfigError
from nntile_py.graph.recompute_choice import EVICTING, StepEstimate, fastest
from nntile_py.system.folders import installed

TREE: dict[str, Any] = {
    "model": {"type": "gpt2", "layers": 3, "embed": 64, "heads": 4},
    "data": {"source": "python-stdlib"},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 3, "batch": 16, "seq": 64, "grad_accumulation": "auto", "log_every": 1},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "tiles": {},
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TREE | changes))
    return path


def command(path: Path, name: str, *sets: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    what = [sys.executable, "-m", "nntile_py.cli", name, str(path), *arguments]
    what += [part for one in sets for part in ("--set", one)]
    return forks.run(what, capture_output=True, text=True, check=False)


def memory_for(path: Path, count: int, recompute: str = "none") -> int:
    """Bytes of runtime.memory in which a step of `count` micro-batches fits, and a step of fewer does not."""
    peaks = []
    for number in (count, count // 2):
        sets = [f"train.batch={16 // number}", f"train.grad_accumulation={number}", f"recompute={recompute}"]
        peaks.append(plan(load(path, sets)).peak_bytes)
    assert peaks[0] < 0.95 * peaks[1]
    return int(sum(peaks) / 2 / 0.9)


def test_as_few_micro_batches_as_fit(tmp_path: Path) -> None:
    path = written(tmp_path)
    train = builders.with_micro_batches(load(path, [])).train
    assert (train.batch, train.grad_accumulation) == (16, 1)
    for count in (2, 4):
        tight = load(path, [f"runtime.memory={memory_for(path, count)}"])
        train = builders.with_micro_batches(tight).train
        assert (train.batch, train.grad_accumulation) == (16 // count, count)
        made = plan(tight)
        assert made.micro_batches == count and [*made.candidates] == [2**k for k in range(count.bit_length())]
        assert made.tokens == 16 * 64 and made.peak_bytes <= tight.runtime.memory  # type: ignore[operator]


def test_together_with_recompute(tmp_path: Path) -> None:
    """One micro-batch fits only with `recompute: layer`; several micro-batches without recompute are faster."""
    path = written(tmp_path)
    peak = plan(load(path, ["train.grad_accumulation=1", "recompute=layer"])).peak_bytes
    config = load(path, [f"runtime.memory={int(peak / 0.9) + 4096}", "recompute=auto"])
    found = builders.micro_batches(config)
    assert [one.recompute for one in found[1] if one.fits] == ["layer"]
    chosen = builders.with_micro_batches(config)
    count = chosen.train.grad_accumulation
    assert count > 1 and builders.step_spec(chosen).chosen_recompute == "none"
    best = next(one for one in found[count] if one.recompute == "none")
    assert best.seconds == min(one.seconds for estimates in found.values() for one in estimates if one.fits)


def test_evictions_must_gain() -> None:
    still = StepEstimate("none", 1, 0, 1.0, True)
    for seconds, chosen in ((0.99 / EVICTING, True), (1.01 / EVICTING, False)):
        moving = StepEstimate("layer", 1, 1, seconds, True)
        assert fastest([still, moving]) is (moving if chosen else still)
    assert fastest([StepEstimate("none", 2, 0, 1.0, False), StepEstimate("layer", 1, 1, math.inf, True)]).fits


def test_nothing_fits(tmp_path: Path) -> None:
    """The step with the smallest peak is chosen, and the run ends with an error about memory."""
    config = load(written(tmp_path), ["runtime.memory=1MiB"])
    train = builders.with_micro_batches(config).train
    assert (train.batch, train.grad_accumulation) == (1, 16)
    done = command(written(tmp_path), "train", "runtime.memory=1MiB", f"out={tmp_path}/run")
    assert done.returncode == 1 and "out of memory" in done.stderr and "Traceback" not in done.stderr
    planned = command(written(tmp_path), "plan", "runtime.memory=1MiB")
    assert planned.returncode == 1 and planned.stderr == done.stderr and "micro-batches       16" in planned.stdout
    assert not any(line.endswith("yes") for line in planned.stdout.splitlines())
    # Within what a run takes, but by estimate too little for several workers.
    tight = plan(load(written(tmp_path), ["train.batch=1", "train.grad_accumulation=16"])).peak_bytes + 4096
    planned = command(written(tmp_path), "plan", f"runtime.memory={tight}")
    assert planned.returncode == 1 and "no choice of recompute and micro-batches fits: the small" in planned.stderr


def test_a_run(tmp_path: Path) -> None:
    """A run with `auto` has the losses of a run with the chosen number, and a resumed run keeps this number."""
    path, losses = written(tmp_path), []
    memory = memory_for(path, 4)
    for name, sets in (("auto", [f"runtime.memory={memory}"]), ("own", ["train.batch=4", "train.grad_accumulation=4"])):
        done = command(path, "train", *sets, f"out={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
        assert ("micro-batches: 4, each of 4 sequences, chosen by estimates" in done.stdout) is (name == "auto")
        losses.append(steps(tmp_path / name))
    assert losses[0] == losses[1] and len(losses[0]) == 3
    saved = load(tmp_path / "auto" / "config.yaml").train
    assert (saved.batch, saved.grad_accumulation) == (4, 4)
    done = command(path, "train", "train.steps=5", arguments=("--resume", f"{tmp_path}/auto"))  # with all memory
    assert done.returncode == 0 and "micro-batches:" not in done.stdout, done.stderr
    assert load(tmp_path / "auto" / "config.yaml").train.grad_accumulation == 4 and len(steps(tmp_path / "auto")) == 5
    again = "train.steps=6", "train.grad_accumulation=auto"
    done = command(path, "train", *again, arguments=("--resume", f"{tmp_path}/auto"))
    saved = load(tmp_path / "auto" / "config.yaml").train
    assert done.returncode == 0 and (saved.batch, saved.grad_accumulation) == (4, 4), done.stderr
    folder = str(tmp_path / "auto")  # as `nntile train --resume FOLDER`, with the folder's config.yaml
    done = command(Path(folder), "train", "train.steps=7", "train.grad_accumulation=auto", arguments=("--resume",))
    saved = load(tmp_path / "auto" / "config.yaml").train
    assert done.returncode == 0 and (saved.batch, saved.grad_accumulation) == (4, 4), done.stderr


def steps(folder: Path) -> list[Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_commands_and_messages(tmp_path: Path) -> None:
    path = written(tmp_path)
    shown = command(path, "plan", f"runtime.memory={memory_for(path, 2)}")
    assert "micro-batches       2, with recompute none (fastest estimate that fits)" in shown.stdout, shown.stderr
    for value in ("0", "many", "1.5"):
        refused = command(path, "plan", f"train.grad_accumulation={value}")
        assert refused.returncode == 2 and "train.grad_accumulation: " in refused.stderr and "auto" in refused.stderr
    with pytest.raises(ConfigError, match=r"train.grad_accumulation: got 'auto'; allowed here: a number"):
        builders.step_spec(load(path, []))
    assert "grad_accumulation: auto" in command(path, "config").stdout


def test_a_task_that_does_not_fit() -> None:
    """A task's tiles may take half of a GPU's memory: a run would refuse the logits of 32 sequences."""
    sets = ["tokenizer.vocab_size=50304", "runtime.cuda=1", "runtime.cuda_memory=5GiB", "recompute=auto"]
    config = load(installed("experiments") / "gpt2_124m.yaml", [*sets, "train.grad_accumulation=auto"])
    found = builders.micro_batches(config)
    assert not any(one.fits for one in found[1]) and all(one.fits for one in found[2])
    assert builders.with_micro_batches(config).train.grad_accumulation == 8


def test_a_batch_that_is_no_power_of_two(tmp_path: Path) -> None:
    config = load(written(tmp_path), ["train.batch=6", "runtime.memory=1MiB"])
    assert [*builders.micro_batches(config)] == [1, 2, 3, 6]
    train = builders.with_micro_batches(config).train
    assert (train.batch, train.grad_accumulation) == (1, 6)
