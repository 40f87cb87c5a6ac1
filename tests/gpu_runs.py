"""Short training runs of a small GPT-2 on GPUs, whose losses and weights tests compare to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

GPUS = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()]
TILINGS = ["{}", '{"batch": 4}', '{"batch": 2, "seq": 100, "embed": 100}']

# GPUs, MiB of each (0: all), tiles, keyword arguments of each Trainer, steps
SCRIPT = """
import hashlib, json, sys
import numpy as np, nntile_py as nt
gpus, room, steps = map(int, sys.argv[1:4])
tiles, settings = map(json.loads, sys.argv[4:])
ids = np.random.default_rng(0).integers(0, 1000, (8, 256))
config = nt.models.GPT2Config(layers=4, embed=256, heads=8, vocab=1000, positions=256, dropout=0.1)
found = []
with nt.Runtime(cpus=0, cuda=gpus, cuda_memory=room << 20 or None):
    for one in settings:
        trainer = nt.Trainer(nt.models.GPT2(config, seed=0), 8, 256, tiles, **one)
        losses = [trainer.step(ids, ids, lr=3e-4) for _ in range(steps)]
        weights = b"".join(w.tobytes() for w in trainer.state_dict().values())
        found.append([losses, hashlib.sha256(weights).hexdigest()])
        trainer.close()
print(json.dumps(found))
"""


def trained(
    python: Any, gpus: int, tiles: str, settings: Sequence[Mapping[str, Any]], *, room: int = 0, steps: int = 3
) -> list[tuple[list[float], str]]:
    """Return the losses and a digest of the weights after some steps, for each of the settings of a Trainer.

    Args:
        python: the fixture.
        room: MiB of each GPU; 0: all.
    """
    run = python(SCRIPT, gpus, room, steps, tiles, json.dumps(settings))
    assert run.returncode == 0, run.stderr[-2000:]
    return [(losses, digest) for losses, digest in json.loads(run.stdout)]
