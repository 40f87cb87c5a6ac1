"""On CUDA devices: products in 8 bits give the same bits on any number of GPUs, and losses near those of bf16."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from nntile_py import _core

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

RUN = """
import hashlib, json, sys
import numpy as np, nntile_py as nt
gpus, tiles = int(sys.argv[1]), json.loads(sys.argv[2])
ids = np.random.default_rng(0).integers(0, 1000, (8, 256)).cumsum(1) // 7 % 1000
config = nt.models.GPT2Config(layers=4, embed=256, heads=8, vocab=1000, positions=256, dropout=0.1)
settings = [("bf16", {}), ("fp8", {}), ("fp8", {"recompute": "layer"}), ("fp8", {"fp8": {"gradients": "e5m2"}})]
found = []
with nt.Runtime(cpus=0, cuda=gpus):
    for precision, one in settings:
        trainer = nt.Trainer(nt.models.GPT2(config, seed=0), 8, 256, tiles, precision, **one)
        losses = [trainer.step(ids, ids) for _ in range(5)]
        weights = b"".join(w.tobytes() for w in trainer.state_dict().values())
        found.append([losses, hashlib.sha256(weights).hexdigest()])
        trainer.close()
print(json.dumps(found))
"""
GPUS = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()]


@pytest.mark.parametrize("tiles", ["{}", '{"batch": 4}', '{"batch": 2, "seq": 100, "embed": 100}'])
def test_bits_are_the_same(python: Any, tiles: str) -> None:
    found = []
    for gpus in GPUS:
        run = python(RUN, gpus, tiles)
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads(run.stdout))
    assert all(one == found[0] for one in found)
    (exact, _), once, again, (wide, _) = found[0]
    assert once == again
    for losses in (once[0], wide):
        np.testing.assert_allclose(losses, exact, rtol=5e-3)
        assert losses != exact
