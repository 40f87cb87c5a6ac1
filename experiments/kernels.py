"""Kernels of our training step on a GPU, and the gaps between them, by torch.profiler: tables on the terminal."""

import argparse
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from nntile_py.bench.common import parse_tiles
from nntile_py.bench.step import ours_on_gpu

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "embed", "heads", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tiles", default="", help="axis=size,...")
    parser.add_argument("--cuda", type=int, default=1)
    o = vars(parser.parse_args()) | {
        "vocab": 50304, "seq": 1024, "dtype": "bf16", "scheduler": "lws", "window": None, "cuda_memory": 0,
        "attention": "vendor", "accumulate": "chain", "fusion": True, "placement": None,
    }  # fmt: skip
    o["tiles"] = parse_tiles(o["tiles"])
    run, _ = ours_on_gpu(o)
    run(5)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run(STEPS)
    events = [e for e in traced.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for device in sorted({e.device_index for e in events}):
        kernels = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in events
            if e.device_index == device and not e.name.startswith("Memcpy")
        )  # fmt: skip
        busy, count, gaps = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
        end, last = kernels[0][1], kernels[0][2]
        for start, stop, name in kernels:
            busy[name] += stop - start
            count[name] += 1
            gaps[last, name] += max(start - end, 0)
            if stop > end:
                end, last = stop, name
        total, idle = sum(busy.values()) / 1e3 / STEPS, sum(gaps.values()) / 1e3 / STEPS
        print(f"GPU {device}: {total:.2f} ms of kernels a step, {idle:.2f} ms between them")
        for name, us in busy.most_common(30):
            print(f"{us / 1e3 / STEPS:9.3f} ms {count[name] / STEPS:7.1f}  {name[:110]}")
        for (before, after), us in gaps.most_common(10):
            print(f"{us / 1e3 / STEPS:9.3f} ms between {before[:45]} and {after[:45]}")


if __name__ == "__main__":
    main()
