"""Training steps on GPUs with a constant of the sources set to each of some values, in turns in one process.

python experiments/in_turns.py nntile_py.tiles.task_groups.EXPORT_SECONDS 1 2e-4 --layers 48 --embed 1600 --heads 25 \\
    --batch 16 --tiles batch=8 --cuda 2
"""

import argparse
import importlib
import statistics
import time

import numpy as np

import nntile_py as nt
from nntile_py.measure.common import parse_tiles
from nntile_py.training.repeated_steps import same_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("constant", help="MODULE.NAME, which is read when a program is made")
    parser.add_argument("values", type=float, nargs="+")
    for name in ("layers", "embed", "heads", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tiles", default="", help="axis=size,...")
    parser.add_argument("--cuda", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    o = parser.parse_args()
    where, _, name = o.constant.rpartition(".")
    module = importlib.import_module(where)
    kind = type(getattr(module, name))  # one that is not there would be set, and change nothing
    config = nt.models.GPT2Config(o.layers, o.embed, o.heads, 50304, 1024)
    ids = np.random.default_rng(0).integers(0, 50304, (o.batch, 1024))
    trainers, steps, times = {}, {}, {value: list[float]() for value in o.values}
    with nt.Runtime(cpus=0, cuda=o.cuda):
        for value in o.values:
            setattr(module, name, kind(value))
            trainers[value] = nt.Trainer(
                nt.models.GPT2(config, seed=0), o.batch, 1024, parse_tiles(o.tiles), precision="bf16",
                optimizer=nt.AdamW(lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95)), clip_grad_norm=1.0,
                shift_labels=False,
            )  # fmt: skip
            steps[value] = same_steps(trainers[value], ids, ids)
        for turn in range(o.turns + 1):  # the first one warms up
            for value, run in steps.items():
                start = time.perf_counter()
                losses = run(o.steps)
                assert np.isfinite(losses).all(), losses
                if turn:
                    times[value].append((time.perf_counter() - start) / o.steps * 1e3)
        for value, ms in times.items():
            tasks = trainers[value].tasks_per_step
            print(f"{value:g}: {statistics.median(ms):.1f} ms a step ({min(ms):.1f}-{max(ms):.1f}), {tasks} tasks")


if __name__ == "__main__":
    main()
