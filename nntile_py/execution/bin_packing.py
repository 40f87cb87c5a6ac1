"""Sequences of unequal lengths without padding: several, one behind the other, in each bin of a fixed capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nntile_py.graph.packed_inputs import DRAWS, LIVE, OWN, ROWS, SEGMENTS, rows_of
from nntile_py.graph.params import Input
from nntile_py.graph.step import StepSpec
from nntile_py.tasks.op import Tensor
from nntile_py.tiles.tasklist import live_slot

Array = np.ndarray[Any, Any]
MASK = "attention_mask"


@dataclass(frozen=True)
class Place:
    """Where a sequence lies: positions `first` to `first + length` of a bin, which numbers those of all passes; it is
    sequence `number` there."""

    bin: int
    first: int
    length: int
    number: int


@dataclass(frozen=True)
class Filled:
    """What a step is given, as its programs take it: arrays, and of each pass the slots that say how full tiles are."""

    arrays: Mapping[str, Any]
    live: Sequence[Mapping[str, float]]
    places: Sequence[Place] = ()  # of the sequences, in the caller's order; none: nothing was packed

    def tokens(self, whole: int) -> int:
        """How many there are, without padding; whole: places of the arrays of a step."""
        if self.places:
            return sum(place.length for place in self.places)
        return int(np.count_nonzero(np.asarray(self.arrays[MASK]))) if MASK in self.arrays else whole


@dataclass(frozen=True)
class Bins:
    """The bins of a pass: `count` of `capacity` tokens each, for sequences of up to `length` tokens.

    quadratic: the work of a sequence of n tokens is as n + quadratic * n^2. inputs: as the packed graph declares them.
    rows: sequences of a bin, at most (None: as many as it has room for). tokens: of a pass, at most (0: as many as the
    bins have room for).
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
        """Tokens of a bin where those of a pass are spread evenly."""
        return (self.tokens or self.count * self.capacity) // self.count

    def work(self, n: int) -> float:
        """Of a sequence of n tokens."""
        return n + self.quadratic * n * n

    def places(self, lengths: Sequence[int], passes: int = 1, batch: int | None = None) -> list[Place]:
        """Sequences spread so that bins have equal work: `batch` of them to each pass in turn, if there are so many.

        Raises ValueError where they do not fit."""
        found: dict[int, Place] = {}
        if batch and len(lengths) == passes * batch:
            for k in range(passes):
                bins = range(k * self.count, (k + 1) * self.count)
                found |= self._spread(lengths, range(k * batch, (k + 1) * batch), bins)
        else:
            found = self._spread(lengths, range(len(lengths)), range(passes * self.count))
        return [found[row] for row in range(len(lengths))]

    def _spread(self, lengths: Sequence[int], rows: range, bins: range) -> dict[int, Place]:
        """The longest first, each to the bin with the least work that has room for it; then evened out."""
        total, most = sum(lengths[k] for k in rows), self.tokens * len(bins) // self.count
        of: dict[int, list[int]] = {k: [] for k in bins}
        used, work = dict.fromkeys(bins, 0), dict.fromkeys(bins, 0.0)
        for row in sorted(rows, key=lambda k: -lengths[k]):
            n = lengths[row]
            free = [k for k in bins if used[k] + n <= self.capacity and len(of[k]) != self.rows]
            if not free or 0 < most < total:
                room = f"{self.capacity}" + (f" and {self.rows} sequences" if self.rows else "")
                room += f", {most} tokens in all" if 0 < most < len(bins) * self.capacity else ""
                raise ValueError(
                    f"{len(rows)} sequences of {total} tokens do not fit into {len(bins)} bins of {room}; give fewer,"
                    " or raise batch"
                )
            best = min(free, key=lambda k: work[k])
            of[best].append(row)
            used[best] += n
            work[best] += self.work(n)
        while len(bins) > 1 and self._nearer(lengths, of, used, work):
            pass
        found = {}
        for k, inside in of.items():
            first = 0
            for number, row in enumerate(sorted(inside, key=lambda row: (-lengths[row], row))):
                found[row] = Place(k, first, lengths[row], number)
                first += lengths[row]
        return found

    def _nearer(
        self, lengths: Sequence[int], of: dict[int, list[int]], used: dict[int, int], work: dict[int, float]
    ) -> bool:
        """Swap two sequences of the bins with the most and the least work, or move one, if that brings these nearer by
        more than a hundredth of it: bins of few sequences are else up to a tenth apart."""
        most, least = max(of, key=lambda k: work[k]), min(of, key=lambda k: work[k])
        gap = work[most] - work[least]
        nearest = gap - 0.01 * work[most]
        best: tuple[int, int | None] | None = None
        for mine in of[most] if nearest > 0 else []:
            for other in (None, *of[least]):
                n, back = lengths[mine], lengths[other] if other is not None else 0
                fits = used[least] + n - back <= self.capacity and (other is not None or len(of[least]) != self.rows)
                left = abs(gap - 2 * (self.work(n) - self.work(back)))
                if fits and left < nearest:
                    nearest, best = left, (mine, other)
        if best is None:
            return False
        for row, source, to in ((best[0], most, least), (best[1], least, most)):
            if row is not None:
                n = lengths[row]
                of[source].remove(row)
                of[to].append(row)
                used[source], used[to] = used[source] - n, used[to] + n
                work[source], work[to] = work[source] - self.work(n), work[to] + self.work(n)
        return True

    def fill(self, inputs: Mapping[str, Any], passes: int, batch: int, *, shift: bool) -> Filled:
        """The arrays of `passes` passes of `batch` sequences, or other numbers that fit, from transformers' padded ones
        with their attention_mask, or from lists of arrays of unequal lengths.

        shift: labels of a causal model are those of the inputs' positions. Raises ValueError for sequences that are
        empty or too long, masks with holes, labels of padding, and arrays that do not fit one another.
        """
        given = self._checked(inputs) if self.inputs else padded(inputs, self.length)
        lengths = lengths_of(given, self.length)
        if MASK in inputs:
            self._check_labels(given, lengths)
        places = self.places(lengths, passes, batch)
        return self.filled({name: one for name, one in given.items() if name != MASK}, places, passes, shift=shift)

    def _checked(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Padded arrays with their mask; ValueError for what is none of the model's inputs, as a user knows them."""
        asked = {name: one for name, one in self.inputs.items() if name not in OWN and not callable(one.default)}
        mask = Input(Tensor(MASK, ["batch", "seq"], [1, self.length], "int64"), below=2)
        for name in inputs:
            if name not in (*asked, MASK):
                raise ValueError(f"{name}: unknown input; allowed are {', '.join([*asked, MASK])}")
        given = _widened(padded(inputs, self.length, asked), self.length, asked)
        tokens = [value for name, value in given.items() if name in asked and "seq" in asked[name].tensor.axes]
        if not tokens:
            needed = ", ".join(name for name, one in asked.items() if one.default is None)
            raise ValueError(f"no inputs of tokens were given; the model needs {needed}")
        rows = len(tokens[0]) if tokens[0].ndim > 1 else 1
        own = {"batch": (rows or 1,), "seq": (self.length,), "sequence": ()}  # where a user has other axes than a bin
        found = {}
        for name, value in given.items():
            one = asked.get(name, mask)
            shape = sum((own.get(axis, (size,)) for axis, size in one.tensor.sizes.items()), ())
            found[name] = one.checked(value, rows, shape if one.batched else None)
        return found

    def _check_labels(self, given: Mapping[str, Array], lengths: Sequence[int]) -> None:
        """ValueError for labels that count, as they do in a padded batch, which has places for them."""
        padding = np.arange(self.length) >= np.array(lengths)[:, None]
        for name, one in self.inputs.items():
            if name in given and one.ignored is not None and "seq" in one.tensor.axes:
                wrong = ((given[name] != one.ignored) & padding).any(1)
                if wrong.any():
                    need = f"{one.ignored} there, as padding is left out"
                    told = f"{name}[{wrong.argmax()}]: some count where {MASK} is 0"
                    raise ValueError(f"{told}; allowed with pack: {need}")

    def filled(self, given: Mapping[str, Array], places: Sequence[Place], passes: int, *, shift: bool) -> Filled:
        """The same where places are known; padded arrays without their mask."""
        arrays = {name: self._packed(name, value, places, passes, shift) for name, value in given.items()}
        arrays[SEGMENTS] = self._segments(places, passes)
        arrays[DRAWS], arrays[ROWS] = self._draws(places, passes)
        # An empty bin has one token, which attends to nothing and counts in no mean: kernels see no empty tiles.
        filled = {axis: np.zeros(passes * self.count, np.int64) for axis in LIVE}
        for place in places:
            filled["seq"][place.bin] += place.length
            filled["sequence"][place.bin] += 1
        if "masked_places" in self.inputs and "labels" in arrays:
            filled["masked"] = (arrays["labels"] != self.inputs["labels"].ignored).sum(1)
        filled["offset"] = np.maximum(filled["sequence"], 1) + 1
        live = [
            {
                live_slot(axis, k): float(max(of[p * self.count + k], 1))
                for axis, of in filled.items() for k in range(self.count)
            }
            for p in range(passes)
        ]  # fmt: skip
        return Filled(arrays, live, places)

    def _packed(self, name: str, value: Array, places: Sequence[Place], passes: int, shift: bool) -> Array:
        one = self.inputs.get(name)
        ignored = one.ignored if one is not None and one.ignored is not None else 0
        out = np.full((passes * self.count, self.capacity, *value.shape[2:]), ignored, value.dtype)
        shifted = bool(one and one.shifted and shift)
        if one and not one.batched:
            return value
        if value.ndim == 1:  # of whole sequences
            for row, place in enumerate(places):
                out[place.bin, place.number] = value[row]
            return out
        for row, place in enumerate(places):
            tokens = value[row, : place.length]
            end = place.first + place.length - shifted
            out[place.bin, place.first : end] = tokens[shifted:]
        return out

    def _segments(self, places: Sequence[Place], passes: int) -> Array:
        ends: list[list[int]] = [[] for _ in range(passes * self.count)]
        for place in sorted(places, key=lambda p: p.first):
            ends[place.bin].append(place.first + place.length)
        out = np.zeros((passes * self.count, self.capacity + 1), np.int64)
        for number, of in enumerate(ends):
            out[number, 1 : len(of) + 1] = of
            out[number, len(of) + 1 :] = of[-1] if of else 0
        return out

    def _draws(self, places: Sequence[Place], passes: int) -> tuple[Array, Array]:
        """The place of each token in the padded array of its pass, so that dropout draws the same there and here; and
        that of each sequence."""
        tokens, sequences = np.zeros((2, passes * self.count, self.capacity), np.int64)
        counts = [0] * passes
        for place in places:
            row = counts[place.bin // self.count]
            counts[place.bin // self.count] += 1
            tokens[place.bin, place.first : place.first + place.length] = row * self.length + np.arange(place.length)
            sequences[place.bin, place.number] = row
        return tokens, sequences

    def unpacked(self, value: Array, places: Sequence[Place], axes: Sequence[str]) -> Array:
        """An output of these axes in the caller's order: [bins, seq, ...] as [sequences, length, ...], zeros where
        padded; [bins, sequence, ...] as [sequences, ...]; [bins, row, ...] as [sequences, 1, ...], as without packing.
        """
        if axes[1] in ("sequence", "row"):
            found = np.stack([value[place.bin, place.number] for place in places])
            return found[:, None] if axes[1] == "row" else found
        out = np.zeros((len(places), self.length, *value.shape[2:]), value.dtype)
        for row, place in enumerate(places):
            out[row, : place.length] = value[place.bin, place.first : place.first + place.length]
        return out


def bins_of(spec: StepSpec, *, training: bool = True) -> Bins:
    """The bins of a pass of such a step, or of an evaluation."""
    embed = getattr(getattr(spec.model, "config", None), "embed", None)
    # A layer has 24 embed^2 flop a token in products, and 4 embed a pair of tokens in attention.
    share = 1 / (6 * embed) if isinstance(embed, int) else 0.0
    graph, _, batch = spec.trace(training=training)
    inputs = graph.inputs
    if optional := batch.optional.keys() - spec.given:
        inputs = spec.with_inputs(spec.given | optional).trace(training=training)[0].inputs
    return Bins(spec.rows, spec.capacity, spec.seq, share, inputs, rows_of(inputs), spec.batch * spec.seq)


def padded(inputs: Mapping[str, Any], length: int, declared: Mapping[str, Input] = {}) -> dict[str, Array]:
    """Arrays as they are; lists of arrays of unequal lengths as padded arrays with their attention_mask.

    declared: what is known of the inputs. Raises ValueError for lists that are not of such arrays, or do not fit."""
    whole = {MASK, *(name for name, one in declared.items() if "seq" not in one.tensor.axes)}
    lists = {
        name: value
        for name, value in inputs.items()
        if name not in whole and isinstance(value, list | tuple) and not _flat(value)
    }
    if lists and MASK in inputs:
        raise ValueError(f"{MASK}: given beside lists of arrays, whose lengths say it; leave it out")
    given = {name: _array(name, value) for name, value in inputs.items() if name not in lists}
    first, found = next(iter(lists), ""), list[int]()
    for name, array in given.items() if lists else ():
        if name not in whole and array.ndim > 1:
            raise ValueError(f"{name}: an array, where {first} is a list of arrays; give both in the same form")
    for name, value in lists.items():
        rows = [_array(f"{name}[{k}]", row) for k, row in enumerate(value)]
        if not rows:
            raise ValueError(f"{name}: {value!r} is not allowed; expected a list of arrays, one a sequence")
        more = declared[name].tensor.shape[2:] if name in declared else rows[0].shape[1:]
        for k, row in enumerate(rows):
            _check_row(f"{name}[{k}]", row, length, more)
        lengths = [len(row) for row in rows]
        if (found := found or lengths) != lengths:
            raise ValueError(f"{name}: its rows have other lengths than those of {first}; give the same")
        given[name] = np.zeros((len(rows), length, *more), np.result_type(*rows))
        for k, row in enumerate(rows):
            given[name][k, : len(row)] = row
    if lists:
        given[MASK] = (np.arange(length) < np.array(found)[:, None]).astype(np.int64)
    return given


def _widened(given: dict[str, Array], length: int, declared: Mapping[str, Input]) -> dict[str, Array]:
    """Arrays that are padded to the longest of their sequences, padded to `length`."""
    found = {
        name: value
        for name, value in given.items()
        if value.ndim > 1 and (name == MASK or (name in declared and "seq" in declared[name].tensor.axes))
    }
    widths = {value.shape[1] for value in found.values()}
    if len(widths) != 1 or (n := widths.pop()) >= length:  # that they fit is looked at later
        return given
    found.setdefault(MASK, np.ones((len(next(iter(found.values()))), n), np.int64))
    for name, value in found.items():
        around = [(0, 0), (0, length - n), *[(0, 0)] * (value.ndim - 2)]
        ignored = declared[name].ignored if name in declared else None
        given[name] = np.pad(value, around, constant_values=ignored or 0)
    return given


def _check_row(name: str, row: Array, length: int, more: tuple[int, ...]) -> None:
    """ValueError where it is not [tokens, *more], of 1 to `length` tokens."""
    if not row.ndim or row.shape[1:] != more:
        need = ", ".join(["tokens", *map(str, more)])
        raise ValueError(f"{name}: shape {row.shape} is not allowed; expected [{need}]")
    if not len(row):
        raise ValueError(f"{name}: an empty sequence; allowed: at least one token")
    if len(row) > length:
        raise ValueError(f"{name}: a sequence of {len(row)} tokens; allowed: at most seq = {length}")


def _flat(value: Any) -> bool:
    """Whether it has a number for each sequence."""
    return bool(value) and not any(isinstance(one, list | tuple) or np.ndim(one) for one in value)


def _array(name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except Exception as error:  # what a tensor of another library raises: any of many
        raise ValueError(f"{name}: is no array ({type(error).__name__}: {error})") from error


def lengths_of(given: Mapping[str, Array], length: int) -> list[int]:
    """Of each sequence, by the attention_mask of padded arrays; raises ValueError where it has holes."""
    if MASK not in given:
        return [length] * len(next(value for value in given.values() if value.ndim > 1))
    mask = given[MASK] != 0
    lengths: list[int] = mask.sum(1).tolist()
    for row, n in enumerate(lengths):
        if not n:
            raise ValueError(f"{MASK}[{row}]: an empty sequence; allowed: at least one token")
        if not mask[row, :n].all():
            raise ValueError(f"{MASK}[{row}]: has holes; allowed with pack: ones, then zeros")
    return lengths
