"""Which sequences each step takes, where they are of unequal lengths: a function of the seed and the step alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from nntile_py.graph.bin_packing import LOOKAHEAD, Bins, SequencePlace, best_fit, consecutive

Array = np.ndarray[Any, Any]
ALIKE = 32  # steps whose bins are sorted by their work, so that those of one step have equal work


class Order:
    """Of sequences of these lengths: all of them, shuffled, then all of them again in another order.

    rows: sequences of a step, or with `bins` those that fit into the bins of its `passes`. ahead: among how many one
    that fits is looked for. Of all that are left long ones would be taken first, and where lengths go with labels a
    step would have those of few labels."""

    def __init__(
        self, lengths: Array, seed: int, rows: int, bins: Bins | None = None, passes: int = 1, *, ahead: int = LOOKAHEAD
    ) -> None:
        self._lengths, self._seed, self._rows = lengths.tolist(), seed, rows
        self._bins, self._passes, self._ahead = bins, passes, ahead
        self._count = bins.count * passes if bins else rows
        self._epochs: dict[int, list[Any]] = {}  # sequences or bins, of the last two that were asked for
        self._begins = [0]  # of each epoch, among all sequences or bins

    def step(self, step: int) -> tuple[list[int], list[SequencePlace]]:
        """The sequences of step 1, 2, ... and, if there are bins, where they lie."""
        items = self._items((step - 1) * self._count, step * self._count)
        if not self._bins:
            return items, []
        placed = list(consecutive(enumerate(items), self._lengths))
        return [sequence for sequence, _ in placed], [place for _, place in placed]

    def fill(self) -> float:
        """The share of the bins that the sequences of one epoch fill."""
        assert self._bins
        return float(sum(self._lengths) / (len(self._epoch(0)) * self._bins.room))

    def _items(self, first: int, end: int) -> list[Any]:
        epoch = 0
        while len(self._begins) <= epoch + 1 or self._begins[epoch + 1] <= first:
            if len(self._begins) <= epoch + 1:
                self._begins.append(self._begins[epoch] + len(self._epoch(epoch)))
            else:
                epoch += 1
        found: list[Any] = []
        while first < end:
            of, begin = self._epoch(epoch), self._begins[epoch]
            found += of[first - begin : end - begin]
            first = begin + len(of)
            epoch += 1
            if len(self._begins) <= epoch:
                self._begins.append(first)
        return found

    def _epoch(self, epoch: int) -> list[Any]:
        if epoch not in self._epochs:
            rng = np.random.default_rng([self._seed, epoch, 2])
            order = rng.permutation(len(self._lengths)).tolist()
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            if self._bins:
                order = self._alike(best_fit(self._lengths, order, self._bins.room, self._bins.rows, self._ahead), rng)
            self._epochs[epoch] = order
        return self._epochs[epoch]

    def _alike(self, bins: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
        """In an order in which those of a step have equal work."""
        assert self._bins
        work, found = [sum(map(self._bins.work, (self._lengths[one] for one in of))) for of in bins], []
        for first in range(0, len(bins), ALIKE * self._count):
            part = sorted(range(first, min(first + ALIKE * self._count, len(bins))), key=lambda k: work[k])
            steps = [part[k : k + self._count] for k in range(0, len(part), self._count)]
            # The last may have fewer, which would shift those behind it.
            found += [steps[k] for k in rng.permutation(len(part) // self._count)] + steps[len(part) // self._count :]
        return [bins[k] for of in found for k in of]
