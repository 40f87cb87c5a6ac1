"""On CUDA devices: `offload` and `recompute` leave all bits as they are, on any number of GPUs."""

from typing import Any

import pytest
import torch
from gpu_runs import GPUS, TILINGS, trained

from nntile_py import _core

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

EVERY = ["weights", "gradients", "optimizer", "activations"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"recompute": "layer"},
    {"offload": EVERY},
    {"offload": ["optimizer"], "recompute": "attention"},
    {"offload": EVERY, "recompute": "layer"},
    {"recompute": "auto"},
]


@pytest.mark.parametrize("tiles", TILINGS)
def test_bits_are_the_same(python: Any, tiles: str) -> None:
    settings = [{"precision": "bf16", **one} for one in SETTINGS]
    found = [one for gpus in GPUS for room in (0, 200) for one in trained(python, gpus, tiles, settings, room=room)]
    assert all(one == found[0] for one in found)
