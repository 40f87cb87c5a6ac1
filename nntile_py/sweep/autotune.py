"""`nntile sweep --auto`: tile sizes for a config. Many are planned, which runs nothing; the best few are measured.

The search walks axis by axis from a few starts to where the plan expects the shortest step, and keeps all it has seen.
What cannot be good is then pruned: too much memory, tasks that are short against the runtime's own time for a task,
fewer tasks at once than workers.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from nntile_py.analysis.plan import Estimate, estimate
from nntile_py.analysis.workloads import build
from nntile_py.config.run import RunConfig, load
from nntile_py.config.spec import step_spec
from nntile_py.errors import ConfigError
from nntile_py.schema import assignment, read_yaml, validated
from nntile_py.sweep.spec import Sweep
from nntile_py.system.cgroup import machine_memory
from nntile_py.tiles import AXES

Tiles = dict[str, int | None]  # by axis; None: not cut
CUTS = (1, 2, 3, 4, 8)  # tiles along an axis
SHORT = 10  # a task should take this many times the runtime's own time for it
MOST_PLANS = 250


def search(path: Path, sets: list[str], budget: int, console: Console) -> Sweep:
    """The sweep that measures the `budget` most promising tilings, the config's own and the uncut one among them."""
    tree = read_yaml(path, "SWEEP", RunConfig) if path.is_file() else {}
    if "config" in tree and tree.keys() & {"grid", "list", "random"}:
        raise ConfigError(f"{path}: this is a sweep's YAML; --auto takes a run's config, such as {tree['config']}")
    config = load(path, sets)
    seen: dict[tuple[int | None, ...], Estimate | None] = {}
    own: Tiles = config.tiles.model_dump()
    starts = [own, dict.fromkeys(AXES), dict.fromkeys(AXES) | {"batch": _tile(config.train.batch, config.workers)}]
    with console.status("planning tilings"):
        for start in starts:
            _walk(config, start, seen)
    refused: Counter[str] = Counter()
    kept: list[tuple[float, tuple[int | None, ...]]] = []  # seconds expected, tiling
    rest = kept[:]
    for key, plan in seen.items():
        reason = why_not(config, plan)
        if reason:
            refused[reason] += 1
        if plan:
            (rest if reason else kept).append((plan.seconds, key))
    pruned = ", ".join(f"{count} for {reason}" for reason, count in refused.most_common()) or "none"
    console.print(f"{len(seen)} tilings planned; pruned: {pruned}", highlight=False)
    always = [_key(own), _key(starts[1])]
    # A model so small that no tiling is good has a best one all the same.
    best = [key for _, key in sorted(kept or rest, key=lambda entry: entry[0])]
    chosen = list(dict.fromkeys([*always, *best]))[: max(budget, 1)]
    made: dict[str, Any] = {
        "config": str(path),
        "set": dict(map(assignment, sets)),
        "list": [{f"tiles.{axis}": size for axis, size in zip(AXES, key, strict=True)} for key in chosen],
        "measure": {"work": "train", "repeats": 5},
    }
    return validated(Sweep, made)


def why_not(config: RunConfig, plan: Estimate | None) -> str | None:
    """The reason for which a tiling is not worth a measurement."""
    if plan is None:
        return "operators that cannot be cut so"
    if plan.peak_bytes > _memory(config):
        return "memory"
    if plan.mean_task < SHORT * plan.speed.overhead:
        return f"tasks shorter than {SHORT} times their overhead"
    if plan.parallelism < config.workers:
        return "less parallelism than workers"
    return None


def candidates(config: RunConfig) -> dict[str, list[int | None]]:
    """Tile sizes to try along each axis: the config's own, none, and even cuts."""
    sizes = step_spec(config).trace()[0].sizes()
    result: dict[str, list[int | None]] = {}
    for axis, own in config.tiles.model_dump().items():
        if axis not in sizes:
            result[axis] = [None]
            continue
        even = [_tile(sizes[axis], n) for n in CUTS if 1 < n <= sizes[axis]]
        result[axis] = list(dict.fromkeys([own, None, *even]))
    return result


def _tile(size: int, count: int) -> int:
    return math.ceil(size / count)


def _key(tiles: Tiles) -> tuple[int | None, ...]:
    return tuple(tiles[axis] for axis in AXES)


def _walk(config: RunConfig, start: Tiles, seen: dict[tuple[int | None, ...], Estimate | None]) -> None:
    """Change one axis at a time to its best value, until nothing changes."""
    choices, now = candidates(config), dict(start)
    changed = True
    while changed and len(seen) < MOST_PLANS:
        changed = False
        for axis in AXES:
            scores = {size: _score(config, _plan(config, now | {axis: size}, seen)) for size in choices[axis]}
            best = min(scores, key=lambda size: scores[size])
            if scores[best] < _score(config, _plan(config, now, seen)):
                now[axis], changed = best, True


def _plan(config: RunConfig, tiles: Tiles, seen: dict[tuple[int | None, ...], Estimate | None]) -> Estimate | None:
    if _key(tiles) not in seen:
        at = config.model_copy(update={"tiles": type(config.tiles)(**tiles)})
        try:
            seen[_key(tiles)] = estimate(build(at).lists, config.workers, gpu=config.runtime.cuda != 0)
        except ConfigError:
            seen[_key(tiles)] = None
    return seen[_key(tiles)]


def _score(config: RunConfig, plan: Estimate | None) -> float:
    """Expected seconds; what would be pruned comes after all that would not."""
    return math.inf if plan is None else plan.seconds * (1 if why_not(config, plan) is None else 1e3)


def _memory(config: RunConfig) -> float:
    """What tiles may take; of GPUs all that they have together, as tiles spread over them."""
    if not config.runtime.cuda:
        return config.runtime.memory or 0.8 * machine_memory()
    from nntile_py.execution.runtime import cuda_devices, default_cuda_memory

    return (config.runtime.cuda_memory or (default_cuda_memory() if cuda_devices() else math.inf)) * config.workers
