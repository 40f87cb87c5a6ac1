"""Random initial weights, drawn in parallel. The numbers do not depend on the number of cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nntile_py.graph.initializers import Constant, Init, Normal, Uniform
from nntile_py.graph.lora import is_adapter
from nntile_py.graph.params import Param, Source
from nntile_py.system.parallel import BLOCK, blocks, in_parallel

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, Array, int], None]  # draw(generator, block to fill, number of its array)


def fill(arrays: Sequence[Array], seed: int | Sequence[int], draw: Draw, first: int = 0) -> None:
    """Fill contiguous arrays with random numbers, in blocks, on all cores.

    Each block has its own generator, seeded with `seed`, the array's number and the block's number.

    Args:
        arrays: Arrays to fill.
        seed: Seed, or several seeds that are combined.
        draw: Fills one block.
        first: The number of the first array in the seeds. The next arrays have the next numbers.
    """

    def one(place: tuple[int, slice]) -> None:
        number, part = place
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(first + number, part.start // BLOCK)))
        draw(rng, arrays[number].reshape(-1)[part], number)

    in_parallel(one, [(number, part) for number, array in enumerate(arrays) for part in blocks(array.size)])


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


class DrawnWeights(Mapping[str, Array]):
    """Mapping with the arrays of `initial_weights`. Draws an array when it is read, and keeps the array read last."""

    def __init__(self, params: Iterable[Param], seed: int | Sequence[int]) -> None:
        self._inits, self._seed = _inits(params), seed
        random = (name for name, (init, _) in self._inits.items() if not isinstance(init, Constant))
        self._numbers = {name: number for number, name in enumerate(random)}
        self._last: tuple[str, Array] | None = None

    def __getitem__(self, name: str) -> Array:
        if self._last is None or self._last[0] != name:
            init, source = self._inits[name]
            self._last = None  # frees the array before the next is allocated
            self._last = name, self._drawn(name, init, source)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inits)

    def __len__(self) -> int:
        return len(self._inits)

    def _drawn(self, name: str, init: Init, source: Source) -> Array:
        if isinstance(init, Constant):
            return np.full(source.shape, init.value, np.float32)
        weight = np.empty(source.shape, np.float32)
        fill([weight], self._seed, lambda rng, block, _: _draw(rng, block, init), self._numbers[name])
        return weight


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
