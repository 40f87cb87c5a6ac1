"""Hours of training: no memory grows, no run stops. `make torture` runs this file."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("NNTILE_TORTURE"), reason="an hour; `make torture` runs it")
MINUTES = float(os.environ.get("NNTILE_SOAK_MINUTES", "60"))

HEAD = """
import json, os, sys, time
import numpy as np
import nntile_py as nt

def held():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    files = len(os.listdir("/proc/self/fd"))
    return {"kib": int(fields["VmRSS"].split()[0]), "threads": int(fields["Threads"]), "files": files}
"""
# The setting of an evaluation that once stopped for ever.
EVALUATE = HEAD + """
with nt.Runtime(cpus=2, scheduler="lws"):
    model = nt.models.GPT2(nt.models.GPT2Config(layers=4, embed=16, heads=2, vocab=300, positions=12))
    trainer = nt.Trainer(model, 2, 12, {"batch": 1, "embed": 8, "vocab": 100})
    ids = np.random.default_rng(0).integers(0, 300, (2, 12))
    first, longest = trainer.evaluate(ids, ids), 0.0
    for k in range(int(sys.argv[1])):
        if k == 200: before = held()
        begin = time.monotonic()
        assert trainer.evaluate(ids, ids) == first
        longest = max(longest, time.monotonic() - begin)
    print(json.dumps([longest, before, held()]))
"""
TRAIN = HEAD + """
from nntile_py.checkpoint.state import Snapshot
end = time.monotonic() + 60 * float(sys.argv[1])
with nt.Runtime(cpus=2):
    model = nt.models.GPT2(nt.models.GPT2Config(layers=2, embed=32, heads=2, vocab=300, positions=32))
    trainer = nt.Trainer(model, 2, 32, {"batch": 1, "embed": 16, "vocab": 100}, clip_grad_norm=1.0)
    ids = np.random.default_rng(0).integers(0, 300, (2, 32))
    steps, before = 0, None
    while time.monotonic() < end:
        for k in range(50): trainer.submit(ids, ids)
        trainer.evaluate(ids, ids, return_logits=True)
        trainer.save(sys.argv[2])
        steps += 50
        if steps == 1000: before = held()
    print(json.dumps([steps, before, held()]))
"""


def started(code: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> Any:
    try:
        out, said = process.communicate(timeout=4 * 3600)
    finally:
        process.kill()
    assert process.returncode == 0, said[-2000:]
    return json.loads(out)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Others that use the cores too."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def flat(before: dict[str, int], after: dict[str, int]) -> bool:
    same = before["threads"] == after["threads"] and before["files"] == after["files"]
    return same and after["kib"] < before["kib"] + 4096


@pytest.mark.timeout(5 * 3600)
def test_a_hundred_thousand_evaluations_at_load_20() -> None:
    begin = time.monotonic()
    with busy(10):
        found = [ended(process) for process in [started(EVALUATE, 10_000) for _ in range(10)]]
    took = time.monotonic() - begin
    longest, load = max(one[0] for one in found), os.getloadavg()[0]
    print(f"100 000 evaluations in {took:.0f} s, load {load:.0f}: the longest took {longest:.1f} s")
    print(*(f"{before} -> {after}" for _, before, after in found), sep="\n")
    assert all(flat(before, after) for _, before, after in found)


@pytest.mark.timeout(5 * 3600)
def test_training_for_an_hour(tmp_path: Any) -> None:
    steps, before, after = ended(started(TRAIN, MINUTES, tmp_path / "saved"))
    print(f"{steps} steps in {MINUTES:g} minutes, an evaluation and a checkpoint every 50: {before} -> {after}")
    assert flat(before, after)
