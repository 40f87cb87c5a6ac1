"""Print simulated times divided by measured times, for the points of an experiment's GPU results.

python experiments/simulated.py experiments/results/2026-11-22-fig17-training-gpu.csv ...   # no GPU is needed
"""

import csv
import re
import statistics
import sys
from pathlib import Path

from nntile_py.analysis.simulate import planned_seconds
from nntile_py.analysis.workloads import build
from nntile_py.measure.experiments import load_experiment
from nntile_py.measure.plots import plain
from nntile_py.measure.sweep_points import points
from nntile_py.tiles import device_model


def compared(path: Path) -> None:
    """Print a line for each number of GPUs in a results CSV: minimum, median, maximum of simulated / measured time."""
    match = re.fullmatch(r"[\d-]*-(\w+)-(\w+)-gpu", path.stem)
    assert match, f"{path}: allowed: results of an experiment's GPU part in a mode, such as DATE-fig17-training-gpu.csv"
    sweep = load_experiment(match[1]).part("gpu", match[2])  # type: ignore[arg-type]
    measured = list(csv.DictReader(path.open()))
    for row in measured:  # older results have the key `fusion` instead of `variant`
        row.setdefault("variant", "fused" if row.get("fusion") == "true" else "naive")
    ratios: dict[int, list[float]] = {}
    for point in points(sweep):
        rows = [row for row in measured if all(row[key] == plain(of) for key, of in point.sets.items())]
        if point.config and rows and rows[0]["status"] == "ok":
            lists = build(point.config, point.measure.work, point.measure.phase).lists
            simulated = planned_seconds(lists, point.config.workers, device_model.speed(lists, gpu=True))
            ratios.setdefault(point.config.workers, []).append(simulated / float(rows[0]["seconds"]))
    for workers, of in ratios.items():
        ratios_text = f"{min(of):.2f}, {statistics.median(of):.2f}, {max(of):.2f}"
        print(f"{match[1]} {match[2]}, {workers} GPUs: simulated / measured {ratios_text} (minimum, median, maximum of "
              f"{len(of)} points)", flush=True)  # fmt: skip


for name in sys.argv[1:]:
    compared(Path(name))
