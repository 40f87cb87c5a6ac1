"""trace.json: the trace-event format that Perfetto, chrome://tracing and speedscope read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.profiling.trace import Info, Trace

WORKERS, FETCHES, BUSES = 1, 2, 3  # processes of the viewer: a group of rows each
MOST_ARROWS = 200_000  # with more, each task keeps the one from the predecessor that ended last
MOST_SAMPLES = 5_000  # of a counter


def write(trace: Trace, path: Path, parts: Trace | None = None) -> None:
    """Write the whole trace; an event a line. `parts`: the trace by parts, drawn inside of their groups."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        encode = json.JSONEncoder(separators=(",", ":")).encode
        for number, event in enumerate(events(trace, parts)):
            file.write(",\n" if number else "")
            file.write(encode(event))
        file.write("\n]}\n")


def events(trace: Trace, parts: Trace | None = None) -> Iterator[dict[str, Any]]:
    t0, t1 = trace.window
    yield from _rows(trace)
    starts, lengths = _spans(trace, t0)
    rows, submitted = trace.worker.tolist(), ((trace.submit - t0) / 1e3).tolist()
    inner, at = _spans(parts, t0) if parts else ([], []), 0
    for task, (step, which) in enumerate(zip(trace.step.tolist(), trace.info.tolist(), strict=True)):
        info = trace.infos[which]
        args = {"task": task, "step": step, "layer": info.layer, "operator": info.operator, "phase": info.phase}
        args |= _work(info)
        args["submitted_us"] = submitted[task]
        if info.parts:
            args["parts"] = [{"name": part.name, **_work(part)} for part in info.parts]
        name = f"{info.name} step {step}" if step else info.name
        yield {"ph": "X", "name": name, "cat": info.phase or "runtime", "pid": WORKERS, "tid": rows[task],
               "ts": starts[task], "dur": lengths[task], "args": args}  # fmt: skip
        if parts:
            for number, part in enumerate(info.parts):
                start, length = (values[at + number] for values in inner)
                args = {"group": task, "estimated": "share of the group's time", **_work(part)}
                yield {"ph": "X", "name": f"{part.name} (estimated)", "cat": "part", "pid": WORKERS, "tid": rows[task],
                       "ts": start, "dur": length, "args": args}  # fmt: skip
            at += len(info.parts) or 1
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    yield from _arrows(trace, starts, ends, rows)
    yield from _fetches(trace, t0)
    for number, bus in enumerate(trace.buses):
        if bus.transfers:
            name = f"{bus.bytes / 1e6:.1f} MB in {bus.transfers} transfers"
            yield {"ph": "X", "name": name, "cat": "bus", "pid": BUSES, "tid": number, "ts": 0, "dur": (t1 - t0) / 1e3,
                   "args": {"bytes": bus.bytes, "transfers": bus.transfers}}  # fmt: skip
    yield from _counters(trace, t0)


def _spans(trace: Trace, t0: int) -> tuple[list[float], list[float]]:
    """When each task began and how long it took, us."""
    return ((trace.start - t0) / 1e3).tolist(), (np.maximum(trace.end - trace.start, 0) / 1e3).tolist()


def _work(info: Info) -> dict[str, Any]:
    return {"kernel": info.kernel, "tiles": info.tiles, "flop": info.flop, "bytes": info.bytes}


def _rows(trace: Trace) -> Iterator[dict[str, Any]]:
    def named(pid: int, tid: int | None, name: str) -> Iterator[dict[str, Any]]:
        kind = "process" if tid is None else "thread"
        at = {"ph": "M", "pid": pid, "tid": tid or 0}
        yield at | {"name": f"{kind}_name", "args": {"name": name}}
        yield at | {"name": f"{kind}_sort_index", "args": {"sort_index": pid if tid is None else tid}}

    yield from named(WORKERS, None, "workers")
    for number, worker in enumerate(trace.workers):
        yield from named(WORKERS, number, worker.name)
    if remote(trace):
        yield from named(FETCHES, None, "fetching input")
        for number in remote(trace):
            yield from named(FETCHES, number, f"to {trace.workers[number].name}")
    moved = [number for number, bus in enumerate(trace.buses) if bus.transfers]
    if moved:
        yield from named(BUSES, None, "buses, in all")
    for number in moved:
        bus = trace.buses[number]
        yield from named(BUSES, number, f"{trace.nodes[bus.source]} to {trace.nodes[bus.target]}")


def remote(trace: Trace) -> list[int]:
    """Workers whose memory is not the main memory."""
    return [number for number, worker in enumerate(trace.workers) if worker.node]


def _arrows(trace: Trace, starts: list[float], ends: list[float], rows: list[int]) -> Iterator[dict[str, Any]]:
    before = trace.before
    if sum(map(len, before)) > MOST_ARROWS:
        before = [[max(b, key=ends.__getitem__)] if b else b for b in before]
    number = 0
    for task, previous in enumerate(before):
        for other in previous:
            number += 1
            both = {"name": "then", "cat": "dependency", "id": number, "pid": WORKERS}
            # An arrow belongs to the slice that encloses its date: the end of one would fall outside.
            yield both | {"ph": "s", "tid": rows[other], "ts": max(starts[other], ends[other] - 0.001)}
            yield both | {"ph": "f", "bp": "e", "tid": rows[task], "ts": starts[task]}


def _fetches(trace: Trace, t0: int) -> Iterator[dict[str, Any]]:
    tasks = np.flatnonzero(np.isin(trace.worker, remote(trace)) & (trace.fetched > trace.fetch))
    shown = dict.fromkeys(remote(trace), t0)  # until when each row is full: several tasks may be fetched for at once
    for task in tasks[np.argsort(trace.fetch[tasks], kind="stable")].tolist():
        worker, end = int(trace.worker[task]), int(trace.fetched[task])
        start = max(int(trace.fetch[task]), shown[worker])
        if start < end:
            shown[worker] = end
            yield {"ph": "X", "name": f"for {trace.info_of(task).name}", "cat": "fetch", "pid": FETCHES, "tid": worker,
                   "ts": (start - t0) / 1e3, "dur": (end - start) / 1e3, "args": {"task": task}}  # fmt: skip


def in_flight(trace: Trace) -> tuple[Any, Any]:
    """Tasks that were submitted and have not ended: dates in ns, how many from then on."""
    dates = np.concatenate((trace.submit, trace.end))
    change = np.repeat([1, -1], len(trace))
    order = np.argsort(dates, kind="stable")
    return dates[order], np.cumsum(change[order])


def memory(trace: Trace) -> dict[str, tuple[Any, Any]]:
    """Bytes in use by memory node: dates in ns, values from then on."""
    order = np.argsort(trace.end, kind="stable")
    used = {trace.nodes[0]: (trace.end[order], trace.main_memory[order])}
    node_of = np.array([worker.node for worker in trace.workers])[trace.worker]
    for node in np.unique(node_of[node_of > 0]).tolist():
        mine = order[node_of[order] == node]
        used[trace.nodes[node]] = trace.end[mine], trace.memory[mine]
    return used


def sampled(dates: Any, values: Any, most: int = MOST_SAMPLES) -> list[tuple[int, int]]:
    """At most so many points; the greatest value of those that one stands for."""
    if len(dates) <= most:
        return list(zip(dates.tolist(), values.tolist(), strict=True))
    edges = np.linspace(0, len(dates), most, endpoint=False).astype(int)
    return list(zip(dates[edges].tolist(), np.maximum.reduceat(values, edges).tolist(), strict=True))


def _counters(trace: Trace, t0: int) -> Iterator[dict[str, Any]]:
    series = {f"memory of {node}": (*points, "bytes") for node, points in memory(trace).items()}
    series["tasks in flight"] = (*in_flight(trace), "tasks")
    for name, (dates, values, unit) in series.items():
        for date, value in sampled(dates, values):
            yield {"ph": "C", "name": name, "pid": WORKERS, "tid": 0, "ts": (date - t0) / 1e3, "args": {unit: value}}
