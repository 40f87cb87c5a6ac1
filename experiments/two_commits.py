"""Training steps of GPT-2 by two installations of nntile_py, in turns: what a change of the sources costs.

python experiments/two_commits.py BEFORE AFTER --cuda 1 --rounds 10 --steps 12 layers=12 embed=768 heads=12 batch=32

BEFORE and AFTER are clones after `make setup`, or unpacked bundles after `./install.sh`. Each is a process of its own
with its half of the cores. KEY=VALUE are the options of `nntile bench step`, values in JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

OPTIONS = {
    "layers": 12, "embed": 768, "heads": 12, "seq": 1024, "batch": 32, "vocab": 50304, "dtype": "bf16",
    "scheduler": "lws", "placement": None, "window": None, "cuda_memory": 0.0, "losses": 3, "tiles": {},
    "attention": "vendor", "accumulate": "chain", "fusion": True, "time_limit": 600.0,
}  # fmt: skip


class Installation:
    """A contestant of `nntile bench step` of one installation."""

    def __init__(self, folder: str, options: dict[str, Any], cores: str) -> None:
        here = Path(folder).resolve()
        bundle = (here / "env.sh").is_file()
        python, source = ("python3", here / "src") if bundle else (here / ".venv/bin/python", here)
        name = "bench/step" if (source / "nntile_py/bench").is_dir() else "bench_step"  # before it was a package
        module = f"nntile_py.{name.replace('/', '.')}"
        start = f"{'. ./env.sh; ' if bundle else ''}cd {source}; exec taskset -c {cores} {python} -P -m {module}"
        self._folder, self.ms = folder, list[float]()
        self._process = subprocess.Popen(
            ["bash", "-c", f"{start} nntile '{json.dumps(options)}'"], cwd=here, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith('{"'):
                answer: dict[str, Any] = json.loads(line)
                if "error" not in answer:
                    return answer
                sys.exit(f"{self._folder}: {answer['error']}")
        sys.exit(f"{self._folder}: ended with status {self._process.wait()}")

    def turn(self, steps: int) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{steps}\n")
        self.ms.append(self.answer()["seconds"] / steps * 1e3)

    def __str__(self) -> str:
        return f"{statistics.median(self.ms):.2f} ms a step ({min(self.ms):.2f} to {max(self.ms):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--cuda", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="in a turn")
    o = parser.parse_args()
    given = {key: json.loads(value) for key, _, value in (item.partition("=") for item in o.options)}
    if unknown := given.keys() - OPTIONS:
        parser.error(f"{', '.join(sorted(unknown))}: unknown; allowed are {', '.join(OPTIONS)}")
    mine = sorted(os.sched_getaffinity(0))
    half = max(1, len(mine) // 2)
    options = OPTIONS | given | {"cuda": o.cuda, "cpus": half}
    parts = [",".join(map(str, part)) for part in (mine[:half], mine[-half:])]
    both = [Installation(folder, options, cores) for folder, cores in zip((o.before, o.after), parts, strict=True)]
    for one in both:
        one.answer()  # that it has started
    for turn in range(o.rounds):
        for one in both[:: 1 if turn % 2 == 0 else -1]:
            one.turn(o.steps)
    before, after = both
    print(f"before: {before}\nafter:  {after}")
    ratios = [b / a for a, b in zip(before.ms, after.ms, strict=True)]
    print(f"after / before: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} by round)")


if __name__ == "__main__":
    main()
