"""Start values, drawn by all cores: the same numbers however many cores there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nntile_py.graph.params import Constant, Init, Param, Source
from nntile_py.system.load import cores

BLOCK = 1 << 20  # words that one generator draws

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, Array, int], None]  # fill a block of array number so-and-so


def fill(arrays: Sequence[Array], seed: int | Sequence[int], draw: Draw, first: int = 0) -> None:
    """Fill contiguous arrays block by block, each with a generator of its own: of the seed, its array, its place.

    first: number of the first array."""

    def one(place: tuple[int, int]) -> None:
        number, at = place
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(first + number, at // BLOCK)))
        draw(rng, arrays[number].reshape(-1)[at : at + BLOCK], number)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(one, [(k, at) for k, array in enumerate(arrays) for at in range(0, array.size, BLOCK)]))


def _inits(params: Iterable[Param]) -> dict[str, tuple[Init, Source]]:
    inits: dict[str, tuple[Init, Source]] = {}
    for param in params:
        for source in param.sources:
            inits.setdefault(source.weight, (param.init, source))
    return inits


def each_initial_weight(params: Iterable[Param], seed: int) -> Iterator[tuple[str, Array]]:
    """Yield names and values of initial_weights one after the other, so that not all are in memory at once."""
    number = 0
    for name, (init, source) in _inits(params).items():
        if isinstance(init, Constant):
            yield name, np.full(source.shape, init.value, np.float32)
            continue
        weight, std = np.empty(source.shape, np.float32), np.float32(init.std)

        def draw(rng: np.random.Generator, block: Array, _: int, std: np.float32 = std) -> None:
            rng.standard_normal(out=block, dtype=np.float32)
            block *= std

        fill([weight], seed, draw, number)
        number += 1
        yield name, weight


def initial_weights(params: Iterable[Param], seed: int | Sequence[int]) -> dict[str, Array]:
    """{weight in the checkpoint: fp32 array} with the start values that the parameters declare."""
    weights: dict[str, Array] = {}
    drawn: list[tuple[str, np.float32]] = []
    for name, (init, source) in _inits(params).items():
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
