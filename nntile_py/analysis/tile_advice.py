"""Count the tasks of a tiling without listing them, and advise coarser tiles if there are too many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nntile_py.config.builders import step_spec
from nntile_py.errors import ConfigError
from nntile_py.graph.count import count_tasks
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import LISTING, MOST_TASKS
from nntile_py.graph.step import TILE_DTYPE, StepSpec
from nntile_py.tiles import AXES, Tiling, device_model
from nntile_py.tiles.placement import Speed

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

MANY = 20_000  # tasks; fewer tasks are listed, and run, within two seconds
LONG = 5.0  # seconds; if listing the tasks takes longer, a note says so


@dataclass(frozen=True)
class TileCost:
    """Cost of a tiling on workers with the rates `speed`.

    Attributes:
        tiles: {axis: tile size}, as in the YAML.
        tasks: number of tasks of a step.
        work: mean seconds of arithmetic in a task.
    """

    tiles: dict[str, int]
    tasks: int
    work: float
    speed: Speed

    @property
    def far_too_fine(self) -> bool:
        """True if there are many tasks, and the mean arithmetic of a task takes less time than its overhead."""
        return self.tasks > MANY and self.work < self.speed.beside


def own_cost(config: RunConfig, spec: StepSpec | None = None) -> TileCost:
    """Return the cost of the tiles that the config has."""
    return next(_coarser(config, spec))


def coarse(config: RunConfig, spec: StepSpec | None = None, *, inference: bool = False) -> TileCost:
    """Return coarser tiles for the config, and their cost.

    The number of tiles is halved along the axis that has the most tiles, until a mean task is long enough (Speed.good)
    or no axis is cut. The batch keeps a tile for each worker.

    Args:
        config: the config of the run.
        spec: the config's StepSpec, if the caller has it already.
        inference: True: count the tasks of a forward pass instead of a training step.
    """
    *_, last = _coarser(config, spec, inference)
    return last


def note(config: RunConfig, spec: StepSpec | None = None) -> str:
    """Return a note for the user if tiles are far too small or listing the tasks takes long; "" otherwise."""
    own = own_cost(config, spec)
    listing = f"listing them takes about {own.tasks * LISTING:.0f} s"
    if not own.far_too_fine:
        long = LONG < own.tasks * LISTING < MOST_TASKS * LISTING
        return f"note: {own.tasks:,} tasks a step; {listing}" if long else ""
    better = coarse(config, spec)
    sets = " ".join(f"--set tiles.{axis}={size}" for axis, size in better.tiles.items() if own.tiles.get(axis) != size)
    advice = (
        f"note: {own.tasks:,} tasks a step; each has {own.work * 1e6:.1f} us of arithmetic and an overhead of about"
        f" {own.speed.beside * 1e6:.0f} us: tiles are far too small; try {sets} ({better.tasks:,} tasks)"
    )
    return advice if own.tasks > MOST_TASKS else f"{advice}; continuing: {listing}"


def sizes(config: RunConfig) -> dict[str, int]:
    """Return {axis: size} for the axes of the config's model that tiles may cut."""
    axes = step_spec(config).padded.trace(training=False)[0].sizes()
    return {axis: axes[axis] for axis in AXES if axis in axes}


def _coarser(config: RunConfig, spec: StepSpec | None = None, inference: bool = False) -> Iterator[TileCost]:
    """Yield the cost of the config's tiling, then of coarser and coarser tilings, until a tiling is good."""
    spec = (spec or step_spec(config)).padded  # has as many tasks as a packed step, and the axes that `tiles` names
    if inference:
        repeats, graph, update = 1, spec.evaluation().graph, Graph()
    else:
        training = spec.graphs
        repeats, graph, update = spec.grad_accumulation, training.graph, spec.update(training)
    whole = graph.sizes()
    speed = device_model.worker(TILE_DTYPE[spec.precision], config.runtime.cuda != 0)

    def cost(tiles: dict[str, int]) -> TileCost:
        tiling = Tiling(tiles)
        tasks = repeats * count_tasks(graph, tiling, spec.accumulate) + count_tasks(update, tiling, spec.accumulate)
        return TileCost(tiles, tasks, repeats * graph.flop(tiling) / speed.flop_s / tasks, speed)

    now = cost(spec.tiling.tiles)
    yield now
    while now.work < speed.good:
        tiles = {axis: -(-whole[axis] // size) for axis, size in now.tiles.items() if axis in whole}
        least = {axis: min(config.workers, count) if axis == "batch" else 1 for axis, count in tiles.items()}
        divisible = [axis for axis in tiles if tiles[axis] > least[axis]]
        if not divisible:
            return
        axis = max(divisible, key=tiles.__getitem__)
        half = -(-whole[axis] // max(-(-tiles[axis] // 2), least[axis]))
        try:
            now = cost(now.tiles | {axis: half})
        except ConfigError:  # query heads that share a key head must be in one tile
            now = cost(now.tiles | {axis: whole[axis]})
        yield now
