"""Sums of tiles over nodes, each with its part of the batch, as messages and tasks.

Nodes have numbers of several digits, whose bases are the prime factors of how many there are. In each round those that
differ in one digit exchange what they have: two in a round where the base is two. So every node does the same at the
same time, for any number of them, and there are as many rounds as digits. A large tile is cut: in each round a node
keeps a piece, gives the others theirs and adds what comes; then the rounds go back, and pieces of the sum are given
(R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, with other bases than two). A small one
travels whole, once each round (recursive doubling, the same paper).

Ranks, which share one program, need a sum on one of them, that updates a weight by it: the same rounds bring it there,
each tile whole, and end on another rank for each. That is as much as pieces would be, for all tiles together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .placement import Speed, batch_parts, own_worker
from .rank_tasks import RECEIVE, SEND, Message, check_size
from .tasklist import Access, R, Task, TaskList, Tile, W, merge


@dataclass(frozen=True)
class Network:
    """Between nodes. bytes_s: bytes/s of a card, each way; share: workers that have a card together.

    latency: seconds of a message on its way; message: of the one thread of a node that sends and receives, for each.
    """

    bytes_s: float
    latency: float
    message: float
    share: int = 1


@dataclass(slots=True)
class Transfer(Message):
    """A message of `size` bytes: a piece of its tile."""

    size: int = 0


@dataclass(slots=True)
class Piecewise(Task):
    """A task on pieces of its tiles, that moves `moved` bytes."""

    moved: int = 0

    @property
    def bytes(self) -> int:
        return self.moved


@dataclass(frozen=True)
class Place:
    """A node among `nodes` that are alike, and what they consist of."""

    node: int
    nodes: int
    network: Network
    workers: int
    speed: Speed


def with_sums(tasks: Sequence[Task], at: Place) -> list[Task]:
    """A node's tasks, and behind the last that adds to a sum over the batch what makes it one over all nodes.

    Those sums are the tiles that outlive the list and are of no part of the batch: gradients, the loss. Small ones take
    turns with workers. One whose messages would take longer than what is left to compute goes through all cards.
    """
    last: dict[Tile, int] = {}
    for number, task in enumerate(tasks):
        for access in task.accesses:
            if access.mode != "R" and access.tile.persistent and not access.tile.part("batch"):
                last[access.tile] = number
    ends: dict[int, list[Tile]] = {}
    for tile, number in last.items():
        ends.setdefault(number, []).append(tile)
    work = [sum(map(at.speed.seconds, task.parts or [task])) / at.workers for task in tasks]
    left, result, tags, turn = math.fsum(work), list[Task](), itertools.count(), itertools.cycle(range(at.workers))
    for number, task in enumerate(tasks):
        result.append(task)
        left -= work[number]
        for tile in ends.get(number, []) if at.nodes > 1 else []:
            small = _travels_whole(tile, at)
            if 2 * tile.bytes / at.network.bytes_s > left and _pays_in_slices(tile, at):
                result += _through_all_cards(tile, task, at, tags)
            else:
                result += all_reduce(tile, task, at, tags, next(turn) if small else task.worker)
    return result


def all_reduce(tile: Tile, maker: Task, at: Place, tags: Iterator[int], worker: int) -> list[Task]:
    """What a node does for the sum of a tile, which `maker` has made, over nodes: on a worker, which has it then.

    One that travels whole goes back to the worker of `maker` with the last addition. tags: the same on all nodes, so
    that the two ends of a message have the same."""
    maker, home = replace(maker, worker=worker), maker.worker
    whole, size, result = _travels_whole(tile, at), tile.bytes, list[Task]()
    for base, stride in _digits(at.nodes):
        size = size if whole else -(-size // base)
        words = -(-size * math.prod(tile.shape) // tile.bytes)
        parts = [Tile(f"{tile.tensor}.part", tile.index, (words,), tile.dtype) for _ in range(1, base)]
        result += _exchange(tile, parts, maker, at.node, base, stride, size, tags)
        result.append(_adds(tile, parts, maker, size))
    if whole:
        result[-1].worker = home
        return result
    for base, stride in reversed(list(_digits(at.nodes))):
        result += _exchange(tile, [tile] * (base - 1), maker, at.node, base, stride, size, tags)
        size *= base
    return result


def _through_all_cards(tile: Tile, maker: Task, at: Place, tags: Iterator[int]) -> list[Task]:
    """The sum of a tile, cut into a slice for each card, which goes to the first worker of that."""
    first = range(0, at.workers, at.network.share)
    words = -(-math.prod(tile.shape) // len(first))
    slices = [Tile(f"{tile.tensor}.slice", (*tile.index, k), (words,), tile.dtype) for k in range(len(first))]
    how: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": max(maker.worker, 0)}
    result: list[Task] = [Piecewise("slice", [R(tile), *map(W, slices)], moved=2 * tile.bytes, **how)]
    for worker, one in zip(first, slices, strict=True):
        result += all_reduce(one, replace(maker, worker=worker), at, tags, worker)
    accesses = [Access(tile, "RW"), *map(R, slices)]
    return [*result, Piecewise("join", accesses, moved=2 * tile.bytes, frees=slices, **how)]


def _digits(nodes: int) -> Iterator[tuple[int, int]]:
    """The base of each digit of a node's number, and what a one in it is worth: the largest first."""
    stride = 1
    for base in sorted(_factors(nodes), reverse=True):
        yield base, stride
        stride *= base


def _others(node: int, base: int, stride: int) -> list[int]:
    """The nodes that differ from one in this digit alone; where it is greater by one, by two, ..."""
    digit = node // stride % base
    return [node + ((digit + by) % base - digit) * stride for by in range(1, base)]


def _factors(number: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number


def _travels_whole(tile: Tile, at: Place) -> bool:
    """Whether it is faster to send a tile whole than in pieces there and back."""
    digits, network = list(_digits(at.nodes)), at.network
    others = sum(base - 1 for base, _ in digits)
    rounds = others * network.message + len(digits) * network.latency
    seconds = tile.bytes / network.bytes_s
    return rounds + others * seconds <= 2 * (rounds + (1 - 1 / at.nodes) * seconds)


def _pays_in_slices(tile: Tile, at: Place) -> bool:
    """Whether to send a tile through all cards gains more than its slices and their messages cost."""
    cards = -(-at.workers // at.network.share)
    messages = cards * sum(base - 1 for base, _ in _digits(at.nodes)) * at.network.message
    gain = (1 - 1 / cards) * tile.bytes / at.network.bytes_s
    return gain > tile.bytes / at.speed.link_s + cards * at.speed.latency + messages


def _exchange(
    tile: Tile, into: Sequence[Tile], maker: Task, node: int, base: int, stride: int, size: int, tags: Iterator[int]
) -> Iterator[Task]:
    """A piece of the tile to each of the others that differ in a digit, and one from each of them, `into` a tile."""
    check_size(tile, size)
    others, receives = _others(node, base, stride), list[Task]()
    for to, source, part in zip(others, reversed(others), into, strict=True):
        how: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": maker.worker}
        how |= {"tag": next(tags), "size": size}
        yield Transfer(SEND, [R(tile)], peer=to, **how)
        receives.append(Transfer(RECEIVE, [Access(part, "RW" if part is tile else "W")], peer=source, **how))
    yield from receives


def _adds(tile: Tile, parts: Sequence[Tile], maker: Task, size: int) -> Task:
    """One task of as many parts as there is to add."""
    model = merge(tile, parts[0], maker.op)
    how: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": maker.worker, "args": model.args}
    into, flop = Access(tile, "RW", True), model.flop * size / tile.bytes
    each: list[Task] = [Piecewise(model.kernel, [into, R(part)], flop=flop, moved=3 * size, **how) for part in parts]
    total: dict[str, Any] = {"flop": flop * len(each), "moved": 3 * size * len(each), "frees": list(parts)}
    return Piecewise("group", [into, *map(R, parts)], parts=each, **total, **how)


class Meeting:
    """How what several ranks add to a sum over the batch meets, where any order will do.

    Each adds up what it makes itself, in a tile of its own, as the policy says; behind the last of it those meet on the
    rank that adds last. What is of a tensor in `later`, (kind, name), goes on in the next lists, and meets in the one
    that is lowered with what `ended` gives.
    """

    def __init__(self, ranks: int, later: Collection[tuple[str, str]] = ()) -> None:
        self.ranks, self.later = ranks, later
        self._apart: dict[Hashable, dict[int, Tile]] = {}  # the tile of each rank, the one where they meet first

    def divide(self, tasks: TaskList) -> None:
        """Give each rank its tiles, in a list that is not resolved yet."""
        parts = batch_parts(access.tile for task in tasks.tasks for access in task.accesses)
        behind: dict[int, list[Task]] = {}
        for tile, run, ends in tasks.runs():
            ranks = [own_worker(tasks.tasks[number], parts, self.ranks) for number, _ in run]
            if tile.part("batch") or len({*ranks}) == 1 or -1 in ranks:
                continue
            order, goes_on = [*dict.fromkeys(reversed(ranks))], ends and self._goes_on(tile)
            own = dict(zip(order, [tile, *(_own(tile, rank, goes_on) for rank in order[1:])], strict=True))
            for rank, (number, access) in zip(ranks, run, strict=True):
                access.tile = own[rank]
                tasks.tasks[number].worker = rank
            last = run[-1][0]
            if not goes_on:
                behind.setdefault(last, []).extend(_reduced(own, tasks.tasks[last].op))
                continue
            self._apart[tile.key] = own
            if tile in tasks.initialised:
                tasks.initialised.update(own.values())
        tasks.tasks = [one for number, task in enumerate(tasks.tasks) for one in (task, *behind.get(number, []))]

    def ended(self) -> Meeting:
        """For the list that reads all that goes on."""
        made = Meeting(self.ranks)
        made._apart = self._apart
        return made

    def joined(self, tiles: Iterable[Tile], op: str) -> list[Task]:
        """What such a list begins with, of these tiles."""
        found = ((t, self._apart[t.key]) for t in tiles if t.key in self._apart and not self._goes_on(t))
        return [task for tile, own in found for task in _reduced({**own, next(iter(own)): tile}, op)]

    def apart(self) -> list[Tile]:
        """The tiles that ranks have beside those where they meet, which outlive the list."""
        return [tile for own in self._apart.values() for tile in [*own.values()][1:]]

    def _goes_on(self, tile: Tile) -> bool:
        return (tile.kind, tile.tensor) in self.later


def _own(tile: Tile, rank: int, kept: bool) -> Tile:
    """A rank's part of a sum; kept: it outlives the list."""
    name, kind = f"{tile.tensor}.of_rank_{rank}", tile.kind if kept else ""
    return Tile(name, tile.index, tile.shape, tile.dtype, tile.monoid, kept, tile.axes, kind)


def _reduced(own: Mapping[int, Tile], op: str) -> Iterator[Task]:
    """Add the tiles of ranks to the first's, in rounds."""
    ranks, tiles = [*own], [*own.values()]
    still = [*range(len(ranks))]
    for base, stride in _digits(len(ranks)):
        still = [k for k in still if k // stride % base == 0]
        for k in still:
            for other in _others(k, base, stride):
                yield merge(tiles[k], tiles[other], op, ranks[k])
