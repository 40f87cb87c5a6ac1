"""Time the products of a layer in bf16 and in 8 bits, by PyTorch's cuBLASLt, on the first GPU.

python experiments/fp8_products.py --tokens 8192 --weights 2048x1536 1536x1536 17920x1536 1536x8960

For each weight [rows x columns], three products are timed: forward, gradient of the input, gradient of the weight. The
sums of `fast` 8-bit products have a lower precision than fp32, those of `exact` ones are in fp32. The default weights
are those of a layer of GPT-2 124M.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.benchmark import Timer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--weights", nargs="+", default=["2304x768", "768x768", "3072x768", "768x3072"])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    total: dict[str, float] = {}
    for weight in options.weights:
        rows, columns = map(int, weight.split("x"))
        tokens = options.tokens
        for m, n, k in ((tokens, rows, columns), (tokens, columns, rows), (rows, columns, tokens)):
            times = product_times(m, n, k, options.device)
            print(f"{m} x {n} x {k}:", ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in times.items()), flush=True)
            total = {name: total.get(name, 0.0) + s for name, s in times.items()}
    print("all:", ", ".join(f"{name} {1e3 * s:.3f} ms" for name, s in total.items()))


def product_times(m: int, n: int, k: int, device: str) -> dict[str, float]:
    """Return seconds of the product of an m x k matrix and the transpose of an n x k matrix, by kind of product."""
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    low = {"a": a.to(torch.float8_e4m3fn), "b": b.to(torch.float8_e4m3fn), "one": torch.ones((), device=device)}
    eight_bits = "torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum={})"
    timers = {
        "bf16": Timer("a @ b.t()", globals={"a": a, "b": b}),
        "fast": Timer(eight_bits.format(True), globals={**low, "torch": torch}),
        "exact": Timer(eight_bits.format(False), globals={**low, "torch": torch}),
    }
    return {name: timer.blocked_autorange(min_run_time=0.1).median for name, timer in timers.items()}


if __name__ == "__main__":
    main()
