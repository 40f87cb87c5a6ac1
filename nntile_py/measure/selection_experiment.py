"""Experiments of kinds `selection` (layouts as a graph) and `widths` (vector widths of fused kernels)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nntile_py.analysis.counts import looks
from nntile_py.analysis.layout_analysis import missing_timings, timing, widened
from nntile_py.analysis.layout_path import Stage, length, shortest, stages
from nntile_py.analysis.workloads import logical
from nntile_py.config.builders import default_layouts, step_spec
from nntile_py.config.builders import timings as opened
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.layout_search import search
from nntile_py.measure.experiment_parts import ExperimentResult, PresetPart
from nntile_py.profiling.operator_timer import OperatorTimer
from nntile_py.schema import Count
from nntile_py.system.console_tables import csv_text
from nntile_py.system.load import Load, is_busy
from nntile_py.system.machine import cache_bytes
from nntile_py.system.pictures import files_of, new_figure
from nntile_py.system.progress import telling
from nntile_py.tasks.generated import Generated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from nntile_py.graph.layouts import Order

PATH = "#d55e00"  # colour of the shortest path


# -- figure 6: the selection of layouts


class SelectionExperiment(PresetPart):
    """A section of kind `selection`: layouts of the forward pass as a shortest path.

    The experiment times the forward operators in all layouts, and finds the fastest sequence of orders of axes.
    """

    repeats: Count = 5

    def run(self, folder: Path, console: Console) -> ExperimentResult:
        """Time the operators in all layouts; timings.jsonl holds the times, from which a later run continues."""
        config = default_layouts(self.resolved())
        timings = opened(config, folder / "timings.jsonl", new=True)
        (graph,) = logical(config, self.work, config.fusion, "forward")
        cuts = step_spec(config).cuts
        with telling(console) as tell, Runtime(**runtime_options(config.runtime.model_dump())), Load() as load:
            timer = OperatorTimer(config, self.repeats, copies_bytes=2 * cache_bytes(bool(config.runtime.cuda)))
            todo = missing_timings(graph, timings, config)
            for number, (key, op) in enumerate(todo.items()):
                tell(f"{number} of {len(todo)} operators in their layouts")
                timings.add(timing(key, *timer.times([op])))
        found = stages(graph, timings, cuts, config.accumulate)
        path, seconds = shortest(found)
        exact = search(graph, timings, cuts, config.accumulate, careful=False)
        own = {id(stage.op) for stage in found}
        chosen = math.fsum(row.seconds + row.transposes for row in exact.rows if id(row.op) in own)
        default, least = length(found, [0] * len(path)), math.fsum(float(stage.seconds.min()) for stage in found)
        notes = [
            f"The shortest path takes {seconds * 1e6:.1f} us, the default orders take {default * 1e6:.1f} us, all"
            f" operators in their own fastest layouts {least * 1e6:.1f} us.",
            f"The layouts that the search of nntile_py chooses for the same operators take {chosen * 1e6:.1f} us, with"
            " transposes; the search also counts residuals and all other inputs.",
            f"The graph has {sum(map(len, [found[0].sources, *(stage.targets for stage in found)]))} nodes.",
        ]
        if is_busy(load.others):
            notes.append(f"Other processes kept {load.others:.1f} cores busy: times are too long.")
        heads = ["operator", "reads", "writes", "order read", "order written", "us", "fastest us", "default us"]
        lines = [
            [
                stage.op.name, stage.source.name, stage.target.name,
                " ".join(stage.sources[a]), " ".join(stage.targets[b]),
                *(f"{of * 1e6:.2f}" for of in (stage.seconds[a, b], stage.seconds.min(), stage.seconds[0, 0])),
            ]
            for stage, (a, b) in zip(found, itertools.pairwise(path), strict=True)
        ]  # fmt: skip
        return ExperimentResult(csv_text(heads, lines), files_of(selection(found, path)), totals=notes)


def selection(of: Sequence[Stage], path: Sequence[int]) -> Figure:
    """Draw the selection graph: a column for each tensor, a node for each order, the shortest path in colour."""
    columns = [of[0].sources, *(stage.targets for stage in of)]
    names = [of[0].source.name, *(stage.target.name for stage in of)]
    figure = new_figure((1.55 * len(columns) + 1, 0.42 * max(map(len, columns)) + 3))
    axes: Axes = figure.subplots()
    for number, stage in enumerate(of):
        _edges(axes, number, stage, path)
    for number, orders in enumerate(columns):
        for place, order in enumerate(orders):
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": PATH if path[number] == place else "#6b7280"}
            axes.text(number, place, _short(order), ha="center", va="center", fontsize=8, bbox=box, zorder=3)
        axes.text(number, -1, names[number].partition("#")[0], ha="center", fontsize=7, rotation=20)
    for number, stage in enumerate(of):
        axes.text(number + 0.5, -2, f"{stage.op.name}\n{stage.op.title}", ha="center", fontsize=6, rotation=20)
    axes.set_ylim(max(map(len, columns)), -3)
    axes.set_xlim(-0.5, len(columns) - 0.3)
    axes.axis("off")
    letters = sorted({f"{_letter(axis)}: {axis}" for orders in columns for axis in orders[0]})
    about = "a node is an order of a tensor's axes, first order: the default; grey: all pairs, dark: fast; orange: the"
    figure.supxlabel(f"{', '.join(letters)}\n{about} shortest path, with us", fontsize=8)
    return figure


def _edges(axes: Axes, number: int, stage: Stage, path: Sequence[int]) -> None:
    best = float(stage.seconds.min())
    for a, b in ((a, b) for a in range(len(stage.sources)) for b in range(len(stage.targets))):
        seconds = float(stage.seconds[a, b])
        if not math.isfinite(seconds):
            continue
        chosen = (a, b) == (path[number], path[number + 1])
        share = best / seconds if seconds else 1.0
        colour, width, alpha = (PATH, 2.5, 1.0) if chosen else ("black", 0.8, 0.08 + 0.4 * share**2)
        axes.plot([number, number + 1], [a, b], color=colour, linewidth=width, alpha=alpha, zorder=1 + chosen)
        if chosen:
            axes.text(number + 0.5, (a + b) / 2 - 0.12, f"{seconds * 1e6:.0f}", color=PATH, fontsize=8, ha="center")


def _letter(axis: str) -> str:
    return {"head_dim": "d", "kv_heads": "g", "qkv": "q", "ffn": "f"}.get(axis, axis[0])


def _short(order: Order) -> str:
    return " ".join(map(_letter, order))


# -- vector widths


class WidthExperiment(PresetPart):
    """A section of kind `widths`: times of the fused kernels of a layer for several vector widths."""

    widths: Annotated[list[Literal[1, 2, 4, 8, 16, 32, 64]], Field(min_length=1)]
    """Numbers of elements that a kernel computes together: in one vector on CPUs, in one thread on GPUs."""
    repeats: Count = 7

    def run(self, folder: Path) -> ExperimentResult:
        """Time each fused kernel in its default width and in each of `widths`, in turns; `folder` stays empty.

        Raises:
            ConfigError: the layer has no fused kernel.
        """
        config = default_layouts(self.resolved())
        graph = logical(config, self.work, config.fusion)[0]
        groups = {looks(op): op for op in graph.ops if isinstance(op, Generated)}
        if not groups:
            raise ConfigError("set: the layer has no generated kernels; needed are fusion.found and a C++ compiler")
        lines, times = [], dict[str, list[float]]()
        with Runtime(**runtime_options(config.runtime.model_dump())), Load() as load:
            timer = OperatorTimer(config, self.repeats, copies_bytes=2 * cache_bytes(bool(config.runtime.cuda)))
            for op in groups.values():
                measured = timer.times([op, *(widened(op, width) for width in self.widths)])
                default, *own = (statistics.median(of) * 1e6 for of in measured)
                best = min(range(len(own)), key=own.__getitem__)
                name = f"{op.name}{' dX' * (op.phase == 'backward')}"
                times[name] = [of / default for of in own]
                gain = f"{own[best] / default:.2f}"
                lines.append([name, op.title, f"{default:.2f}", *(f"{of:.2f}" for of in own), self.widths[best], gain])
        heads = ["kernel", "operators", "us by default", *(f"us at {width}" for width in self.widths), "best width",
                 "best / default"]  # fmt: skip
        notes = ["By default the compiler chooses the width on CPUs, and the kernel's block on GPUs."]
        if is_busy(load.others):
            notes.append(f"Other processes kept {load.others:.1f} cores busy: times are too long.")
        return ExperimentResult(csv_text(heads, lines), self._picture(times), totals=notes)

    def _picture(self, times: dict[str, list[float]]) -> dict[str, bytes]:
        figure = new_figure((8.5, 4))
        axes = figure.subplots()
        for number, (name, of) in enumerate(times.items()):
            axes.plot(range(len(of)), of, marker="osD^v<>"[number % 7], label=name)
        axes.axhline(1, color="gray", linewidth=1)
        axes.set_xticks(range(len(self.widths)), list(map(str, self.widths)))
        axes.set_xlabel("elements per vector")
        axes.set_ylabel("time divided by the default width's")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", fontsize=7)
        return files_of(figure)
