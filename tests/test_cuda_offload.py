"""On CUDA devices: `offload` and `recompute` leave all bits as they are, on any number of GPUs."""

import json
from typing import Any

import pytest
import torch

from nntile_py import _core

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

# GPUs, MiB of each (0: all), tiles
RUN = """
import hashlib, json, sys
import numpy as np, nntile_py as nt
gpus, room, tiles = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
ids = np.random.default_rng(0).integers(0, 1000, (8, 256))
config = nt.models.GPT2Config(layers=4, embed=256, heads=8, vocab=1000, positions=256, dropout=0.1)
every = ["weights", "gradients", "optimizer", "activations"]
settings = [{}, {"recompute": "layer"}, {"offload": every}, {"offload": ["optimizer"], "recompute": "attention"},
            {"offload": every, "recompute": "layer"}, {"recompute": "auto"}]
digests = []
with nt.Runtime(cpus=0, cuda=gpus, cuda_memory=room << 20 or None):
    for one in settings:
        trainer = nt.Trainer(nt.models.GPT2(config, seed=0), 8, 256, tiles, "bf16", **one)
        losses = [trainer.step(ids, ids).hex() for _ in range(3)]
        weights = b"".join(w.tobytes() for w in trainer.state_dict().values())
        digests.append([losses, hashlib.sha256(weights).hexdigest()])
        trainer.close()
print(json.dumps(digests))
"""
GPUS = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()]


@pytest.mark.parametrize("tiles", ["{}", '{"batch": 4}', '{"batch": 2, "seq": 100, "embed": 100}'])
def test_bits_are_the_same(python: Any, tiles: str) -> None:
    found = []
    for gpus in GPUS:
        for room in (0, 200):
            run = python(RUN, gpus, room, tiles)
            assert run.returncode == 0, run.stderr[-2000:]
            found += json.loads(run.stdout)
    assert all(one == found[0] for one in found)
