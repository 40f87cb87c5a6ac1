"""Analyse the layouts of a workload: missing timings, the layouts that the search chooses, and what these gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nntile_py.analysis.folding import starred
from nntile_py.analysis.workloads import Work, logical
from nntile_py.config.builders import default_layouts, step_spec
from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import LayoutChoice, SearchedLayouts, search
from nntile_py.graph.layouts import described, laid, products
from nntile_py.graph.timings import LayoutComparison, Timing, Timings
from nntile_py.system.console_tables import plain_table
from nntile_py.system.pictures import new_figure
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.op import CONTRACTION, Op

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from nntile_py.config.run_config import RunConfig

Stacked = bool | Literal["qk"]
STACKED: dict[Stacked, str] = {False: "none", "qk": "QK", True: "QKV"}  # Q, K, V computed by one product (Table II)
WIDE = 150  # width of the full table in characters; a narrower terminal wraps its lines
NARROW = 118  # a terminal with fewer characters a line shows only times
LEGEND = """x: number of equal operators. Times are milliseconds of one operator. transposes: transpositions before and
after it. needless: these layouts need no such operator.
A layout is the order of axes in memory: of the inputs -> of the outputs. In a product, M and N are the axes of rows and
columns, K the summed axes, B the batch axes. In other operators, R stands for the axes whose order is
free; axes that must stay in their place have their own names."""
WIDTHS = (4, 8, 16)  # numbers of elements that a generated kernel computes together, tried besides its default
TimingKey = tuple[str, str, int | None]  # operator, layout, width, as in Timing


def graph_of(config: RunConfig, work: Work, stacked: Stacked) -> Graph:
    """Return the fused graph of a workload's forward and backward pass, in the default layouts.

    Args:
        stacked: which of Q, K and V one product computes, a key of STACKED.

    Raises:
        ConfigError: the workload has no product, or packed batches.
    """
    plain = default_layouts(config)
    if config.train.pack:
        raise ConfigError("train.pack: got true; allowed with layouts: false")
    fusion = config.fusion.changed(qkv=stacked)
    graph = logical(plain, work, fusion)[0]
    if not any(isinstance(op, Contract) for op in graph.ops):
        need = "train, encoder, decoder, mha, or another work with a product"
        raise ConfigError(f"--work {work}: it has no product whose layouts could be compared; allowed: {need}")
    return graph


def own_stacked(config: RunConfig) -> Stacked:
    """Return which of Q, K and V one product computes by the config, as a key of STACKED."""
    return config.fusion.qkv


def widened(op: Op, width: int) -> Op:
    """Return a copy of a Generated operator whose kernel computes `width` elements together."""
    assert isinstance(op, Generated)
    wider = op.on(op.inputs, op.outputs, width)
    wider.name, wider.phase = op.name, op.phase
    return wider


def variants(config: RunConfig, work: Work) -> Iterator[tuple[Stacked, Graph]]:
    """Yield each key of STACKED (which of Q, K and V one product computes) with its graph; equal graphs once."""
    seen = set()
    for stacked in STACKED:
        graph = graph_of(config, work, stacked)
        if (looks := tuple((op.title, tuple(t.shape for t in op.inputs)) for op in graph.ops)) not in seen:
            seen.add(looks)
            yield stacked, graph


def missing_timings(graph: Graph, timings: Timings, config: RunConfig) -> dict[TimingKey, Op]:
    """Return the operators and layouts that have no timing: {key of the timing: operator in the layout}.

    For products these are all layouts, also those with another order of the weights' axes; for other operators, the
    layouts that the search needs. Products come first."""
    cuts, policy = step_spec(default_layouts(config)).cuts, config.accumulate
    missing: dict[TimingKey, Op] = {}
    for op in graph.ops:
        for layout in products(op) if isinstance(op, Contract) else []:
            product = laid(op, layout)
            key = described(product, cuts, policy)
            if timings.best(*key) is None:
                missing.setdefault((*key, None), product)
    for key, op in search(graph, timings, cuts, policy).missing.items():
        if isinstance(op, Generated):
            for width in WIDTHS:
                missing[(*key, width)] = widened(op, width)
        missing.setdefault((*key, None), op)
    return missing


@dataclass(frozen=True)
class LayoutLine:
    """A row of the table of layouts: equal operators.

    Attributes:
        count: number of equal operators.
        operator: text that identifies the operator, see Timing.
        layouts: number of measured layouts and widths.
        default: milliseconds of one operator in the default layout; chosen: in the chosen layout; best and worst: in
            the fastest and the slowest measured layout.
        transposes: milliseconds of the transpositions before and after one operator in the chosen layout.
        layout: text of the chosen layout; empty if the chosen layouts make the operator needless.
        product: True for a product.
    """

    name: str
    count: int
    operator: str
    layouts: int
    default: float
    chosen: float
    transposes: float
    best: float
    worst: float
    layout: str
    product: bool


@dataclass(frozen=True)
class LayoutResult:
    """The result of the layout search for one way to stack Q, K and V.

    Attributes:
        stacked: which of Q, K and V one product computes, a key of STACKED.
        seconds: sum of the operators' times in the chosen layouts, transpositions included.
        default: sum in the default layouts.
        bound: sum in the layouts that the search would choose if it ignored the noise of the times.
        least: sum with each operator in its own fastest layout.
        lines: rows of the table.
        program: digest of graph and chosen layouts; None if these are the default layouts.
        comparison: measured times of whole steps in default and chosen layouts; None if they were not compared.
    """

    stacked: Stacked
    seconds: float
    default: float
    bound: float
    least: float
    lines: list[LayoutLine]
    program: str | None
    comparison: LayoutComparison | None

    def above(self, seconds: float) -> float:
        """Return by how many percent `seconds` is above `least`."""
        return 100 * (seconds / self.least - 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "qkv": STACKED[self.stacked], "seconds": self.seconds, "default_seconds": self.default,
            "bound_seconds": self.bound, "least_seconds": self.least, "above_least_percent": self.above(self.seconds),
            "comparison": self.comparison and vars(self.comparison) | {"slower": self.comparison.slower},
            "operators": [vars(line) for line in self.lines],
        }  # fmt: skip


def layout_results(config: RunConfig, work: Work, timings: Timings) -> list[LayoutResult]:
    """Return the result of the layout search for each way to stack Q, K and V whose timings are complete.

    Raises:
        ConfigError: no way has complete timings.
    """
    cuts, results, lacking = step_spec(default_layouts(config)).cuts, [], 0
    for stacked, graph in variants(config, work):
        chosen = search(graph, timings, cuts, config.accumulate)
        if chosen.missing:
            lacking = lacking or len(chosen.missing)
        else:
            bound = search(graph, timings, cuts, config.accumulate, careful=False).seconds
            results.append(
                LayoutResult(stacked, chosen.seconds, chosen.default, bound, chosen.least, _lines(chosen, timings),
                             chosen.program, timings.comparisons.get(chosen.program or ""))
            )  # fmt: skip
    if not results:
        raise ConfigError(f"{timings.path}: lacks {lacking} timings; measure them first by `nntile layouts tune` "
                          f"with the same work and keys, {timings.workers}")  # fmt: skip
    return results


def _lines(chosen: SearchedLayouts, timings: Timings) -> list[LayoutLine]:
    alike: dict[tuple[str, str, str, float], list[LayoutChoice]] = {}
    for row in chosen.rows:
        phase = "" if row.op.phase == "forward" else f" {row.op.phase}"
        alike.setdefault((starred(row.op.name) + phase, row.operator, row.layout, row.transposes), []).append(row)
    lines, taken = [], dict[str, int]()
    for (name, operator, layout, transposes), rows in alike.items():
        taken[name] = taken.get(name, 0) + 1
        name += f" ({taken[name]})" * (taken[name] > 1)
        every = [t.seconds for t in timings.known.get(operator, {}).values()] or [0.0]
        row = rows[0]
        lines.append(LayoutLine(
            name, len(rows), operator, len(every), default=1e3 * row.default_seconds, chosen=1e3 * row.seconds,
            transposes=1e3 * transposes, best=1e3 * row.least, worst=1e3 * max(every), layout=layout,
            product=row.op.category is CONTRACTION,
        ))  # fmt: skip
    return lines


def render(results: Sequence[LayoutResult], timings: Timings, console: Console) -> None:
    """Print the conclusion of each result, the table of the fastest result, and the sums of each result."""
    best = min(results, key=lambda of: of.seconds)
    short = console.is_terminal and console.width < NARROW
    times = ("default", "chosen", "best", "worst") if short else ("default", "chosen", "transposes", "best", "worst")
    heads = ("operator", *times) if short else ("operator", "x", "layouts", *times, "layout chosen")
    # Only the last column (`layout chosen`) wraps. On a narrow terminal every column may wrap.
    table = plain_table(heads, text=("operator", "layout chosen"), rigid=() if short else heads[:-1])
    for line in best.lines:
        cells = [f"{getattr(line, head):.3f}" for head in times]
        more = [str(line.count), str(line.layouts), *cells, line.layout or "needless"]
        table.add_row(line.name, *(cells if short else more))
    if not short:
        console.width = max(console.width, WIDE)
    for result in results:
        console.print(conclusion(result), highlight=False, soft_wrap=True, style="bold")
    console.print()
    console.print(table)
    brief = f"Milliseconds of one operator. A terminal of {NARROW} columns shows layouts, and so does --json."
    console.print(brief if short else LEGEND, highlight=False, soft_wrap=True)
    for result in results:
        console.print(sums(result), highlight=False, soft_wrap=True)
        if result.comparison:
            console.print(f"  Whole steps: {result.comparison}.", highlight=False, soft_wrap=True)
    console.print(f"{timings.path}: {', '.join(timings.of.values())}", highlight=False, soft_wrap=True)


def sums(result: LayoutResult) -> str:
    """Return a text with the sums of all operators' times: in their own fastest, the default and the chosen layouts."""
    each = (
        ("default layouts", result.default),
        ("chosen", result.seconds),
        ("the least of all choices together", result.bound),
    )
    text = ", ".join(f"{name} {1e3 * seconds:.3f} (+{result.above(seconds):.1f} %)" for name, seconds in each)
    optima = f"Sum of the operators' optima {1e3 * result.least:.3f} ms"
    return f"Q, K, V as one: {STACKED[result.stacked]}. {optima}; {text}."


def conclusion(result: LayoutResult) -> str:
    """Return the result as text: the layouts that `layout: searched` takes, and what they gain."""
    return f"Q, K, V as one: {STACKED[result.stacked]}. {decision(result.program, result.comparison)}"


def decision(program: str | None, comparison: LayoutComparison | None) -> str:
    """Return a sentence that says which layouts `layout: searched` takes, and why.

    Args:
        program: digest of the searched program; None if the search chooses the default layouts.
        comparison: measured times of whole steps in the default and in the searched layouts; None if not measured.
    """
    if not program:
        return "The default layouts stay: other layouts gain less than the noise of the measured times."
    if not comparison:
        how = "`nntile layouts tune` compares them for the config's own Q, K, V"
        return f"`layout: searched` takes other layouts than the default; whole steps were not compared: {how}."
    if comparison.slower:
        return f"The default layouts stay: whole steps in searched layouts are slower. {comparison}."
    return f"`layout: searched` takes the searched layouts. Whole steps: {comparison}."


def violins(result: LayoutResult, timings: Timings) -> Figure:
    """Draw for each operator the distribution of its times over all measured layouts, and return the figure.

    The best, chosen and default layouts are marked. The two halves correspond to figures 4 (products) and 5 (other
    operators) of Ivanov et al. 2021."""
    distinct = {line.operator: line for line in reversed(result.lines) if line.layouts > 1}.values()
    halves = [[line for line in result.lines if line in distinct and line.product is of] for of in (True, False)]
    titles = [t for t, half in zip(("products", "other operators"), halves, strict=True) if half]
    halves = [half for half in halves if half]
    figure = new_figure((9.5, 1.6 + 0.42 * sum(map(len, halves))))
    every = figure.subplots(len(halves), squeeze=False, height_ratios=[len(half) + 1 for half in halves])[:, 0]
    for axes, title, half in zip(every, titles, halves, strict=True):
        times = [[1e3 * t.seconds for t in timings.known[line.operator].values()] for line in half]
        places = range(1, len(half) + 1)
        bodies = axes.violinplot(times, places, orientation="horizontal", widths=0.8, showextrema=False)["bodies"]
        for body in bodies:
            body.set(facecolor="#0072b2", alpha=0.35)
        for mark, colour, name in (("|", "#333333", "best"), ("o", "#d55e00", "chosen"), ("x", "#009e73", "default")):
            axes.plot([getattr(line, name) for line in half], places, mark, color=colour, label=name, markersize=6)
        axes.set_yticks(places, [f"{line.name}, {line.layouts}" for line in half], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="both", labelsize=7)
        axes.set_title(title, fontsize=9)
    every[-1].set_xlabel("time in each measured layout (ms); after each name the number of layouts")
    every[0].legend(fontsize=7)
    source = ", ".join(timings.of.values())
    figure.supxlabel(f"{sums(result)}\n{source}", fontsize=7, color="#59636e", x=0.01, ha="left")
    return figure


def timing(key: TimingKey, times: Sequence[float]) -> Timing:
    """Return the entry of the timing database for repeated `times`. Its time is the shortest, the least disturbed."""
    operator, layout, width = key
    return Timing(operator, layout, min(times), tuple(times), width)
