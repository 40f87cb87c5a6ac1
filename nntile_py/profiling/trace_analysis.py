"""From a trace to the figures of summary.json: shares of the workers, operators against the roofline, critical path."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nntile_py.profiling.message_waits import idle, summarised
from nntile_py.profiling.trace import REDUCTION, Info, Trace, Worker, accumulating, by_parts, length
from nntile_py.tiles.dependencies import critical_path

# bf16 flop/s and bytes/s that were measured, by a part of the device's name.
DEVICES = {"H200": (790e12, 4.3e12)}
# What a device of unknown speed is taken for where only proportions matter: the time of a group's parts.
USUAL = (600e12, 3.5e12)


@dataclass(frozen=True, slots=True)
class Peak:
    """What one worker can do: flop/s, bytes/s; None where it is not known.

    cpu_share: of the time in which it was measured, the part in which the threads had a core; None: not measured."""

    flop: float | None
    bytes: float | None
    source: str
    cpu_share: float | None = None

    def seconds(self, flop: Any, size: Any) -> Any:
        """The least time for so much work."""
        if self.flop is None or self.bytes is None:
            return np.nan * flop
        return np.maximum(flop / self.flop, size / self.bytes)


def summarise(trace: Trace, peaks: Mapping[str, Peak], tiles: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All of summary.json but the findings. `peaks` by kind of worker; `tiles`: of each axis size, tile, count.

    Figures by operator are of the parts of groups, whose times are estimates: `estimated` is the share of such time."""
    t0, t1 = trace.window
    window = (t1 - t0) * 1e-9
    steps = len(np.unique(trace.step[trace.step > 0]))
    workers = [_worker(trace, number) for number in range(len(trace.workers))]
    path = _path(trace, parts(trace, peaks), window)
    count, between = len(trace), summarised(trace, workers) if trace.ranks > 1 else {}
    overhead = sum(w["overhead"] for w in workers) * window
    work = float(trace.seconds.sum())
    return {
        "seconds": window,
        "light": trace.light,
        "steps": steps,
        "seconds_per_step": window / max(steps, 1),
        "tasks": count,
        "mean_task_s": work / max(count, 1),
        "overhead_per_task_s": overhead / max(count, 1),
        "submission": _submission(trace) / window,
        "parallelism": work / path["seconds"] if path["seconds"] else 0.0,
        "flop": float(_column(trace, "flop").sum()),
        "workers": workers,
        "operators": _operators(parts(trace, peaks), peaks),
        "critical_path": path,
        "transfers": [
            {"from": trace.nodes[b.source], "to": trace.nodes[b.target], "bytes": b.bytes, "transfers": b.transfers}
            for b in trace.buses
            if b.transfers
        ],
        "peaks": {kind: vars_of(peak) for kind, peak in peaks.items()},
        "tiles": dict(tiles or {}),
    } | between


def parts(trace: Trace, peaks: Mapping[str, Peak]) -> Trace:
    """The trace with each group's time shared among its parts, in proportion to max(flop / peak, bytes / peak)."""

    def floor(info: Info, worker: Worker) -> float:
        peak = peaks.get(worker.kind)
        flop, size = (peak and peak.flop) or USUAL[0], (peak and peak.bytes) or USUAL[1]
        return max(info.flop / flop, info.bytes / size)

    return by_parts(trace, floor)


def vars_of(peak: Peak) -> dict[str, Any]:
    return {
        "flop_per_s": peak.flop, "bytes_per_s": peak.bytes, "source": peak.source, "cpu_share": peak.cpu_share,
    }  # fmt: skip


def _column(trace: Trace, name: str) -> Any:
    return np.array([getattr(info, name) for info in trace.infos], np.float64)[trace.info]


def _worker(trace: Trace, number: int) -> dict[str, Any]:
    """Shares of the window. Where a device overlaps them: working before communicating before overhead."""
    worker, mine = trace.workers[number], trace.worker == number
    t0, t1 = trace.window
    run = trace.start[mine], trace.end[mine]
    fetch = trace.fetch[mine], trace.fetched[mine]
    working, moving, total = length(run), length(run, fetch), max(t1 - t0, 1)
    all_busy = total - length(idle(trace, number))
    return {
        "name": worker.name,
        "kind": worker.kind,
        "node": trace.nodes[worker.node],
        "tasks": int(mine.sum()),
        "busy_s": working * 1e-9,
        "working": working / total,
        "communicating": (moving - working) / total,
        "overhead": (all_busy - moving) / total,
        "idle": (total - all_busy) / total,
        "starpu": worker.counters,
    }


def _operators(trace: Trace, peaks: Mapping[str, Peak]) -> list[dict[str, Any]]:
    """A row for each operator and phase, the longest first. `trace`: by parts."""
    groups: dict[tuple[str, str], int] = {}
    of_info = np.array([groups.setdefault(info.group, len(groups)) for info in trace.infos], np.int64)
    of_task = of_info[trace.info]
    seconds, flop, size = trace.seconds, _column(trace, "flop"), _column(trace, "bytes")
    estimated = np.array([info.estimated for info in trace.infos])[trace.info]
    ideal = np.full(len(trace), np.nan)
    for kind, peak in peaks.items():
        here = np.isin(trace.worker, [k for k, w in enumerate(trace.workers) if w.kind == kind])
        ideal[here] = peak.seconds(flop[here], size[here])
    sums = {
        name: np.bincount(of_task, weights=values, minlength=len(groups))
        for name, values in (
            ("s", seconds),
            ("flop", flop),
            ("bytes", size),
            ("ideal", ideal),
            ("estimated", seconds * estimated),
        )
    }
    counts, total = np.bincount(of_task, minlength=len(groups)), max(float(seconds.sum()), 1e-12)
    compute = {kind: (p.flop or 0) / p.bytes for kind, p in peaks.items() if p.bytes}
    ridge = min(compute.values(), default=0.0)
    rows = []
    for (operator, phase), k in groups.items():
        if not counts[k]:
            continue
        s = float(sums["s"][k])
        reached = float(sums["ideal"][k]) / s if s and np.isfinite(sums["ideal"][k]) and operator != REDUCTION else None
        intensity = float(sums["flop"][k] / sums["bytes"][k]) if sums["bytes"][k] else None
        rows.append(
            {
                "operator": operator,
                "phase": phase,
                "seconds": s,
                "share": s / total,
                "estimated": float(sums["estimated"][k]) / s if s else 0.0,
                "tasks": int(counts[k]),
                "mean_s": s / int(counts[k]),
                "tflop_per_s": float(sums["flop"][k]) / s / 1e12 if s else 0.0,
                "gb_per_s": float(sums["bytes"][k]) / s / 1e9 if s else 0.0,
                "flop_per_byte": intensity,
                "bound_by": None if intensity is None or not ridge else ("flop" if intensity > ridge else "memory"),
                "roofline": reached,
            }
        )
    return sorted(rows, key=lambda row: -row["seconds"])


def _path(trace: Trace, parts: Trace, window: float) -> dict[str, Any]:
    path = critical_path(trace.before, trace.seconds)
    seconds, of_part = trace.seconds, parts.seconds
    counts = np.array([len(info.parts) or 1 for info in trace.infos], np.int64)[trace.info]
    first = np.cumsum(counts) - counts
    by: dict[tuple[str, str], list[float]] = {}
    for part in (first[task] + k for task in path for k in range(counts[task])):
        by.setdefault(parts.info_of(part).group, []).append(float(of_part[part]))
    total = float(seconds[path].sum()) if path else 0.0
    chained = accumulating(trace, path)
    return {
        "seconds": total,
        "share_of_run": total / window if window else 0.0,
        "tasks": len(path),
        "accumulation_share": float(seconds[chained].sum()) / total if total else 0.0,
        "operators": sorted(
            (
                {"operator": operator, "phase": phase, "seconds": sum(times), "tasks": len(times)}
                for (operator, phase), times in by.items()
            ),
            key=lambda row: -float(str(row["seconds"])),
        ),
    }


def _submission(trace: Trace) -> float:
    """Seconds in which the main thread was submitting a program; of several ranks, of the one that took longest."""
    totals, rank = [0] * trace.ranks, trace.rank
    for replay in np.unique(trace.replay[trace.replay > 0]):
        tasks = trace.replay == replay
        dates = trace.submit[tasks]
        totals[int(rank[tasks][0])] += int(dates.max() - dates.min())
    return max(totals) * 1e-9


# -- peaks


def device_peak(name: str, precision: str) -> Peak:
    """Of a GPU by its name; flop/s are known for bf16 only, and fp16 is taken to be as fast."""
    for part, (flop, size) in DEVICES.items():
        if part in name:
            return Peak(flop if precision in ("bf16", "fp16") else None, size, f"table: {part}, {precision}")
    return Peak(None, None, "unknown device: set profile.peak_flop and profile.peak_bytes")


def at_least_seen(peak: Peak, trace: Trace, kind: str) -> Peak:
    """The peak, with no fewer flop/s than a task on a worker of this kind reached: a busy machine may hide them."""
    here = np.isin(trace.worker, [k for k, w in enumerate(trace.workers) if w.kind == kind])
    rates = np.where(here, _column(trace, "flop") / np.maximum(trace.seconds, 1e-9), 0.0)
    best = int(rates.argmax()) if len(rates) else -1
    if peak.flop is None or best < 0 or rates[best] <= peak.flop:
        return peak
    told = f"{trace.info_of(best).group[0]} reached {rates[best] / 1e9:,.1f} Gflop/s in this run"
    if peak.source == "config":
        return replace(peak, source=f"config; too low: {told}")
    source = f"{peak.source}; it gave {peak.flop / 1e9:,.1f} Gflop/s, {told}"
    return replace(peak, flop=float(rates[best]), source=source)


def best_of(work: Callable[[], object], seconds: float = 0.2) -> tuple[float, float, float]:
    """Of calls for so long, one at least: seconds of the best, or of all by the processor time that they took, which
    leaves out the time of other processes; seconds of all together; processor time of this thread for them."""
    times: list[float] = []
    start, own = time.perf_counter(), time.thread_time()
    now = start
    while not times or now < start + seconds:  # a thread may wait for its core as long as that
        work()
        times.append(time.perf_counter() - now)
        now = time.perf_counter()
    own = time.thread_time() - own
    return min(*times, own / len(times) or np.inf), now - start, own


def measure_cpu(workers: int, precision: str) -> Peak:
    """Of one CPU worker while all of them are at it: a GEMM, and a copy that no cache holds. Takes half a second."""
    import threading

    import torch

    dtype = torch.float64 if precision == "fp64" else torch.float32
    barrier = threading.Barrier(workers)
    found: list[tuple[float, float, float]] = []

    def run() -> None:
        torch.set_num_threads(1)  # of this thread
        a, b = torch.rand(768, 768, dtype=dtype), torch.rand(768, 768, dtype=dtype)
        source, target = torch.rand(1 << 22), torch.empty(1 << 22)
        product, best, wall, own = torch.empty_like(a), [], 0.0, 0.0
        works: list[tuple[Callable[[], object], int]] = [
            (lambda: torch.mm(a, b, out=product), 2 * 768**3),
            (lambda: target.copy_(source), 2 * source.nbytes),
        ]
        for work, amount in works:
            work()
            barrier.wait()
            seconds, took, mine = best_of(work)
            best.append(amount / seconds)
            wall, own = wall + took, own + mine
        found.append((best[0], best[1], own / wall))

    threads = [threading.Thread(target=run) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flop, size, share = (sum(values) / len(found) for values in zip(*found, strict=True))
    told = f"measured: {workers} thread{'s at once' * (workers > 1)}, best of a GEMM of 768 and of a copy of 16 MiB"
    return Peak(flop, size, told, share)
