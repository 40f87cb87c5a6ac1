"""Forward passes of a packed BERT base on a GPU, its tasks one by one and as a CUDA graph, in turns: ms of each.

    python experiments/captured.py [--table 1x64,1x256,8x64] [--alpha 0.6] [--flight 4] [--layers 12]

A row of the table is BATCHxLONGEST. A time is the median of several, each of `flight` passes submitted together;
`alone` is that of one pass and its wait.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nntile_py as nt
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import load
from nntile_py.measure.config_peer import inputs_of
from nntile_py.training.repeated_steps import forward_passes

TURNS = 15
WAYS = {"tasks": False, "graph": True}


def timed(run: Callable[[int], Any], flight: int) -> float:
    """Milliseconds of a pass."""
    start = time.perf_counter()
    run(flight)
    return (time.perf_counter() - start) * 1e3 / flight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="1x64,1x128,1x256,1x512,1x1024,8x64,8x128,8x256,8x512,16x64,16x128,16x512")
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--flight", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    o = parser.parse_args()
    warnings.simplefilter("default")
    with nt.Runtime(cpus=0, cuda=1):
        print("cell     tasks, alone    graph, alone     tasks     graph   tasks/graph")
        for cell in o.table.split(","):
            batch, seq = cell.split("x")
            sets = [f"train.batch={batch}", f"train.seq={seq}", "train.pack=true", "model.head=none", "runtime.cuda=1"]
            config = load(Path(__file__).with_name("bert_base.yaml"), [*sets, f"model.layers={o.layers}"])
            spec = step_spec(config, build_model(config))
            inputs = inputs_of(config, "inference", o.alpha, spec)
            runs = {name: forward_passes(spec, inputs, captured)[1] for name, captured in WAYS.items()}
            for run in runs.values():
                run(5)
            found = {(name, flight): [timed(run, flight)] for name, run in runs.items() for flight in (1, o.flight)}
            for _ in range(TURNS):
                for (name, flight), times in found.items():
                    times.append(timed(runs[name], flight))
            medians = {key: statistics.median(times) for key, times in found.items()}
            cells = [medians[name, flight] for flight in (1, o.flight) for name in WAYS]
            print(f"{cell:8}" + "".join(f"{ms:12.3f}" for ms in cells) + f"{cells[2] / cells[3]:12.2f}", flush=True)


if __name__ == "__main__":
    main()
