"""Random initial weights, drawn in parallel. The numbers do not depend on the number of cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nntile_py.graph.lora import is_adapter
from nntile_py.graph.params import Constant, Init, Normal, Param, Source, Uniform
from nntile_py.system.load import cores

BLOCK = 1 << 20  # elements drawn by one random generator

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, Array, int], None]  # draw(generator, block to fill, number of its array)


def fill(arrays: Sequence[Array], seed: int | Sequence[int], draw: Draw, first: int = 0) -> None:
    """Fill contiguous arrays with random numbers, in blocks, on all cores.

    Each block has its own generator, seeded with `seed`, the array's number and the block's number.

    Args:
        arrays: Arrays to fill.
        seed: Seed, or several seeds that are combined.
        draw: Fills one block.
        first: Number of the first array; the others follow.
    """

    def one(place: tuple[int, int]) -> None:
        number, at = place
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(first + number, at // BLOCK)))
        draw(rng, arrays[number].reshape(-1)[at : at + BLOCK], number)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(one, [(k, at) for k, array in enumerate(arrays) for at in range(0, array.size, BLOCK)]))


def _draw(rng: np.random.Generator, block: Array, init: Normal | Uniform) -> None:
    """Fill a block with random numbers of a distribution."""
    if isinstance(init, Uniform):
        rng.random(out=block, dtype=np.float32)
        block -= np.float32(0.5)
        block *= np.float32(2 * init.bound)
    else:
        rng.standard_normal(out=block, dtype=np.float32)
        block *= np.float32(init.std)


def _inits(params: Iterable[Param]) -> dict[str, tuple[Init, Source]]:
    """Return {name in the checkpoint: (initialisation, source with the weight's shape)} of the parameters' weights."""
    inits: dict[str, tuple[Init, Source]] = {}
    for param in params:
        for source in param.sources:
            inits.setdefault(source.weight, (param.init, source))
    return inits


def each_initial_weight(params: Iterable[Param], seed: int) -> Iterator[tuple[str, Array]]:
    """Yield (name, value) of each weight of `initial_weights`, so that only one weight is in memory at a time."""
    number = 0
    for name, (init, source) in _inits(params).items():
        if isinstance(init, Constant):
            yield name, np.full(source.shape, init.value, np.float32)
            continue
        weight = np.empty(source.shape, np.float32)

        def draw(rng: np.random.Generator, block: Array, _: int, init: Normal | Uniform = init) -> None:
            _draw(rng, block, init)

        fill([weight], seed, draw, number)
        number += 1
        yield name, weight


def initial_weights(params: Iterable[Param], seed: int | Sequence[int]) -> dict[str, Array]:
    """Return {name in the checkpoint: fp32 array} of random or constant initial weights, as the parameters declare."""
    weights: dict[str, Array] = {}
    drawn: list[tuple[str, Normal | Uniform]] = []
    for name, (init, source) in _inits(params).items():
        if isinstance(init, Constant):
            weights[name] = np.full(source.shape, init.value, np.float32)
        else:
            weights[name] = np.empty(source.shape, np.float32)
            drawn.append((name, init))

    def draw(rng: np.random.Generator, block: Array, number: int) -> None:
        _draw(rng, block, drawn[number][1])

    fill([weights[name] for name, _ in drawn], seed, draw)
    return weights


def initial_adapters(params: Iterable[Param], seed: int | Sequence[int]) -> dict[str, Array]:
    """Return {name in the checkpoint: array} with random initial values of the parameters that are adapters."""
    return initial_weights([one for one in params if is_adapter(one.sources[0].weight)], seed)
