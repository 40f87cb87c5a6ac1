"""Measure a training step with several tile sizes from Python: write a sweep's YAML, run it, read its results."""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--repeats", type=int, default=3)
repeats = parser.parse_args().repeats

run = {
    "model": {"type": "gpt2", "layers": 2, "embed": 64, "heads": 4},
    "tokenizer": {"vocab_size": 500},
    "train": {"batch": 8, "seq": 64, "steps": 10},
}
sweep = {
    "config": "run.yaml",
    "grid": {"tiles.batch": [2, 4, None], "tiles.embed": [32, None]},  # None: not cut
    "measure": {"work": "train", "repeats": repeats},
    "plots": [{"x": "tiles.batch", "series": "tiles.embed"}],
}
with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    nntile = Path(sys.executable).with_name("nntile")
    subprocess.run([nntile, "sweep", "sweep.yaml", "--out", "out"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with (folder / "out" / "results.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["seconds"]))
    for row in rows:
        print(f"batch {row['tiles.batch'] or 'uncut':>5}  embed {row['tiles.embed'] or 'uncut':>5}"
              f"  {1e3 * float(row['seconds']):7.1f} ms a step, {row['tasks']} tasks")  # fmt: skip
