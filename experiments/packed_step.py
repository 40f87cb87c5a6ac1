"""Training steps of a packed BERT whose bins have room for just the tokens of a batch of unequal lengths: ms of each.

    python experiments/packed_step.py [--table 128x256,512x64] [--alpha 0.6] [--set fusion.found=true]

A row of the table is LONGESTxBATCH. Its sequences have a mean length of alpha times the longest and lie in bins, one
for each tile of the batch, of as many tokens, rounded up to whole sequences; they are packed once, as PyTorch would be
given its offsets. A time is the median of 7, each of 10 steps that are submitted together. `bert_table.py` has PyTorch
beside. With --kernels: those of each GPU after that, and the gaps between them, as `kernels.py step` has them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

import nntile_py as nt
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import load, runtime_options
from nntile_py.execution import memory
from nntile_py.measure.config_peer import inputs_of, just_filled
from nntile_py.system.clock import clocked
from nntile_py.training.repeated_steps import same_steps

REPEATS, STEPS = 7, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).with_name("bert_base.yaml")))
    parser.add_argument("--table", default="128x256,512x64")
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    o = parser.parse_args()
    rows = [tuple(map(int, row.split("x"))) for row in o.table.split(",")]
    sets = [*o.sets, "train.pack=true"]
    configs = {row: load(o.config, [*sets, f"train.seq={row[0]}", f"train.batch={row[1]}"]) for row in rows}
    if o.kernels and not all(config.runtime.cuda for config in configs.values()):
        parser.error("--kernels is allowed only with GPUs (runtime.cuda)")
    with nt.Runtime(**runtime_options(next(iter(configs.values())).runtime.model_dump())):
        print("longest x batch   tokens        ms  (least to greatest)   tokens/s      GiB")
        for (seq, batch), config in configs.items():
            given = inputs_of(config, "train", o.alpha)
            real = int(np.sum(given["attention_mask"])) if "attention_mask" in given else seq * batch
            spec = just_filled(step_spec(config, build_model(config)), given)
            trainer = nt.Trainer.of_spec(spec, seed=config.seed)
            run = same_steps(trainer, given)
            run(4)
            times = clocked(run, REPEATS, STEPS)
            middle, held = statistics.median(times), memory.gpu_peak() / 2**30 if config.runtime.cuda else 0.0
            spread = f"({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})"
            told = f"{seq:7} x {batch:<5} {real:8} {middle * 1e3:9.2f}  {spread:20} {real / middle:9.0f} {held:8.2f}"
            print(told, flush=True)
            if o.kernels:
                from kernels import traced  # a script beside this one

                traced(run)
            trainer.close()


if __name__ == "__main__":
    main()
