"""All-reduce: sums of tiles over nodes, as messages and tasks. Each node computes a part of the batch.

A node's number is written with one digit for each prime factor of the number of nodes; the factor is the digit's base.
In each round, nodes whose numbers differ only in one digit exchange their data: pairs of nodes if the base is two. So
all nodes do the same work at the same time, for any number of nodes. There are as many rounds as digits.

A large tile is sent in pieces. In each round a node cuts its current piece into as many parts as the digit's base. The
node keeps one part, sends each other part to another node, and adds the parts that it receives. Then the rounds run
backwards and distribute the pieces of the sum (R. Rabenseifner, "Optimization of collective reduction operations",
ICCS 2004, with bases other than two). A small tile is sent whole in each round (recursive doubling, same paper).

Ranks share one program (see RankSums), so only the rank that updates a weight needs the sum of the weight's gradient.
Rounds of whole tiles leave a tile's sum on one rank, and the sums of different tiles on different ranks. All ranks
together send as many bytes as in the first rounds with pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .placement import Speed, batch_parts, own_worker
from .rank_tasks import RECEIVE, SEND, MessageTask, check_size
from .task import Access, R, Task, Tile, W, merge
from .tasklist import TaskList


@dataclass(frozen=True)
class Network:
    """A network between nodes.

    Attributes:
        bytes_s: bytes/s of an adapter, each way.
        latency: seconds of a message in transit.
        message: seconds of a node's communication thread for each message.
        share: number of workers that share an adapter.
    """

    bytes_s: float
    latency: float
    message: float
    share: int = 1


@dataclass(slots=True)
class Transfer(MessageTask):
    """A message that carries a piece of a tile, `size` bytes."""

    size: int = 0


@dataclass(slots=True)
class Piecewise(Task):
    """A task on slices of its tiles. moved: bytes that the task reads and writes."""

    moved: int = 0

    @property
    def bytes(self) -> int:
        return self.moved


@dataclass(frozen=True)
class ClusterNode:
    """Node number `node` of `nodes` equal nodes, and the hardware of each node."""

    node: int
    nodes: int
    network: Network
    workers: int
    speed: Speed


def with_sums(tasks: Sequence[Task], here: ClusterNode) -> list[Task]:
    """Return a node's tasks with all-reduce tasks inserted after the last task that adds to each sum over the batch.

    Sums over the batch are persistent tiles of tensors without the axis batch: gradients and the loss. Small
    sums, which travel whole, are added by one worker each, distributed evenly over the workers. A sum is sent in slices
    through all adapters if its messages would otherwise take longer than the computation that is left, and if slices
    save more time than they cost.
    """
    last: dict[Tile, int] = {}
    for number, task in enumerate(tasks):
        for access in task.accesses:
            if access.mode != "R" and access.tile.persistent and not access.tile.part("batch"):
                last[access.tile] = number
    ends: dict[int, list[Tile]] = {}
    for tile, number in last.items():
        ends.setdefault(number, []).append(tile)
    work = [sum(map(here.speed.seconds, task.parts or [task])) / here.workers for task in tasks]
    left, result, tags, turn = math.fsum(work), list[Task](), itertools.count(), itertools.cycle(range(here.workers))
    for number, task in enumerate(tasks):
        result.append(task)
        left -= work[number]
        for tile in ends.get(number, []) if here.nodes > 1 else []:
            small = _travels_whole(tile, here)
            if 2 * tile.bytes / here.network.bytes_s > left and _pays_in_slices(tile, here):
                result += _through_all_adapters(tile, task, here, tags)
            else:
                result += all_reduce(tile, task, here, tags, next(turn) if small else task.worker)
    return result


def all_reduce(tile: Tile, maker: Task, here: ClusterNode, tags: Iterator[int], worker: int) -> list[Task]:
    """Return one node's tasks and messages that add a tile over all nodes.

    Args:
        maker: the task that writes the node's contribution.
        tags: tags of messages, the same on all nodes, so both ends of a message agree.
        worker: the worker that adds. A tile that travels whole returns to the worker of `maker` with the last addition.
    """
    maker, home = replace(maker, worker=worker), maker.worker
    whole, size, result = _travels_whole(tile, here), tile.bytes, list[Task]()
    for base, stride in _digits(here.nodes):
        size = size if whole else -(-size // base)
        numel = -(-size * math.prod(tile.shape) // tile.bytes)
        parts = [Tile(f"{tile.tensor}.part", tile.index, (numel,), tile.dtype) for _ in range(1, base)]
        result += _exchange(tile, parts, maker, here.node, base, stride, size, tags)
        result.append(_adds(tile, parts, maker, size))
    if whole:
        result[-1].worker = home
        return result
    for base, stride in reversed(list(_digits(here.nodes))):
        result += _exchange(tile, [tile] * (base - 1), maker, here.node, base, stride, size, tags)
        size *= base
    return result


def _through_all_adapters(tile: Tile, maker: Task, here: ClusterNode, tags: Iterator[int]) -> list[Task]:
    """Return tasks that add a tile over all nodes in slices: each adapter's first worker adds one slice."""
    first = range(0, here.workers, here.network.share)
    numel = -(-math.prod(tile.shape) // len(first))
    slices = [Tile(f"{tile.tensor}.slice", (*tile.index, k), (numel,), tile.dtype) for k in range(len(first))]
    options: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": max(maker.worker, 0)}
    result: list[Task] = [Piecewise("slice", [R(tile), *map(W, slices)], moved=2 * tile.bytes, **options)]
    for worker, one in zip(first, slices, strict=True):
        result += all_reduce(one, replace(maker, worker=worker), here, tags, worker)
    accesses = [Access(tile, "RW"), *map(R, slices)]
    return [*result, Piecewise("join", accesses, moved=2 * tile.bytes, frees=slices, **options)]


def _digits(nodes: int) -> Iterator[tuple[int, int]]:
    """Yield (base, place value) for each digit of a node's number, the largest base first."""
    stride = 1
    for base in sorted(_factors(nodes), reverse=True):
        yield base, stride
        stride *= base


def _others(node: int, base: int, stride: int) -> list[int]:
    """Return the nodes that differ from `node` in one digit only: greater by one, by two, ... (modulo the base).

    Args:
        stride: place value of this digit.
    """
    digit = node // stride % base
    return [node + ((digit + by) % base - digit) * stride for by in range(1, base)]


def _factors(number: int) -> Iterator[int]:
    """Yield the prime factors of a number."""
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number


def _travels_whole(tile: Tile, here: ClusterNode) -> bool:
    """Return whether sending a tile whole in each round is faster than sending pieces and then distributing the sum."""
    digits, network = list(_digits(here.nodes)), here.network
    others = sum(base - 1 for base, _ in digits)
    rounds = others * network.message + len(digits) * network.latency
    seconds = tile.bytes / network.bytes_s
    return rounds + others * seconds <= 2 * (rounds + (1 - 1 / here.nodes) * seconds)


def _pays_in_slices(tile: Tile, here: ClusterNode) -> bool:
    """Return whether sending a tile through all adapters saves more time than slicing and more messages cost."""
    adapters = -(-here.workers // here.network.share)
    messages = adapters * sum(base - 1 for base, _ in _digits(here.nodes)) * here.network.message
    gain = (1 - 1 / adapters) * tile.bytes / here.network.bytes_s
    return gain > tile.bytes / here.speed.link_s + adapters * here.speed.latency + messages


def _exchange(
    tile: Tile, into: Sequence[Tile], maker: Task, node: int, base: int, stride: int, size: int, tags: Iterator[int]
) -> Iterator[Task]:
    """Yield messages that exchange pieces of the tile with each node that differs from `node` in one digit only.

    Args:
        into: the tiles that receive the other nodes' pieces.
    """
    check_size(tile, size)
    others, receives = _others(node, base, stride), list[Task]()
    for to, source, part in zip(others, reversed(others), into, strict=True):
        options: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": maker.worker}
        options |= {"tag": next(tags), "size": size}
        yield Transfer(SEND, [R(tile)], peer=to, **options)
        receives.append(Transfer(RECEIVE, [Access(part, "RW" if part is tile else "W")], peer=source, **options))
    yield from receives


def _adds(tile: Tile, parts: Sequence[Tile], maker: Task, size: int) -> Task:
    """Return one task that adds all received parts to the tile."""
    model = merge(tile, parts[0], maker.op)
    options: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": maker.worker}
    options["args"] = model.args
    into, flop = Access(tile, "RW", True), model.flop * size / tile.bytes
    each: list[Task] = [
        Piecewise(model.kernel, [into, R(part)], flop=flop, moved=3 * size, **options) for part in parts
    ]
    total: dict[str, Any] = {"flop": flop * len(each), "moved": 3 * size * len(each), "frees": list(parts)}
    return Piecewise("group", [into, *map(R, parts)], parts=each, **total, **options)


class RankSums:
    """Adds the contributions of several ranks to sums over the batch, if any order of addition is allowed.

    Each rank adds its contributions to a tile of its own, by the accumulation policy. After the last contribution, the
    tiles of all ranks are added in rounds. The rank that contributed last gets the total.

    Args:
        later: (kind, name) of tensors whose sums continue in the next lists. The tiles of all ranks are then added in
            the list that is lowered with the object returned by `ended`.
    """

    def __init__(self, ranks: int, later: Collection[tuple[str, str]] = ()) -> None:
        self.ranks, self.later = ranks, later
        self._own_tiles: dict[Hashable, dict[int, Tile]] = {}  # {sum: {rank: tile}}; the first gets the total

    def divide(self, tasks: TaskList) -> None:
        """Change an unresolved list so that each rank adds to its own tiles; insert tasks that add these tiles."""
        parts = batch_parts(access.tile for task in tasks.tasks for access in task.accesses)
        after: dict[int, list[Task]] = {}
        for tile, run, ends in tasks.runs():
            ranks = [own_worker(tasks.tasks[number], parts, self.ranks) for number, _ in run]
            if tile.part("batch") or len({*ranks}) == 1 or -1 in ranks:
                continue
            order, continues = [*dict.fromkeys(reversed(ranks))], ends and self._continues(tile)
            own = dict(zip(order, [tile, *(_own(tile, rank, continues) for rank in order[1:])], strict=True))
            for rank, (number, access) in zip(ranks, run, strict=True):
                access.tile = own[rank]
                tasks.tasks[number].worker = rank
            last = run[-1][0]
            if not continues:
                after.setdefault(last, []).extend(_reduced(own, tasks.tasks[last].op))
                continue
            self._own_tiles[tile.key] = own
            if tile in tasks.initialised:
                tasks.initialised.update(own.values())
        tasks.tasks = [one for number, task in enumerate(tasks.tasks) for one in (task, *after.get(number, []))]

    def ended(self) -> RankSums:
        """Return the RankSums for the list that reads the sums which continued from earlier lists."""
        last = RankSums(self.ranks)
        last._own_tiles = self._own_tiles
        return last

    def joined(self, tiles: Iterable[Tile], op: str) -> list[Task]:
        """Return tasks that add the ranks' own tiles of each sum in `tiles`.

        The tasks belong at the start of a list that reads the sums. Sums that continue in later lists are left out.
        """
        sums = ((t, self._own_tiles[t.key]) for t in tiles if t.key in self._own_tiles and not self._continues(t))
        return [task for tile, own in sums for task in _reduced({**own, next(iter(own)): tile}, op)]

    def apart(self) -> list[Tile]:
        """Return the ranks' own tiles that outlive the list, without the tiles that get the totals."""
        return [tile for own in self._own_tiles.values() for tile in [*own.values()][1:]]

    def _continues(self, tile: Tile) -> bool:
        return (tile.kind, tile.tensor) in self.later


def _own(tile: Tile, rank: int, kept: bool) -> Tile:
    """Return a new tile for a rank's contributions to the sum `tile`. kept: the new tile outlives the list."""
    name, kind = f"{tile.tensor}.of_rank_{rank}", tile.kind if kept else ""
    return Tile(name, tile.index, tile.shape, tile.dtype, tile.monoid, kept, tile.axes, kind)


def _reduced(own: Mapping[int, Tile], op: str) -> Iterator[Task]:
    """Yield tasks that add the tiles of all ranks, in rounds. own: {rank: tile}; its first tile gets the total."""
    ranks, tiles = [*own], [*own.values()]
    left = [*range(len(ranks))]
    for base, stride in _digits(len(ranks)):
        left = [k for k in left if k // stride % base == 0]
        for k in left:
            for other in _others(k, base, stride):
                yield merge(tiles[k], tiles[other], op, ranks[k])
