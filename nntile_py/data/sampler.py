"""Sampler: chooses the sequences that each step reads. The choice depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nntile_py.graph.bin_packing import LOOKAHEAD, Bins, best_fit, consecutive
from nntile_py.graph.step_inputs import SequencePlace

Array = np.ndarray[Any, Any]
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
            order, and each epoch counts on.
        lookahead: Number of sequences among which to search for a sequence that fits into a bin. A search among all
            sequences would read the long ones first. If lengths depend on labels, such steps would have few different
            labels.
    """

    def __init__(
        self, lengths: Array, seed: int, rows: int, bins: Bins | None = None, passes: int = 1,
        *, order: Callable[[int], Array] | None = None, lookahead: int = LOOKAHEAD,
    ) -> None:  # fmt: skip
        self._lengths, self._seed, self._order = lengths, seed, order
        self._bins, self._lookahead = bins, lookahead
        self._count = bins.count * passes if bins else rows  # sequences, or bins, of a step
        self._epochs: dict[int, list[Any]] = {}  # sequences, or bins, of the two epochs read last
        self._starts = [0]  # for each epoch, the number of its first sequence, or bin, counted over all epochs

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
        """Return the share of the bins' tokens that the sequences of an epoch fill."""
        assert self._bins
        return float(self._lengths.sum() / (len(self._epoch(0)) * self._bins.room))

    def _items(self, first: int, end: int) -> list[Any]:
        epoch = 0
        while len(self._starts) <= epoch + 1 or self._starts[epoch + 1] <= first:
            if len(self._starts) <= epoch + 1:
                self._starts.append(self._starts[epoch] + len(self._epoch(epoch)))
            else:
                epoch += 1
        items: list[Any] = []
        while first < end:
            content, start = self._epoch(epoch), self._starts[epoch]
            items += list(content[first - start : end - start])
            first = start + len(content)
            epoch += 1
            if len(self._starts) <= epoch:
                self._starts.append(first)
        return items

    def _epoch(self, epoch: int) -> list[Any]:
        if epoch not in self._epochs:
            rng = np.random.default_rng([self._seed, epoch, 2])
            count = len(self._lengths)
            numbers: Any = self._order(epoch) if self._order else rng.permutation(count) + epoch * count
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            items: Any = self._packed(numbers.tolist(), rng) if self._bins else numbers
            self._epochs[epoch] = items
        return self._epochs[epoch]

    def _packed(self, numbers: list[int], rng: np.random.Generator) -> list[list[int]]:
        """Pack the sequences of an epoch into bins, so that the bins of each step have about equal work."""
        assert self._bins
        lengths = self._lengths[np.array(numbers) % len(self._lengths)].tolist()
        bins = best_fit(lengths, range(len(numbers)), self._bins.room, self._bins.rows, self._lookahead)
        work = [sum(map(self._bins.work, (lengths[place] for place in content))) for content in bins]
        ordered: list[list[int]] = []
        for first in range(0, len(bins), SORTED_STEPS * self._count):
            part = sorted(range(first, min(first + SORTED_STEPS * self._count, len(bins))), key=lambda k: work[k])
            steps = [part[k : k + self._count] for k in range(0, len(part), self._count)]
            # The last step may have fewer bins. It stays last, as it would shift the steps behind it otherwise.
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
