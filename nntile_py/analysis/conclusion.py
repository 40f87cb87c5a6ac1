"""Conclusion of an analysis: whether memory bounds the workload, its longest operators, and advice on the config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nntile_py.analysis.roofline import Peak
from nntile_py.analysis.tile_advice import own_cost
from nntile_py.analysis.workloads import build
from nntile_py.config.builders import planned_speed, tiling
from nntile_py.config.sections import AUTO_TILES
from nntile_py.graph.estimate import estimate
from nntile_py.tasks.op import CATEGORIES, CONTRACTION

if TYPE_CHECKING:
    from nntile_py.analysis.operator_row import OperatorRow
    from nntile_py.analysis.workloads import Work
    from nntile_py.config.run_config import RunConfig

MUCH = 0.15  # a cause that takes at least this share of the time gets advice
REREAD = 1.3  # if an operator moves more than this times its least possible elements, its tasks reread operands
LOW_PEAK = 0.5  # products below this share of the peak flop/s gain from larger tiles
LONGEST = 3  # number of operators that the conclusion names


def conclusion(rows: Sequence[OperatorRow], peak: Peak, config: RunConfig, work: Work) -> list[str]:
    """Return the conclusion of an analysis as sentences. rows: the operators of the workload `work` after fusion."""
    seconds = {row.name: row.least_seconds(peak) for row in rows}
    total = math.fsum(seconds.values())
    if not total or math.isnan(total):
        return ["Conclusion: none; set profile.peak_flop and profile.peak_bytes, or use --measure."]
    timed = all(row.seconds is not None for row in rows)
    memory = math.fsum(seconds[row.name] for row in rows if _moves(row, peak, timed)) / total
    bound = "memory" if memory > 0.5 else "arithmetic"
    times = "measured time" if timed else "least time at the peak rates"
    classes = [(of, math.fsum(seconds[row.name] for row in rows if row.category is of) / total) for of in CATEGORIES]
    first, share = max(classes, key=lambda item: item[1])
    longest = sorted(rows, key=lambda row: -seconds[row.name])[:LONGEST]
    named = ", ".join(f"{row.name} {seconds[row.name] / total:.0%}" for row in longest)
    lines = [
        f"Conclusion: {bound} bounds this workload. Memory-bound operators take {memory:.0%} of the {times}.",
        f"Most of it is {first.mark} {first.name}: {share:.0%}. The longest operators: {named}.",
    ]
    advice = [text for text in _advice(rows, seconds, total, peak, config, timed) if text]
    if not advice and memory <= 0.5:
        advice = [_at_arithmetic_limit(config, work)]
    return [*lines, f"Try: {'; '.join(advice)}." if advice else "Nothing stands out that a key of the config changes."]


def _moves(row: OperatorRow, peak: Peak, timed: bool) -> bool:
    """Return True if an operator is memory-bound.

    If times were measured (`timed`), its least possible bytes decide, else the bytes that its tasks move."""
    if timed or peak.flop is None or peak.bytes is None:
        return bool(row.memory_bound(peak))
    return row.bytes / peak.bytes > row.flop / peak.flop


def _advice(
    rows: Sequence[OperatorRow], seconds: dict[str, float], total: float, peak: Peak, config: RunConfig, timed: bool
) -> list[str]:
    """Return texts of advice, each on keys of the config to change, for causes that take at least MUCH of the time.

    seconds: time of each operator by name. total: sum of these times. timed: they were measured."""

    def share(of: Sequence[OperatorRow]) -> float:
        return math.fsum(seconds[row.name] for row in of) / total

    moving = [row for row in rows if _moves(row, peak, timed)]
    reread = [row for row in moving if row.least and row.moved > REREAD * row.least]
    scores = [row for row in moving if {"seq", "key"} <= {*row.independent, *row.reduced}]
    update = [row for row in rows if row.phase == "update"]
    slow = [row for row in rows if row.category is CONTRACTION and (row.peak_share(peak) or 100) < 100 * LOW_PEAK]
    unfused = [name for name in ("bias", "activation", "qkv", "residual_norm") if not getattr(config.fusion, name)]
    cut = [f"tiles.{axis}" for axis in tiling(config).tiles]
    advice = []
    if unfused and share(moving) >= MUCH:
        advice.append(f"`fusion: true` (fusion.{', fusion.'.join(unfused)} are off)")
    if getattr(config.model, "attention", "vendor") == "naive" and share(scores) >= MUCH:
        advice.append(f"`model.attention: vendor`, which stores no scores ({share(scores):.0%} of the time)")
    if cut and share(reread) >= MUCH:
        advice.append(f"larger {', '.join(cut)}: tasks read operands several times ({share(reread):.0%} of the time)")
    if share(update) >= MUCH:
        advice.append(
            f"a larger `train.batch` or `train.grad_accumulation`: the update takes {share(update):.0%} of the time"
        )
    if timed and share(slow) >= MUCH:
        larger = f"larger tiles ({', '.join(cut)})" if cut else "larger sizes, such as `train.batch`"
        advice.append(f"{larger}: products below {LOW_PEAK:.0%} of the peak take {share(slow):.0%} of the time")
    if config.runtime.cuda and config.precision in ("fp32", "tf32"):
        advice.append("`precision: bf16`, which halves the bytes and makes products faster")
    return advice


def _at_arithmetic_limit(config: RunConfig, work: Work) -> str:
    """Return advice for a workload that arithmetic bounds: larger tasks, more tasks at once, or more workers.

    The plan of the workload decides which advice. With `tiles: auto`, there is no advice on tiles."""
    lower = ", or `precision: fp32`" if config.precision == "fp64" else ""
    auto = config.tiles == AUTO_TILES
    cut = [] if auto else [f"tiles.{axis}" for axis in tiling(config).tiles]
    larger = f"larger {', '.join(cut)}, or a larger `train.batch`" if cut else "a larger `train.batch`"
    if work == "train" and own_cost(config).far_too_fine:  # listing so many tasks takes too long
        return f"{larger}: tasks are shorter than the runtime's overhead for them"
    planned = estimate(build(config, work).lists, config.workers, config.runtime.cuda != 0, planned_speed(config))
    if planned.mean_task < planned.speed.good:
        each, overhead = planned.mean_task * 1e6, planned.speed.overhead * 1e6
        return f"{larger}: by the plan, a task takes {each:,.0f} us, and the runtime {overhead:,.0f} us for each task"
    if planned.parallelism < 1.25 * max(config.workers, 2):
        more = "smaller tiles with more workers" if config.workers == 1 else "smaller tiles"
        if auto:  # the number of workers decides the tiles
            more = "more workers" if config.workers == 1 else "a larger `train.batch`"
        return f"{more}: by the plan, {planned.parallelism:.1f} tasks can run at once on average{lower}"
    return f"more workers{lower}: products are at the arithmetic limit"
