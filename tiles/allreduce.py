"""Sums of tiles over nodes that run the same program, each on its part of the batch, as messages and tasks.

Nodes have numbers of several digits, whose bases are the prime factors of how many there are. In each round those that
differ in one digit exchange what they have: two in a round where the base is two. So every node does the same at the
same time, for any number of them, and there are as many rounds as digits. A large tile is cut: in each round a node
keeps a piece, gives the others theirs and adds what comes; then the rounds go back, and pieces of the sum are given
(R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, with other bases than two). A small one
travels whole, once each round (recursive doubling, the same paper).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .ranks import RECEIVE, SEND, Message, check_size
from .tasklist import Access, Task, Tile, merge


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
class Add(Task):
    """Adds a piece of `size` bytes, that has come, to the same piece of a tile."""

    size: int = 0

    @property
    def bytes(self) -> int:
        return 3 * self.size


def with_sums(tasks: Sequence[Task], node: int, nodes: int, network: Network) -> list[Task]:
    """A node's tasks, and behind the last that adds to a sum over the batch what makes it one over all nodes.

    Those sums are the tiles that outlive the list and are of no part of the batch: gradients, the loss.
    """
    last: dict[Tile, int] = {}
    for number, task in enumerate(tasks):
        for access in task.accesses:
            if access.mode != "R" and access.tile.persistent and not access.tile.part("batch"):
                last[access.tile] = number
    ends: dict[int, list[Tile]] = {}
    for tile, number in last.items():
        ends.setdefault(number, []).append(tile)
    result, tags = [], itertools.count()
    for number, task in enumerate(tasks):
        result.append(task)
        for tile in ends.get(number, []):
            result += all_reduce(tile, task, node, nodes, network, tags)
    return result


def all_reduce(
    tile: Tile, maker: Task, node: int, nodes: int, network: Network, tags: Iterator[int]
) -> list[Task]:
    """What `node` does for the sum of a tile that `maker` has made on each node, on the same worker of each.

    tags: the same on all nodes, so that the two ends of a message have the same."""
    digits = list(_digits(nodes))
    whole = _travels_whole(tile, digits, network)
    result: list[Task] = []
    size = tile.bytes
    for base, stride in digits:
        size = size if whole else -(-size // base)
        parts = [Tile(f"{tile.tensor}.part", tile.index, tile.shape, tile.dtype) for _ in range(1, base)]
        result += _exchange(tile, parts, maker, node, base, stride, size, tags)
        result.append(_adds(tile, parts, maker, size))
    if whole:
        return result
    for base, stride in reversed(digits):
        result += _exchange(tile, [tile] * (base - 1), maker, node, base, stride, size, tags)
        size *= base
    return result


def _digits(nodes: int) -> Iterator[tuple[int, int]]:
    """The base of each digit of a node's number, and what a one in it is worth: the largest first."""
    stride = 1
    for base in sorted(_factors(nodes), reverse=True):
        yield base, stride
        stride *= base


def _factors(number: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number


def _travels_whole(tile: Tile, digits: list[tuple[int, int]], network: Network) -> bool:
    """Whether it is faster to send a tile whole than in pieces there and back."""
    others = sum(base - 1 for base, _ in digits)
    rounds = others * network.message + len(digits) * network.latency
    seconds = tile.bytes / network.bytes_s
    pieces = 1 - 1 / math.prod(base for base, _ in digits)
    return rounds + others * seconds <= 2 * (rounds + pieces * seconds)


def _exchange(
    tile: Tile, into: Sequence[Tile], maker: Task, node: int, base: int, stride: int, size: int, tags: Iterator[int]
) -> Iterator[Task]:
    """A piece of the tile to each of the others that differ in a digit, and one from each of them, `into` a tile."""
    check_size(tile, size)
    digit, receives = node // stride % base, list[Task]()
    for shift, part in enumerate(into, 1):
        to, source = (node + ((digit + by) % base - digit) * stride for by in (shift, -shift))
        how: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": maker.worker}
        how |= {"tag": next(tags), "size": size}
        yield Transfer(SEND, [Access(tile, "R")], peer=to, **how)
        receives.append(Transfer(RECEIVE, [Access(part, "RW" if part is tile else "W")], peer=source, **how))
    yield from receives


def _adds(tile: Tile, parts: Sequence[Tile], maker: Task, size: int) -> Task:
    """One task of as many parts as there is to add."""
    model = merge(tile, parts[0], maker.op)
    how: dict[str, Any] = {"op": maker.op, "priority": maker.priority, "worker": maker.worker, "args": model.args}
    into, flop = Access(tile, "RW", True), model.flop * size / tile.bytes
    each: list[Task] = [Add(model.kernel, [into, Access(part, "R")], flop=flop, size=size, **how) for part in parts]
    accesses = [into, *(Access(part, "R") for part in parts)]
    return Add("group", accesses, parts=each, flop=flop * len(each), size=size * len(each), frees=list(parts), **how)
