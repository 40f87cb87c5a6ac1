"""On CUDA devices: 8-bit products give the same bits on any number of GPUs, and losses near those of bf16."""

from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import GPUS, TILINGS, trained

from nntile_py import _core

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

SETTINGS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp8"},
    {"precision": "fp8", "recompute": "layer"},
    {"precision": "fp8", "fp8": {"gradients": "e5m2"}},
]


@pytest.mark.parametrize("tiles", TILINGS)
def test_bits_are_the_same(python: Any, tiles: str) -> None:
    found = [trained(python, gpus, tiles, SETTINGS, steps=5) for gpus in GPUS]
    assert all(one == found[0] for one in found)
    (exact, _), once, again, (wide, _) = found[0]
    assert once == again
    for losses in (once[0], wide):
        np.testing.assert_allclose(losses, exact, rtol=5e-3)
        assert losses != exact
