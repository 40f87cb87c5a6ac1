"""Sequences of a tokenized text: documents cut to a length, windows of documents, mixtures of several sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nntile_py.data.collators import Array
from nntile_py.data.token_files import Tokens

BLOCK = 4096  # sequences in a block of a mixture; the number of sequences from a source is equal in all blocks
_PHASE, _DOCUMENTS, _ORDER, _MIX = 3, 4, 2, 5  # parts of seeds: each kind of random choice has a generator of its own


class SequenceTable(Protocol):
    """Sequences of one source. Their tokens may change from epoch to epoch; their number and lengths do not.

    Attributes:
        lengths: Number of tokens of each sequence, an integer array.
        cut: Number of documents that were longer than a sequence."""

    lengths: Array
    cut: int

    def place(self, epoch: int, number: int) -> Sequence[slice]:
        """Return where the tokens of a sequence are in the source's array: mostly one slice."""
        ...


class Pieces:
    """Documents, each cut into sequences of at most `longest` tokens. The sequences are the same in all epochs.

    Args:
        lengths: Tokens of each document, at least 1.
        longest: Largest number of tokens of a sequence.
    """

    def __init__(self, lengths: Array, longest: int) -> None:
        counts = -(-lengths // longest)
        # All arrays except `lengths` have an entry for each document: a long text has many more sequences.
        self._ends, self._of_document, self._longest = np.cumsum(counts), lengths, longest
        self._starts = np.cumsum(lengths) - lengths
        self.lengths = np.full(counts.sum(), longest, np.int32)
        self.lengths[self._ends - 1] = lengths - (counts - 1) * longest
        self.cut = int((lengths > longest).sum())

    def place(self, epoch: int, number: int) -> Sequence[slice]:
        document, part = self._part(number)
        start = int(self._starts[document]) + part * self._longest
        return [slice(start, start + int(self.lengths[number]))]

    def _part(self, number: int) -> tuple[int, int]:
        """Return the document of a sequence, and the sequence's number in the document."""
        document = int(np.searchsorted(self._ends, number, side="right"))
        return document, number - (int(self._ends[document - 1]) if document else 0)


class Answered:
    """The beginning of each sequence, at most `longest` tokens. Sequences are left out if they have no answer there.

    Args:
        tokens: The sequences and which of their tokens are learned.
        longest: Largest number of tokens of a sequence.

    Attributes:
        left_out: Number of sequences that were left out.
    """

    def __init__(self, tokens: Tokens, longest: int) -> None:
        assert tokens.learned is not None
        starts, lengths = np.cumsum(tokens.lengths) - tokens.lengths, np.minimum(tokens.lengths, longest)
        # The first token of a sequence is never predicted.
        bounds = np.stack([starts + 1, starts + lengths], axis=1).ravel()
        counts = np.add.reduceat(np.append(tokens.learned, 0), bounds, dtype=np.int64)[::2]
        kept = (lengths > 1) & (counts > 0)
        self._starts, self.lengths = starts[kept], lengths[kept]
        self.cut, self.left_out = int((tokens.lengths > longest).sum()), int((~kept).sum())

    def place(self, epoch: int, number: int) -> Sequence[slice]:
        start = int(self._starts[number])
        return [slice(start, start + int(self.lengths[number]))]


class TextWindows(Pieces):
    """Windows of documents: they have exactly `longest` tokens, or all tokens of a shorter document.

    The windows of a document overlap so that the first window begins at the document's first token and the last window
    ends at its last token. The beginnings of the other windows are random, and differ in each epoch.

    Args:
        lengths: Tokens of each document, at least 1.
        longest: Number of tokens of a window.
        seed: Seed of these beginnings. None: only the last two windows of a document overlap, in all epochs.
    """

    def __init__(self, lengths: Array, longest: int, seed: int | None) -> None:
        super().__init__(lengths, longest)
        self._seed = seed
        self.lengths[self._ends - 1] = np.minimum(lengths, longest)

    def place(self, epoch: int, number: int) -> Sequence[slice]:
        document, part = self._part(number)
        length, of_document = int(self.lengths[number]), int(self._of_document[document])
        slack = -(-of_document // length) * length - of_document  # tokens of all overlaps of the document's windows
        back = 0
        if slack and self._seed is not None:
            rng = np.random.default_rng([self._seed, epoch, _PHASE, document])
            back = int(rng.integers(0, slack + 1))
        start = int(self._starts[document]) + min(max(part * length - back, 0), of_document - length)
        return [slice(start, start + length)]


class Concatenated:
    """Windows of exactly `longest` tokens over all documents, which are joined in a new order in each epoch.

    Args:
        lengths: Tokens of each document.
        longest: Number of tokens of a window.
        seed: Decides the order, and where the first window of an epoch begins. None: the order stays.

    Raises:
        ValueError: The text has fewer than `longest` tokens.
    """

    def __init__(self, lengths: Array, longest: int, seed: int | None) -> None:
        total = int(lengths.sum())
        if total < longest:
            raise ValueError(f"{total} tokens")
        # With a seed, one window is left out if possible: each epoch can then start at another offset.
        count = max(1, total // longest - (seed is not None))
        self.lengths, self.cut = np.full(count, longest, np.int32), 0
        self._of_document, self._longest, self._seed = lengths, longest, seed
        self._starts = np.cumsum(lengths) - lengths
        self._epochs: dict[int, tuple[Array, Array, int]] = {}

    def _epoch(self, epoch: int) -> tuple[Array, Array, int]:
        """Return the order of the documents, the ends of the ordered documents, and the place of the first window."""
        if epoch not in self._epochs:
            order, phase = np.arange(len(self._of_document)), 0
            if self._seed is not None:
                rng = np.random.default_rng([self._seed, epoch, _DOCUMENTS])
                order = rng.permutation(order)
                phase = int(rng.integers(0, self._of_document.sum() - self.lengths.sum() + 1))
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = order, np.cumsum(self._of_document[order]), phase
        return self._epochs[epoch]

    def place(self, epoch: int, number: int) -> Sequence[slice]:
        order, ends, first = self._epoch(epoch)
        begin = first + number * self._longest
        end, slices = begin + self._longest, []
        at = int(np.searchsorted(ends, begin, side="right"))
        while begin < end:
            document, stop = order[at], min(end, int(ends[at]))
            start = int(self._starts[document] + self._of_document[document]) - (int(ends[at]) - begin)
            slices.append(slice(start, start + stop - begin))
            begin, at = stop, at + 1
        return slices


class Mixture:
    """The sequences of several sources. Each block of BLOCK sequences has a fixed share of sequences of each source.

    A sequence's number counts the epochs too: number % len(lengths) is the sequence, number // len(lengths) the epoch
    of its source. A source whose share is larger than its size goes through its epochs faster than other sources.

    Args:
        tokens: The tokens of each source.
        sequences: The sequences of each source.
        weights: The share of each source, relative to the other sources.
        seed: Decides the order.

    Attributes:
        lengths: Number of tokens of each sequence.
        cut: Number of documents that were longer than a sequence.
    """

    def __init__(
        self, tokens: Sequence[Tokens], sequences: Sequence[SequenceTable], weights: Sequence[float], seed: int
    ) -> None:
        self._tokens, self._sequences, self._seed = tokens, sequences, seed
        self._counts = np.array([len(one.lengths) for one in sequences])
        self._firsts = np.cumsum(self._counts) - self._counts
        self._shares = shares(weights, BLOCK)
        lengths = [one.lengths for one in sequences]
        self.lengths = np.concatenate(lengths) if len(lengths) > 1 else lengths[0]
        self.cut = sum(one.cut for one in sequences)

    def order(self, epoch: int) -> Array:
        """Return the numbers of the sequences of an epoch. An epoch is len(lengths) sequences."""
        total = len(self.lengths)
        if len(self._counts) == 1:
            return self._permutation(0, epoch, epoch * total)
        first, end = epoch * total, (epoch + 1) * total
        numbers = np.concatenate([self._block(block) for block in range(first // BLOCK, -(-end // BLOCK))])
        begin = first - first // BLOCK * BLOCK
        return numbers[begin : begin + total]

    def _block(self, block: int) -> Array:
        """Return the numbers of the sequences of a block, in random order."""
        parts = []
        for source, (share, count) in enumerate(zip(self._shares, self._counts, strict=True)):
            at = np.arange(block * share, (block + 1) * share)
            epochs = at // count
            local = np.concatenate(
                [self._permutation(source, epoch)[at[epochs == epoch] % count] for epoch in np.unique(epochs)]
            )
            parts.append(epochs * len(self.lengths) + self._firsts[source] + local)
        return np.random.default_rng([self._seed, block, _MIX]).permutation(np.concatenate(parts))

    def _permutation(self, source: int, epoch: int, first: int = 0) -> Array:
        """Return the numbers of a source's sequences in random order, counted from `first`."""
        kind, end = [_ORDER, source] if source else [_ORDER], first + int(self._counts[source])
        # There may be millions of sequences: int32 takes half of the memory, if 32 bits are enough.
        numbers = np.arange(first, end, dtype=np.int32 if end < 2**31 else np.int64)
        np.random.default_rng([self._seed, int(epoch), *kind]).shuffle(numbers)
        return numbers

    def take(self, number: int) -> tuple[Array, Array | None]:
        """Return the tokens of a sequence, int64, and which tokens are learned (see Tokens.learned; None: all)."""
        epoch, local = divmod(number, len(self.lengths))
        source = int(np.searchsorted(self._firsts, local, side="right")) - 1
        tokens, places = self._tokens[source], self._sequences[source].place(epoch, local - self._firsts[source])
        ids = np.concatenate([tokens.ids[place] for place in places]).astype(np.int64)
        learned = tokens.learned
        return ids, None if learned is None else np.concatenate([learned[place] for place in places])

    def spread(self, count: int) -> list[int]:
        """Return the numbers of `count` sequences, spread evenly over each source."""
        found = list[int]()
        shares_of = shares(self._shares, count) if len(self._counts) > 1 else [count]
        for first, size, share in zip(self._firsts, self._counts, shares_of, strict=True):
            found += (first + np.linspace(0, size - 1, share).round().astype(np.int64)).tolist()
        return found


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return `total` divided in proportion to `weights`: the largest remainders are rounded up.

    No share is 0 if `total` allows it."""
    exact = np.array(weights, float) / sum(weights) * total
    result = np.maximum(np.floor(exact).astype(int), 1)
    for k in np.argsort(np.floor(exact) - exact, kind="stable")[: max(total - result.sum(), 0)]:
        result[k] += 1
    while result.sum() > total:
        result[result.argmax()] -= 1
    return [int(share) for share in result]
