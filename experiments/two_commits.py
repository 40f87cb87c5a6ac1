"""Time steps of a config with two installations of nntile_py, alternating: the cost of a change in the sources.

python experiments/two_commits.py BEFORE AFTER gpt2_124m.yaml --set tokenizer.vocab_size=50304 --steps 12

BEFORE and AFTER are clones after `make setup`, or unpacked bundles after `./install.sh`. Both read CONFIG.
Each installation runs in its own process, on half of the cores. This script needs only Python.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


class Installation:
    """A process that runs training steps, or forward passes, with one installation."""

    def __init__(self, folder: str, o: argparse.Namespace, cores: str) -> None:
        here, self._passes = Path(folder).resolve(), o.inference
        bundle = (here / "env.sh").is_file()
        python, source = ("python3", here / "src") if bundle else (here / ".venv/bin/python", here)
        self._old = not (source / "nntile_py/measure/worker.py").is_file()  # a version with an older protocol
        old = "step_worker" if (source / "nntile_py/bench/step_worker.py").is_file() else "step"
        module = f"nntile_py.bench.{old} nntile '{json.dumps(self._old_options(o))}'"
        start = f"{'. ./env.sh; ' if bundle else ''}cd {source}; exec taskset -c {cores} {python} -P -m "
        self._folder, self.ms = folder, list[float]()
        self._process = subprocess.Popen(
            ["bash", "-c", start + (module if self._old else "nntile_py.measure.worker")], cwd=here, text=True,
            bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        if not self._old:
            work = "inference" if o.inference else "train"
            measure = {"work": work, "alpha": o.alpha, "warmup": 3}
            self._send({"config": str(Path(o.config).resolve()), "sets": o.sets, "measure": measure})

    @staticmethod
    def _old_options(o: argparse.Namespace) -> dict[str, Any]:
        cuda = next((int(item.partition("=")[2]) for item in o.sets if item.startswith("runtime.cuda=")), 1)
        return {
            "config": str(Path(o.config).resolve()), "sets": o.sets, "cuda": cuda * o.gpu, "alpha": o.alpha,
            "inference": o.inference, "losses": 0, "cuda_memory": 0.0, "cpus": 1, "time_limit": 600.0,
        }  # fmt: skip

    def _send(self, request: dict[str, Any] | int) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{json.dumps(request)}\n")

    def answer(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith('{"'):
                answer: dict[str, Any] = json.loads(line)
                if "error" not in answer:
                    return answer
                sys.exit(f"{self._folder}: {answer['error']}")
        sys.exit(f"{self._folder}: ended with status {self._process.wait()}")

    def turn(self, steps: int) -> None:
        repeats = 15 if self._passes else 1
        self._send(steps if self._old else {"repeats": repeats, "steps": steps})
        self.ms.append(self.answer()["seconds"] / (steps if self._old else 1) * 1e3)

    def __str__(self) -> str:
        return f"{statistics.median(self.ms):.3f} ms a step ({min(self.ms):.3f} to {max(self.ms):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--alpha", type=float, default=1.0, help="mean length of the sequences divided by train.seq")
    parser.add_argument("--inference", action="store_true", help="time forward passes")
    parser.add_argument("--cpu", action="store_false", dest="gpu", help="the config runs on CPU workers")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps in a measurement")
    o = parser.parse_args()
    mine = sorted(os.sched_getaffinity(0))
    half = max(1, len(mine) // 2)
    parts = [",".join(map(str, part)) for part in (mine[:half], mine[-half:])]
    both = [Installation(folder, o, cores) for folder, cores in zip((o.before, o.after), parts, strict=True)]
    for one in both:
        one.answer()  # the first answer: the process has started its workload
    for turn in range(o.rounds):
        for one in both[:: 1 if turn % 2 == 0 else -1]:
            one.turn(o.steps)
    before, after = both
    print(f"before: {before}\nafter:  {after}")
    ratios = [b / a for a, b in zip(before.ms, after.ms, strict=True)]
    print(f"after / before: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} by round)")


if __name__ == "__main__":
    main()
