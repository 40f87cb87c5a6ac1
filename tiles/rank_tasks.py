"""One list of tasks for several ranks: each rank keeps its own tasks, and messages move tiles between ranks.

Every rank builds the same list with the rank of each task (placement.py) and splits it in the same way, so sender and
receiver agree on each message without communication. Each message has a position in the order of the whole list, and
every rank submits in this order. A rank whose window is full therefore waits only for tasks that other ranks have
submitted or can submit: there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from nntile_py.errors import ConfigError

from .task import Access, Task, Tile
from .tasklist import TaskList

SEND, RECEIVE = "send", "receive"
NEAR = 8  # a rank keeps a borrowed weight if its next use is at most 1 / NEAR of the list's tasks away
MOST_BYTES = 2**31 - 1  # of one message, as MPI counts bytes in an int


@dataclass(slots=True)
class MessageTask(Task):
    """A task that sends a tile's newest version to rank `peer` (kernel SEND), or receives it from `peer` (RECEIVE)."""

    peer: int = -1
    tag: int = -1

    @property
    def size(self) -> int:
        """Bytes of the message."""
        return self.accesses[0].tile.bytes


def check_size(tile: Tile, size: int) -> None:
    """Raise ConfigError if `size` bytes of a tile do not fit into one message."""
    if size > MOST_BYTES:
        need = f"at most {MOST_BYTES} where it travels between ranks; allowed: smaller tiles"
        raise ConfigError(f"tiles: {tile} has {size} bytes, {need} along {', '.join(tile.axes) or 'its axes'}")


def messages(tile: Tile, source: int, to: int, tag: int, op: str = "", priority: int = 0) -> dict[int, MessageTask]:
    """Return {rank: its task} for both ends of a message: a send and a receive.

    Raises:
        ConfigError: the tile does not fit into one message.
    """
    check_size(tile, tile.bytes)
    how = {"op": op, "priority": priority, "tag": tag}
    return {
        source: MessageTask(SEND, [Access(tile, "R")], peer=to, **how),  # type: ignore[arg-type]
        to: MessageTask(RECEIVE, [Access(tile, "W")], peer=source, **how),  # type: ignore[arg-type]
    }


def listed(message: MessageTask) -> TaskList:
    """Return a task list that consists of this message only."""
    tasks = TaskList()
    tasks.tasks.append(message)
    return tasks


@dataclass
class RankLists:
    """A task list split over ranks.

    Attributes:
        lists: the list of each rank.
        needs: by tile, the ranks that read contents written before this list, in the order of their first use.
        held: by tile key, the ranks that hold the newest version of each persistent tile that the list writes, after
            the list. Tiles that the list only reads are left out.
    """

    lists: list[TaskList]
    needs: dict[Tile, list[int]] = field(default_factory=dict)
    held: dict[Hashable, set[int]] = field(default_factory=dict)


class Replicas:
    """Records which ranks hold the newest version of each persistent tile. The records on all ranks are equal.

    Args:
        numbers: yields the tags of tiles, the same on all ranks.
        shard: True: a weight stays on the rank that updates the weight, and other ranks borrow the weight for their
            tasks (ZeRO-3: Rajbhandari et al. 2020, section 5.3).
    """

    def __init__(self, ranks: int, numbers: Iterator[int] | None = None, shard: bool = False) -> None:
        self.ranks, self.shard = ranks, shard
        self.tiles: dict[Hashable, Tile] = {}
        self._numbers = itertools.count() if numbers is None else numbers
        self._tags: dict[Hashable, int] = {}
        self._users: dict[Hashable, set[int]] = {}
        self._held: dict[Hashable, set[int]] = {}
        self._owner: dict[Hashable, int] = {}

    def tag(self, tile: Tile) -> int:
        """Return the tile's tag in messages."""
        if tile.key not in self._tags:
            self._tags[tile.key] = next(self._numbers)
        return self._tags[tile.key]

    def share(self, lists: Iterable[TaskList]) -> list[RankLists]:
        """Split task lists over the ranks, and return a RankLists for each list.

        lists: Their tasks have a rank as `worker`. The lists run one after the other.
        """
        lists = list(lists)
        for task in (task for tasks in lists for task in tasks.tasks):
            for access in (access for access in task.accesses if access.tile.persistent):
                tile = access.tile
                self._users.setdefault(tile.key, set()).add(task.worker)
                self.tiles.setdefault(tile.key, tile)
                if self.shard and tile.kind == "param" and access.mode != "R":
                    self._owner[tile.key] = task.worker
        return [_Sharing(tasks, self).shared for tasks in lists]

    def users(self, tile: Tile) -> set[int]:
        """Return the ranks with memory for the tile; rank 0 if no list uses the tile."""
        owner = self.owner(tile)
        return {owner} if owner is not None else self._users.get(tile.key) or {0}

    def owner(self, tile: Tile) -> int | None:
        """Return the rank that lends the tile to all others; None if every user keeps a copy."""
        return self._owner.get(tile.key)

    def holders(self, tile: Tile) -> list[int]:
        """Return the ranks that hold the tile's newest version; rank 0 if no rank has written the tile."""
        return sorted(self._held.get(tile.key) or {0})

    def written(self, tile: Tile) -> set[int]:
        """Record that each user writes the tile in a program of its own, with equal values; return the users."""
        self._held[tile.key] = set(self.users(tile))
        return self._held[tile.key]

    def missing(self, tile: Tile, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """Return the transfers (from, to) that bring the tile's newest version to these ranks, and record them as done.

        Receivers pass the tile on, so the number of holders doubles in each round. The result is empty if no rank has
        written the tile.
        """
        held = self._held.get(tile.key)
        if not held:
            return []
        order = [*sorted(held), *(rank for rank in dict.fromkeys(ranks) if rank not in held)]
        transfers = [(order[k % _doubled(len(held), k)], order[k]) for k in range(len(held), len(order))]
        held.update(order)
        return transfers

    def brought(self, needs: Iterable[tuple[Tile, Iterable[int]]]) -> Iterator[tuple[int, MessageTask]]:
        """Yield (rank, message task) pairs that bring the newest version of each tile to the ranks that need it."""
        for tile, ranks in needs:
            for source, to in self.missing(tile, ranks):
                yield from messages(tile, source, to, self.tag(tile)).items()

    def ran(self, shared: RankLists) -> None:
        """Record the ranks that hold the tiles which a list writes. Call this after the list was submitted."""
        self._held.update((key, set(ranks)) for key, ranks in shared.held.items())


def _doubled(number: int, below: int) -> int:
    """Return the largest number * 2**k that does not exceed `below`."""
    while 2 * number <= below:
        number *= 2
    return number


class _Sharing:
    """Splits one list over the ranks, with messages between them.

    A copy becomes invalid when another rank writes the tile. A rank frees a borrowed weight after a use if the
    rank's next use of the weight is not near (see NEAR).
    """

    def __init__(self, tasks: TaskList, replicas: Replicas) -> None:
        self._replicas, ranks = replicas, range(replicas.ranks)
        self.shared = RankLists([TaskList(tasks.policy, live=tasks.live) for _ in ranks])
        self._held: dict[Tile, set[int]] = {}  # holders of tiles that this list has written or borrows
        self._writer: dict[Tile, int] = {}
        self._last: dict[tuple[int, Tile], Task] = {}  # a rank's last task that uses a tile
        self._read: dict[tuple[int, Tile], int] = {}  # number of a rank's last task that read a borrowed tile
        self._near = len(tasks.tasks) // NEAR
        self._clears: list[list[Tile]] = [[] for _ in ranks]  # tiles to clear before the next task of each rank
        for number, task in enumerate(tasks.tasks):
            for tile in task.clears:
                self._held[tile] = set()
                for rank in replicas.users(tile) | {task.worker}:
                    self._clears[rank].append(tile)
            for access in task.accesses:
                if access.mode != "W":
                    self._fetch(access.tile, task, number)
            task.clears, task.frees = [], []
            self._append(task.worker, task)
            for access in task.accesses:
                if access.mode != "R":
                    self._keep(access.tile, task.worker)
                    self._writer[access.tile] = task.worker
        for tile in [*self._held]:
            if (owner := replicas.owner(tile)) is not None:
                self._keep(tile, owner)
        self.shared.held = {tile.key: ranks for tile, ranks in self._held.items() if tile.persistent}
        for one in self.shared.lists:
            _free(one.tasks)

    def _fetch(self, tile: Tile, task: Task, number: int) -> None:
        """Bring a tile to the rank of a task that reads it."""
        rank, owner = task.worker, self._replicas.owner(tile)
        if tile not in self._held:
            if not tile.persistent:
                return  # a reduction begins: there is no version yet
            if owner is None:
                needing = self.shared.needs.setdefault(tile, [])
                if rank not in needing:
                    needing.append(rank)
                return
            self._held[tile], self._writer[tile] = {owner}, owner
        held = self._held[tile]
        if owner is not None:
            if rank != owner and number - self._read.get((rank, tile), number) > self._near:
                self._keep(tile, *held - {rank})
            self._read[rank, tile] = number
        held = self._held[tile]
        if held and rank not in held:
            ends = messages(tile, self._writer[tile], rank, self._replicas.tag(tile), task.op, task.priority)
            for end, message in ends.items():
                self._append(end, message)
            held.add(rank)

    def _keep(self, tile: Tile, *ranks: int) -> None:
        """Leave the tile to these ranks only; all other holders free it after their last use."""
        for rank in self._held.get(tile, set()) - {*ranks}:
            last = self._last.get((rank, tile))
            if last and tile not in last.frees:
                last.frees.append(tile)
        self._held[tile] = {*ranks}

    def _append(self, rank: int, task: Task) -> None:
        """Append a task to a rank's list, with the tiles that this rank must clear before it."""
        task.clears, self._clears[rank] = self._clears[rank], []
        self.shared.lists[rank].tasks.append(task)
        self._last.update(((rank, access.tile), task) for access in task.accesses)


def _free(tasks: list[Task]) -> None:
    """Free each temporary tile after the rank's last task that uses it."""
    last = {access.tile: task for task in tasks for access in task.accesses if not access.tile.persistent}
    for tile, task in last.items():
        if tile not in task.frees:
            task.frees.append(tile)


def described(lists: Iterable[TaskList]) -> dict[str, str]:
    """Return {name of a task: text about the task} for placed lists. Ranks can run together only with equal texts."""
    return {
        f"task {k} of list {number} ({task.op or task.kernel})": f"for rank {task.worker}: {text}"
        for number, tasks in enumerate(lists)
        for k, (task, text) in enumerate(zip(tasks.tasks, tasks.described(), strict=True))
    }
