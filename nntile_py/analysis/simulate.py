"""Simulate a planned program on several GPUs or nodes: tasks are placed, grouped, then simulated event by event.

Nodes sum gradients over a network (tiles/allreduce.py). If all nodes run the same program on parts of the batch, one
node is simulated in place of all: it receives its own messages.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from nntile_py.tiles import TaskList, Tile
from nntile_py.tiles.allreduce import Network, Piecewise
from nntile_py.tiles.dependencies import TileUse, dependencies
from nntile_py.tiles.placement import Residency, Speed, place
from nntile_py.tiles.rank_tasks import RECEIVE, MessageTask, Replicas
from nntile_py.tiles.task import Task
from nntile_py.tiles.task_groups import GROUP_SECONDS, grouped

Copies = dict[Hashable, set[int]]  # {key of a tile: workers that hold it}
# Events. READY: a task's tiles are on its worker; ENDED: a task has ended. Of a message at the receiving node, LANDED:
# its latency has passed; CAME: the network card has received all bytes; TAKEN: the message thread has handled it.
READY, ENDED, LANDED, CAME, TAKEN = range(5)


@dataclass
class SimulatedList:
    """Result of the simulation of one task list on one node. All times are in seconds.

    Attributes:
        start, end: times since the start of the simulation.
        busy: time of each worker, including the runtime's time for its tasks.
        adding: the part of `busy` for sums over nodes.
        inside: bytes sent from worker to worker within the node.
        between: bytes sent to other nodes, equal to the bytes received.
        messages: messages sent to other nodes.
        cards: time in which each network card sends.
        thread: busy time of the thread that sends and receives messages.
        computed: time from `start` to the end of the last task that is not part of a sum over nodes.
        sending: time from the first message to the end.
        last: the tile whose sum ended last.
    """

    start: float = 0.0
    end: float = 0.0
    busy: list[float] = field(default_factory=list)
    adding: list[float] = field(default_factory=list)
    inside: int = 0
    between: int = 0
    messages: int = 0
    cards: dict[int, float] = field(default_factory=dict)
    thread: float = 0.0
    computed: float = 0.0
    sending: float = 0.0
    last: Tile | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def planned_seconds(lists: Sequence[TaskList], workers: int, speed: Speed) -> float:
    """Return the simulated seconds of a step on one machine.

    A first step, which puts tiles in place, is simulated before and not counted.

    Args:
        lists: the step's resolved task lists, in the order in which they run.
        workers: number of workers.
        speed: rates of a worker.
    """
    simulated = simulate([programs(lists, workers, speed)], workers, speed)
    return simulated[-1].end - simulated[0].start


def programs(lists: Sequence[TaskList], workers: int, speed: Speed, *, group: bool = True) -> list[list[Task]]:
    """Return the tasks of each list as a run executes them: placed on workers, and grouped unless `group` is False."""
    residency: Residency = {}
    tasks_of: dict[int, list[Task]] = {}  # a list that runs several times is placed once
    for tasks in lists:
        if id(tasks) not in tasks_of:
            placed = place(tasks, workers, speed, residency) if workers > 1 else tasks
            if group:
                placed = grouped(placed, speed.flop_s, speed.bytes_s, GROUP_SECONDS, one_worker=workers == 1)
            tasks_of[id(tasks)] = placed.tasks
    return [tasks_of[id(tasks)] for tasks in lists]


def simulate(
    nodes: Sequence[Sequence[Sequence[Task]]], workers: int, speed: Speed, network: Network | None = None
) -> list[SimulatedList]:
    """Simulate a step. A first step, which puts tiles in place, is simulated before and not reported.

    Args:
        nodes: for each node its task lists; or those of one node that stands for all.
        workers: number of workers of a node.
        speed: rates of a worker.
        network: the network between nodes.

    Returns:
        The first node's result for each list.
    """
    copies: list[Copies] = [{} for _ in nodes]
    now, result = 0.0, list[SimulatedList]()
    for _ in range(2):
        result = []
        for lists in zip(*nodes, strict=True):
            result.append(SimulatedList(now, now, [0.0] * workers, [0.0] * workers))
            now = result[-1].end = _Simulation(lists, workers, speed, copies, now, network, result[-1]).run()
    return result


def rank_programs(lists: Sequence[TaskList], ranks: int, speed: Speed, shard: bool = False) -> list[list[list[Task]]]:
    """Return for each rank, and each of `lists`, the tasks and messages of a step after the first.

    shard: as shard_weights of Runtime."""
    residency: Residency = {}
    distinct = {id(tasks): tasks for tasks in lists}
    placed = {number: place(tasks, ranks, speed, residency) for number, tasks in distinct.items()}
    replicas = Replicas(ranks, shard=shard)
    shares = dict(zip(placed, replicas.share(placed.values()), strict=True))
    for tile in (tile for tasks in lists for tile in tasks.initialised if tile.kind != "grad"):
        replicas.written(tile)
    of_ranks: list[list[list[Task]]] = []
    for _ in range(2):
        of_ranks = [[] for _ in range(ranks)]
        for shared in (shares[id(tasks)] for tasks in lists):
            for own in of_ranks:
                own.append([])
            for rank, message in replicas.brought(shared.needs.items()):
                of_ranks[rank][-1].append(message)
            for own, tasks in zip(of_ranks, shared.lists, strict=True):
                own[-1] += [replace(task, worker=0) for task in tasks.tasks]
            replicas.ran(shared)
    return of_ranks


def simulate_list(tasks: Sequence[Task], workers: int, speed: Speed, copies: Copies, start: float = 0.0) -> float:
    """Simulate one node's tasks, all submitted at time `start`. Returns the time when the last task ends.

    A task's tiles are fetched when its predecessors have ended, one tile at a time into each worker. A worker runs the
    first task of the list whose tiles it holds. Lack of memory and the end of a reduction are not simulated.

    Args:
        copies: {key of a tile: workers that hold it}, updated here. A tile without an entry is on all workers.
    """
    return _Simulation([tasks], workers, speed, [copies], start).run()


class _Node:
    """State of a simulated node: tasks, their dependencies, transfers in progress.

    cards: number of network cards. several: False: one node is simulated, and peers of messages are ignored."""

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
        self.receives: dict[tuple[int, int], deque[int]] = {}  # tasks that receive messages, by sender and tag
        for number, task in enumerate(tasks):
            if isinstance(task, MessageTask) and task.kernel == RECEIVE:
                self.receives.setdefault((task.peer if several else 0, task.tag), deque()).append(number)
                self.missing[number] += 1
        self.arrived = [start] * workers  # for each worker, the time when all tiles fetched so far have arrived
        self.waiting: list[list[int]] = [[] for _ in range(workers)]
        self.busy = [False] * workers
        self.thread = start  # time when the message thread is free
        self.out, self.into = [start] * cards, [start] * cards  # times when each card is free to send, to receive


class _Simulation:
    """Simulation of one task list on each node; `simulate_list` says what is simulated.

    A node's message thread sends a message when the message's tile is complete. The network card of the tile's worker
    transmits one message at a time. The card and the message thread of the receiving node also handle one message at a
    time.

    Args:
        lists: the task list of each node.
        copies: for each node, {key of a tile: workers that hold it}, updated here.
        start: time of the start.
        used: result for the first node, which the simulation fills in.
    """

    def __init__(
        self, lists: Sequence[Sequence[Task]], workers: int, speed: Speed, copies: Sequence[Copies], start: float,
        network: Network | None = None, used: SimulatedList | None = None,
    ) -> None:  # fmt: skip
        self.speed, self.start, self.network = speed, start, network or Network(1.0, 0.0, 0.0, workers)
        self.used = used or SimulatedList(start, start, [0.0] * workers, [0.0] * workers)
        cards = -(-workers // self.network.share)
        several = len(lists) > 1
        self.nodes = [_Node(one, workers, held, start, cards, several) for one, held in zip(lists, copies, strict=True)]
        self.events: list[tuple[float, int, int, int]] = []  # date, kind, node, task

    def run(self) -> float:
        """Simulate until no event is left. Returns the time when the last task ends."""
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
                self._receive(what, at, number, now)
            self._next(at, max(self.nodes[at].tasks[number].worker, 0), now)
        if self.used.sending:
            self.used.sending = now - self.used.sending
        return now

    def _begin(self, at: int, number: int, now: float) -> None:
        """Start the transfers of a task whose predecessors have ended."""
        task = self.nodes[at].tasks[number]
        if isinstance(task, MessageTask) and task.kernel == RECEIVE:
            heapq.heappush(self.events, (now, ENDED, at, number))
        else:
            heapq.heappush(self.events, (self._fetched(at, task, now), READY, at, number))

    def _ready(self, at: int, number: int, now: float) -> None:
        """Queue a task whose tiles are on its worker."""
        task = self.nodes[at].tasks[number]
        if isinstance(task, MessageTask):
            self._send(at, number, task, now)
        else:
            heapq.heappush(self.nodes[at].waiting[max(task.worker, 0)], number)

    def _fetched(self, at: int, task: Task, now: float) -> float:
        """Fetch a task's tiles. Returns the time when the task's worker has them all."""
        node, worker, arrived = self.nodes[at], max(task.worker, 0), now
        for access in task.accesses:
            held = node.copies.get(access.tile.key)
            if access.mode not in ("W", "REDUX") and held and worker not in held:
                arrived = max(node.arrived[worker], now) + self.speed.latency + access.tile.bytes / self.speed.link_s
                node.arrived[worker] = arrived
                held.add(worker)
                self.used.inside += access.tile.bytes * (at == 0)
        return arrived

    def _next(self, at: int, worker: int, now: float) -> None:
        """Start the first queued task of a worker that is idle."""
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
            self.used.thread += 2 * self.network.message  # as many messages are received

    def _receive(self, what: int, at: int, number: int, now: float) -> None:
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
