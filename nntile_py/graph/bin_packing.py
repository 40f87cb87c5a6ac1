"""Packing of sequences of unequal lengths: each bin of fixed capacity holds several sequences without padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nntile_py.graph.packed_inputs import DRAWS, LIVE, OWN, ROWS, SEGMENTS, rows_of
from nntile_py.graph.padding import MASK, lengths_of, padded, widened
from nntile_py.graph.params import Array, Input
from nntile_py.graph.step import StepSpec
from nntile_py.graph.step_inputs import SequencePlace, StepInputs
from nntile_py.tasks.op import Tensor
from nntile_py.tiles.task import live_slot

LOOKAHEAD = 4096  # number of waiting sequences among which `best_fit` looks for a sequence that fits


def consecutive(
    bins: Iterable[tuple[int, Sequence[int]]], lengths: Sequence[int]
) -> Iterator[tuple[int, SequencePlace]]:
    """Yield (sequence, place) for the sequences of all bins; each bin holds its sequences in order, without gaps.

    Args:
        bins: for each bin, its number and the numbers of its sequences.
        lengths: the length of each sequence.
    """
    for number, sequences in bins:
        first = 0
        for k, sequence in enumerate(sequences):
            yield sequence, SequencePlace(number, first, lengths[sequence], k)
            first += lengths[sequence]


def best_fit(
    lengths: Sequence[int], order: Sequence[int], capacity: int, rows: int | None = None, lookahead: int = LOOKAHEAD
) -> list[list[int]]:
    """Pack sequences into as many bins as they need. Return, for each bin, the numbers of its sequences.

    A bin starts with the first sequence in `order` that is not packed yet. While the bin has room, the longest sequence
    that fits, among the next `lookahead` sequences of `order`, is added.

    Args:
        lengths: the length of each sequence.
        order: the numbers of the sequences to pack.
        capacity: tokens of a bin.
        rows: largest number of sequences in a bin; None: no limit.
        lookahead: number of sequences to search.
    """
    waiting: list[deque[int]] = [deque() for _ in range(capacity + 1)]  # by length
    waiting_lengths, seen = 0, 0  # bit n of waiting_lengths: a sequence of n tokens waits
    taken, bins = np.zeros(len(lengths), np.bool_), []
    for position, first in enumerate(order):
        if taken[first]:
            continue
        for sequence in order[seen : position + lookahead]:
            waiting[lengths[sequence]].append(sequence)
            waiting_lengths |= 1 << lengths[sequence]
        seen = max(seen, position + lookahead)
        taken[first] = True
        content, room = [first], capacity - lengths[first]
        while len(content) != rows and (fitting := waiting_lengths & ((2 << room) - 1)):
            n = fitting.bit_length() - 1
            sequence = waiting[n].popleft()
            if not waiting[n]:
                waiting_lengths -= 1 << n
            if not taken[sequence]:
                taken[sequence] = True
                content.append(sequence)
                room -= n
        bins.append(content)
    return bins


@dataclass(frozen=True)
class Bins:
    """The bins of a pass: `count` bins of `capacity` tokens, for sequences of up to `length` tokens.

    Attributes:
        quadratic: the work on a sequence of n tokens is n + quadratic * n^2, by which bins are balanced.
        inputs: {name: input} that the packed graph declares; empty: unknown.
        rows: largest number of sequences in a bin; None: as many as fit.
        tokens: largest number of tokens in a pass; 0: as many as fit into the bins.
    """

    count: int
    capacity: int
    length: int
    quadratic: float = 0.0
    inputs: Mapping[str, Input] = field(default_factory=dict)
    rows: int | None = None
    tokens: int = 0

    @property
    def room(self) -> int:
        """Number of tokens in each bin if a pass has its largest number of tokens, spread evenly over the bins."""
        return (self.tokens or self.count * self.capacity) // self.count

    def work(self, n: int) -> float:
        """Return the work on a sequence of n tokens, in units of the linear work on one token."""
        return n + self.quadratic * n * n

    def places(self, lengths: Sequence[int], passes: int = 1, batch: int | None = None) -> list[SequencePlace]:
        """Return a place for each sequence, so that the bins have nearly equal work.

        If there are exactly passes * batch sequences, each pass has `batch` consecutive sequences, and only the bins of
        the same pass have nearly equal work.

        Raises:
            ValueError: the sequences do not fit.
        """
        places: dict[int, SequencePlace] = {}
        if batch and len(lengths) == passes * batch:
            for k in range(passes):
                bins = range(k * self.count, (k + 1) * self.count)
                places |= self._spread(lengths, range(k * batch, (k + 1) * batch), bins)
        else:
            places = self._spread(lengths, range(len(lengths)), range(passes * self.count))
        return [places[row] for row in range(len(lengths))]

    def _spread(self, lengths: Sequence[int], rows: range, bins: range) -> dict[int, SequencePlace]:
        """Spread the sequences `rows` over `bins`. Return {sequence: place}.

        The longest sequence comes first. Each sequence goes into the bin with the least work among the bins with room.
        Then sequences are swapped between bins until the bins have nearly equal work, see `_swap`.
        """
        total, limit = sum(lengths[k] for k in rows), self.tokens * len(bins) // self.count
        content: dict[int, list[int]] = {k: [] for k in bins}
        used, work = dict.fromkeys(bins, 0), dict.fromkeys(bins, 0.0)
        for row in sorted(rows, key=lambda k: -lengths[k]):
            n = lengths[row]
            free = [k for k in bins if used[k] + n <= self.capacity and len(content[k]) != self.rows]
            if not free or 0 < limit < total:
                room = f"{self.capacity}" + (f" and {self.rows} sequences" if self.rows else "")
                room += f", {limit} tokens in all" if 0 < limit < len(bins) * self.capacity else ""
                raise ValueError(
                    f"{len(rows)} sequences of {total} tokens do not fit into {len(bins)} bins of {room};"
                    " allowed: fewer sequences, or a larger batch"
                )
            best = min(free, key=lambda k: work[k])
            content[best].append(row)
            used[best] += n
            work[best] += self.work(n)
        while len(bins) > 1 and self._swap(lengths, content, used, work):
            pass
        by_length = ((k, sorted(rows, key=lambda row: (-lengths[row], row))) for k, rows in content.items())
        return dict(consecutive(by_length, lengths))

    def _swap(
        self, lengths: Sequence[int], content: dict[int, list[int]], used: dict[int, int], work: dict[int, float]
    ) -> bool:
        """Swap two sequences between the bins with the most and the least work, or move one sequence.

        Returns False if no swap reduces the difference by more than 1 % of the larger work. Without swaps, the work of
        bins with few sequences differs by up to a tenth.
        """
        most, least = max(content, key=lambda k: work[k]), min(content, key=lambda k: work[k])
        gap = work[most] - work[least]
        smallest = gap - 0.01 * work[most]
        best: tuple[int, int | None] | None = None
        for mine in content[most] if smallest > 0 else []:
            for other in (None, *content[least]):
                n, back = lengths[mine], lengths[other] if other is not None else 0
                has_row = other is not None or len(content[least]) != self.rows
                fits = used[least] + n - back <= self.capacity and has_row
                left = abs(gap - 2 * (self.work(n) - self.work(back)))
                if fits and left < smallest:
                    smallest, best = left, (mine, other)
        if best is None:
            return False
        for row, source, to in ((best[0], most, least), (best[1], least, most)):
            if row is not None:
                n = lengths[row]
                content[source].remove(row)
                content[to].append(row)
                used[source], used[to] = used[source] - n, used[to] + n
                work[source], work[to] = work[source] - self.work(n), work[to] + self.work(n)
        return True

    def fill(self, inputs: Mapping[str, Any], passes: int, batch: int, *, shift: bool) -> StepInputs:
        """Pack a user's inputs for `passes` passes. A pass has `batch` sequences, or any other number that fits.

        Args:
            inputs: padded arrays with transformers' attention_mask, or lists of arrays of unequal lengths.
            shift: True: shift the labels of a causal model, so each position gets the label of the next position.

        Raises:
            ValueError: a sequence is empty or too long, a mask has holes, padding has labels, or sizes differ.
        """
        arrays = self._checked(inputs) if self.inputs else padded(inputs, self.length)
        lengths = lengths_of(arrays, self.length)
        if MASK in inputs:
            self._check_labels(arrays, lengths)
        places = self.places(lengths, passes, batch)
        return self.filled({name: one for name, one in arrays.items() if name != MASK}, places, passes, shift=shift)

    def _checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Check a user's inputs and return them as padded arrays with their mask.

        Raises:
            ValueError: the model has no such input, or an array is wrong. The message leaves out inputs that the engine
                computes.
        """
        allowed = {name: one for name, one in self.inputs.items() if name not in OWN and not callable(one.default)}
        mask = Input(Tensor(MASK, ["batch", "seq"], [1, self.length], "int64"), below=2)
        for name in inputs:
            if name not in (*allowed, MASK):
                raise ValueError(f"{name}: unknown input; allowed: {', '.join([*allowed, MASK])}")
        arrays = widened(padded(inputs, self.length, allowed), self.length, allowed)
        tokens = [
            value for name, value in arrays.items() if name in allowed and "seq" in allowed[name].tensor.axes
        ]  # fmt: skip
        if not tokens:
            needed = ", ".join(name for name, one in allowed.items() if one.default is None)
            raise ValueError(f"no inputs of tokens were given; the model needs {needed}")
        rows = len(tokens[0]) if tokens[0].ndim > 1 else 1
        user_sizes = {"batch": (rows or 1,), "seq": (self.length,), "sequence": ()}  # sizes in the user's arrays
        checked = {}
        for name, value in arrays.items():
            one = allowed.get(name, mask)
            shape = sum((user_sizes.get(axis, (size,)) for axis, size in one.tensor.sizes.items()), ())
            checked[name] = one.checked(value, rows, shape if one.batched else None)
        return checked

    def _check_labels(self, arrays: Mapping[str, Array], lengths: Sequence[int]) -> None:
        """Raise ValueError if padding has labels that are not ignored: a packed batch has no padding."""
        padding = np.arange(self.length) >= np.array(lengths)[:, None]
        for name, one in self.inputs.items():
            if name in arrays and one.ignored is not None and "seq" in one.tensor.axes:
                wrong = ((arrays[name] != one.ignored) & padding).any(1)
                if wrong.any():
                    need = f"{one.ignored} there, as padding is left out"
                    message = f"{name}[{wrong.argmax()}]: has labels where {MASK} is 0"
                    raise ValueError(f"{message}; allowed with pack: {need}")

    def filled(
        self, arrays: Mapping[str, Array], places: Sequence[SequencePlace], passes: int, *, shift: bool
    ) -> StepInputs:
        """Pack padded arrays, without their mask, so that each sequence lies in its place. shift: as in `fill`."""
        packed = {name: self._packed(name, value, places, passes, shift) for name, value in arrays.items()}
        packed[SEGMENTS] = self._segments(places, passes)
        packed[DRAWS], packed[ROWS] = self._padded_positions(places, passes)
        # An empty bin gets one token, so that no tile is empty. The token attends to nothing and counts in no mean.
        counts = {axis: np.zeros(passes * self.count, np.int64) for axis in LIVE}
        for place in places:
            counts["seq"][place.bin] += place.length
            counts["sequence"][place.bin] += 1
        if "masked_places" in self.inputs and "labels" in packed:
            counts["masked"] = (packed["labels"] != self.inputs["labels"].ignored).sum(1)
        counts["offset"] = np.maximum(counts["sequence"], 1) + 1
        live = [
            {
                live_slot(axis, k): float(max(of[p * self.count + k], 1))
                for axis, of in counts.items() for k in range(self.count)
            }
            for p in range(passes)
        ]  # fmt: skip
        return StepInputs(packed, live, places)

    def _packed(self, name: str, value: Array, places: Sequence[SequencePlace], passes: int, shift: bool) -> Array:
        """Return one input packed into bins: [bins, capacity, ...].

        value: a value for each token, [sequences, length, ...], or for each sequence, [sequences, ...].
        """
        one = self.inputs.get(name)
        ignored = one.ignored if one is not None and one.ignored is not None else 0
        of_sequences = value.ndim == 1 or (one is not None and "sequence" in one.tensor.axes)
        more = value.shape[1 if of_sequences else 2 :]
        out = np.full((passes * self.count, self.capacity, *more), ignored, value.dtype)
        shifted = bool(one and one.shifted and shift)
        if one and not one.batched:
            return value
        if of_sequences:
            for row, place in enumerate(places):
                out[place.bin, place.number] = value[row]
            return out
        for row, place in enumerate(places):
            tokens = value[row, : place.length]
            end = place.first + place.length - shifted
            out[place.bin, place.first : end] = tokens[shifted:]
        return out

    def _segments(self, places: Sequence[SequencePlace], passes: int) -> Array:
        """Return the offsets of each bin's sequences: int64 [bins, capacity + 1], filled up with the last offset."""
        ends: list[list[int]] = [[] for _ in range(passes * self.count)]
        for place in sorted(places, key=lambda p: p.first):
            ends[place.bin].append(place.first + place.length)
        out = np.zeros((passes * self.count, self.capacity + 1), np.int64)
        for number, of in enumerate(ends):
            out[number, 1 : len(of) + 1] = of
            out[number, len(of) + 1 :] = of[-1] if of else 0
        return out

    def _padded_positions(self, places: Sequence[SequencePlace], passes: int) -> tuple[Array, Array]:
        """Return the position of each token, and the row of each sequence, in the padded array of its pass.

        Dropout draws its random numbers by these positions, so packed and padded batches drop the same elements.
        """
        tokens, sequences = np.zeros((2, passes * self.count, self.capacity), np.int64)
        counts = [0] * passes
        for place in places:
            row = counts[place.bin // self.count]
            counts[place.bin // self.count] += 1
            tokens[place.bin, place.first : place.first + place.length] = row * self.length + np.arange(place.length)
            sequences[place.bin, place.number] = row
        return tokens, sequences

    def unpacked(self, value: Array, places: Sequence[SequencePlace], axes: Sequence[str]) -> Array:
        """Return an output as it would be without packing, with the sequences in the caller's order.

        An output for each token, with the axes [bins, seq, ...], becomes [sequences, length, ...]; positions behind a
        sequence's end are 0. An output for each sequence becomes [sequences, ...] if its axes are
        [bins, sequence, ...], and [sequences, 1, ...] if they are [bins, row, ...].
        """
        if axes[1] in ("sequence", "row"):
            rows = np.stack([value[place.bin, place.number] for place in places])
            return rows[:, None] if axes[1] == "row" else rows
        out = np.zeros((len(places), self.length, *value.shape[2:]), value.dtype)
        for row, place in enumerate(places):
            out[row, : place.length] = value[place.bin, place.first : place.first + place.length]
        return out


def bins_of(spec: StepSpec, *, training: bool = True) -> Bins:
    """Return the bins of a pass: of a training step, or of an evaluation if `training` is False."""
    embed = getattr(getattr(spec.model, "config", None), "embed", None)
    # A layer takes 24 embed^2 flop for each token in products, and 4 embed flop for each pair of tokens in attention.
    quadratic = 1 / (6 * embed) if isinstance(embed, int) else 0.0
    if training:
        graph, optional = spec.graphs.graph, spec.graphs.optional
    else:
        graph, _, batch = spec.trace(training=False)
        optional = batch.optional
    inputs = graph.inputs
    if absent := optional.keys() - spec.given:
        inputs = spec.with_inputs(spec.given | absent).trace(training=training)[0].inputs
    return Bins(spec.rows, spec.capacity, spec.seq, quadratic, inputs, rows_of(inputs), spec.batch * spec.seq)
