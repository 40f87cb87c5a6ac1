"""The setting `tiles: auto`: the tiling whose step is estimated to be the fastest on the given workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nntile_py.errors import ConfigError
from nntile_py.graph.count import count_tasks
from nntile_py.graph.estimate import estimate
from nntile_py.graph.recompute_choice import Room
from nntile_py.graph.recompute_rule import AUTO
from nntile_py.tiles import TaskList, Tiling
from nntile_py.tiles.placement import Speed

if TYPE_CHECKING:
    from nntile_py.graph.step import StepSpec

GAIN = 0.95  # a tiling with more tiles must take less than this share of the time: estimates are not exact
LISTED = 50_000  # tasks of all tilings together that a search lists, in about 5 s
INNER = ("heads", "ffn", "vocab")  # axes that are cut if the batch alone does not keep the workers busy
PARTS = (2, 4, 8)  # numbers of tiles along such an axis


@dataclass(frozen=True)
class TileEstimate:
    """The estimate for one tiling.

    Attributes:
        tiles: {axis: tile size}; axes that are left out are not cut.
        tasks: number of tasks of a step.
        parallelism: time of all tasks divided by the time of the longest chain of dependent tasks.
        seconds: time of a step.
        peak_bytes: largest number of bytes alive at once.
        fits: the step fits into the memory.
    """

    tiles: dict[str, int]
    tasks: int
    parallelism: float
    seconds: float
    peak_bytes: int
    fits: bool

    @property
    def text(self) -> str:
        """The tile sizes as in a YAML, such as {batch: 4, heads: 3}."""
        return tiles_text(self.tiles)

    def better(self, other: TileEstimate) -> bool:
        """Return whether this tiling, which has more tiles than `other`, is the better one."""
        return self.fits if self.fits != other.fits else self.seconds < GAIN * other.seconds


@dataclass(frozen=True)
class TileSearch:
    """The tilings that a search has estimated.

    Attributes:
        program: digest of the tasks of the uncut step, the same for equal configs.
        estimates: in the order of the search; the first tiling is uncut.
        best: the chosen one of `estimates`.
        speed: rates of one worker, with which the tilings were estimated.
    """

    program: str
    estimates: list[TileEstimate]
    best: TileEstimate
    speed: Speed


def tiles_text(tiles: Mapping[str, int]) -> str:
    """Return tile sizes as in a YAML, such as {batch: 4, heads: 3}; for no tile sizes `{}, uncut`."""
    return f"{{{', '.join(f'{axis}: {size}' for axis, size in tiles.items())}}}" if tiles else "{}, uncut"


def program_of(spec: StepSpec, room: Room) -> str:
    """Return a key of the spec's step, its number of passes and the memory; the key is the same in every process."""
    return f"{_digest(_uncut(spec))}-{spec.grad_accumulation}-{room.bytes >> 20}-{room.beyond >> 20}"


def search_tiles(spec: StepSpec, workers: int, room: Room, speed: Speed) -> TileSearch:
    """Search for the fastest tiling by estimates; the result depends on the arguments only.

    The batch is cut into about as many tiles as there are workers, as tasks of different sequences are independent. If
    tasks still wait for each other, as in a small batch, the search also cuts the axes INNER, one after the other, as
    long as the estimate becomes shorter. It never cuts `seq`, which attention computes in one task, nor `embed`, over
    which nearly every product sums.

    Args:
        spec: the step; its own tiling has no effect.
        workers: number of workers, of all ranks together.
        room: memory of all ranks together, and the kind of the workers.
        speed: rates of one worker.

    Raises:
        ConfigError: the step cannot be built.
    """
    spec = _uncut(spec)
    search = _Search(spec, workers, room, speed)
    now = search.add({})
    assert now
    for size in sorted({math.ceil(spec.batch / workers), max(spec.batch // workers, 1)}, reverse=True):
        if size < spec.batch and (cut := search.add({"batch": size})) and cut.better(now):
            now = cut
    while now.parallelism < workers:
        cuts = [cut for tiles in _finer(search.sizes, now.tiles) if (cut := search.add(tiles)) and cut.better(now)]
        if not cuts:
            break
        now = min(cuts, key=lambda cut: cut.seconds)
    if not now.fits:
        now = min((one for one in search.estimates if one.fits), key=lambda one: one.seconds, default=now)
    return TileSearch(_digest(spec), search.estimates, now, speed)


def _uncut(spec: StepSpec) -> StepSpec:
    """Return the spec without tile sizes.

    The layout search and `recompute: auto` depend on the tile sizes, so both are switched off.
    """
    again = "none" if spec.recompute == AUTO else spec.recompute
    return replace(spec, tiling=Tiling(), recompute=again, timings=None)


def _digest(spec: StepSpec) -> str:
    step = spec.step()
    return "".join(lowering.tasks.digest()[:16] for lowering in (step.first, step.update))


def _finer(sizes: Mapping[str, int], tiles: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield tilings with one more cut axis than `tiles`."""
    for axis in INNER:
        if axis not in tiles and axis in sizes:
            for parts in PARTS:
                if parts <= sizes[axis]:
                    yield {**tiles, axis: math.ceil(sizes[axis] / parts)}


class _Search:
    """The tilings estimated so far."""

    def __init__(self, spec: StepSpec, workers: int, room: Room, speed: Speed) -> None:
        self.spec, self.workers, self.room, self.speed = spec, workers, room, speed
        self.estimates: list[TileEstimate] = []
        self.sizes = spec.graphs.graph.sizes()
        self._listed = 0

    def add(self, tiles: dict[str, int]) -> TileEstimate | None:
        """Estimate a tiling; return None if it is not allowed, or if all tilings together would exceed LISTED tasks."""
        spec = replace(self.spec, tiling=Tiling(tiles)) if tiles else self.spec
        try:
            # The uncut step and the first cut of the batch are estimated whatever they cost.
            if len(self.estimates) > 1 and self._listed + self._count(spec) > LISTED:
                return None
            lists = self._lists(spec)
        except ConfigError:
            if not tiles:
                raise
            return None
        self._listed += sum(len(tasks.tasks) for tasks in {id(tasks): tasks for tasks in lists}.values())
        of = estimate(lists, self.workers, self.room.gpu, self.speed)
        fits = self.room.fits(of.peak_bytes, lists)
        self.estimates.append(TileEstimate(tiles, of.tasks, of.parallelism, of.seconds, of.peak_bytes, fits))
        return self.estimates[-1]

    def _count(self, spec: StepSpec) -> int:
        return count_tasks(spec.graphs.graph, spec.cuts, spec.accumulate)

    def _lists(self, spec: StepSpec) -> list[TaskList]:
        return spec.step().in_turn(spec.grad_accumulation)
