"""LayerNorm of many rows on CUDA: each of the ways to cut it, in Triton's interpreter against float64."""

import importlib
from typing import Any

import numpy as np
import pytest
import test_triton  # imports triton's kernels for the interpreter
from operators import ROWS

from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch
from nntile_py.testing import Case, error
from nntile_py.tiles import Tiling

layer_norm_triton: Any = importlib.import_module("nntile_py.tasks.layer_norm_triton")
SIZES = {"batch": 1, "seq": 45, "embed": 768}  # the last program of each way has fewer rows than the others


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("row", ["LayerNorm", "LayerNorm residual"])
def test_against_float64(monkeypatch: pytest.MonkeyPatch, row: str, way: int) -> None:
    monkeypatch.setattr(layer_norm_triton, "MANY", 45)
    case = Case(SIZES, "bf16")
    ROWS[row](case)
    (task,) = lower(case.graph, Tiling({})).tasks.tasks
    assert len(launch.load()[task.kernel]([task]).ways) == 3
    values = case.draw(np.random.default_rng(0))
    ran = test_triton.interpret(case, {}, "chain", values, way)
    for tensor, want in case.expected(values).items():
        assert error(ran.read(tensor), want) < 1e-2, tensor
