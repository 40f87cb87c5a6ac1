"""Merge the traces of several ranks into one trace, on rank 0's clock, with the messages between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from nntile_py.profiling.trace import Bus, Ints, MessageEnd, TaskInfo, Trace, TracedMessage, Worker
from nntile_py.tiles.dependencies import dependencies

DATES = ("submit", "pop", "fetch", "fetched", "start", "end", "released")


def with_ends(
    trace: Trace, passages: Sequence[tuple[int, int, TaskInfo, MessageEnd]], replay: Ints, index: Ints
) -> None:
    """Add the sends and receives of one rank to its trace, with their dependencies.

    Args:
        passages: for each send or receive: number of its program's submission, position in the task list, its task,
            the send or receive.
        replay, index: for each task: number of its program's submission, position in the task list.
    """
    if not passages:
        return
    tasks = enumerate(zip(replay.tolist(), index.tolist(), strict=True))
    order: list[tuple[float, int, bool, int]] = [(r or np.inf, at, False, task) for task, (r, at) in tasks]
    order += [(r, at, True, number) for number, (r, at, _, _) in enumerate(passages)]
    order.sort()
    uses = [passages[k][2].uses if message else trace.info_of(k).uses for *_, message, k in order]
    before: list[list[int]] = [[] for _ in range(len(trace))]
    own: list[dict[str, list[int]]] = [{"before": [], "after": [], "relays": []} for _ in passages]
    for (*_, message, k), earlier in zip(order, dependencies(uses), strict=True):
        for *_, of_message, other in (order[place] for place in earlier):
            if message:
                own[k]["relays" if of_message else "before"].append(other)
            elif of_message:
                own[other]["after"].append(k)
            else:
                before[k].append(other)
    of_ends: list[dict[str, Any]] = [{name: tuple(of) for name, of in one.items()} for one in own]
    ends = [replace(end, **of) for (*_, end), of in zip(passages, of_ends, strict=True)]
    # StarPU reports the end of a message after it has released the tasks that wait for it.
    starts = trace.start.tolist()
    trace.ends = [replace(e, ended=min([e.ended, *(starts[task] for task in e.after)])) for e in ends]
    trace._before = before


class RankClock:
    """Converts dates of a rank to rank 0's clock. The drift between the two clocks is assumed to be constant.

    Args:
        start, end: clock readings at the start and end of a run, in ns: rank 0's date, the rank's date at the same
            moment, half of the round trip of the comparison.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int]) -> None:
        self._at, self._offset = int(start[1]), int(start[1]) - int(start[0])
        self.drift = (int(end[1]) - int(end[0]) - self._offset) / max(int(end[1]) - self._at, 1)
        self.error = max(int(start[2]), int(end[2]))
        self.offset = self._offset

    def dates(self, theirs: Any) -> Any:
        drifted = np.rint((np.asarray(theirs) - self._at) * self.drift).astype(np.int64)
        return theirs - self._offset - drifted

    def end(self, end: MessageEnd) -> MessageEnd:
        return replace(end, posted=int(self.dates(end.posted)), ended=int(self.dates(end.ended)))


def merge_traces(traces: Sequence[Trace], hosts: Sequence[str], start: Any, end: Any) -> Trace:
    """Return the merged trace of all ranks.

    Args:
        hosts: name of each rank's machine.
        start, end: results of Ranks.clocks before and after the run.
    """
    clocks = [RankClock(*readings) for readings in zip(start, end, strict=True)]
    ends = [[clock.end(e) for e in trace.ends] for trace, clock in zip(traces, clocks, strict=True)]
    dated = [
        replace(trace, **{name: clock.dates(getattr(trace, name)) for name in DATES}, _before=trace.before)
        for trace, clock in zip(traces, clocks, strict=True)
    ]
    pairs = [*_pairs(ends)]
    place, across = _order(dated, ends, pairs)
    merged = _joined(dated, hosts, place)
    ends = [
        [replace(e, before=tuple(at[t] for t in e.before), after=tuple(at[t] for t in e.after)) for e in of]
        for of, at in zip(ends, place, strict=True)
    ]
    ready = _ready(ends, pairs, merged)
    merged.messages = [
        TracedMessage(send[0], receive[0], sent, received, ready[send], _open(merged, received))
        for send, receive in pairs
        for sent, received in [(ends[send[0]][send[1]], ends[receive[0]][receive[1]])]
    ]
    merged._before = [[] for _ in range(len(merged))]
    for rank, trace in enumerate(dated):
        for task, before in enumerate(trace.before):
            others = {place[rank][other] for other in before} | {place[r][t] for r, t in across.get((rank, task), ())}
            merged._before[place[rank][task]] = sorted(others)
    merged.clock = {
        "error_s": max(clock.error for clock in clocks) * 1e-9,
        "offsets_s": [clock.offset * 1e-9 for clock in clocks],
        "drift": [clock.drift for clock in clocks],
    }
    return merged


Which = tuple[int, int]  # (rank, number of its task), or (rank, number of its send or receive)


def _pairs(ends: Sequence[Sequence[MessageEnd]]) -> Iterable[tuple[Which, Which]]:
    """Yield each send with its receive. Messages of one tag between two ranks arrive in the order of sending."""
    waiting: dict[tuple[int, int, int], deque[int]] = {}
    for rank, of in enumerate(ends):
        for number, end in enumerate(of):
            if not end.sends:
                waiting.setdefault((end.peer, rank, end.tag), deque()).append(number)
    for rank, of in enumerate(ends):
        for number, end in enumerate(of):
            if end.sends:
                yield (rank, number), (end.peer, waiting[rank, end.peer, end.tag].popleft())


def _order(
    traces: Sequence[Trace], ends: Sequence[Sequence[MessageEnd]], pairs: Sequence[tuple[Which, Which]]
) -> tuple[list[list[int]], dict[Which, set[Which]]]:
    """Number the tasks of all ranks so that each task comes after its predecessors on all ranks.

    Returns:
        For each rank the new number of each task; for each task its predecessors on other ranks.
    """
    senders = {receive: send for send, receive in pairs}

    def makers(rank: int, number: int) -> set[Which]:
        """Return the tasks, on all ranks, that a send or receive waits for."""
        end = ends[rank][number]
        tasks = {(rank, task) for task in end.before}
        if not end.sends:
            return tasks | makers(*senders[rank, number])
        for other in end.relays:
            if not ends[rank][other].sends:  # the tile was received before it is sent on
                tasks |= makers(rank, other)
        return tasks

    across: dict[Which, set[Which]] = {}
    for rank, of in enumerate(ends):
        for number, end in enumerate(of):
            for task in end.after:
                across.setdefault((rank, task), set()).update(makers(rank, number))
    place: list[list[int]] = [[] for _ in traces]
    total, count = sum(map(len, traces)), 0
    while count < total:
        before = count
        for rank, trace in enumerate(traces):
            while (task := len(place[rank])) < len(trace) and all(
                r == rank or t < len(place[r]) for r, t in across.get((rank, task), ())
            ):
                place[rank].append(count)
                count += 1
        assert count > before, "ranks wait for each other in a circle"
    return place, across


def _joined(traces: Sequence[Trace], hosts: Sequence[str], place: Sequence[Sequence[int]]) -> Trace:
    """Return one trace with the tasks of all ranks; names of workers and nodes begin with their rank.

    Args:
        place: for each rank the new number of each task.
    """
    number = np.argsort(np.concatenate([np.asarray(p, np.int64) for p in place]), kind="stable")
    infos: list[TaskInfo] = []
    workers: list[Worker] = []
    buses: list[Bus] = []
    nodes: list[str] = []
    mains: list[int] = []
    parts: dict[str, list[Ints]] = {f.name: [] for f in fields(Trace) if f.type == "Ints"}
    replays = 0
    for rank, trace in enumerate(traces):
        shift = {"info": len(infos), "worker": len(workers), "replay": replays}
        for name, of in parts.items():
            column = getattr(trace, name) + shift.get(name, 0)
            of.append(np.where(trace.replay == 0, 0, column) if name == "replay" else column)
        replays = max(replays, int(parts["replay"][-1].max(initial=0)))
        first = len(nodes)
        workers += [replace(w, name=f"rank {rank} {w.name}", node=first + w.node, rank=rank) for w in trace.workers]
        mains.append(first)
        buses += [replace(bus, source=first + bus.source, target=first + bus.target) for bus in trace.buses]
        nodes += [f"rank {rank} {name}" for name in trace.nodes]
        infos += trace.infos
    columns: dict[str, Any] = {name: np.concatenate(of)[number] for name, of in parts.items()}
    return Trace(
        infos=infos, workers=workers, nodes=nodes, buses=buses, mains=mains, hosts=[*hosts], light=traces[0].light,
        **columns,
    )  # fmt: skip


def _ready(
    ends: Sequence[Sequence[MessageEnd]], pairs: Sequence[tuple[Which, Which]], trace: Trace
) -> dict[Which, int]:
    """Return for each send the date at which its tile was complete."""
    arrived = {receive: ends[receive[0]][receive[1]].ended for _, receive in pairs}
    ready = {}
    for send, (target, number) in pairs:
        end = ends[send[0]][send[1]]
        dates = [end.posted, *(int(trace.end[task]) for task in end.before)]
        dates += [arrived[send[0], other] for other in end.relays if (send[0], other) in arrived]
        ready[send] = min(max(dates), end.ended, ends[target][number].ended)
    return ready


def _open(trace: Trace, receive: MessageEnd) -> int:
    """Return the date from which the receiver's tile could be overwritten: all earlier tasks that use it had ended."""
    return max([receive.posted, *(int(trace.end[task]) for task in receive.before)])
