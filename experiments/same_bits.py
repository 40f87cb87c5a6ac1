"""Hashes of the weights after some steps of a GPT-2 with dropout, on different workers, GPUs and ranks.

    python experiments/same_bits.py                        # one and two CPU workers, one, two and four ranks
    python experiments/same_bits.py --gpus 1 2 --precision bf16 fp8

Each row is a process of its own, or one for each rank. The row `then` stops halfway, and continues from the checkpoint
on the other number of workers. Ends with an error if the hashes of a precision differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BATCH, SEQ, VOCAB = 8, 128, 500
TILES = {"batch": 2, "ffn": 256, "vocab": 192}
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "STARPU_WORKERS_NOBIND": "1"}


def train(steps: int, precision: str, runtime: dict[str, int], folder: str) -> str | None:
    """Train from a checkpoint in `folder` or from the start, save a checkpoint there, and return the weights' hash.

    None: this process is not the first rank.
    """
    import nntile_py as nt

    config = nt.models.GPT2Config(layers=4, embed=128, heads=4, vocab=VOCAB, positions=SEQ, dropout=0.1)
    saved = Path(folder, "checkpoint")
    with nt.Runtime(**runtime, mpi=True) as running:
        if saved.exists():
            trainer = nt.Trainer.load(saved)
        else:
            trainer = nt.Trainer(nt.models.GPT2(config, seed=0), BATCH, SEQ, TILES, precision, nt.AdamW(lr=1e-3), 1.0)
        for step in range(trainer.steps, trainer.steps + steps):
            ids = np.random.default_rng(step).integers(0, VOCAB, (BATCH, SEQ))
            trainer.step(ids, ids)
        trainer.save(saved)
        weights = b"".join(value.tobytes() for value in trainer.state_dict().values())
        first = not running.ranks or running.ranks.rank == 0
    return hashlib.sha256(weights).hexdigest()[:16] if first else None


def hashed(steps: int, precision: str, key: str, counts: Sequence[int], ranks: int = 1) -> str:
    """Return the hash after training in processes with `key`=count workers, one process for each count in turn."""
    with tempfile.TemporaryDirectory() as folder:
        for turn, count in enumerate(counts):
            some = steps * (turn + 1) // len(counts) - steps * turn // len(counts)
            command = [sys.executable, __file__, "--one", f"{some}", precision, key, f"{count}", folder]
            mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", f"{ranks}"] if ranks > 1 else []
            made = subprocess.run(mpirun + command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
            if made.returncode:
                raise SystemExit(made.stderr)
        return made.stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[], help="numbers of GPUs; default: no GPU")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="numbers of ranks of one CPU worker")
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.one:
        steps, precision, key, count, folder = o.one
        runtime = {"cpus": 0, key: int(count)}
        print(train(int(steps), precision, runtime, folder) or "")
        return
    key, counts = ("cuda", o.gpus) if o.gpus else ("cpus", [1, 2])
    print(f"| precision | {'GPUs' if o.gpus else 'CPU workers'} | ranks | weights after {o.steps} steps |")
    print("|---|---|---|---|", flush=True)
    for precision in o.precision:
        rows = [(f"{count}", [count], 1) for count in counts]
        if len(counts) > 1:
            rows.append((f"{counts[0]}, then {counts[-1]}", [counts[0], counts[-1]], 1))
        rows += [("1", [1], ranks) for ranks in ([] if o.gpus else o.ranks)]
        found = set()
        for title, used, ranks in rows:
            found.add(digest := hashed(o.steps, precision, key, used, ranks))
            print(f"| {precision} | {title} | {ranks} | `{digest}` |", flush=True)
        if len(found) > 1:
            raise SystemExit(f"{precision}: the hashes differ")


if __name__ == "__main__":
    main()
