"""Layers of a model that are alike, so that a picture draws only one of them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

MIN_LAYERS = 3  # shorter runs of equal layers are not folded


def layer_number(name: str) -> int | None:
    """Return the layer of an operator's name, whose scope is h0, h1, ...; None outside of layers."""
    match = re.match(r"h(\d+)\.", name)
    return int(match[1]) if match else None


def starred(name: str) -> str:
    """Replace a layer's number by a star: one name for the same place in all layers."""
    return re.sub(r"(?<![^.])(h?)\d+(?=\.)", r"\1*", name)


@dataclass
class Unit:
    """An operator or a task. Layers whose units have equal `looks` are alike."""

    layer: int | None
    looks: Hashable
    reads: list[Hashable]
    writes: list[Hashable]


@dataclass
class Folded:
    """Which layers to draw.

    Attributes:
        runs: first and last layer of each fold.
        same: for a tensor or tile that is not drawn, the drawn one that stands for it.
        comes_from: for a unit and the number of one of its reads, what the picture reads instead.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    same: dict[Hashable, Hashable] = field(default_factory=dict)
    comes_from: dict[tuple[int, int], Hashable] = field(default_factory=dict)

    def run_of(self, layer: int | None) -> tuple[int, int] | None:
        """Return the fold that contains the layer."""
        return next((run for run in self.runs if layer is not None and run[0] <= layer <= run[1]), None)

    def draws(self, layer: int | None) -> bool:
        """Return whether the layer is drawn: the first layer of a fold is, the other layers of the fold are not."""
        run = self.run_of(layer)
        return run is None or layer == run[0]


def fold(numbered: Sequence[tuple[int, Unit]]) -> Folded:
    """Fold runs of consecutive layers with the same units.

    The units after a run read from the run's last layer. In a backward pass, the first layer reads from the second
    layer: the picture shows what the run's last layer reads there, from outside of the run.

    Args:
        numbered: units with their numbers.
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
                    if own != key:  # a tensor that all layers add to stands for itself
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
    """Return runs of at least MIN_LAYERS consecutive layers that look alike."""
    runs: list[list[int]] = []
    for layer in sorted(looks):
        if runs and runs[-1][-1] == layer - 1 and looks[layer] == looks[layer - 1]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [(run[0], run[-1]) for run in runs if len(run) >= MIN_LAYERS]
