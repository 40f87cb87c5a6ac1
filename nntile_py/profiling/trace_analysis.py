"""Figures of summary.json: shares of the workers' time, operators and their roofline, critical path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.analysis.roofline import Peak
from nntile_py.profiling.message_waits import idle, summarised
from nntile_py.profiling.trace import REDUCTION, TaskInfo, Trace, Worker, accumulating, by_parts, length
from nntile_py.tiles.dependencies import critical_path

# Assumed flop/s and bytes/s of an unknown device, for splitting a fused group's time among its tasks.
ASSUMED = (600e12, 3.5e12)


def summarise(trace: Trace, peaks: Mapping[str, Peak], tiles: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of summary.json without the findings.

    Figures by operator count the tasks of a fused group separately, with estimated times. `estimated` is the estimated
    share of an operator's time.

    Args:
        peaks: peak rates of one worker, by kind of worker.
        tiles: for each axis its size, its tile, the number of tiles.
    """
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
        "flop": float(trace.column("flop").sum()),
        "workers": workers,
        "operators": _operators(parts(trace, peaks), peaks),
        "critical_path": path,
        "transfers": [
            {"from": trace.nodes[b.source], "to": trace.nodes[b.target], "bytes": b.bytes, "transfers": b.transfers}
            for b in trace.buses
            if b.transfers
        ],
        "peaks": {kind: peak.to_dict() for kind, peak in peaks.items()},
        "tiles": dict(tiles or {}),
    } | between


def parts(trace: Trace, peaks: Mapping[str, Peak]) -> Trace:
    """Return the trace with each fused group split into its tasks.

    A task gets a share of the group's time in proportion to max(flop / peak flop/s, bytes / peak bytes/s).
    """

    def floor(info: TaskInfo, worker: Worker) -> float:
        peak = peaks.get(worker.kind)
        flop, size = (peak and peak.flop) or ASSUMED[0], (peak and peak.bytes) or ASSUMED[1]
        return max(info.flop / flop, info.bytes / size)

    return by_parts(trace, floor)


def _worker(trace: Trace, number: int) -> dict[str, Any]:
    """Return a worker's shares of the run. Overlapping times count once: as working, communicating or overhead."""
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
    """Return a row for each operator and phase, the longest first. trace: with fused groups split into their tasks."""
    groups: dict[tuple[str, str], int] = {}
    of_info = np.array([groups.setdefault(info.group, len(groups)) for info in trace.infos], np.int64)
    of_task = of_info[trace.info]
    seconds, flop, size = trace.seconds, trace.column("flop"), trace.column("bytes")
    estimated = np.array([info.estimated for info in trace.infos])[trace.info]
    ideal = np.full(len(trace), np.nan)
    for kind, peak in peaks.items():
        here = trace.on_kind(kind)
        ideal[here] = peak.seconds(flop[here], size[here])
    columns = seconds, flop, size, ideal, seconds * estimated
    sums = [np.bincount(of_task, column, len(groups)) for column in columns]
    counts, total = np.bincount(of_task, minlength=len(groups)), max(float(seconds.sum()), 1e-12)
    ridge = min(((peak.flop or 0) / peak.bytes for peak in peaks.values() if peak.bytes), default=0.0)
    rows: list[dict[str, Any]] = []
    for (operator, phase), k in groups.items():
        if not counts[k]:
            continue
        s, work, moved, least, guessed = (float(of[k]) for of in sums)
        intensity = work / moved if moved else None
        rows.append({
            "operator": operator, "phase": phase, "seconds": s, "share": s / total,
            "estimated": guessed / s if s else 0.0, "tasks": int(counts[k]), "mean_s": s / int(counts[k]),
            "tflop_per_s": work / s / 1e12 if s else 0.0, "gb_per_s": moved / s / 1e9 if s else 0.0,
            "flop_per_byte": intensity,
            "bound_by": None if intensity is None or not ridge else ("flop" if intensity > ridge else "memory"),
            "roofline": least / s if s and np.isfinite(least) and operator != REDUCTION else None,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["seconds"])


def _path(trace: Trace, parts: Trace, window: float) -> dict[str, Any]:
    """Return the figures of the critical path for summary.json.

    Args:
        parts: the trace with fused groups split into their tasks.
        window: seconds of the run.
    """
    path = critical_path(trace.before, trace.seconds)
    seconds, of_part = trace.seconds, parts.seconds
    counts = np.array([len(info.parts) or 1 for info in trace.infos], np.int64)[trace.info]
    first = np.cumsum(counts) - counts
    by: dict[tuple[str, str], list[float]] = {}
    for part in (first[task] + k for task in path for k in range(counts[task])):
        by.setdefault(parts.info_of(part).group, []).append(float(of_part[part]))
    total = float(seconds[path].sum()) if path else 0.0
    rows = [
        {"operator": operator, "phase": phase, "seconds": sum(times), "tasks": len(times)}
        for (operator, phase), times in sorted(by.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "seconds": total, "share_of_run": total / window if window else 0.0, "tasks": len(path),
        "accumulation_share": float(seconds[accumulating(trace, path)].sum()) / total if total else 0.0,
        "operators": rows,
    }  # fmt: skip


def _submission(trace: Trace) -> float:
    """Return the seconds that the main thread spent submitting programs, on the rank where this took longest."""
    totals, rank = [0] * trace.ranks, trace.rank
    for replay in np.unique(trace.replay[trace.replay > 0]):
        tasks = trace.replay == replay
        dates = trace.submit[tasks]
        totals[int(rank[tasks][0])] += int(dates.max() - dates.min())
    return max(totals) * 1e-9
