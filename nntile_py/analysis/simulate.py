"""How long a planned program would take on several GPUs, without one: placed, grouped, then played event by event."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from nntile_py.tiles import TaskList
from nntile_py.tiles.batching import GROUP_SECONDS, grouped
from nntile_py.tiles.eviction import mark_evictions, room_in_turn
from nntile_py.tiles.order import Use, dependencies
from nntile_py.tiles.placement import Residency, Speed, place
from nntile_py.tiles.tasklist import Task


def planned_seconds(lists: Sequence[TaskList], workers: int, speed: Speed) -> float:
    """Seconds of a step, whose resolved `lists` run one after the other, after a first step that put tiles in place."""
    residency: Residency = {}
    made: dict[int, list[Task]] = {}  # a list that is run several times is placed once
    for one in lists:
        if id(one) not in made:
            apart = place(one, workers, speed, residency) if workers > 1 else one
            alone = workers == 1
            made[id(one)] = grouped(apart, speed.flop_s, speed.bytes_s, GROUP_SECONDS, alone=alone).tasks
    copies: dict[Hashable, set[int]] = {}
    first = 0.0
    for tasks in (made[id(one)] for one in lists):
        first = play(tasks, workers, speed, copies, first)
    end = first
    for tasks in (made[id(one)] for one in lists):
        end = play(tasks, workers, speed, copies, end)
    return end - first


def evicted_bytes(lists: Sequence[TaskList], memory: float) -> int:
    """Bytes that a step on one worker with so much memory sends to main memory, and gets back."""
    room = room_in_turn(lists, memory)
    if not room:
        return 0
    mark_evictions(list({id(one): one for one in lists}.values()), room)
    return sum(tile.bytes for one in lists for task in one.tasks for tile in task.evicts)


def play(
    tasks: Sequence[Task], workers: int, speed: Speed, copies: dict[Hashable, set[int]], start: float = 0.0
) -> float:
    """When the last of the tasks, each with its worker (or all on one), has ended, if all were submitted at `start`.

    A task's tiles travel as soon as its predecessors have ended, one after the other into a worker. A worker takes the
    first in the list of those whose tiles are there. copies: the workers that hold each tile, brought up to date; a
    tile that is not in it is wherever it is wanted. Not played: memory that runs short, and what ends a reduction.
    """
    before = dependencies([Use(a.tile.key, a.mode) for a in task.accesses] for task in tasks)
    after: list[list[int]] = [[] for _ in tasks]
    missing = [len(previous) for previous in before]
    for number, previous in enumerate(before):
        for earlier in previous:
            after[earlier].append(number)
    arrived = [start] * workers  # when what is on its way to each worker is there
    waiting: list[list[int]] = [[] for _ in range(workers)]
    busy = [False] * workers
    events: list[tuple[float, bool, int]] = []  # when, whether it is a task's end, the task

    def fetch(number: int, now: float) -> None:
        worker, there = max(tasks[number].worker, 0), now
        for access in tasks[number].accesses:
            held = copies.get(access.tile.key)
            if access.mode not in ("W", "REDUX") and held and worker not in held:
                there = max(arrived[worker], now) + speed.latency + access.tile.bytes / speed.link_s
                arrived[worker] = there
                held.add(worker)
        heapq.heappush(events, (there, False, number))

    for number, count in enumerate(missing):
        if not count:
            fetch(number, start)
    end = start
    while events:
        end, ended, number = heapq.heappop(events)
        worker = max(tasks[number].worker, 0)
        if ended:
            busy[worker] = False
            for access in tasks[number].accesses:
                if access.mode not in ("R", "REDUX"):
                    copies[access.tile.key] = {worker}
            for later in after[number]:
                missing[later] -= 1
                if not missing[later]:
                    fetch(later, end)
        else:
            heapq.heappush(waiting[worker], number)
        if waiting[worker] and not busy[worker]:
            busy[worker], chosen = True, heapq.heappop(waiting[worker])
            parts = tasks[chosen].parts or [tasks[chosen]]
            seconds = sum(map(speed.seconds, parts)) + speed.launch * len(parts)
            heapq.heappush(events, (end + seconds + speed.overhead, True, chosen))
    return end
