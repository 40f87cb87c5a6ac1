"""With accumulate: chain the losses are the same bits, whatever the number of workers, the scheduler and the window."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CPUS

CODE = """
import json, sys
import numpy as np
import nntile_py as nt
options, runs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
rng = np.random.default_rng(0)
ids = rng.integers(0, 101, (4, 19))
inputs = {"input_ids": ids, "labels": ids, "attention_mask": (np.arange(19) < [[19], [9], [19], [4]]).astype(int)}
cls = getattr(nt.models, options.pop("model", "GPT2"))
if cls is nt.models.GPT2:
    del inputs["attention_mask"]
more = {"kv_heads": 2, "ffn": 60} if cls is nt.models.Llama else {"dropout": 0.1}
config = cls.Config(layers=1, embed=24, heads=4, vocab=101, positions=19, **more)
for run in runs:
    with nt.Runtime(**run):
        trainer = nt.Trainer(cls(config, seed=3), 4, 19, seed=5, clip_grad_norm=1.0, **options)
        pending = [trainer.submit(inputs) for _ in range(5)]  # the same batch: its loss falls
        results = [p.result() for p in pending]
        weights = trainer.state_dict()
    print(json.dumps([r.loss.hex() for r in results] + [r.grad_norm.hex() for r in results]
                     + [float(np.sum(w.astype(np.float64) ** 2)).hex() for w in weights.values()]))
"""
TILES = {"batch": 2, "seq": 7, "embed": 10, "heads": 3, "ffn": 50, "vocab": 60}
Losses = Callable[..., list[list[str]]]


@pytest.fixture(scope="module")
def losses(python: Any) -> Losses:
    """Return losses and gradient norms of five steps, then norms of the weights, one list per runtime."""

    def run(runs: list[dict[str, Any]], **options: Any) -> list[list[str]]:
        done = python(CODE, json.dumps({"tiles": TILES, "attention": "merge"} | options), json.dumps(runs))
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def once(losses: Losses) -> list[str]:
    (result,) = losses([{"cpus": 1, "scheduler": "lws"}])
    first, last = (float.fromhex(result[k]) for k in (0, 4))
    assert 4 < last < first < 5  # about log 101, and falling: something is being trained
    assert len(set(result[:10])) == 10
    return result


@pytest.mark.few(2)
@pytest.mark.parametrize("scheduler", ["lws", "dmdas", "eager", "prio"])
def test_workers_and_schedulers(losses: Losses, once: list[str], scheduler: str) -> None:
    """In a second run of the process, dmdas uses times measured in the first run."""
    runs = [{"cpus": cpus, "scheduler": scheduler} for cpus in (CPUS, 1, CPUS)]
    assert losses(runs) == [once] * 3


def test_a_window_of_few_tasks(losses: Losses, once: list[str]) -> None:
    assert losses([{"cpus": CPUS, "window": window} for window in (50, 1)]) == [once] * 2


@pytest.mark.parametrize("found", [True, False])
def test_whole_rows(losses: Losses, once: list[str], found: bool) -> None:
    """With uncut rows, norms are in groups, and several tasks add to their sums."""
    options = {"tiles": {"batch": 1, "ffn": 50}, "fusion": {"found": found}}
    runs = [{"cpus": 1}, {"cpus": CPUS}, {"cpus": CPUS, "scheduler": "dmdas"}, {"cpus": 2, "placement": "planned"}]
    first, *others = losses(runs, **options)
    assert others == [first] * 3
    assert first != once


@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_other_attention_without_fusion(losses: Losses, once: list[str], attention: str) -> None:
    runs = [{"cpus": 1}, {"cpus": CPUS}, {"cpus": CPUS, "scheduler": "dmdas"}]
    first, *others = losses(runs, attention=attention, fusion=False)
    assert others == [first] * 2
    assert first != once


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["BERT", "Llama"])
@pytest.mark.parametrize("attention", ["vendor", "naive"])
def test_other_models(losses: Losses, model: str, attention: str) -> None:
    """With padded rows; BERT with dropout, Llama with fewer heads of keys."""
    tiles = TILES | {"heads": 2}
    first, *others = losses([{"cpus": cpus} for cpus in (1, CPUS, CPUS)], model=model, attention=attention, tiles=tiles)
    assert others == [first] * 2
    begin, end = (float.fromhex(first[k]) for k in (0, 4))
    assert 4 < end < begin < 5


def test_other_tiles_round_otherwise(losses: Losses, once: list[str]) -> None:
    uncut = losses([{"cpus": CPUS}], tiles={})
    assert uncut[0] != once  # what is compared above is all the bits
    for one, other in zip(uncut[0][:5], once[:5], strict=True):
        assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-5)
