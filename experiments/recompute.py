"""Time and memory of a training step of GPT-2 for values of the setting `recompute`.

    python experiments/recompute.py none layer [--workers 1 2]

Each measurement is a process of its own. Prints the planned peak of a pass, the largest resident memory of the process,
and the mean time of three steps after two.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

ROWS, SEQ, VOCAB = 16, 256, 512


def measure(recompute: str, workers: int) -> str:
    """Return a row of the table."""
    import nntile_py as nt

    config = nt.models.GPT2Config(layers=12, embed=384, heads=6, vocab=VOCAB, positions=SEQ)
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ))
    with nt.Runtime(cpus=workers):
        model, adamw = nt.models.GPT2(config, seed=0), nt.AdamW(lr=1e-3)
        trainer = nt.Trainer(model, ROWS, SEQ, {"batch": 4}, optimizer=adamw, recompute=recompute)
        for _ in range(2):
            trainer.step(ids, ids)
        began = time.perf_counter()
        for _ in range(3):
            trainer.step(ids, ids)
        seconds = (time.perf_counter() - began) / 3
        planned = trainer.built.first.tasks.peak_bytes() >> 20
        trainer.close()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return f"| `{recompute}` | {workers} | {planned} | {resident} | {seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recompute", nargs="+")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.recompute[0], options.workers[0]))
        return
    print("| recompute | workers | peak of a pass, MiB | process, MiB | s a step |")
    for workers in options.workers:
        for value in options.recompute:
            subprocess.run([sys.executable, __file__, value, "--workers", str(workers), "--one"], check=True)


if __name__ == "__main__":
    main()
