"""Layers of a model that are alike, so that a picture draws one of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

FEWEST = 3  # layers in a row that are worth folding


@dataclass
class Unit:
    """An operator or a task: its layer, how it looks, what it reads and writes."""

    layer: int | None
    looks: Hashable
    reads: list[Hashable]
    writes: list[Hashable]


@dataclass
class Folded:
    """What to draw: `runs` are the first and the last layer of each fold.

    same: of a tensor or a tile that is not drawn, the one that is; comes_from: of a unit and the number of one of its
    reads, what is read instead."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    same: dict[Hashable, Hashable] = field(default_factory=dict)
    comes_from: dict[tuple[int, int], Hashable] = field(default_factory=dict)

    def run_of(self, layer: int | None) -> tuple[int, int] | None:
        """The fold that the layer is part of."""
        return next((run for run in self.runs if layer is not None and run[0] <= layer <= run[1]), None)

    def draws(self, layer: int | None) -> bool:
        """Whether units of this layer are drawn: of a fold the first layer is."""
        run = self.run_of(layer)
        return run is None or layer == run[0]


def fold(numbered: Sequence[tuple[int, Unit]]) -> Folded:
    """Folds runs of layers that have the same units, one after the other. Each unit comes with its number.

    What follows a run reads from its last layer; what the first layer reads from the second (in a backward pass) is
    what the last one reads from outside."""
    of_layer: dict[int, list[int]] = {}
    made_in: dict[Hashable, int] = {}
    units = dict(numbered)
    for number, unit in numbered:
        if unit.layer is not None:
            of_layer.setdefault(unit.layer, []).append(number)
            for key in unit.writes:
                made_in.setdefault(key, unit.layer)
    result = Folded(_runs({layer: tuple(units[n].looks for n in mine) for layer, mine in of_layer.items()}))
    for first, last in result.runs:
        for layer in range(first + 1, last + 1):
            for n, here in zip(of_layer[first], of_layer[layer], strict=True):
                for key, own in zip(units[n].writes, units[here].writes, strict=True):
                    if own != key:  # one that all layers add to stands for itself
                        result.same.setdefault(own, key)
                for key, own in zip(units[n].reads, units[here].reads, strict=True):
                    if own != key and key not in made_in and own not in made_in:  # weights
                        result.same.setdefault(own, key)
        for n, end in zip(of_layer[first], of_layer[last], strict=True):
            for number, (key, outside) in enumerate(zip(units[n].reads, units[end].reads, strict=True)):
                if first < made_in.get(key, first) <= last:
                    result.comes_from[n, number] = outside
    return result


def _runs(looks: dict[int, Hashable]) -> list[tuple[int, int]]:
    """Layers that follow each other and look alike, at least FEWEST of them."""
    runs: list[list[int]] = []
    for layer in sorted(looks):
        if runs and runs[-1][-1] == layer - 1 and looks[layer] == looks[layer - 1]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [(run[0], run[-1]) for run in runs if len(run) >= FEWEST]
