"""What the README says to type works."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nntile_py as nt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks() -> list[str]:
    """The indented blocks of the README, without their indentation."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", README, re.M)
    return [re.sub(r"^    ", "", block, flags=re.M) for block in found]


def block(word: str) -> str:
    (only,) = [b for b in blocks() if word in b]
    return only


def test_python_task(capsys: pytest.CaptureFixture[str]) -> None:
    exec("import numpy as np, nntile_py as nt\n" + block("def axpy"), {})
    assert capsys.readouterr().out.strip() == "[2. 2. 2. 2.]"


def test_own_operator() -> None:
    names: dict[str, Any] = {"nt": nt, "__name__": "mine"}
    exec(block("class Scale("), names)
    names["Scale"].reference = lambda self, x: (0.4 * x,)
    with pytest.raises(AssertionError, match=r"off by 2\.5e-01, .*chain"):
        exec(block("class Scale(").splitlines()[-1], names)


def test_training_snippet() -> None:
    transformers = pytest.importorskip("transformers")
    hf = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=611, n_positions=64, n_embd=48, n_layer=1, n_head=4)
    )
    ids = np.random.default_rng(0).integers(0, 611, (4, 37))
    names = {"hf": hf, "input_ids": ids, "labels": ids}
    exec(block("from_hf(hf)"), names)
    assert set(names["grads"]) == set(names["weights"]) == {name for name, _ in hf.named_parameters()}
    assert names["logits"].shape == (4, 37, 611)


@pytest.mark.parametrize("command", re.findall(r"^    nntile (plan [^\s#]+|doctor)", README, re.M))
def test_commands(command: str) -> None:
    made = subprocess.run(
        [Path(sys.executable).with_name("nntile"), *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout


def test_make_targets() -> None:
    targets = re.findall(r"^    make (\w+)", README, re.M)
    assert targets == ["train", "test", "bundle"]
    for target in targets:
        made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, env=os.environ)
        assert made.returncode == 0, made.stderr


def test_version() -> None:
    made = subprocess.run([Path(sys.executable).with_name("nntile"), "--version"], capture_output=True, text=True)
    assert made.stdout.strip() == nt.__version__
