"""Tasks that work and tasks that fail, and how a process that might hang is run: for the tests of what goes wrong."""

from typing import Any

import numpy as np
import pytest

import nntile_py as nt

CONFIG = nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8)
IDS = np.arange(16).reshape(2, 8)


@nt.task(x="R", y="RW")
def axpy(x: Any, y: Any, *, alpha: float) -> None:
    y += alpha * x


@nt.task(x="RW")
def fail(x: Any) -> None:
    raise ValueError("of no use")


@nt.task(x="W")
def fill(x: Any, value: float = 7.0) -> None:
    x[...] = value


def works() -> None:
    """The runtime does what it is told: a task in Python and a step of training."""
    y = nt.array(np.ones(3))
    axpy(nt.array([1.0, 2.0, 3.0]), y, alpha=2.0)
    assert y.numpy().tolist() == [3, 5, 7]
    loss = nt.Trainer(nt.models.GPT2(CONFIG), 2, 8, {"vocab": 7}).step(IDS, IDS)
    assert loss == pytest.approx(np.log(20), rel=0.05)


PRELUDE = """
import sys
import numpy as np
import nntile_py as nt
from nntile_py import _core

def refused(call, text):
    try:
        call()
    except (nt.TaskError, MemoryError) as error:
        assert text in str(error), error
        print("refused")
    else:
        raise SystemExit("not refused")

@nt.task(x="RW")
def inc(x): x += 1

model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
ids = np.zeros((2, 8), int)
"""


def ends_well(python: Any, code: str, refused: int = 0, timeout: float = 120) -> None:
    done = python(PRELUDE + code, timeout=timeout)
    assert done.returncode == 0 and "Traceback" not in done.stderr, (done.returncode, done.stderr)
    assert done.stdout.split() == ["refused"] * refused + ["end"]
