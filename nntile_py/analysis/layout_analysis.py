"""Layouts of a workload: what has to be measured for them, which were chosen, how much they matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nntile_py.analysis.operators import starred
from nntile_py.analysis.workloads import Work, logical
from nntile_py.config.builders import default_layouts, step_spec
from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import LayoutChoice, SearchedLayouts, search
from nntile_py.graph.layouts import described, laid, products
from nntile_py.graph.timings import LayoutComparison, Timing, Timings
from nntile_py.system.pictures import new_figure
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.op import CONTRACTION, Op

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from nntile_py.config.run_config import RunConfig

Stacked = bool | Literal["qk"]
STACKED: dict[Stacked, str] = {False: "none", "qk": "QK", True: "QKV"}  # algebraic fusion, as the paper's Table II
WIDE = 150  # columns at least; in fewer the terminal wraps lines
NARROW = 118  # in a terminal of fewer columns, times alone
LEGEND = """x: how many. Milliseconds of one; turning: transpositions before or after it; needless: they are left out.
Layouts are axes in their order in memory, of what is read -> of what is written. Of a product M and N are the axes of
rows and columns, K those that are summed, B a batch's; of others R are all axes that are not named."""
WIDTHS = (4, 8, 16)  # of generated kernels, besides the one that they have
Key = tuple[str, str, int | None]  # of a timing


def graph_of(config: RunConfig, work: Work, stacked: Stacked) -> Graph:
    """Forward and backward, fused, in the default layout. ConfigError: nothing of it can be laid out otherwise."""
    plain = default_layouts(config)
    if config.train.pack:
        raise ConfigError("train.pack: got true; allowed with layouts: false")
    fusion = config.fusion.changed(qkv=stacked)
    graph = logical(plain, work, fusion)[0]
    if not any(isinstance(op, Contract) for op in graph.ops):
        need = "train, encoder, decoder, mha, or another work with one"
        raise ConfigError(f"--work {work}: it has no product whose layouts could be compared; allowed: {need}")
    return graph


def own_stacked(config: RunConfig) -> Stacked:
    """The algebraic fusion that the config itself asks for."""
    return config.fusion.qkv


def widened(op: Op, width: int) -> Op:
    """A generated kernel with another number of elements that go together."""
    assert isinstance(op, Generated)
    made = op.on(op.inputs, op.outputs, width)
    made.name, made.phase = op.name, op.phase
    return made


def variants(config: RunConfig, work: Work) -> Iterator[tuple[Stacked, Graph]]:
    """By what of queries, keys and values is one product; those that come to the same once."""
    seen = set()
    for stacked in STACKED:
        graph = graph_of(config, work, stacked)
        if (looks := tuple((op.title, tuple(t.shape for t in op.inputs)) for op in graph.ops)) not in seen:
            seen.add(looks)
            yield stacked, graph


def wanted(graph: Graph, timings: Timings, config: RunConfig) -> dict[Key, Op]:
    """What was not measured yet: each with an operator of its own in that layout, those for the search last.

    Of products also the layouts that need the weights in another order than they have."""
    cuts, policy = step_spec(default_layouts(config)).cuts, config.accumulate
    found: dict[Key, Op] = {}
    for op in graph.ops:
        for layout in products(op) if isinstance(op, Contract) else []:
            made = laid(op, layout)
            told = described(made, cuts, policy)
            if timings.best(*told) is None:
                found.setdefault((*told, None), made)
    for told, op in search(graph, timings, cuts, policy).missing.items():
        if isinstance(op, Generated):
            for width in WIDTHS:
                found[(*told, width)] = widened(op, width)
        found.setdefault((*told, None), op)
    return found


@dataclass(frozen=True)
class Line:
    """An operator in the table: milliseconds of one, in the default layout, the chosen one, its best, its worst."""

    name: str
    count: int
    operator: str
    layouts: int
    default: float
    chosen: float
    turning: float
    best: float
    worst: float
    layout: str
    product: bool


@dataclass(frozen=True)
class Found:
    """Of one algebraic fusion: the sums in seconds. bound: no choice for all operators together takes less. program:
    see SearchedLayouts; comparison: on whole steps of it, if they were compared."""

    stacked: Stacked
    seconds: float
    default: float
    bound: float
    least: float
    lines: list[Line]
    program: str | None
    comparison: LayoutComparison | None

    def above(self, seconds: float) -> float:
        """Percent by which this is above the sum of the operators' optima."""
        return 100 * (seconds / self.least - 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "qkv": STACKED[self.stacked], "seconds": self.seconds, "default_seconds": self.default,
            "bound_seconds": self.bound, "least_seconds": self.least, "above_least_percent": self.above(self.seconds),
            "comparison": self.comparison and vars(self.comparison) | {"slower": self.comparison.slower},
            "operators": [vars(line) for line in self.lines],
        }  # fmt: skip


def shown(config: RunConfig, work: Work, timings: Timings) -> list[Found]:
    """The search's result for each algebraic fusion that was measured; ConfigError: none was, whole."""
    cuts, found, lacking = step_spec(default_layouts(config)).cuts, [], 0
    for stacked, graph in variants(config, work):
        chosen = search(graph, timings, cuts, config.accumulate)
        if chosen.missing:
            lacking = lacking or len(chosen.missing)
        else:
            bound = search(graph, timings, cuts, config.accumulate, careful=False).seconds
            found.append(Found(stacked, chosen.seconds, chosen.default, bound, chosen.least, _lines(chosen, timings),
                               chosen.program, timings.comparisons.get(chosen.program or "")))  # fmt: skip
    if not found:
        raise ConfigError(f"{timings.path}: lacks {lacking} timings of this; measure them first, by `nntile layouts "
                          f"tune` with the same work and keys, {timings.workers}")  # fmt: skip
    return found


def _lines(chosen: SearchedLayouts, timings: Timings) -> list[Line]:
    alike: dict[tuple[str, str, str, float], list[LayoutChoice]] = {}
    for row in chosen.rows:
        phase = "" if row.op.phase == "forward" else f" {row.op.phase}"
        alike.setdefault((starred(row.op.name) + phase, row.operator, row.layout, row.transposes), []).append(row)
    lines, taken = [], dict[str, int]()
    for (name, operator, layout, turning), rows in alike.items():
        taken[name] = taken.get(name, 0) + 1
        name += f" ({taken[name]})" * (taken[name] > 1)
        every = [t.seconds for t in timings.known.get(operator, {}).values()] or [0.0]
        row = rows[0]
        lines.append(Line(
            name, len(rows), operator, len(every), default=1e3 * row.default_seconds, chosen=1e3 * row.seconds,
            turning=1e3 * turning, best=1e3 * row.least, worst=1e3 * max(every), layout=layout,
            product=row.op.category is CONTRACTION,
        ))  # fmt: skip
    return lines


def render(found: Sequence[Found], timings: Timings, console: Console) -> None:
    """The operators of the cheapest, and the sums of all."""
    from rich.table import Table

    best = min(found, key=lambda of: of.seconds)
    table = Table(box=None, pad_edge=False, header_style="bold")
    short = console.is_terminal and console.width < NARROW
    times = ("default", "chosen", "best", "worst") if short else ("default", "chosen", "turning", "best", "worst")
    for head in ("operator", *times) if short else ("operator", "x", "layouts", *times, "layout chosen"):
        left, last = head in ("operator", "layout chosen"), head == "layout chosen"
        table.add_column(head, justify="left" if left else "right", no_wrap=not (last or short))  # gives way to times
    for line in best.lines:
        cells = [f"{getattr(line, head):.3f}" for head in times]
        more = [str(line.count), str(line.layouts), *cells, line.layout or "needless"]
        table.add_row(line.name, *(cells if short else more))
    if not short:
        console.width = max(console.width, WIDE)
    console.print(table)
    told_of = f"Milliseconds of one. Layouts are told in {NARROW} columns and more, and by --json." if short else LEGEND
    console.print(told_of, highlight=False, soft_wrap=True)
    for of in found:
        console.print(told(of), highlight=False, soft_wrap=True)
        if of.program:
            console.print(f"  {ruled(of.comparison)}", highlight=False, soft_wrap=True)
    console.print(f"{timings.path}: {', '.join(timings.of.values())}", highlight=False, soft_wrap=True)


def told(of: Found) -> str:
    sums = ("default layouts", of.default), ("chosen", of.seconds), ("the least of all choices together", of.bound)
    each = ", ".join(f"{name} {1e3 * seconds:.3f} (+{of.above(seconds):.1f} %)" for name, seconds in sums)
    return f"Q, K, V as one: {STACKED[of.stacked]}. Sum of the operators' optima {1e3 * of.least:.3f} ms; {each}."


def ruled(comparison: LayoutComparison | None) -> str:
    """What whole steps say of a choice, and what `layout: searched` makes of it."""
    if not comparison:
        return "Whole steps: not compared; `nntile layouts tune` compares those of the config's own Q, K, V."
    takes = "; layout: searched takes the default layouts" if comparison.slower else ""
    return f"Whole steps: {comparison}{takes}."


def violins(found: Found, timings: Timings) -> Figure:
    """How the times of each operator's layouts are spread, with the best, the chosen and the default one: the paper's
    figures 4 (products) and 5 (others)."""
    distinct = {of.operator: of for of in reversed(found.lines) if of.layouts > 1}.values()
    halves = [[line for line in found.lines if line in distinct and line.product is of] for of in (True, False)]
    titles = [t for t, half in zip(("products", "other operators"), halves, strict=True) if half]
    halves = [half for half in halves if half]
    figure = new_figure((9.5, 1.6 + 0.42 * sum(map(len, halves))))
    every = figure.subplots(len(halves), squeeze=False, height_ratios=[len(half) + 1 for half in halves])[:, 0]
    for axes, title, half in zip(every, titles, halves, strict=True):
        times = [[1e3 * t.seconds for t in timings.known[line.operator].values()] for line in half]
        places = range(1, len(half) + 1)
        parts = axes.violinplot(times, places, orientation="horizontal", widths=0.8, showextrema=False)
        for body in parts["bodies"]:
            body.set(facecolor="#0072b2", alpha=0.35)
        for mark, colour, of in (("|", "#333333", "best"), ("o", "#d55e00", "chosen"), ("x", "#009e73", "default")):
            axes.plot([getattr(line, of) for line in half], places, mark, color=colour, label=of, markersize=6)
        axes.set_yticks(places, [f"{line.name}, {line.layouts}" for line in half], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="both", labelsize=7)
        axes.set_title(title, fontsize=9)
    every[-1].set_xlabel("ms, in all layouts that were measured (their number)")
    every[0].legend(fontsize=7)
    figure.supxlabel(f"{told(found)}\n{', '.join(timings.of.values())}", fontsize=7, color="#59636e", x=0.01, ha="left")
    return figure


def timing(key: Key, times: Sequence[float]) -> Timing:
    """What is kept of a measurement. The least of the times counts, which others disturbed least."""
    operator, layout, width = key
    return Timing(operator, layout, min(times), tuple(times), width)
