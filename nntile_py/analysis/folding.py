"""Folding: find runs of equal layers of a model, of which a picture draws only the first layer."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

MIN_LAYERS = 3  # shorter runs of equal layers are not folded


def layer_number(name: str) -> int | None:
    """Return the number of the layer (h0, h1, ...) in an operator's name; None outside of layers."""
    match = re.match(r"h(\d+)\.", name)
    return int(match[1]) if match else None


def starred(name: str) -> str:
    """Replace the layer's number by a star (h3.fc becomes h*.fc), so that an operator has one name in all layers."""
    return re.sub(r"(?<![^.])(h?)\d+(?=\.)", r"\1*", name)


@dataclass
class Unit:
    """An operator or a task. Two layers are equal if their units have equal `looks`.

    Attributes:
        layer: number of its layer; None outside of layers.
        reads, writes: keys of the tensors or tiles that the unit reads and writes.
    """

    layer: int | None
    looks: Hashable
    reads: list[Hashable]
    writes: list[Hashable]


@dataclass
class Folded:
    """Folds: runs of equal layers, of which only the first layer is drawn.

    Attributes:
        runs: first and last layer of each fold.
        same: {tensor or tile that is not drawn: tensor or tile that is drawn in its place}.
        comes_from: {(number of a drawn unit, position among its reads): tensor or tile that the picture shows there}.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    same: dict[Hashable, Hashable] = field(default_factory=dict)
    comes_from: dict[tuple[int, int], Hashable] = field(default_factory=dict)

    def run_of(self, layer: int | None) -> tuple[int, int] | None:
        """Return first and last layer of the fold that contains `layer`; None if no fold does."""
        return next((run for run in self.runs if layer is not None and run[0] <= layer <= run[1]), None)

    def draws(self, layer: int | None) -> bool:
        """Return True if the layer is drawn: it is the first layer of a fold, or in no fold."""
        run = self.run_of(layer)
        return run is None or layer == run[0]


def fold(numbered: Sequence[tuple[int, Unit]]) -> Folded:
    """Find runs of consecutive equal layers, and return them as folds.

    In a backward pass, the first layer of a run reads results of the second layer, which is not drawn. The picture then
    shows the corresponding read of the run's last layer, whose data come from outside of the run.

    Args:
        numbered: the operators or tasks, each with its number.
    """
    of_layer: dict[int, list[int]] = {}
    writer_layer: dict[Hashable, int] = {}
    units = dict(numbered)
    for number, unit in numbered:
        if unit.layer is not None:
            of_layer.setdefault(unit.layer, []).append(number)
            for key in unit.writes:
                writer_layer.setdefault(key, unit.layer)
    result = Folded(_runs({layer: tuple(units[n].looks for n in own) for layer, own in of_layer.items()}))
    for first, last in result.runs:
        for layer in range(first + 1, last + 1):
            for n, here in zip(of_layer[first], of_layer[layer], strict=True):
                for key, own in zip(units[n].writes, units[here].writes, strict=True):
                    if own != key:  # equal for a tensor to which all layers add
                        result.same.setdefault(own, key)
                for key, own in zip(units[n].reads, units[here].reads, strict=True):
                    if own != key and key not in writer_layer and own not in writer_layer:  # weights
                        result.same.setdefault(own, key)
        for n, end in zip(of_layer[first], of_layer[last], strict=True):
            for number, (key, outside) in enumerate(zip(units[n].reads, units[end].reads, strict=True)):
                if first < writer_layer.get(key, first) <= last:
                    result.comes_from[n, number] = outside
    return result


def _runs(looks: dict[int, Hashable]) -> list[tuple[int, int]]:
    """Return first and last layer of each run of at least MIN_LAYERS consecutive layers with equal `looks`."""
    runs: list[list[int]] = []
    for layer in sorted(looks):
        if runs and runs[-1][-1] == layer - 1 and looks[layer] == looks[layer - 1]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [(run[0], run[-1]) for run in runs if len(run) >= MIN_LAYERS]
