"""`nntile sweep --auto`: search the tile sizes of a config. Many tilings are planned, the most promising are measured.

The search starts at the config's own tiles (at coarser tiles if the config's are far too small) and at two other
tilings. The search changes one axis at a time, towards the shortest planned step. It prunes tilings that need too much
memory, tilings whose tasks are short against the runtime's overhead, and tilings with fewer parallel tasks than
workers. The config's own tiling is measured too, unless its tiles are far too small. The sweep then reports the
speed-up over this tiling. searched.csv and plot.png, .svg, .pdf show the planned, pruned and measured tilings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nntile_py.analysis.tile_advice import coarse, note, own_cost
from nntile_py.analysis.workloads import build
from nntile_py.config.builders import keep_measured, step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.config.scheduler_file import check_machine
from nntile_py.config.sections import TilesSection
from nntile_py.errors import ConfigError
from nntile_py.graph.estimate import Estimate, estimate
from nntile_py.graph.tile_choice import tiles_text
from nntile_py.measure.plots import Row, caption, plain, spread
from nntile_py.measure.results import best_row, within_spread
from nntile_py.measure.sweep_spec import Sweep
from nntile_py.schema import assignment, validated
from nntile_py.system.cgroup import machine_memory
from nntile_py.system.console_tables import csv_text
from nntile_py.system.folders import replace_file
from nntile_py.system.machine import described, machine
from nntile_py.system.pictures import new_figure, save_figure
from nntile_py.system.progress import telling
from nntile_py.system.units import counted
from nntile_py.tiles import AXES
from nntile_py.tiles.placement import GOOD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tiles = dict[str, int | None]  # by axis; None: uncut
Key = tuple[int | None, ...]  # tile sizes in the order of AXES
Seen = dict[Key, Estimate | str]  # the plan of a tiling, or the reason for which it has none
CUTS = (1, 2, 3, 4, 8)  # numbers of tiles along an axis that the search tries
UNCUTTABLE, TOO_FINE = "operators that cannot be cut so", "far too many tasks"
MOST_PLANS = 250  # tilings; with more, the search ends
ROUNDS = 3  # rounds of the sweep


@dataclass
class Candidate:
    """A tiling of the search.

    Attributes:
        plan: None if the tiling cannot be planned.
        pruned: the reason for which the tiling is not measured; None: it is worth a measurement.
    """

    key: Key
    plan: Estimate | None
    pruned: str | None

    def __str__(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in zip(AXES, self.key, strict=True) if size) or "uncut"


@dataclass
class Search:
    """The planned tilings, and the sweep that measures the most promising of them."""

    name: str
    tilings: list[Candidate]
    sweep: Sweep
    own: Key | None = None  # the config's own tiling, if it is measured
    config: RunConfig | None = None

    def baseline(self, rows: list[Row]) -> Row | None:
        """Return the row of the config's own tiling; None if it was not measured."""
        return _measured(rows).get(self.own) if self.own else None


def search(path: Path, sets: list[str], budget: int, console: Console) -> Search:
    """Plan tilings; return them with a sweep of the config's own, the uncut and the most promising other tilings.

    Args:
        budget: largest number of tilings in the sweep, at least 1. The tiling at which the search starts is the first,
            then follow the most promising tilings, and the uncut tiling if the budget is more than 2.
    """
    config = load(path, sets)
    check_machine(config.runtime)
    seen: Seen = {}
    start: Tiles = dict.fromkeys(AXES) | step_spec(config).tiling.tiles
    own: Key | None = _key(start)
    if (now := own_cost(config)).far_too_fine:  # listing so many tasks takes too long, measuring them longer
        start.update(coarse(config).tiles)
        own = None
        text = f"the config's own tiles give {now.tasks:,} tasks a step, too many to measure; starting at coarser tiles"
        console.print(text, highlight=False, soft_wrap=True)
    elif text := note(config):
        console.print(f"{text}, for each tiling", highlight=False, soft_wrap=True)
    uncut: Tiles = dict.fromkeys(AXES)
    starts = [start, uncut, uncut | {"batch": _tile(config.train.batch, config.workers)}]
    with telling(console) as tell:
        tell("planning tilings")
        for tiles in starts:
            _walk(config, tiles, seen)
    tilings = [
        Candidate(key, None if isinstance(plan, str) else plan, why_not(config, plan)) for key, plan in seen.items()
    ]
    chosen = _chosen(tilings, _key(start), _key(uncut), budget)
    console.print(_account(tilings, chosen, budget), highlight=False, soft_wrap=True)
    for tiling in tilings:
        if tiling.key in chosen:  # such as the tiling of the config, which is measured in any case
            tiling.pruned = None
    tree = {
        "config": str(path),
        "set": dict(map(assignment, sets)),
        "list": [{f"tiles.{axis}": size for axis, size in zip(AXES, key, strict=True)} for key in chosen],
        "measure": {"work": "train", "repeats": 3},
        "rounds": ROUNDS,
    }
    return Search(path.stem, tilings, validated(Sweep, tree), own, config)


def _chosen(tilings: list[Candidate], start: Key, uncut: Key, budget: int) -> list[Key]:
    """Return the tilings to measure: `start`, the most promising other tilings, and `uncut` if the budget is above 2.

    If all tilings of a small model are pruned, the most promising are those with the shortest planned steps."""
    planned = [(tiling.plan.seconds, tiling) for tiling in tilings if tiling.plan]
    kept = [entry for entry in planned if not entry[1].pruned] or planned
    best = [tiling.key for _, tiling in sorted(kept, key=lambda entry: entry[0])]
    last = [uncut] if budget > 2 and uncut != start else []
    others = [key for key in best if key not in (start, uncut)][: budget - 1 - len(last)]
    return [start, *others, *last]


def _account(tilings: list[Candidate], chosen: list[Key], budget: int) -> str:
    """Return a text with the numbers of planned, pruned and chosen tilings. The chosen tilings will be measured."""
    reasons = Counter(tiling.pruned for tiling in tilings if tiling.pruned)
    pruned = ", ".join(f"{count} for {reason}" for reason, count in reasons.most_common()) or "none"
    anyway = sum(tiling.pruned is not None for tiling in tilings if tiling.key in chosen)
    text = f"{counted(len(tilings), 'tiling')} planned; pruned: {pruned}"
    if all(tiling.pruned for tiling in tilings):
        text += ". As all are pruned, those with the shortest planned steps are measured"
    elif anyway:
        text += f". {anyway} of the pruned tilings will be measured for comparison"
    text += f"\n{counted(len(chosen), 'tiling')} will be measured, in {ROUNDS} rounds; "
    if len(chosen) < budget:
        return text + f"fewer than --budget {budget}, as no other tiling is worth a measurement"
    return text + "--budget N sets their number"


def keep_winner(searched: Search, rows: list[Row]) -> str:
    """Store the fastest measured tiling as the value of `tiles: auto`, unless another tiling may be as fast.

    Returns a message for the user; "" if no tiling is clearly the fastest."""
    best, of = best_row(rows, searched.sweep.best), searched.sweep.best
    if searched.config is None or not best or len(rows) < 2 or within_spread(rows, of) or not spread(best, of.metric):
        return ""
    tiles = {axis: size for axis in AXES if (size := best["sets"][f"tiles.{axis}"])}
    if not keep_measured(searched.config, tiles):
        return f"{tiles_text(tiles)} is not kept for `tiles: auto`, as the cache folder cannot be written"
    return f"`tiles: auto` now stands for {tiles_text(tiles)} in this config on this machine"


def write_search(searched: Search, rows: list[Row], folder: Path) -> None:
    """Write searched.csv and plot.png, .svg, .pdf: all planned tilings, with the times of the measured ones."""
    heads = [*(f"tiles.{axis}" for axis in AXES), "planned_seconds", "tasks", "planned_task_us", "parallelism",
             "peak_bytes", "pruned", "seconds"]  # fmt: skip
    measured, lines = _measured(rows), []
    for tiling in searched.tilings:
        of, row = tiling.plan, measured.get(tiling.key)
        planned = [of.seconds, of.tasks, of.mean_task * 1e6, of.parallelism, of.peak_bytes] if of else [""] * 5
        lines.append([*map(plain, tiling.key), *planned, tiling.pruned or "", row["seconds"] if row else ""])
    replace_file(folder / "searched.csv", csv_text(heads, lines))
    where = machine()
    save_figure(draw_search(searched, rows, f"{described(where)}, {where['date']}"), folder / "plot")


def _measured(rows: list[Row]) -> dict[Key, Row]:
    """Return {tiling: row} for the rows that were measured without an error."""
    return {tuple(row["sets"][f"tiles.{axis}"] for axis in AXES): row for row in rows if row["status"] == "ok"}


def draw_search(searched: Search, rows: list[Row], where: str) -> Figure:
    """Draw planned time against number of tasks, by reason of pruning (left), and measured times (right)."""
    measured = _measured(rows)
    ordered = sorted(((tiling, measured[tiling.key]) for tiling in searched.tilings if tiling.key in measured),
                     key=lambda pair: -float(pair[1]["seconds"]))  # fmt: skip
    figure = new_figure((11.5, max(4.4, 2.2 + 0.28 * len(ordered))))
    left, right = figure.subplots(1, 2)
    _draw_planned(left, searched, measured)
    for place, (_, row) in enumerate(ordered):
        middle, (low, high) = row["seconds"], spread(row) or (row["seconds"],) * 2
        best = place == len(ordered) - 1
        right.errorbar([middle * 1e3], [place], xerr=[[(middle - low) * 1e3], [(high - middle) * 1e3]], marker="o",
                       capsize=3, color="#009e73" if best else "#d55e00")  # fmt: skip
    right.set_yticks(range(len(ordered)), [str(tiling) for tiling, _ in ordered], fontsize=8)
    right.set_xlim(left=0)
    right.set_xlabel("measured time of a step (ms)")
    right.set_title(f"{len(ordered)} measured, the best at the top", fontsize=10)
    right.grid(alpha=0.3, axis="x")
    figure.suptitle(f"{searched.name}: search of tile sizes", fontsize=11)
    figure.supxlabel(caption(rows, where), fontsize=7.5, color="#59636e", x=0.01, ha="left")
    return figure


def _draw_planned(axes: Any, searched: Search, measured: Mapping[Key, Row]) -> None:
    from matplotlib.ticker import LogLocator

    plans = [(tiling, tiling.plan) for tiling in searched.tilings if tiling.plan]
    reasons = dict.fromkeys([None, *(tiling.pruned for tiling in searched.tilings)])
    colours = ("#0072b2", "#9aa0a6", "#cc79a7", "#e69f00", "#000000")
    series: list[tuple[str, list[Estimate], dict[str, Any]]] = [
        (f"pruned: {reason}" if reason else "kept", [plan for tiling, plan in plans if tiling.pruned == reason],
         {"color": colour, "marker": marker, "markersize": 5})
        for reason, colour, marker in zip(reasons, colours, "oxxxx", strict=False)
    ]  # fmt: skip
    ring = {"color": "#d55e00", "marker": "o", "markersize": 10, "fillstyle": "none"}
    series.append(("measured", [plan for tiling, plan in plans if tiling.key in measured], ring))
    for name, own, style in series:
        if own:
            counts, ms = [plan.tasks for plan in own], [plan.seconds * 1e3 for plan in own]
            axes.plot(counts, ms, linestyle="", label=f"{name} ({len(own)})", **style)
    times, counts = ([getattr(plan, name) for _, plan in plans] or [1] for name in ("seconds", "tasks"))
    scale = "log" if max(times) > 10 * min(times) else "linear"
    axes.set(xscale="log", yscale=scale, xlabel="tasks of a step", ylabel="planned time of a step (ms)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(counts) < 100 * min(counts) else (1,)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")
    axes.set_title(f"{counted(len(searched.tilings), 'tiling')} planned", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2, fontsize=8, frameon=False)


def why_not(config: RunConfig, plan: Estimate | str) -> str | None:
    """Return the reason for which a tiling is not worth a measurement, or None."""
    if isinstance(plan, str):
        return plan
    if plan.peak_bytes > _memory(config):
        return "memory"
    if plan.mean_task < plan.speed.good / 2:  # tasks of at least half a good length: measured
        return f"tasks shorter than {GOOD // 2} times their overhead"
    if plan.parallelism < config.workers:
        return "less parallelism than workers"
    return None


def sizes_to_try(config: RunConfig) -> dict[str, list[int | None]]:
    """Return the tile sizes to try along each axis: the config's own, uncut, and sizes that give CUTS tiles."""
    sizes = step_spec(config).trace()[0].sizes()
    result: dict[str, list[int | None]] = {}
    for axis, own in (dict.fromkeys(AXES) | step_spec(config).tiling.tiles).items():
        if axis not in sizes:
            result[axis] = [None]
            continue
        even = [_tile(sizes[axis], n) for n in CUTS if 1 < n <= sizes[axis]]
        result[axis] = list(dict.fromkeys([own, None, *even]))
    return result


def _tile(size: int, count: int) -> int:
    return math.ceil(size / count)


def _key(tiles: Tiles) -> Key:
    return tuple(tiles[axis] for axis in AXES)


def _walk(config: RunConfig, start: Tiles, seen: Seen) -> None:
    """From `start`, set one axis at a time to its best tile size until nothing changes; put all plans into `seen`."""
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
        at = config.model_copy(update={"tiles": TilesSection(**tiles)})
        try:
            lists = None if own_cost(at).far_too_fine else build(at).lists
            seen[_key(tiles)] = estimate(lists, config.workers, config.runtime.cuda != 0) if lists else TOO_FINE
        except ConfigError:
            seen[_key(tiles)] = UNCUTTABLE
    return seen[_key(tiles)]


def _score(config: RunConfig, plan: Estimate | str) -> float:
    """Return the planned seconds of a step, times 1000 if the tiling is pruned; infinity without a plan."""
    return math.inf if isinstance(plan, str) else plan.seconds * (1 if why_not(config, plan) is None else 1e3)


def _memory(config: RunConfig) -> float:
    """Return the bytes that tiles may take: of main memory, or of all GPUs together."""
    if not config.runtime.cuda:
        return config.runtime.memory or 0.8 * machine_memory()
    from nntile_py.execution.starpu_settings import cuda_devices, default_cuda_memory

    return (config.runtime.cuda_memory or (default_cuda_memory() if cuda_devices() else math.inf)) * config.workers
