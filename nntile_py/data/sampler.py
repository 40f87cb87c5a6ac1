"""Sampler: chooses the sequences that each step reads. The choice depends only on the seed and the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nntile_py.graph.bin_packing import LOOKAHEAD, Bins, best_fit, consecutive
from nntile_py.graph.step_inputs import SequencePlace

Array = np.ndarray[Any, Any]
_PACKING = 6  # part of the seed of the random generator for packing, which no other generator has
PART = 2**18  # sequences of an epoch that are packed at a time: a large text has millions
SORTED_STEPS = 32  # steps whose bins are sorted together by work, so that the bins of one step have equal work


class Sampler:
    """Assigns sequences to steps: each epoch has all sequences once, in a random order of its own.

    Args:
        lengths: Number of tokens of each sequence.
        seed: Decides the order.
        rows: Number of sequences that a step reads without bins.
        bins: The bins of a pass. A step reads as many sequences as fit into the bins of its passes. None: no packing.
        passes: Number of forward and backward passes in a step.
        order: Returns the numbers of the sequences of an epoch; number % len(lengths) is the sequence. None: a random
            order; the numbers of epoch k begin at k * len(lengths).
        lookahead: Number of sequences among which to search for a sequence that fits into a bin. A search among all
            sequences would read the long sequences first. If lengths depend on labels, the first steps would have few
            different labels.
    """

    def __init__(
        self, lengths: Array, seed: int, rows: int, bins: Bins | None = None, passes: int = 1,
        *, order: Callable[[int], Array] | None = None, lookahead: int = LOOKAHEAD,
    ) -> None:  # fmt: skip
        self._lengths, self._seed, self._order = lengths, seed, order
        self._bins, self._lookahead = bins, lookahead
        self._count = bins.count * passes if bins else rows  # sequences, or bins, of a step
        self._parts = -(-len(lengths) // PART)  # of an epoch
        self._numbers: tuple[int, Any] = -1, None  # the epoch read last, and the order of its sequences
        self._items_of: dict[int, Any] = {}  # sequences, or bins, of the two parts read last
        self._starts = [0]  # for each part, the number of its first sequence, or bin, counted over all epochs

    def step(self, step: int) -> tuple[list[int], list[SequencePlace]]:
        """Return the numbers of the sequences that a step reads, and the place of each sequence in a bin.

        The numbers count over all epochs: number % len(lengths) is the sequence.

        step: 1, 2, ... Without bins there are no places."""
        items = self._items((step - 1) * self._count, step * self._count)
        if not self._bins:
            return items, []
        placed = list(consecutive(enumerate(items), _Cyclic(self._lengths)))
        return [sequence for sequence, _ in placed], [place for _, place in placed]

    def fill(self) -> float:
        """Return the share of the bins' tokens that the first sequences of an epoch fill."""
        assert self._bins
        bins, lengths = self._part(0), _Cyclic(self._lengths)
        return float(np.mean([sum(lengths[number] for number in content) for content in bins]) / self._bins.room)

    def _items(self, first: int, end: int) -> list[Any]:
        while self._starts[-1] < end:
            self._starts.append(self._starts[-1] + self._size(len(self._starts) - 1))
        items, part = list[Any](), bisect_right(self._starts, first) - 1
        while first < end:
            start = self._starts[part]
            items += list(self._part(part)[first - start : end - start])
            part += 1
            first = self._starts[part]
        return items

    def _size(self, part: int) -> int:
        """Return the number of sequences, or of bins, of a part."""
        return len(self._part(part)) if self._bins else min(PART, len(self._lengths) - part % self._parts * PART)

    def _part(self, part: int) -> Any:
        """Return the sequences, or the bins, of a part of an epoch. Parts are counted over all epochs."""
        if part not in self._items_of:
            epoch, first = part // self._parts, part % self._parts * PART
            if self._numbers[0] != epoch:
                self._numbers = epoch, self._ordered(epoch)
            numbers = self._numbers[1][first : first + PART]
            if len(self._items_of) > 1:
                del self._items_of[min(self._items_of)]
            rng = np.random.default_rng([self._seed, epoch, 2, _PACKING, first])
            self._items_of[part] = self._packed(numbers.tolist(), rng) if self._bins else numbers
        return self._items_of[part]

    def _ordered(self, epoch: int) -> Array:
        """Return the numbers of all sequences in the order of an epoch."""
        if self._order:
            return self._order(epoch)
        count = len(self._lengths)
        return np.random.default_rng([self._seed, epoch, 2]).permutation(count) + epoch * count

    def _packed(self, numbers: list[int], rng: np.random.Generator) -> list[list[int]]:
        """Pack the sequences of a part of an epoch into bins. The bins of each step have about equal work."""
        assert self._bins
        lengths = self._lengths[np.array(numbers) % len(self._lengths)].tolist()
        bins = best_fit(lengths, range(len(numbers)), self._bins.room, self._bins.rows, self._lookahead)
        work = [sum(map(self._bins.work, (lengths[place] for place in content))) for content in bins]
        ordered: list[list[int]] = []
        for first in range(0, len(bins), SORTED_STEPS * self._count):
            part = sorted(range(first, min(first + SORTED_STEPS * self._count, len(bins))), key=lambda k: work[k])
            steps = [part[k : k + self._count] for k in range(0, len(part), self._count)]
            # The last step may have too few bins. It stays last: elsewhere it would shift the bins of later steps.
            last = len(part) // self._count
            ordered += [steps[k] for k in rng.permutation(last)] + steps[last:]
        return [[numbers[place] for place in bins[k]] for step in ordered for k in step]


class _Cyclic(Sequence[int]):
    """Lengths by number: the lengths of an epoch's sequences, repeated for ever."""

    def __init__(self, lengths: Array) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: Any) -> Any:
        return int(self._lengths[number % len(self._lengths)])
