"""`nntile sweep --auto`: search the tile sizes of a config. Many tilings are planned, the most promising are measured.

The search walks axis by axis from a few starts, the config's own tiles among them (coarser ones if these are far too
small), towards the shortest planned step. It prunes tilings that need too much memory, whose tasks are short against
the runtime's overhead, or that have fewer parallel tasks than workers. The config's own tiling is measured first: the
gain is the ratio to it. searched.csv and plot.png, .svg, .pdf show the planned, pruned and measured tilings.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nntile_py.analysis.plan import Estimate, estimate
from nntile_py.analysis.tile_advice import coarse, note, own_cost
from nntile_py.analysis.workloads import build
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.measure.plots import Row, caption, plain, spread
from nntile_py.measure.sweep_spec import Sweep
from nntile_py.schema import assignment, read_yaml, validated
from nntile_py.system.cgroup import machine_memory
from nntile_py.system.folders import replace_file
from nntile_py.system.pictures import new_figure, save_figure
from nntile_py.system.progress import telling
from nntile_py.tiles import AXES
from nntile_py.tiles.placement import GOOD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tiles = dict[str, int | None]  # by axis; None: not cut
Seen = dict[tuple[int | None, ...], Estimate | str]  # by tiling: its plan, or why there is none
CUTS = (1, 2, 3, 4, 8)  # tiles along an axis
UNCUTTABLE, TOO_FINE = "operators that cannot be cut so", "far too many tasks"
MOST_PLANS = 250
ROUNDS = 3


@dataclass
class Candidate:
    """A planned tiling: sizes in the order of AXES, and the reason for which it is not worth a measurement, or None."""

    key: tuple[int | None, ...]
    plan: Estimate | None  # None: not planned, for the reason in `pruned`
    pruned: str | None

    def __str__(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in zip(AXES, self.key, strict=True) if size) or "uncut"


@dataclass
class Search:
    """The planned tilings, and the sweep that measures the most promising of them."""

    name: str
    tilings: list[Candidate]
    sweep: Sweep
    own: tuple[int | None, ...] | None = None  # the config's own tiling, if it is measured

    def baseline(self, rows: list[Row]) -> Row | None:
        """Return the row of the config's own tiling."""
        return _measured(rows).get(self.own) if self.own else None


def search(path: Path, sets: list[str], budget: int, console: Console) -> Search:
    """Plan tilings; the sweep measures the config's own, the uncut one, and the most promising, `budget` in all."""
    tree = read_yaml(path, "SWEEP", RunConfig) if path.is_file() else {}
    if "config" in tree and tree.keys() & {"grid", "list", "random"}:
        raise ConfigError(f"{path}: this is a sweep's YAML; --auto takes a run's config, such as {tree['config']}")
    config = load(path, sets)
    seen: Seen = {}
    start: Tiles = config.tiles.model_dump()
    own: tuple[int | None, ...] | None = _key(start)
    if (now := own_cost(config)).far_too_fine:  # listing so many tasks takes too long, measuring them longer
        start.update(coarse(config).tiles)
        own = None
        text = f"the config's own tiles make {now.tasks:,} tasks a step, far too many to measure; beginning at others"
        console.print(text, highlight=False, soft_wrap=True)
    elif text := note(config):
        console.print(f"{text}, for each of the tilings", highlight=False, soft_wrap=True)
    whole: Tiles = dict.fromkeys(AXES)
    starts = [start, whole, whole | {"batch": _tile(config.train.batch, config.workers)}]
    with telling(console) as tell:
        tell("planning tilings")
        for begin in starts:
            _walk(config, begin, seen)
    tilings = [
        Candidate(key, None if isinstance(plan, str) else plan, why_not(config, plan)) for key, plan in seen.items()
    ]
    refused = Counter(one.pruned for one in tilings if one.pruned)
    pruned = ", ".join(f"{count} for {reason}" for reason, count in refused.most_common()) or "none"
    console.print(f"{len(seen)} tilings planned; pruned: {pruned}", highlight=False, soft_wrap=True)
    always = [_key(start), _key(whole)]  # the config's own first: the baseline of the gain
    # A model so small that no tiling is good still has a best one.
    planned = [(one.plan.seconds, one) for one in tilings if one.plan]
    kept = [entry for entry in planned if not entry[1].pruned] or planned
    best = [one.key for _, one in sorted(kept, key=lambda entry: entry[0])]
    chosen = list(dict.fromkeys([*always, *best]))[: max(budget, 1)]
    text = f"{len(chosen)} of them will be measured, each {ROUNDS} times in turns; --budget N takes fewer"
    console.print(text, highlight=False, soft_wrap=True)
    tree = {
        "config": str(path),
        "set": dict(map(assignment, sets)),
        "list": [{f"tiles.{axis}": size for axis, size in zip(AXES, key, strict=True)} for key in chosen],
        "measure": {"work": "train", "repeats": 3},
        "rounds": ROUNDS,
    }
    return Search(path.stem, tilings, validated(Sweep, tree), own)


def write_search(found: Search, rows: list[Row], folder: Path) -> None:
    """Write searched.csv and plot.png, .svg, .pdf: planned and pruned tilings, and the measured ones by their time."""
    from nntile_py.system.machine import described, machine

    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*(f"tiles.{axis}" for axis in AXES), "planned_seconds", "tasks", "planned_task_us", "parallelism",
                     "peak_bytes", "pruned", "seconds"])  # fmt: skip
    measured = _measured(rows)
    for one in found.tilings:
        of, row = one.plan, measured.get(one.key)
        planned = [of.seconds, of.tasks, of.mean_task * 1e6, of.parallelism, of.peak_bytes] if of else [""] * 5
        writer.writerow([*map(plain, one.key), *planned, one.pruned or "", row["seconds"] if row else ""])
    replace_file(folder / "searched.csv", out.getvalue())
    where = machine()
    save_figure(draw_search(found, rows, f"{described(where)}, {where['date']}"), folder / "plot")


def _measured(rows: list[Row]) -> dict[tuple[int | None, ...], Row]:
    """Return the good rows by their tiling."""
    return {tuple(row["sets"][f"tiles.{axis}"] for axis in AXES): row for row in rows if row["status"] == "ok"}


def draw_search(found: Search, rows: list[Row], where: str) -> Figure:
    """Draw planned time against the number of tasks, by reason of pruning (left), and the measured times (right)."""
    measured = _measured(rows)
    ordered = sorted(((one, measured[one.key]) for one in found.tilings if one.key in measured),
                     key=lambda pair: -float(pair[1]["seconds"]))  # fmt: skip
    from matplotlib.ticker import LogLocator

    figure = new_figure((11.5, max(4.4, 2.2 + 0.28 * len(ordered))))
    left, right = figure.subplots(1, 2)
    drawn = [(one, one.plan) for one in found.tilings if one.plan]
    reasons = [None, *dict.fromkeys(one.pruned for one in found.tilings if one.pruned)]
    for reason, colour, marker in zip(reasons, ("#0072b2", "#9aa0a6", "#cc79a7", "#e69f00", "#000000"), "oxxxx",
                                      strict=False):  # fmt: skip
        here = [of for one, of in drawn if one.pruned == reason]
        if here:
            told = f"{'pruned: ' + reason if reason else 'kept'} ({len(here)})"
            left.plot([of.tasks for of in here], [of.seconds * 1e3 for of in here], linestyle="", marker=marker,
                      color=colour, markersize=5, label=told)  # fmt: skip
    rings = [of for one, of in drawn if one.key in measured]
    left.plot([of.tasks for of in rings], [of.seconds * 1e3 for of in rings], linestyle="", marker="o", markersize=10,
              fillstyle="none", color="#d55e00", label=f"measured ({len(rings)})")  # fmt: skip
    times = [of.seconds for _, of in drawn] or [1.0]
    scale = "log" if max(times) > 10 * min(times) else "linear"
    left.set(xscale="log", yscale=scale, xlabel="tasks of a step", ylabel="planned time of a step (ms)")
    counts = [of.tasks for _, of in drawn] or [1]
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(counts) < 100 * min(counts) else (1,)))
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.xaxis.set_minor_formatter("")
    left.set_title(f"{len(found.tilings)} tilings planned", fontsize=10)
    left.grid(alpha=0.3)
    left.legend(loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2, fontsize=8, frameon=False)
    for place, (_, row) in enumerate(ordered):
        middle, (low, high) = row["seconds"], spread(row) or (row["seconds"],) * 2
        best = place == len(ordered) - 1
        right.errorbar([middle * 1e3], [place], xerr=[[(middle - low) * 1e3], [(high - middle) * 1e3]], marker="o",
                       capsize=3, color="#009e73" if best else "#d55e00")  # fmt: skip
    right.set_yticks(range(len(ordered)), [str(one) for one, _ in ordered], fontsize=8)
    right.set_xlim(left=0)
    right.set_xlabel("measured time of a step (ms)")
    right.set_title(f"{len(ordered)} measured, the best at the top", fontsize=10)
    right.grid(alpha=0.3, axis="x")
    figure.suptitle(f"{found.name}: search of tile sizes", fontsize=11)
    figure.supxlabel(caption(rows, where), fontsize=7.5, color="#59636e", x=0.01, ha="left")
    return figure


def why_not(config: RunConfig, plan: Estimate | str) -> str | None:
    """Return the reason for which a tiling is not worth a measurement, or None."""
    if isinstance(plan, str):
        return plan
    if plan.peak_bytes > _memory(config):
        return "memory"
    if plan.mean_task < plan.speed.good / 2:  # tilings between are measured
        return f"tasks shorter than {GOOD // 2} times their overhead"
    if plan.parallelism < config.workers:
        return "less parallelism than workers"
    return None


def sizes_to_try(config: RunConfig) -> dict[str, list[int | None]]:
    """Return the tile sizes to try along each axis: the config's own, none, and even cuts."""
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


def _walk(config: RunConfig, start: Tiles, seen: Seen) -> None:
    """Change one axis at a time to its best value, until nothing changes."""
    choices, now = sizes_to_try(config), dict(start)
    changed = True
    while changed and len(seen) < MOST_PLANS:
        changed = False
        for axis in AXES:
            scores = {size: _score(config, _plan(config, now | {axis: size}, seen)) for size in choices[axis]}
            best = min(scores, key=lambda size: scores[size])
            if scores[best] < _score(config, _plan(config, now, seen)):
                now[axis], changed = best, True


def _plan(config: RunConfig, tiles: Tiles, seen: Seen) -> Estimate | str:
    if _key(tiles) not in seen:
        at = config.model_copy(update={"tiles": type(config.tiles)(**tiles)})
        try:
            lists = None if own_cost(at).far_too_fine else build(at).lists
            seen[_key(tiles)] = estimate(lists, config.workers, config.runtime.cuda != 0) if lists else TOO_FINE
        except ConfigError:
            seen[_key(tiles)] = UNCUTTABLE
    return seen[_key(tiles)]


def _score(config: RunConfig, plan: Estimate | str) -> float:
    """Return the expected seconds; tilings to prune come after all others."""
    return math.inf if isinstance(plan, str) else plan.seconds * (1 if why_not(config, plan) is None else 1e3)


def _memory(config: RunConfig) -> float:
    """Return the bytes that tiles may take: of all GPUs together, as tiles spread over them."""
    if not config.runtime.cuda:
        return config.runtime.memory or 0.8 * machine_memory()
    from nntile_py.execution.starpu_settings import cuda_devices, default_cuda_memory

    return (config.runtime.cuda_memory or (default_cuda_memory() if cuda_devices() else math.inf)) * config.workers
