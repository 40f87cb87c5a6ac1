"""trace.json in the trace-event format, which Perfetto, chrome://tracing and speedscope read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.profiling.message_waits import Wait, waits
from nntile_py.profiling.trace import TaskInfo, Trace, TracedMessage
from nntile_py.system.folders import replaced

WORKERS, FETCHES, BUSES, MESSAGES = 1, 2, 3, 4  # processes of the viewer: groups of rows
RANKS = 10  # step between the process numbers of two ranks
SENDS, RECEIVES, WAITING = 0, 1, 2  # rows of MESSAGES
MOST_ARROWS = 200_000  # with more, each task keeps only the arrow from its last predecessor
MOST_SAMPLES = 5_000  # largest number of points of a counter's curve


def write(trace: Trace, path: Path, parts: Trace | None = None) -> None:
    """Write trace.json, one event a line.

    Args:
        parts: the same trace with each fused group split into its tasks; the viewer shows them inside the group.
    """
    with replaced(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        encode = json.JSONEncoder(separators=(",", ":")).encode
        for number, event in enumerate(events(trace, parts)):
            file.write(b",\n" if number else b"")
            file.write(encode(event).encode())
        file.write(b"\n]}\n")


def events(trace: Trace, parts: Trace | None = None) -> Iterator[dict[str, Any]]:
    t0, t1 = trace.window
    between = _Between(trace, t0)
    yield from _rows(trace)
    yield from between.rows()
    starts, lengths = _spans(trace, t0)
    rows, submitted = trace.worker.tolist(), ((trace.submit - t0) / 1e3).tolist()
    pids = (WORKERS + RANKS * trace.rank).tolist()
    inner, at = _spans(parts, t0) if parts else ([], []), 0
    for task, (step, which) in enumerate(zip(trace.step.tolist(), trace.info.tolist(), strict=True)):
        info = trace.infos[which]
        args = {"task": task, "step": step, "layer": info.layer, "operator": info.operator, "phase": info.phase}
        args |= _work(info)
        args["submitted_us"] = submitted[task]
        if info.parts:
            args["parts"] = [{"name": part.name, **_work(part)} for part in info.parts]
        name = f"{info.name} step {step}" if step else info.name
        yield {"ph": "X", "name": name, "cat": info.phase or "runtime", "pid": pids[task], "tid": rows[task],
               "ts": starts[task], "dur": lengths[task], "args": args}  # fmt: skip
        if parts:
            for number, part in enumerate(info.parts):
                start, length = (values[at + number] for values in inner)
                args = {"group": task, "estimated": "share of the group's time", **_work(part)}
                yield {"ph": "X", "name": f"{part.name} (estimated)", "cat": "part", "pid": pids[task],
                       "tid": rows[task], "ts": start, "dur": length, "args": args}  # fmt: skip
            at += len(info.parts) or 1
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    places = [*zip(pids, rows, starts, ends, strict=True)]
    yield from _arrows(trace, places)
    yield from between.events(places)
    yield from _fetches(trace, t0)
    for number, bus in enumerate(trace.buses):
        if bus.transfers:
            name = f"{bus.bytes / 1e6:.1f} MB in {bus.transfers} transfers"
            yield {"ph": "X", "name": name, "cat": "bus", "pid": BUSES, "tid": number, "ts": 0, "dur": (t1 - t0) / 1e3,
                   "args": {"bytes": bus.bytes, "transfers": bus.transfers}}  # fmt: skip
    yield from _counters(trace, t0)


def _spans(trace: Trace, t0: int) -> tuple[list[float], list[float]]:
    """Return start and length of each task in us."""
    return ((trace.start - t0) / 1e3).tolist(), (np.maximum(trace.end - trace.start, 0) / 1e3).tolist()


def _work(info: TaskInfo) -> dict[str, Any]:
    return {"kernel": info.kernel, "tiles": info.tiles, "flop": info.flop, "bytes": info.bytes}


def _named(pid: int, tid: int | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the events that name a process of the viewer, or a row of the process."""
    kind = "process" if tid is None else "thread"
    at = {"ph": "M", "pid": pid, "tid": tid or 0}
    yield at | {"name": f"{kind}_name", "args": {"name": name}}
    yield at | {"name": f"{kind}_sort_index", "args": {"sort_index": pid if tid is None else tid}}


def _rows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the events that name the rows of workers, fetches and buses."""
    for rank in range(trace.ranks):
        yield from _named(WORKERS + RANKS * rank, None, f"rank {rank}: workers" if trace.ranks > 1 else "workers")
    for number, worker in enumerate(trace.workers):
        yield from _named(WORKERS + RANKS * worker.rank, number, worker.name)
    if remote(trace):
        yield from _named(FETCHES, None, "fetching input")
        for number in remote(trace):
            yield from _named(FETCHES, number, f"to {trace.workers[number].name}")
    moved = [number for number, bus in enumerate(trace.buses) if bus.transfers]
    if moved:
        yield from _named(BUSES, None, "buses (sums)")
    for number in moved:
        bus = trace.buses[number]
        yield from _named(BUSES, number, f"{trace.nodes[bus.source]} to {trace.nodes[bus.target]}")


def remote(trace: Trace) -> list[int]:
    """Return the numbers of the workers that use a memory of their own, such as a GPU's, instead of main memory."""
    return [number for number, worker in enumerate(trace.workers) if worker.node not in trace.mains]


Slice = tuple[int, int, float, float]  # process, row, start, end (us)


def _last(place: Slice) -> float:
    """Return a date just before a slice's end, as viewers do not attach arrows to the end itself."""
    return max(place[2], place[3] - 0.001)


def _arrow(number: int, name: str, tail: Slice, at: float, head: Slice, to: float) -> Iterator[dict[str, Any]]:
    """Yield an arrow from the date `at` in slice `tail` to the date `to` in slice `head`."""
    both = {"name": name, "cat": "dependency" if name == "then" else name, "id": number}
    yield both | {"ph": "s", "pid": tail[0], "tid": tail[1], "ts": at}
    yield both | {"ph": "f", "bp": "e", "pid": head[0], "tid": head[1], "ts": to}


def _arrows(trace: Trace, places: list[Slice]) -> Iterator[dict[str, Any]]:
    """Yield arrows between dependent tasks of the same rank."""
    rank = trace.rank.tolist()
    before = [[other for other in b if rank[other] == rank[task]] for task, b in enumerate(trace.before)]
    if sum(map(len, before)) > MOST_ARROWS:
        before = [[max(b, key=lambda other: places[other][3])] if b else b for b in before]
    number = 0
    for task, previous in enumerate(before):
        for other in previous:
            number += 1
            tail, head = places[other], places[task]
            yield from _arrow(number, "then", tail, _last(tail), head, head[2])


class _Between:
    """Rows of each rank for its sends, its receives, and the waits of its workers.

    Slices of a row must not overlap. If two messages overlap, the later slice starts at the end of the earlier one."""

    def __init__(self, trace: Trace, t0: int) -> None:
        self._trace, self._t0, self._waits = trace, t0, _merged(waits(trace), trace.ranks)
        self._slices: list[tuple[TracedMessage, Slice, Slice]] = []
        full: dict[tuple[int, int], int] = {}  # end of each row's last slice
        for message in sorted(trace.messages, key=lambda m: m.receive.ended):
            start, end = message.way
            sent, received = (MESSAGES + RANKS * message.source, SENDS), (MESSAGES + RANKS * message.target, RECEIVES)
            shown = max(message.ready, full.get(sent, t0)), max(start, full.get(received, t0))
            full[sent] = full[received] = end
            left, right = [(date - t0) / 1e3 for date in shown], (end - t0) / 1e3
            self._slices.append((message, (*sent, left[0], right), (*received, left[1], right)))

    def rows(self) -> Iterator[dict[str, Any]]:
        for rank in range(self._trace.ranks if self._slices else 0):
            pid = MESSAGES + RANKS * rank
            yield from _named(pid, None, f"rank {rank}: messages")
            yield from _named(pid, SENDS, "sends")
            yield from _named(pid, RECEIVES, "receives")
            yield from _named(pid, WAITING, "workers wait for another rank")

    def events(self, tasks: list[Slice]) -> Iterator[dict[str, Any]]:
        number = max(MOST_ARROWS, len(tasks))  # after the numbers of arrows between tasks
        for message, sent, received in self._slices:
            args = {"tile": message.send.name, "bytes": message.send.bytes, "step": message.send.step}
            start, end = message.way
            args |= {"complete_us": (message.ready - self._t0) / 1e3, "in_transit_us": (end - start) / 1e3}
            for (pid, tid, left, right), name in (
                (sent, f"to rank {message.target}: {message.send.name}"),
                (received, f"from rank {message.source}: {message.send.name}"),
            ):
                yield {"ph": "X", "name": name, "cat": "message", "pid": pid, "tid": tid, "ts": left,
                       "dur": right - left, "args": args}  # fmt: skip
            yield from _arrow(number := number + 1, "message", sent, sent[2], received, _last(received))
            sources = [(tasks[task], sent) for task in message.send.before]
            for tail, head in sources + [(received, tasks[task]) for task in message.receive.after]:
                if _last(tail) <= head[2]:  # otherwise the ranks' clocks are too inexact for an arrow
                    yield from _arrow(number := number + 1, "then", tail, _last(tail), head, head[2])
        for rank, of in enumerate(self._waits):
            for start, end, wait in of:
                yield {"ph": "X", "name": f"for rank {wait.peer}: {wait.message.send.name}", "cat": "wait",
                       "pid": MESSAGES + RANKS * rank, "tid": WAITING, "ts": (start - self._t0) / 1e3,
                       "dur": (end - start) / 1e3, "args": {"task": wait.task}}  # fmt: skip


def _merged(every: list[Wait], ranks: int) -> list[list[tuple[int, int, Wait]]]:
    """Return for each rank its workers' waits. Overlapping waits are joined: (start, end, the wait that ends last)."""
    merged: list[list[tuple[int, int, Wait]]] = [[] for _ in range(ranks)]
    for wait in sorted(every, key=lambda w: w.start):
        own = merged[wait.rank]
        if own and wait.start <= own[-1][1]:
            start, end, last = own[-1]
            own[-1] = start, max(end, wait.end), wait if wait.end > end else last
        else:
            own.append((wait.start, wait.end, wait))
    return merged


def _fetches(trace: Trace, t0: int) -> Iterator[dict[str, Any]]:
    tasks = np.flatnonzero(np.isin(trace.worker, remote(trace)) & (trace.fetched > trace.fetch))
    shown = dict.fromkeys(remote(trace), t0)  # end of each row's last slice: fetches may overlap
    for task in tasks[np.argsort(trace.fetch[tasks], kind="stable")].tolist():
        worker, end = int(trace.worker[task]), int(trace.fetched[task])
        start = max(int(trace.fetch[task]), shown[worker])
        if start < end:
            shown[worker] = end
            yield {"ph": "X", "name": f"for {trace.info_of(task).name}", "cat": "fetch", "pid": FETCHES, "tid": worker,
                   "ts": (start - t0) / 1e3, "dur": (end - start) / 1e3, "args": {"task": task}}  # fmt: skip


def in_flight(trace: Trace) -> tuple[Any, Any]:
    """Return how many tasks were submitted and had not ended: dates of changes (ns), numbers after the changes."""
    dates = np.concatenate((trace.submit, trace.end))
    change = np.repeat([1, -1], len(trace))
    order = np.argsort(dates, kind="stable")
    return dates[order], np.cumsum(change[order])


def memory(trace: Trace) -> dict[str, tuple[Any, Any]]:
    """Return the bytes in use on each memory node: dates of changes (ns), bytes after the changes."""
    order, used = np.argsort(trace.end, kind="stable"), {}
    for rank, main in enumerate(trace.mains):
        own = order[trace.rank[order] == rank]
        used[trace.nodes[main]] = trace.end[own], trace.main_memory[own]
    node_of = np.array([worker.node for worker in trace.workers])[trace.worker]
    for node in np.unique(node_of[~np.isin(node_of, trace.mains)]).tolist():
        mine = order[node_of[order] == node]
        used[trace.nodes[node]] = trace.end[mine], trace.memory[mine]
    return used


def sampled(dates: Any, values: Any, most: int = MOST_SAMPLES) -> list[tuple[int, int]]:
    """Return at most `most` points (date, value); a point has the largest value of the points that it replaces."""
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
