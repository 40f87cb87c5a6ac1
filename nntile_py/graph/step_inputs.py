"""The inputs of a step, and the places of packed sequences in its bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nntile_py.graph.padding import MASK


@dataclass(frozen=True)
class SequencePlace:
    """Where a packed sequence lies: it fills `length` positions of a bin, from position `first` on.

    Attributes:
        bin: number of the bin, counted through all passes of a step.
        number: index of the sequence among the sequences of its bin.
    """

    bin: int
    first: int
    length: int
    number: int


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step, as its programs take them.

    Attributes:
        arrays: {input: array}.
        live: for each pass, the values of the slots that say how far the pass fills each bin.
        places: the place of each sequence, in the caller's order; empty without packing.
    """

    arrays: Mapping[str, Any]
    live: Sequence[Mapping[str, float]]
    places: Sequence[SequencePlace] = ()

    def tokens(self, array_tokens: int) -> int:
        """Return the number of tokens without padding.

        array_tokens: number of positions, padding included; returned if the inputs have no mask and are not packed.
        """
        if self.places:
            return sum(place.length for place in self.places)
        return int(np.count_nonzero(np.asarray(self.arrays[MASK]))) if MASK in self.arrays else array_tokens
