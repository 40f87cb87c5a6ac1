"""Random arrays drawn by all cores: the same numbers however many cores there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

BLOCK = 1 << 20  # words that one generator draws

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, Array, int], None]  # fill a block of array number so-and-so


def fill(arrays: Sequence[Array], seed: int, draw: Draw) -> None:
    """Fill contiguous arrays block by block, each with a generator of its own: of the seed, its array, its place."""

    def one(place: tuple[int, int]) -> None:
        number, at = place
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number, at // BLOCK)))
        draw(rng, arrays[number].reshape(-1)[at : at + BLOCK], number)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, [(k, at) for k, array in enumerate(arrays) for at in range(0, array.size, BLOCK)]))
