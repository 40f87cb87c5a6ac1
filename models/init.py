"""Start values, drawn by all cores: the same numbers however many cores there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nntile_py.graph.params import Constant, Init, Param, Source
from nntile_py.system.load import cores

BLOCK = 1 << 20  # words that one generator draws

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, Array, int], None]  # fill a block of array number so-and-so


def fill(arrays: Sequence[Array], seed: int | Sequence[int], draw: Draw) -> None:
    """Fill contiguous arrays block by block, each with a generator of its own: of the seed, its array, its place."""

    def one(place: tuple[int, int]) -> None:
        number, at = place
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number, at // BLOCK)))
        draw(rng, arrays[number].reshape(-1)[at : at + BLOCK], number)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(one, [(k, at) for k, array in enumerate(arrays) for at in range(0, array.size, BLOCK)]))


def initial_weights(params: Iterable[Param], seed: int | Sequence[int]) -> dict[str, Array]:
    """{weight in the checkpoint: fp32 array} with the start values that the parameters declare."""
    inits: dict[str, tuple[Init, Source]] = {}
    for param in params:
        for source in param.sources:
            inits.setdefault(source.weight, (param.init, source))
    weights: dict[str, Array] = {}
    drawn: list[tuple[str, np.float32]] = []
    for name, (init, source) in inits.items():
        if isinstance(init, Constant):
            weights[name] = np.full(source.shape, init.value, np.float32)
        else:
            weights[name] = np.empty(source.shape, np.float32)
            drawn.append((name, np.float32(init.std)))

    def draw(rng: np.random.Generator, block: Array, number: int) -> None:
        rng.standard_normal(out=block, dtype=np.float32)
        block *= drawn[number][1]

    fill([weights[name] for name, _ in drawn], seed, draw)
    return weights
