"""How long a planned program would take on several GPUs, without one: placed, grouped, then played event by event.

On several nodes, too, whose sums meet over a network (tiles/allreduce.py). Nodes that run the same program, each with
its part of the batch, do the same at the same time: one is played, and what comes to it is what it sends itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from nntile_py.tiles import TaskList, Tile
from nntile_py.tiles.allreduce import Network, Piecewise
from nntile_py.tiles.dependencies import TileUse, dependencies
from nntile_py.tiles.eviction import mark_evictions, room_in_turn
from nntile_py.tiles.placement import Residency, Speed, place
from nntile_py.tiles.rank_tasks import RECEIVE, MessageTask, Replicas
from nntile_py.tiles.task_groups import GROUP_SECONDS, grouped
from nntile_py.tiles.tasklist import Task

Copies = dict[Hashable, set[int]]  # the workers that hold each tile
READY, ENDED, LANDED, CAME, TAKEN = range(5)  # a task's tiles are there; its end; a message, on its way into a node


@dataclass
class Played:
    """What became of a node in a step: seconds, bytes. Of a list, where `play` fills it in."""

    start: float = 0.0
    end: float = 0.0
    busy: list[float] = field(default_factory=list)  # of each worker, with the runtime's time for its tasks
    adding: list[float] = field(default_factory=list)  # the part of it for what comes from other nodes
    inside: int = 0  # bytes between workers of the node
    between: int = 0  # to other nodes; as many come from them
    messages: int = 0  # to them
    cards: dict[int, float] = field(default_factory=dict)  # of each network card: seconds that it sends
    thread: float = 0.0  # of the one that sends and receives
    computed: float = 0.0  # from the start to the end of the last task that is no part of a sum over nodes
    sending: float = 0.0  # from the first message to the end
    last: Tile | None = None  # whose sum ended last

    @property
    def seconds(self) -> float:
        return self.end - self.start


def planned_seconds(lists: Sequence[TaskList], workers: int, speed: Speed) -> float:
    """Seconds of a step, whose resolved `lists` run one after the other, after a first step that put tiles in place."""
    made = played([programs(lists, workers, speed)], workers, speed)
    return made[-1].end - made[0].start


def programs(lists: Sequence[TaskList], workers: int, speed: Speed, *, group: bool = True) -> list[list[Task]]:
    """What the workers run, list by list: placed, and in groups, as a run would do it."""
    residency: Residency = {}
    made: dict[int, list[Task]] = {}  # a list that is run several times is placed once
    for one in lists:
        if id(one) not in made:
            apart = place(one, workers, speed, residency) if workers > 1 else one
            alone = workers == 1
            if group:
                apart = grouped(apart, speed.flop_s, speed.bytes_s, GROUP_SECONDS, alone=alone)
            made[id(one)] = apart.tasks
    return [made[id(one)] for one in lists]


def played(
    nodes: Sequence[Sequence[Sequence[Task]]], workers: int, speed: Speed, network: Network | None = None
) -> list[Played]:
    """What becomes of each list of a step on the first of these nodes, after a first step that put tiles in place.

    nodes: the lists of each, of all nodes that there are, or of one that stands for all.
    """
    copies: list[Copies] = [{} for _ in nodes]
    now, result = 0.0, list[Played]()
    for _ in range(2):
        result = []
        for lists in zip(*nodes, strict=True):
            result.append(Played(now, now, [0.0] * workers, [0.0] * workers))
            now = result[-1].end = _Play(lists, workers, speed, copies, now, network, result[-1]).run()
    return result


def of_ranks(lists: Sequence[TaskList], ranks: int, speed: Speed, shard: bool = False) -> list[list[list[Task]]]:
    """What each rank runs of a step's resolved lists, in the second step: its tasks and messages, list by list."""
    residency: Residency = {}
    placed = {id(one): place(one, ranks, speed, residency) for one in {id(one): one for one in lists}.values()}
    replicas = Replicas(ranks, shard=shard)
    shares = dict(zip(placed, replicas.share(placed.values()), strict=True))
    for tile in (tile for one in lists for tile in one.initialised if tile.kind != "grad"):
        replicas.written(tile)
    made: list[list[list[Task]]] = []
    for _ in range(2):
        made = [[] for _ in range(ranks)]
        for shared in (shares[id(one)] for one in lists):
            for own in made:
                own.append([])
            for rank, message in replicas.brought(shared.needs.items()):
                made[rank][-1].append(message)
            for own, one in zip(made, shared.lists, strict=True):
                own[-1] += [replace(task, worker=0) for task in one.tasks]
            replicas.ran(shared)
    return made


def evicted_bytes(lists: Sequence[TaskList], memory: float) -> int:
    """Bytes that a step on one worker with so much memory sends to main memory, and gets back."""
    room = room_in_turn(lists, memory)
    if not room:
        return 0
    mark_evictions(list({id(one): one for one in lists}.values()), room)
    return sum(tile.bytes for one in lists for task in one.tasks for tile in task.evicts)


def play(tasks: Sequence[Task], workers: int, speed: Speed, copies: Copies, start: float = 0.0) -> float:
    """When the last of the tasks, each with its worker (or all on one), has ended, if all were submitted at `start`.

    A task's tiles travel as soon as its predecessors have ended, one after the other into a worker. A worker takes the
    first in the list of those whose tiles are there. copies: the workers that hold each tile, brought up to date; a
    tile that is not in it is wherever it is wanted. Not played: memory that runs short, and what ends a reduction.
    """
    return _Play([tasks], workers, speed, [copies], start).run()


class _Node:
    """What one has to do, and what is under way there."""

    def __init__(
        self, tasks: Sequence[Task], workers: int, copies: Copies, start: float, cards: int, several: bool
    ) -> None:
        self.tasks, self.copies = tasks, copies
        before = dependencies([TileUse(a.tile.key, a.mode) for a in task.accesses] for task in tasks)
        self.after: list[list[int]] = [[] for _ in tasks]
        self.missing = [len(previous) for previous in before]
        for number, previous in enumerate(before):
            for earlier in previous:
                self.after[earlier].append(number)
        self.receives: dict[tuple[int, int], deque[int]] = {}  # the tasks that take messages, by source and tag
        for number, task in enumerate(tasks):
            if isinstance(task, MessageTask) and task.kernel == RECEIVE:
                self.receives.setdefault((task.peer if several else 0, task.tag), deque()).append(number)
                self.missing[number] += 1
        self.arrived = [start] * workers  # when what is on its way to each worker is there
        self.waiting: list[list[int]] = [[] for _ in range(workers)]
        self.busy = [False] * workers
        self.thread = start  # when the one that sends and receives is free
        self.out, self.into = [start] * cards, [start] * cards  # when all has gone through each card


class _Play:
    """The lists of nodes from `start` on; see `play`. used: is told what becomes of the first.

    A message is sent by its node's thread when its tile is there, goes through the card of its worker, one after the
    other, and so it comes in.
    """

    def __init__(
        self, lists: Sequence[Sequence[Task]], workers: int, speed: Speed, copies: Sequence[Copies], start: float,
        network: Network | None = None, used: Played | None = None,
    ) -> None:  # fmt: skip
        self.speed, self.start, self.network = speed, start, network or Network(1.0, 0.0, 0.0, workers)
        self.used = used or Played(start, start, [0.0] * workers, [0.0] * workers)
        cards = -(-workers // self.network.share)
        several = len(lists) > 1
        self.nodes = [_Node(one, workers, held, start, cards, several) for one, held in zip(lists, copies, strict=True)]
        self.events: list[tuple[float, int, int, int]] = []  # when, what, the node, the task

    def run(self) -> float:
        """Returns when the last has ended."""
        for at, node in enumerate(self.nodes):
            for number, count in enumerate(node.missing):
                if not count:
                    self._begin(at, number, self.start)
        now = self.start
        while self.events:
            now, what, at, number = heapq.heappop(self.events)
            if what == READY:
                self._ready(at, number, now)
            elif what == ENDED:
                self._end(at, number, now)
            else:
                self._on_its_way(what, at, number, now)
            self._next(at, max(self.nodes[at].tasks[number].worker, 0), now)
        if self.used.sending:
            self.used.sending = now - self.used.sending
        return now

    def _begin(self, at: int, number: int, now: float) -> None:
        """What the task waits for has been done."""
        task = self.nodes[at].tasks[number]
        if isinstance(task, MessageTask) and task.kernel == RECEIVE:
            heapq.heappush(self.events, (now, ENDED, at, number))
        else:
            heapq.heappush(self.events, (self._fetched(at, task, now), READY, at, number))

    def _ready(self, at: int, number: int, now: float) -> None:
        """Its tiles are there."""
        task = self.nodes[at].tasks[number]
        if isinstance(task, MessageTask):
            self._send(at, number, task, now)
        else:
            heapq.heappush(self.nodes[at].waiting[max(task.worker, 0)], number)

    def _fetched(self, at: int, task: Task, now: float) -> float:
        """When its tiles are there."""
        node, worker, there = self.nodes[at], max(task.worker, 0), now
        for access in task.accesses:
            held = node.copies.get(access.tile.key)
            if access.mode not in ("W", "REDUX") and held and worker not in held:
                there = max(node.arrived[worker], now) + self.speed.latency + access.tile.bytes / self.speed.link_s
                node.arrived[worker] = there
                held.add(worker)
                self.used.inside += access.tile.bytes * (at == 0)
        return there

    def _next(self, at: int, worker: int, now: float) -> None:
        """A worker that has nothing to do begins the first of the tasks whose tiles are there."""
        node = self.nodes[at]
        if not node.waiting[worker] or node.busy[worker]:
            return
        node.busy[worker], chosen = True, heapq.heappop(node.waiting[worker])
        parts = node.tasks[chosen].parts or [node.tasks[chosen]]
        seconds = sum(map(self.speed.seconds, parts)) + self.speed.launch * len(parts)
        heapq.heappush(self.events, (now + seconds + self.speed.overhead, ENDED, at, chosen))
        if at == 0:
            self.used.busy[worker] += seconds + self.speed.overhead
            if isinstance(node.tasks[chosen], Piecewise):
                self.used.adding[worker] += seconds + self.speed.overhead

    def _end(self, at: int, number: int, now: float) -> None:
        node, task = self.nodes[at], self.nodes[at].tasks[number]
        worker = max(task.worker, 0)
        if not isinstance(task, MessageTask):
            node.busy[worker] = False
        for access in task.accesses:
            if access.mode not in ("R", "REDUX"):
                node.copies[access.tile.key] = {worker}
        for later in node.after[number]:
            self._one_less(at, later, now)
        if at == 0 and isinstance(task, MessageTask | Piecewise):
            self.used.last = next(access.tile for access in task.accesses)
        elif at == 0:
            self.used.computed = now - self.start

    def _one_less(self, at: int, number: int, now: float) -> None:
        missing = self.nodes[at].missing
        missing[number] -= 1
        if not missing[number]:
            self._begin(at, number, now)

    # -- messages

    def _send(self, at: int, number: int, task: MessageTask, now: float) -> None:
        node, card = self.nodes[at], max(task.worker, 0) // self.network.share
        node.thread = max(node.thread, now) + self.network.message
        leaves, seconds = max(node.thread, node.out[card]), task.size / self.network.bytes_s
        node.out[card] = leaves + seconds
        heapq.heappush(self.events, (node.out[card], ENDED, at, number))
        to = task.peer if len(self.nodes) > 1 else 0
        landed = leaves + self.network.latency
        taken = self.nodes[to].receives[at, task.tag].popleft()
        heapq.heappush(self.events, (landed, LANDED, to, taken))
        if at == 0:
            self.used.sending = self.used.sending or now
            self.used.between += task.size
            self.used.messages += 1
            self.used.cards[card] = self.used.cards.get(card, 0.0) + seconds
            self.used.thread += 2 * self.network.message  # one of another comes

    def _on_its_way(self, what: int, at: int, number: int, now: float) -> None:
        node, task = self.nodes[at], self.nodes[at].tasks[number]
        assert isinstance(task, MessageTask)
        if what == LANDED:
            card = max(task.worker, 0) // self.network.share
            node.into[card] = max(node.into[card], now) + task.size / self.network.bytes_s
            heapq.heappush(self.events, (node.into[card], CAME, at, number))
        elif what == CAME:
            node.thread = max(node.thread, now) + self.network.message
            heapq.heappush(self.events, (node.thread, TAKEN, at, number))
        else:
            self._one_less(at, number, now)
