"""Measure the cost of a checkpoint every N steps: time steps with and without checkpoints, alternating.

python experiments/checkpoints.py experiments/gpt2_tiny.yaml --every 100 --rounds 8 [KEY=VALUE ...]

As in `nntile train` with checkpoint.every=N, a checkpoint is copied and written during the steps; the measurement ends
when the checkpoint is written. Inputs are random. The checkpoints are removed afterwards.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

from nntile_py.checkpoint.run_folder import METRICS, RunFolder
from nntile_py.checkpoint.writer import CheckpointWriter
from nntile_py.config.run_config import load
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.config.sections import CheckpointSection
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.random_inputs import random_inputs
from nntile_py.system.load import Load
from nntile_py.training.run_start import build_trainer
from nntile_py.training.step_handle import Pending

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("config")
parser.add_argument("set", nargs="*")
parser.add_argument("--every", type=int, default=100)
parser.add_argument("--rounds", type=int, default=8)
parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder on the disk to measure")
options = parser.parse_args()

config = load(options.config, options.set)
options.folder.mkdir(parents=True, exist_ok=True)
with Runtime(**runtime_options(config.runtime.model_dump())), tempfile.TemporaryDirectory(dir=options.folder) as run:
    trainer = build_trainer(config)
    inputs = random_inputs(trainer.spec.trace()[0], config.train.batch * config.train.grad_accumulation, config.seed)
    (Path(run) / METRICS).touch()
    saver = CheckpointWriter(CheckpointSection(every=options.every), trainer, RunFolder(Path(run)), {}, {}, print)

    def turn(saves: bool) -> float:
        """Run `every` steps, with one checkpoint if `saves`; return the mean seconds of a step."""
        begin, in_flight = time.perf_counter(), deque[Pending]()
        for step in range(options.every):
            in_flight.append(trainer.submit(inputs))
            if saves and not step:
                saver.begin(trainer.steps)
            while len(in_flight) > (1 if step < options.every - 1 else 0):
                saver.reported(in_flight.popleft().result().step, good=True)
        saver.finish()
        return (time.perf_counter() - begin) / options.every

    turn(False), turn(True)  # not measured: they choose kernels and allocate memory
    seconds = {False: list[float](), True: list[float]()}
    with Load() as load_of:
        for saves in itertools.islice(itertools.cycle([False, True, True, False]), 2 * options.rounds):
            seconds[saves].append(turn(saves))
    size = sum(file.stat().st_size for file in Path(run, "checkpoints", f"step-{saver.newest:06d}").iterdir())

for saves, took in seconds.items():
    ms = [1e3 * s for s in took]
    print(f"{'with' if saves else 'without'}: {statistics.median(ms):.2f} ms a step ({min(ms):.2f} to {max(ms):.2f})")
ratios = [after / before for before, after in zip(seconds[False], seconds[True], strict=True)]
print(f"a checkpoint of {size / 2**20:.0f} MiB every {options.every} steps: {statistics.median(ratios):.4f} times"
      f" ({min(ratios):.4f} to {max(ratios):.4f}, {options.rounds} rounds)")  # fmt: skip
print(f"meanwhile: {load_of.facts()}")
