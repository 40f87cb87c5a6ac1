"""CPU and GPU workers in one step: losses of CPU workers alone, and a trace in which both kinds run tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import nntile_py as nt
from nntile_py.profiling.recorder import run_steps
from nntile_py.testing import error

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

CONFIG = nt.models.GPT2Config(layers=2, embed=128, heads=4, vocab=512, positions=64)
SPLIT = ["adamw", "embedding*", "h0.mlp.*"]
POLICIES: dict[str, dict[str, Any]] = {
    "lws": {}, "dmdas": {"calibrate": True}, "dmdar": {"calibrate": True}, "heteroprio": {},
}  # fmt: skip


def trainer(precision: str, **options: Any) -> nt.Trainer:
    optimizer = nt.AdamW(lr=1e-3)
    return nt.Trainer(nt.models.GPT2(CONFIG, seed=1), 8, 64, precision=precision, optimizer=optimizer, **options)


def losses(precision: str = "fp32", steps: int = 12, **options: Any) -> list[float]:
    own = trainer(precision, **options)
    ids = np.random.default_rng(5).integers(0, CONFIG.vocab, (8, 64))
    result = [p.result().loss for p in [own.submit(ids, ids) for _ in range(steps)]]
    own.close()
    return result


@pytest.fixture(scope="module")
def expected(cpu_losses: Any) -> list[float]:
    """The losses of CPU workers alone."""
    return cpu_losses("test_cuda_cpus", "losses()")  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheduler", POLICIES)
@pytest.mark.parametrize("on_cpu", [None, SPLIT], ids=["any", "split"])
@pytest.mark.parametrize("tiles", [{"batch": 2}, {"batch": 3, "embed": 48, "heads": 3, "ffn": 200, "vocab": 300}])
def test_losses(expected: list[float], scheduler: str, on_cpu: list[str] | None, tiles: dict[str, int]) -> None:
    with nt.Runtime(cpus=4, cuda=1, scheduler=scheduler, on_cpu=on_cpu, **POLICIES[scheduler]):
        got = losses(tiles=tiles, clip_grad_norm=None)
    assert got[-1] < 0.8 * got[0] and error(got, expected) < 1e-4


def test_tf32(expected: list[float]) -> None:
    with nt.Runtime(cpus=4, cuda=1, on_cpu=SPLIT):
        assert error(losses("tf32", tiles={"batch": 2}), expected) < 5e-3


def test_a_split_gives_the_same_bits() -> None:
    """Each task has its kind of worker, and the policy chain its order: two runs have the same bits."""
    runs = []
    for _ in range(2):
        with nt.Runtime(cpus=4, cuda=1, on_cpu=SPLIT):
            runs.append(losses(tiles={"batch": 2}))
    assert runs[0] == runs[1]


def test_a_state_that_is_larger_than_the_gpus_memory() -> None:
    """Weights, gradients and moments take more than the limit; the losses are those of a GPU with enough memory."""
    config = nt.models.GPT2Config(layers=4, embed=512, heads=8, vocab=4096, positions=64)
    limit, runs = 150_000_000, []
    ids = np.random.default_rng(5).integers(0, config.vocab, (8, 64))
    for memory in (None, limit):
        with nt.Runtime(cpus=4, cuda=1, on_cpu=["adamw"], cuda_memory=memory):
            own = nt.Trainer(nt.models.GPT2(config, seed=1), 8, 64, precision="fp32", tiles={"batch": 2})
            state = 16 * sum(weight.size for weight in own.state_dict().values())
            runs.append([p.result().loss for p in [own.submit(ids, ids) for _ in range(4)]])
            own.close()
    assert state > limit and runs[0] == runs[1]


def test_a_trace_has_both_kinds() -> None:
    with nt.Runtime(cpus=4, cuda=1, on_cpu=SPLIT):
        own = trainer("fp32", tiles={"batch": 2})
        trace = run_steps(own, 2, 1)
        own.close()
    ran: dict[str, Counter[str]] = {}
    for task in range(len(trace)):
        for part in trace.info_of(task).parts or [trace.info_of(task)]:
            ran.setdefault(trace.workers[trace.worker[task]].kind, Counter())[part.kernel] += 1
    assert set(ran) == {"CPU", "CUDA"}, ran
    assert {"adamw", "embedding", "embedding_grad", "contract"} <= set(ran["CPU"])
    assert not {"adamw", "embedding", "embedding_grad"} & set(ran["CUDA"]) and ran["CUDA"]["contract"]


def test_bf16_is_refused() -> None:
    with nt.Runtime(cpus=4, cuda=1, on_cpu=["adamw"]), pytest.raises(nt.ConfigError, match=r"'adamw' matches .* bf16"):
        trainer("bf16").close()


def test_an_unknown_pattern_is_refused() -> None:
    with nt.Runtime(cpus=4, cuda=1, on_cpu=["adam"]), pytest.raises(nt.ConfigError, match="'adam' matches no task"):
        trainer("fp32").close()


@pytest.mark.parametrize(("options", "needed"), [({"cpus": 0}, "cpus"), ({"placement": "planned"}, "placement")])
def test_refused_runtimes(options: dict[str, Any], needed: str) -> None:
    with pytest.raises(nt.ConfigError, match=f"runtime.{needed}"):
        nt.Runtime(**{"cpus": 2, "cuda": 1, "on_cpu": ["adamw"], **options})
