"""What the tiles of a config cost, told in a second, before its tasks are listed; and tiles that are coarse enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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

MANY = 20_000  # tasks: fewer are listed, and run, in a second or two
LONG = 5.0  # seconds to list them: worth telling


@dataclass(frozen=True)
class Cut:
    """Of a tiling: tasks of a step, seconds of arithmetic of the mean task, `tiles` as in a YAML; on such workers."""

    tiles: dict[str, int]
    tasks: int
    work: float
    speed: Speed

    @property
    def far_too_fine(self) -> bool:
        """Whether so many tasks compute less than each costs beside."""
        return self.tasks > MANY and self.work < self.speed.beside


def ahead(config: RunConfig) -> Cut:
    """Of the config's own tiles. Raises ConfigError, as the step would."""
    return next(_coarser(config))


def coarse(config: RunConfig, inference: bool = False) -> Cut:
    """Coarser tiles, one axis after the other, until a mean task is long enough (Speed.good) or all are whole.

    The axis with most tiles goes first; the batch keeps a tile for each worker. inference: of a forward pass."""
    *_, last = _coarser(config, inference)
    return last


def note(config: RunConfig) -> str:
    """What to tell, before minutes go by, a user whose tiles are far too small or who has many; else nothing."""
    own = ahead(config)
    listing = f"to list them takes about {own.tasks * LISTING:.0f} s"
    if not own.far_too_fine:
        long = LONG < own.tasks * LISTING < MOST_TASKS * LISTING
        return f"note: {own.tasks:,} tasks a step; {listing}" if long else ""
    better = coarse(config)
    sets = " ".join(f"--set tiles.{axis}={size}" for axis, size in better.tiles.items() if own.tiles.get(axis) != size)
    told = (
        f"note: {own.tasks:,} tasks a step, {own.work * 1e6:.1f} us of arithmetic each, beside which each costs about"
        f" {own.speed.beside * 1e6:.0f} us: tiles far too small; try {sets} ({better.tasks:,} tasks)"
    )
    return told if own.tasks > MOST_TASKS else f"{told}; going on: {listing}"


def padded(config: RunConfig) -> StepSpec:
    """Of packed sequences the padded batch, which has as many tasks: its axes are those that `tiles` names."""
    return replace(step_spec(config), pack=False)


def sizes(config: RunConfig) -> dict[str, int]:
    """Of each axis that tiles may cut."""
    found = padded(config).trace(training=False)[0].sizes()
    return {axis: found[axis] for axis in AXES if axis in found}


def _coarser(config: RunConfig, inference: bool = False) -> Iterator[Cut]:
    """The config's own tiling, then coarser and coarser ones, up to one that is good."""
    spec = padded(config)
    if inference:
        repeats, graph, update = 1, spec.evaluation().graph, Graph()
    else:
        made = spec.graphs()
        repeats, graph, update = spec.grad_accumulation, made.graph, spec.update(made)
    whole = graph.sizes()
    speed = device_model.worker(TILE_DTYPE.get(spec.dtype, spec.dtype), config.runtime.cuda != 0)

    def cut(tiles: dict[str, int]) -> Cut:
        tiling = Tiling(tiles)
        tasks = repeats * count_tasks(graph, tiling, spec.policy) + count_tasks(update, tiling, spec.policy)
        return Cut(tiles, tasks, repeats * graph.flop(tiling) / speed.flop_s / tasks, speed)

    now = cut(spec.tiling.tiles)
    yield now
    while now.work < speed.good:
        tiles = {axis: -(-whole[axis] // size) for axis, size in now.tiles.items() if axis in whole}
        least = {axis: min(config.workers, count) if axis == "batch" else 1 for axis, count in tiles.items()}
        able = [axis for axis in tiles if tiles[axis] > least[axis]]
        if not able:
            return
        axis = max(able, key=tiles.__getitem__)
        half = -(-whole[axis] // max(-(-tiles[axis] // 2), least[axis]))
        try:
            now = cut(now.tiles | {axis: half})
        except ConfigError:  # heads that share keys cannot be cut there
            now = cut(now.tiles | {axis: whole[axis]})
        yield now
