"""On CUDA devices: a run that is saved and gone on with equals one that never stopped, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nntile_py import _core

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

# first and last step, dtype, passes of a step, GPUs, MiB of each, folder to load from or "", folder to save in
RUN = """
import hashlib, json, sys
import numpy as np, nntile_py as nt
first, last, passes, gpus, room = (int(sys.argv[k]) for k in (1, 2, 4, 5, 6))
dtype, load, save = sys.argv[3], sys.argv[7], sys.argv[8]
ids = np.random.default_rng(0).integers(0, 1000, (6, 8 * passes, 256))
with nt.Runtime(cpus=0, cuda=gpus, cuda_memory=room << 20):
    if load:
        trainer = nt.Trainer.load(load)
    else:
        config = nt.models.GPT2Config(layers=4, embed=256, heads=8, vocab=1000, positions=256, dropout=0.1)
        # Tiles of 100 and of 56: kernels know of the one that it is a multiple of 8 words and not of 16.
        trainer = nt.Trainer(
            nt.models.GPT2(config, seed=1), 8, 256, {"batch": 4, "embed": 100}, dtype, clip_grad_norm=1.0,
            grad_accumulation=passes,
        )
    told = []
    for step in range(first, last):
        result = trainer.submit({"input_ids": ids[step], "labels": ids[step]}).result()
        told += [result.loss.hex(), result.grad_norm.hex()]
    trainer.save(save)
    told.append(hashlib.sha256(b"".join(w.tobytes() for w in trainer.state_dict().values())).hexdigest())
print(json.dumps(told))
"""
GPUS = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()]


def run(python: Any, *arguments: Any) -> list[str]:
    done = python(RUN, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def never_stopped(python: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[str]]:
    """What six steps on one GPU give, by dtype and passes."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        (dtype, passes): run(python, 0, 6, dtype, passes, 1, 4096, "", folder / f"{dtype}-{passes}")
        for dtype in ("fp32", "tf32", "bf16", "fp16") for passes in (1, 2)
    }  # fmt: skip


@pytest.mark.parametrize("then", GPUS)
@pytest.mark.parametrize("before", GPUS)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
def test_gone_on(
    python: Any, tmp_path: Path, never_stopped: dict[tuple[str, int], list[str]], dtype: str, passes: int, before: int,
    then: int,
) -> None:  # fmt: skip
    """On another number of GPUs too, and with less memory than all tiles take (some 45 MiB)."""
    begun = run(python, 0, 2, dtype, passes, before, 4096, "", tmp_path / "two")
    ended = run(python, 2, 6, dtype, passes, then, 24 if then == before else 4096, tmp_path / "two", tmp_path / "six")
    assert begun[:-1] + ended == never_stopped[dtype, passes]
