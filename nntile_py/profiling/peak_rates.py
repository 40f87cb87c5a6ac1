"""Peak flop/s and bytes/s of workers: from the config, from a table of devices, or measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nntile_py import _core
from nntile_py.analysis.roofline import Peak
from nntile_py.config.run_config import RunConfig
from nntile_py.profiling.trace import Trace
from nntile_py.system.worker_rates import best_of, measured_rates

# Measured bf16 flop/s and bytes/s of GPUs, by a part of the device's name.
DEVICES = {"H200": (790e12, 4.3e12)}


def peaks_of(trace: Trace, config: RunConfig) -> dict[str, Peak]:
    """Return {kind of worker: peak of one worker}. A measured peak is at least the highest flop/s of a task."""
    peaks: dict[str, Peak] = {}
    for worker in trace.workers:
        if worker.kind in peaks:
            continue
        peak = known_peak(worker.kind, worker.name, sum(w.kind == worker.kind for w in trace.workers), config)
        raised = worker.kind == "CPU" or peak.source == "config"
        peaks[worker.kind] = at_least_seen(peak, trace, worker.kind) if raised else peak
    return peaks


def known_peak(kind: str, name: str, workers: int, config: RunConfig) -> Peak:
    """Return the peak of one worker: from the config, else measured for a CPU worker, or from DEVICES for a GPU."""
    rates = config.profile
    if rates.peak_flop and rates.peak_bytes:
        return Peak(rates.peak_flop, rates.peak_bytes, "config")
    return measure_cpu(workers, config.precision) if kind == "CPU" else device_peak(name, config.precision)


def peak_of_workers(config: RunConfig) -> Peak:
    """Return the peak of all workers of the running runtime together: see known_peak."""
    import torch

    gpus = _core.cuda_workers()
    count, name = gpus or config.workers, torch.cuda.get_device_name(0) if gpus else ""
    return known_peak("CUDA" if gpus else "CPU", name, count, config).of_workers(count)


def device_peak(name: str, precision: str) -> Peak:
    """Return the peak of a GPU from DEVICES. Flop/s are known for bf16, and assumed to be equal for fp16."""
    for part, (flop, size) in DEVICES.items():
        if part in name:
            return Peak(flop if precision in ("bf16", "fp16") else None, size, f"table: {part}, {precision}")
    return Peak(None, None, "unknown device: set profile.peak_flop and profile.peak_bytes")


def at_least_seen(peak: Peak, trace: Trace, kind: str) -> Peak:
    """Raise the peak to the highest flop/s of a task on this kind of worker; a config's peak only gets a remark."""
    rates = np.where(trace.on_kind(kind), trace.column("flop") / np.maximum(trace.seconds, 1e-9), 0.0)
    best = int(rates.argmax()) if len(rates) else -1
    if peak.flop is None or best < 0 or rates[best] <= peak.flop:
        return peak
    reached = f"{trace.info_of(best).group[0]} reached {rates[best] / 1e9:,.1f} Gflop/s in this run"
    if peak.source == "config":
        return replace(peak, source=f"config; too low: {reached}")
    return peak.at_least(float(rates[best]), reached)


def largest_flop(config: RunConfig) -> float | None:
    """Return an upper bound on the flop/s of all workers of the running runtime; None: unknown.

    For CPU workers it is at least the rate of multiply-adds in registers. The peak of known_peak is no upper bound: it
    is the rate of torch's GEMM, and on some CPUs our own products are faster.
    """
    peak = peak_of_workers(config).flop
    if _core.cuda_workers():
        return peak
    loops, fp64 = 100_000, config.precision == "fp64"  # below 1 ms
    flop = float(_core.fma_flop(loops, fp64))
    seconds, _, _ = best_of(lambda: _core.fma_flop(loops, fp64), 0.05)
    return max(peak or 0.0, config.workers * flop / seconds)


def measure_cpu(workers: int, precision: str) -> Peak:
    """Measure the peak of one CPU worker, by a GEMM and a large copy on all workers at once; takes 0.5 s."""
    rates = measured_rates(workers, precision == "fp64")
    threads_of = f"{workers} thread{'s at once' * (workers > 1)}"
    source = f"measured: {threads_of}, best of a GEMM of 768 and of a copy of 16 MiB"
    return Peak(rates.flop_s, rates.bytes_s, source, rates.cpu_share)
