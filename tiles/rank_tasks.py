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
NEAR = 8  # a borrowed weight is kept for a use that comes within this part of a list
MOST_BYTES = 2**31 - 1  # of a message: MPI counts in ints


@dataclass(slots=True)
class Message(Task):
    """The newest version of a tile goes to, or comes from, the rank `peer`; kernel: SEND or RECEIVE."""

    peer: int = -1
    tag: int = -1

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return self.accesses[0].tile.bytes


def check_size(tile: Tile, size: int) -> None:
    """ConfigError, if no message can hold so many bytes of a tile."""
    if size > MOST_BYTES:
        need = f"at most {MOST_BYTES} where it travels between ranks; allowed: smaller tiles"
        raise ConfigError(f"tiles: {tile} has {size} bytes, {need} along {', '.join(tile.axes) or 'its axes'}")


def messages(tile: Tile, source: int, to: int, tag: int, op: str = "", priority: int = 0) -> dict[int, Message]:
    """Both ends of one, by rank. Raises ConfigError for a tile that no message can hold."""
    check_size(tile, tile.bytes)
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

    numbers: gives each tile its tag, the same on all ranks. shard: a weight stays with the rank that updates it; others
    borrow it for as long as they use it (ZeRO-3: Rajbhandari et al. 2020, section 5.3).
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
        if tile.key not in self._tags:
            self._tags[tile.key] = next(self._numbers)
        return self._tags[tile.key]

    def share(self, lists: Iterable[TaskList]) -> list[Shared]:
        """Share out placed lists that run in turn."""
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
        """The ranks that have a place for the tile; the first where no list uses it."""
        owner = self.owner(tile)
        return {owner} if owner is not None else self._users.get(tile.key) or {0}

    def owner(self, tile: Tile) -> int | None:
        """The rank from which all others borrow it; None: whoever uses it keeps it."""
        return self._owner.get(tile.key)

    def holders(self, tile: Tile) -> list[int]:
        """The ranks that have the newest version; the first where nobody has written it."""
        return sorted(self._held.get(tile.key) or {0})

    def written(self, tile: Tile) -> set[int]:
        """Each of these ranks writes it from its own program, the same on all of them."""
        self._held[tile.key] = set(self.users(tile))
        return self._held[tile.key]

    def missing(self, tile: Tile, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """What has to travel, (from, to), so that these ranks hold the newest version; from now on they count as such.

        Who has got it passes it on: in each round as many as have it. Nothing, where nobody has written the tile."""
        held = self._held.get(tile.key)
        if not held:
            return []
        order = [*sorted(held), *(rank for rank in dict.fromkeys(ranks) if rank not in held)]
        found = [(order[k % _doubled(len(held), k)], order[k]) for k in range(len(held), len(order))]
        held.update(order)
        return found

    def brought(self, needs: Iterable[tuple[Tile, Iterable[int]]]) -> Iterator[tuple[int, Message]]:
        """The messages, each with its rank, after which these ranks hold the newest version of these tiles."""
        for tile, ranks in needs:
            for source, to in self.missing(tile, ranks):
                yield from messages(tile, source, to, self.tag(tile)).items()

    def ran(self, shared: Shared) -> None:
        """The list was submitted, behind what its `needs` were missing."""
        self._held.update((key, set(ranks)) for key, ranks in shared.held.items())


def _doubled(number: int, below: int) -> int:
    """The number, doubled as often as it stays at or below another."""
    while 2 * number <= below:
        number *= 2
    return number


class _Sharing:
    """Shares out one list. A copy goes where another rank has written the tile, or where it was borrowed."""

    def __init__(self, tasks: TaskList, replicas: Replicas) -> None:
        self._replicas, ranks = replicas, range(replicas.ranks)
        self.shared = Shared([TaskList(tasks.policy, live=tasks.live) for _ in ranks])
        self._held: dict[Tile, set[int]] = {}  # of versions that this list has made, and of what it borrows
        self._writer: dict[Tile, int] = {}
        self._last: dict[tuple[int, Tile], Task] = {}  # the last entry of a rank that uses a tile
        self._read: dict[tuple[int, Tile], int] = {}  # where in the whole list a rank has read what it borrows
        self._near = len(tasks.tasks) // NEAR
        self._clears: list[list[Tile]] = [[] for _ in ranks]  # before the next entry of each
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
                return  # nothing is there: a reduction begins
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
        """Only these have the tile from here on; the others let go of it after their last use."""
        for rank in self._held.get(tile, set()) - {*ranks}:
            last = self._last.get((rank, tile))
            if last and tile not in last.frees:
                last.frees.append(tile)
        self._held[tile] = {*ranks}

    def _append(self, rank: int, task: Task) -> None:
        task.clears, self._clears[rank] = self._clears[rank], []
        self.shared.lists[rank].tasks.append(task)
        self._last.update(((rank, access.tile), task) for access in task.accesses)


def _free(tasks: list[Task]) -> None:
    """Each tile that does not outlive the list goes after its last use on this rank."""
    last = {access.tile: task for task in tasks for access in task.accesses if not access.tile.persistent}
    for tile, task in last.items():
        if tile not in task.frees:
            task.frees.append(tile)


def described(lists: Iterable[TaskList]) -> dict[str, str]:
    """Each task of placed lists, by its name: the same on all ranks, or they cannot work together."""
    return {
        f"task {k} of list {number} ({task.op or task.kernel})": f"for rank {task.worker}: {text}"
        for number, tasks in enumerate(lists)
        for k, (task, text) in enumerate(zip(tasks.tasks, tasks.described(), strict=True))
    }
