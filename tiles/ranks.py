"""One list of tasks for several ranks: each keeps its own tasks, and a message is added where a tile has to travel.

Every rank makes the same list, with the rank of each task (placement.py), and shares it out in the same way: so that
whoever sends and whoever receives agree without a word. Messages have a place in the order of the whole list. A rank
that submits in this order and waits, with its window full, waits for what the others have submitted or can submit.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from nntile_py.errors import ConfigError

from .tasklist import Access, Task, TaskList, Tile

SEND, RECEIVE = "send", "receive"
MOST_BYTES = 2**31 - 1  # of a message: MPI counts in ints


@dataclass(slots=True)
class Message(Task):
    """The newest version of a tile goes to, or comes from, the rank `peer`; kernel: SEND or RECEIVE."""

    peer: int = -1
    tag: int = -1


def messages(tile: Tile, source: int, to: int, tag: int, op: str = "", priority: int = 0) -> dict[int, Message]:
    """Both ends of one, by rank. Raises ConfigError for a tile that no message can hold."""
    if tile.bytes > MOST_BYTES:
        need = f"at most {MOST_BYTES} where it travels between ranks; allowed: smaller tiles"
        raise ConfigError(f"tiles: {tile} has {tile.bytes} bytes, {need} along {', '.join(tile.axes) or 'its axes'}")
    how = {"op": op, "priority": priority, "tag": tag}
    return {
        source: Message(SEND, [Access(tile, "R")], peer=to, **how),  # type: ignore[arg-type]
        to: Message(RECEIVE, [Access(tile, "W")], peer=source, **how),  # type: ignore[arg-type]
    }


def listed(message: Message) -> TaskList:
    """A list of it alone."""
    made = TaskList()
    made.tasks.append(message)
    return made


@dataclass
class Shared:
    """A list as its ranks run it: one list for each.

    needs: the ranks that read what a tile holds before the list begins, in the order of their first use. held: the
    ranks that have the newest version of each tile that outlives the list, after it has run; of one that it only reads
    those are more than before, and not here.
    """

    lists: list[TaskList]
    needs: dict[Tile, list[int]] = field(default_factory=dict)
    held: dict[Hashable, set[int]] = field(default_factory=dict)


class Replicas:
    """Which ranks hold the newest version of each tile that outlives the lists; every rank knows it of all.

    numbers: gives each tile its tag, the same on all ranks.
    """

    def __init__(self, ranks: int, numbers: Iterator[int] | None = None) -> None:
        self.ranks = ranks
        self.tiles: dict[Hashable, Tile] = {}
        self._numbers = itertools.count() if numbers is None else numbers
        self._tags: dict[Hashable, int] = {}
        self._users: dict[Hashable, set[int]] = {}
        self._held: dict[Hashable, set[int]] = {}

    def tag(self, tile: Tile) -> int:
        if tile.key not in self._tags:
            self._tags[tile.key] = next(self._numbers)
        return self._tags[tile.key]

    def share(self, lists: Iterable[TaskList]) -> list[Shared]:
        """Share out placed lists that run in turn."""
        lists = list(lists)
        for task in (task for tasks in lists for task in tasks.tasks):
            for tile in (access.tile for access in task.accesses if access.tile.persistent):
                self._users.setdefault(tile.key, set()).add(task.worker)
                self.tiles.setdefault(tile.key, tile)
        return [_Sharing(tasks, self).shared for tasks in lists]

    def users(self, tile: Tile) -> set[int]:
        """The ranks that have a place for the tile; the first where no list uses it."""
        return self._users.get(tile.key) or {0}

    def holders(self, tile: Tile) -> list[int]:
        """The ranks that have the newest version; the first where nobody has written it."""
        return sorted(self._held.get(tile.key) or {0})

    def written(self, tile: Tile) -> set[int]:
        """Each of these ranks writes it from its own program, the same on all of them."""
        self._held[tile.key] = set(self.users(tile))
        return self._held[tile.key]

    def missing(self, tile: Tile, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """What has to travel, (from, to), so that these ranks hold the newest version; from now on they count as such.

        Nothing, where nobody has written the tile."""
        held = self._held.get(tile.key)
        if not held:
            return []
        source = min(held)
        found = [(source, rank) for rank in ranks if rank not in held]
        held.update(rank for _, rank in found)
        return found

    def ran(self, shared: Shared) -> None:
        """The list was submitted, behind what its `needs` were missing."""
        self._held.update((key, set(ranks)) for key, ranks in shared.held.items())


class _Sharing:
    """Shares out one list."""

    def __init__(self, tasks: TaskList, replicas: Replicas) -> None:
        self._replicas, ranks = replicas, range(replicas.ranks)
        self.shared = Shared([TaskList(tasks.policy, live=tasks.live) for _ in ranks])
        self._held: dict[Tile, set[int]] = {}  # of versions that this list has made
        self._writer: dict[Tile, int] = {}
        self._clears: list[list[Tile]] = [[] for _ in ranks]  # before the next entry of each
        for task in tasks.tasks:
            for tile in task.clears:
                self._held[tile] = set()
                for rank in replicas.users(tile) | {task.worker}:
                    self._clears[rank].append(tile)
            for access in task.accesses:
                if access.mode != "W":
                    self._fetch(access.tile, task)
            task.clears, task.frees = [], []
            self._append(task.worker, task)
            for access in task.accesses:
                if access.mode != "R":
                    self._held[access.tile], self._writer[access.tile] = {task.worker}, task.worker
        self.shared.held = {tile.key: ranks for tile, ranks in self._held.items() if tile.persistent}
        for one in self.shared.lists:
            _free(one.tasks)

    def _fetch(self, tile: Tile, task: Task) -> None:
        """Bring a tile to the rank of a task that reads it."""
        if tile not in self._held:
            if not tile.persistent:
                return  # nothing is there: a reduction begins
            needing = self.shared.needs.setdefault(tile, [])
            if task.worker not in needing:
                needing.append(task.worker)
        elif self._held[tile] and task.worker not in self._held[tile]:
            tag = self._replicas.tag(tile)
            ends = messages(tile, self._writer[tile], task.worker, tag, task.op, task.priority)
            for rank, message in ends.items():
                self._append(rank, message)
            self._held[tile].add(task.worker)

    def _append(self, rank: int, task: Task) -> None:
        task.clears, self._clears[rank] = self._clears[rank], []
        self.shared.lists[rank].tasks.append(task)


def _free(tasks: list[Task]) -> None:
    """Each tile that does not outlive the list goes after its last use on this rank."""
    last = {access.tile: task for task in tasks for access in task.accesses if not access.tile.persistent}
    for tile, task in last.items():
        task.frees.append(tile)


def described(lists: Iterable[TaskList]) -> dict[str, str]:
    """Each task of placed lists, by its name: the same on all ranks, or they cannot work together."""
    return {
        f"task {k} of list {number} ({task.op or task.kernel})": f"for rank {task.worker}: {text}"
        for number, tasks in enumerate(lists)
        for k, (task, text) in enumerate(zip(tasks.tasks, tasks.described(), strict=True))
    }
