"""Count the bytes that a layer's kernels move, by the GPU's counters, beside the bytes of the tiles in their tasks.

    python experiments/counters.py [--work encoder] [--phase forward] [--set train.batch=96 --set train.seq=128]

Needs Nsight Compute (`ncu`) and permission to read GPU counters. The layer is that of encoder_layer.yaml, in bf16, with
BERT-large's sizes, fused attention and fusion groups. Each kernel runs by itself, with empty caches. The columns are in
MB (10^6 bytes). tiles: bytes that the task reads and writes, each tile once. L2: bytes that multiprocessors read from
the L2 cache and write to it. DRAM: bytes that the L2 cache reads from memory and writes back before the kernel's end.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

METRICS = (  # names in ncu: read from L2, written to L2, read from memory, written to memory
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__m_l1tex2xbar_write_bytes.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)
SETS = (
    "tiles={}", "precision=bf16", "runtime.cpus=0", "runtime.cuda=1", "runtime.memory=null", "model.embed=1024",
    "model.heads=16", "train.batch=8", "train.seq=512", "fusion.found=true",
)  # fmt: skip
TASK = "task: "  # start of the lines that the process under ncu prints for this script


def layer(o: argparse.Namespace) -> None:
    """Run the layer once while ncu counts; print the layer's tasks in the order of execution."""
    import torch

    import nntile_py as nt
    from nntile_py.analysis.workloads import build
    from nntile_py.config.run_config import load
    from nntile_py.config.scheduler_file import runtime_options
    from nntile_py.profiling.operator_timer import small_program

    config = load(Path(__file__).with_name("encoder_layer.yaml"), [*SETS, *o.sets])
    built = build(config, o.work, o.phase)
    with nt.Runtime(**runtime_options(config.runtime.model_dump())):
        run = small_program(built.graphs[0], config)
        run(3)  # compiles and chooses kernels, allocates memory
        torch.cuda.cudart().cudaProfilerStart()
        run(1)
        torch.cuda.cudart().cudaProfilerStop()
    for task in (task for tasks in built.lists for task in tasks.tasks):
        read, written = (sum(a.tile.bytes for a in task.accesses if letter in a.mode) for letter in "RW")
        print(f"{TASK}{task.op}\t{read}\t{written}")


def kernels(output: str) -> list[tuple[str, dict[str, float]]]:
    """Return (name, {metric: value}) of the kernels in ncu's output, in the order of execution."""
    by_id: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO(output[output.index('"ID"') :])):
        values = by_id.setdefault(row["ID"], (row["Kernel Name"], {}))[1]
        values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [*by_id.values()]


def table(tasks: Sequence[Sequence[str]], seen: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Print a row for each task and its kernel.

    Args:
        tasks: for each task its operator, bytes read, bytes written.
        seen: for each kernel its name and {metric: value}, in the order of execution.
    """
    if len(tasks) != len(seen):
        print(f"{len(tasks)} tasks and {len(seen)} kernels: rows may pair a task with another task's kernel")
    heads = ("tiles R", "L2 R", "DRAM R", "tiles W", "L2 W", "DRAM W")
    print(f"{'task':34} {'kernel':34}" + "".join(f" {head:>8}" for head in heads))
    for (op, *tiles), (name, values) in zip_longest(tasks, seen, fillvalue=("", {})):
        read, written = map(float, tiles if op else (0, 0))
        l2_read, l2_written, dram_read, dram_written = (values.get(metric, 0.0) for metric in METRICS)
        moved = (read, l2_read, dram_read, written, l2_written, dram_written)
        print(f"{op[:34]:34} {name[:34]:34}" + "".join(f" {each / 1e6:8.2f}" for each in moved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="encoder", choices=("encoder", "decoder", "mha"))
    parser.add_argument("--phase", default="forward", choices=("forward", "backward"))
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the process under ncu
    o: Any = parser.parse_args()
    if o.inside:
        layer(o)
        return
    ncu = ["ncu", "--profile-from-start", "off", "--csv", "--print-units", "base", "--clock-control", "none"]
    command = [*ncu, "--metrics", ",".join(METRICS), sys.executable, "-P", __file__, *sys.argv[1:], "--inside"]
    ran = subprocess.run(command, text=True, capture_output=True, check=False)
    if ran.returncode or '"ID"' not in ran.stdout:
        sys.exit(f"ncu gave no counters (status {ran.returncode}):\n{(ran.stdout + ran.stderr)[-2000:]}")
    lines = [line[len(TASK) :].split("\t") for line in ran.stdout.splitlines() if line.startswith(TASK)]
    table(lines, kernels(ran.stdout))


if __name__ == "__main__":
    main()
