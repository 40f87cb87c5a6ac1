"""Figures of a trace of several ranks: messages between ranks, and the time that workers waited for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nntile_py.profiling.trace import Ints, Trace, TracedMessage, common, intervals, length, merge

# A shorter pause between two tasks counts as overhead of the runtime, a longer pause as idle time.
PAUSE_NS = 10_000


@dataclass(frozen=True, slots=True)
class Wait:
    """An idle worker waited from `start` to `end` (ns) for a message to or from another rank.

    The worker's next task waited for this message, directly or through its predecessors.

    Attributes:
        task: the task that the message delayed: the worker's next task, or a predecessor of it.
    """

    rank: int
    worker: int
    task: int
    start: int
    end: int
    message: TracedMessage

    @property
    def peer(self) -> int:
        return self.message.source if self.rank == self.message.target else self.message.target

    @property
    def late(self) -> int:
        """Return the date (ns) from which the worker waited for the transfer. Before, the tile was not computed yet."""
        return min(max(self.message.way[0], self.start), self.end)


def waits(trace: Trace) -> list[Wait]:
    """Return the waits of all workers for messages, sorted by worker and time."""
    if not trace.messages:
        return []
    lacking, released = _releases(trace)
    starts, result = trace.start.tolist(), list[Wait]()
    for worker, of in enumerate(trace.workers):
        mine = np.flatnonzero(trace.worker == worker)
        mine = mine[np.argsort(trace.start[mine], kind="stable")]
        begin = trace.start[mine]
        for start, end in zip(*(dates.tolist() for dates in idle(trace, worker)), strict=True):
            place = int(np.searchsorted(begin, end))
            task = int(mine[place]) if place < len(mine) else -1
            while task >= 0 and start < end:  # back along each task's last predecessor
                if task in lacking:
                    since, arrived, message = lacking[task]
                    if (a := max(start, since)) < (b := min(end, arrived)):
                        result.append(Wait(of.rank, worker, task, a, b, message))
                    end = min(end, since)
                task = released[task]
                end = min(end, starts[task])
    return sorted(result, key=lambda wait: (wait.worker, wait.start))


def _releases(trace: Trace) -> tuple[dict[int, tuple[int, int, TracedMessage]], list[int]]:
    """Find the tasks that a message delayed, and each task's last predecessor.

    Returns:
        For each delayed task: start and end of the time in which it lacked only the message, and the message. For each
        task of the trace: its predecessor on the same rank that ended last; -1: none.
    """
    last: dict[int, tuple[int, TracedMessage]] = {}
    for message in trace.messages:
        for end in (message.receive, message.send):
            for task in end.after:
                if task not in last or last[task][0] < end.ended:
                    last[task] = end.ended, message
    rank_of, ends, submitted = trace.rank.tolist(), trace.end.tolist(), trace.submit.tolist()
    released = []
    for task, before in enumerate(trace.before):
        own = (other for other in before if rank_of[other] == rank_of[task])
        released.append(max(own, key=ends.__getitem__, default=-1))
    lacking = {}
    for task, (arrived, message) in last.items():
        since = max(submitted[task], ends[released[task]] if released[task] >= 0 else 0)
        if since < arrived:
            lacking[task] = since, arrived, message
    return lacking, released


def idle(trace: Trace, worker: int) -> tuple[Ints, Ints]:
    """Return starts and ends (ns) of the intervals in which a worker had no task, not even one in preparation.

    Pauses between two tasks that are shorter than PAUSE_NS are left out.
    """
    mine, (t0, t1) = trace.worker == worker, trace.window
    handle = np.minimum(trace.pop[mine], trace.fetch[mine]), trace.released[mine]
    parts = [(trace.fetch[mine], trace.fetched[mine]), (trace.start[mine], trace.end[mine]), handle]
    busy = merge(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    start, end = np.append(t0, busy[1]), np.append(busy[0], t1)
    long = end - start >= PAUSE_NS
    long[[0, -1]] = True
    return start[long], np.maximum(end, start)[long]


def summarised(trace: Trace, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of summary.json on messages between ranks.

    Also add to each row of `workers` the key `waiting`: the share of the run in which the worker waited for messages.
    """
    t0, t1 = trace.window
    window, every = max(t1 - t0, 1), waits(trace)
    ranks = [_rank(trace, rank, [w for w in every if w.rank == rank], workers) for rank in range(trace.ranks)]
    links: dict[tuple[int, int], list[TracedMessage]] = {}
    for message in trace.messages:
        links.setdefault((message.source, message.target), []).append(message)
    top: dict[tuple[int, int, str], int] = {}
    for wait in every:
        key = wait.rank, wait.peer, wait.message.receive.name
        top[key] = top.get(key, 0) + wait.end - wait.start
    longest = sorted(top.items(), key=lambda item: -item[1])[:10]
    return {
        "ranks": ranks,
        "messages": [
            {"from": source, "to": target, "messages": len(of), "bytes": sum(m.send.bytes for m in of),
             "share_of_run": length(intervals(m.way for m in of)) / window}
            for (source, target), of in sorted(links.items())
        ],
        "waited_for": [
            {"rank": rank, "for_rank": peer, "tile": tile, "seconds": ns * 1e-9} for (rank, peer, tile), ns in longest
        ],
        "clock": trace.clock,
    }  # fmt: skip


def _rank(trace: Trace, rank: int, own: Sequence[Wait], workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    t0, t1 = trace.window
    window = max(t1 - t0, 1)
    numbers = [number for number, worker in enumerate(trace.workers) if worker.rank == rank]
    for number in numbers:
        workers[number]["waiting"] = sum(w.end - w.start for w in own if w.worker == number) / window
    unready = sum(w.late - w.start for w in own) / window / len(numbers)
    mine = [m for m in trace.messages if rank in (m.source, m.target)]
    sent, received = [m for m in mine if m.source == rank], [m for m in mine if m.target == rank]
    way, of_rank = intervals(m.way for m in mine), trace.rank == rank
    transit, hidden = length(way), common(way, merge(trace.start[of_rank], trace.end[of_rank]))
    return {
        "rank": rank,
        "host": trace.hosts[rank] if trace.hosts else "",
        "workers": len(numbers),
        "tasks": int(of_rank.sum()),
        "working": sum(workers[n]["working"] for n in numbers) / len(numbers),
        "communicating": transit / window,  # share of the run in which a message was in transit
        "hidden": hidden / max(transit, 1),  # share of the transit time in which a worker of the rank computed
        "exposed": (transit - hidden) / window,  # share of the run: a message in transit, no worker computing
        "waiting": sum(workers[n]["waiting"] for n in numbers) / len(numbers),  # share of the workers' time
        "waiting_for_tasks": unready,  # the part of `waiting` before the tile was computed
        "sent_bytes": sum(m.send.bytes for m in sent),
        "sent_messages": len(sent),
        "received_bytes": sum(m.send.bytes for m in received),
        "received_messages": len(received),
    }
