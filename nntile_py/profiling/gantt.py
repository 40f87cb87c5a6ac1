"""The Gantt chart of a trace: gantt.png, .svg, .pdf, and part of report.html. Many short tasks share a bar."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.profiling.message_waits import waits
from nntile_py.profiling.trace import Trace, TracedMessage, intervals, merge
from nntile_py.system.pictures import new_figure, save_figure
from nntile_py.tasks.op import operators
from nntile_py.tasks.optimizer import OPTIMIZERS

# Colours for kinds of operators without a fixed colour.
SPARE = ("#b39ddb", "#17becf", "#6b4f2a", "#f781bf", "#2f4f4f", "#c0ca33", "#8d6e9f", "#e4b9a0")
OTHER = "#9aa0a6"
MOST_KINDS = 8  # kinds of operators with their own colour; all others share OTHER
MOST_MESSAGES = 40  # messages drawn as arrows: those that workers waited for longest; more would hide bars
# Rows of a rank's messages, with their colours.
LANES = {"sending": "#333333", "receiving": "#8a8a8a", "waiting for another rank": "#e41a1c"}
# Largest number of bars in a row. A row with more tasks is drawn as this many columns. Each column is empty or has the
# colour of one kind of operators, and a kind's share of the columns is its share of the time.
COLUMNS = 1200


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a worker's row.

    Attributes:
        left, right: start and end, as shares of the time that the chart shows.
        kind: kind of operator, as an index into Gantt.kinds.
        task: number of the task; -1 for a bar of several tasks.
    """

    left: float
    right: float
    kind: int
    task: int = -1


@dataclass
class Gantt:
    """Bars of all workers.

    Attributes:
        kinds: names of the kinds of operators.
        colours: the colour of each kind.
        rows: the bars of each worker.
    """

    kinds: list[str]
    colours: list[str]
    rows: list[list[Bar]]


def gantt(trace: Trace, columns: int = COLUMNS) -> Gantt:
    """Return the bars of all workers, at most `columns` for each.

    The MOST_KINDS kinds of operators that take most time have their own colours.
    """
    seconds: dict[str, float] = {}
    spent = np.bincount(trace.info, weights=trace.seconds, minlength=len(trace.infos)).tolist()
    for info, time in zip(trace.infos, spent, strict=True):
        seconds[_kind(info)] = seconds.get(_kind(info), 0.0) + time
    top = sorted((kind for kind in seconds if seconds[kind]), key=lambda kind: -seconds[kind])
    kinds = top if len(top) <= MOST_KINDS + 1 else [*top[:MOST_KINDS], "other"]
    number = {kind: k for k, kind in enumerate(kinds)}
    of_task = np.array([number.get(_kind(info), len(kinds) - 1) for info in trace.infos])[trace.info]
    return Gantt(
        kinds, _colours(kinds), [_row(trace, worker, of_task, columns) for worker in range(len(trace.workers))]
    )


def fixed_colours() -> dict[str, str]:
    """Return {kind of operator: colour} for the kinds that have the same colour in all pictures."""
    fixed = {optimizer.__name__: optimizer.colour for optimizer in OPTIMIZERS.values() if optimizer.colour}
    by_phase = ((name, phase, colour) for name, op in operators().items() for phase, colour in op.colours.items())
    return fixed | {f"{name} {phase}": colour for name, phase, colour in by_phase}


def _colours(kinds: list[str]) -> list[str]:
    """Return the colours of these kinds.

    Kinds without a fixed colour get spare colours in the order of their names: each the spare colour that differs most
    from the colours chosen before it."""
    fixed, left = fixed_colours(), [*SPARE]
    chosen = {kind: fixed[kind] for kind in kinds if kind in fixed}
    for kind in sorted(set(kinds) - {*fixed, "other"}):
        if left:
            taken = (OTHER, *chosen.values())
            chosen[kind] = max(left, key=lambda spare: min(difference(spare, colour) for colour in taken))
            left.remove(chosen[kind])
    return [chosen.get(kind, OTHER) for kind in kinds]


def difference(one: str, other: str) -> float:
    """Return how different two colours such as #0072b2 look, from 0 (equal) to about 765 (black and white).

    Source: https://www.compuphase.com/cmetric.htm
    """
    (r, g, b), (r2, g2, b2) = ([int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in (one, other))
    red = (r + r2) / 2
    parts = (2 + red / 256) * (r - r2) ** 2, 4 * (g - g2) ** 2, (2 + (255 - red) / 256) * (b - b2) ** 2
    return math.sqrt(sum(parts))


def _kind(info: Any) -> str:
    return f"{info.operator} {info.phase}".strip() if info.phase != "update" else info.operator


def _row(trace: Trace, worker: int, kinds: Any, columns: int) -> list[Bar]:
    t0, t1 = trace.window
    mine = np.flatnonzero(trace.worker == worker)
    mine = mine[np.argsort(trace.start[mine], kind="stable")]
    if len(mine) <= columns:
        left, right = ((dates[mine] - t0) / (t1 - t0) for dates in (trace.start, trace.end))
        table = (left.tolist(), right.tolist(), kinds[mine].tolist(), mine.tolist())
        return [Bar(*bar) for bar in zip(*table, strict=True)]
    edges = np.linspace(t0, t1, columns + 1)
    present = np.unique(kinds[mine])
    filled = np.array([_fill(trace, mine[kinds[mine] == kind], edges) for kind in present])
    idle = np.maximum(np.diff(edges) - filled.sum(axis=0), 0)
    best = np.append(present, -1)[_shared(np.vstack((filled, idle)))]
    starts = np.flatnonzero(np.diff(best, prepend=-2))
    ends = np.append(starts[1:], columns)
    return [
        Bar(a / columns, b / columns, int(best[a])) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
        if best[a] >= 0
    ]  # fmt: skip


def _shared(filled: Any) -> Any:
    """Return the kind to show in each column, so that the area of each kind is in proportion to its time.

    A column shows one of the kinds that ran in it: the kind with the most time that earlier columns have not shown.

    Args:
        filled: the time of each kind in each column; the last kind is idle time.
    """
    owed, best = np.zeros(len(filled)), np.zeros(filled.shape[1], np.int64)
    for column, here in enumerate(filled.T):
        owed += here
        best[column] = chosen = np.where(here > 0, owed, -np.inf).argmax()
        owed[chosen] -= here.sum()
    return best


def _fill(trace: Trace, tasks: Any, edges: Any) -> Any:
    """Return the time (ns) that these tasks ran within each column. edges: the dates between the columns."""
    start, end = merge(trace.start[tasks], trace.end[tasks])
    total = np.concatenate(([0], np.cumsum(end - start)))
    at = np.searchsorted(start, edges, side="right")
    cut = np.where(at > 0, np.maximum(end[np.maximum(at - 1, 0)] - edges, 0), 0)
    return np.diff(total[at] - cut)


Spans = dict[str, list[tuple[float, float]]]  # for each name of LANES: (start, end) as shares of the chart's time


def lanes(trace: Trace) -> list[Spans]:
    """Return for each rank the intervals in which it sent, received, or had workers that waited for another rank."""
    (t0, t1), every, result = trace.window, waits(trace), []
    for rank in range(trace.ranks):
        spans = {
            "sending": [(m.ready, m.send.ended) for m in trace.messages if m.source == rank],
            "receiving": [m.way for m in trace.messages if m.target == rank],
            "waiting for another rank": [(w.start, w.end) for w in every if w.rank == rank],
        }
        shares = {name: [((dates - t0) / (t1 - t0)).tolist() for dates in intervals(of)] for name, of in spans.items()}
        result.append({name: [*zip(*of, strict=True)] for name, of in shares.items()})
    return result


def arrows(trace: Trace) -> list[tuple[int, float, int, float]]:
    """Return the MOST_MESSAGES messages that workers waited for longest, as arrows (source, left, target, right).

    source and target are ranks; left and right are start and end of the arrow, as shares of the chart's time.
    """
    (t0, t1), shown = trace.window, trace.messages
    if len(shown) > MOST_MESSAGES:
        waited: dict[int, tuple[int, TracedMessage]] = {}
        for wait in waits(trace):
            waited[id(wait.message)] = waited.get(id(wait.message), (0,))[0] + wait.end - wait.start, wait.message
        shown = [message for _, message in sorted(waited.values(), key=lambda of: -of[0])[:MOST_MESSAGES]]
    return [(m.source, (m.ready - t0) / (t1 - t0), m.target, (m.receive.ended - t0) / (t1 - t0)) for m in shown]


def save(trace: Trace, summary: dict[str, Any], folder: Path, title: str, hardware: str, whole: Trace) -> None:
    """Draw gantt.png, gantt.svg and gantt.pdf. Each rank has a row for its messages below its workers.

    Args:
        trace: the trace with each fused group split into its tasks.
        hardware: text on machine and tiles, below the title.
        whole: the trace with unsplit groups, and with the messages between ranks.
    """
    from matplotlib.patches import Patch

    chart, milliseconds = gantt(trace), summary["seconds"] * 1e3
    # Rows as (rank, number of the worker); -1: the rank's messages, below its workers.
    order: list[tuple[int, int]] = [(worker.rank, number) for number, worker in enumerate(trace.workers)]
    order += [(rank, -1) for rank in range(trace.ranks) if whole.messages]
    order.sort(key=lambda at: (at[0], at[1] < 0, at[1]))
    rows, of_ranks = len(order), lanes(whole)
    labels: list[str] = []
    of_messages: dict[int, int] = {}
    figure = new_figure((10, 2.2 + 0.42 * rows))
    axes = figure.add_subplot()
    for row, (rank, number) in enumerate(order):
        if number < 0:
            of_messages[rank] = row
            for k, (name, spans) in enumerate(of_ranks[rank].items()):
                bars = [(left * milliseconds, (right - left) * milliseconds) for left, right in spans]
                axes.broken_barh(bars, (row - 0.4 + 0.27 * k, 0.26), facecolors=LANES[name], linewidth=0)
            labels.append(f"rank {rank} messages\nwaiting {summary['ranks'][rank]['waiting']:.0%}")
            continue
        bars = [(b.left * milliseconds, (b.right - b.left) * milliseconds) for b in chart.rows[number]]
        colours = [chart.colours[b.kind] for b in chart.rows[number]]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours, linewidth=0)
        worker = summary["workers"][number]
        labels.append(f"{worker['name']}\nworking {worker['working']:.0%}")
    for source, left, target, right in arrows(whole):
        tail, head = (left * milliseconds, of_messages[source]), (right * milliseconds, of_messages[target])
        how = {"arrowstyle": "-|>", "linewidth": 0.5, "mutation_scale": 5, "color": "black", "alpha": 0.5}
        axes.annotate("", head, tail, arrowprops=how)
    axes.set_yticks(range(rows), labels)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, milliseconds)
    axes.set_xlabel("time (ms)")
    axes.set_title(title, fontsize=11, loc="left", pad=32)
    axes.annotate(hardware, (0, 1), (0, 5), "axes fraction", "offset points", va="bottom", fontsize=8, color="#59636e")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    starts = [date * milliseconds for date in step_starts(trace)]
    for date in starts[1:]:
        axes.axvline(date, color="black", linewidth=0.8, linestyle=":")
    named = {**dict(zip(chart.kinds, chart.colours, strict=True)), **(LANES if whole.messages else {})}
    patches = [Patch(color=of, label=kind) for kind, of in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    save_figure(figure, folder / "gantt")


def step_starts(trace: Trace) -> list[float]:
    """Return the start of each step's first task, as a share of the chart's time."""
    t0, t1 = trace.window
    steps = np.unique(trace.step[trace.step > 0])
    return [(int(trace.start[trace.step == step].min()) - t0) / (t1 - t0) for step in steps]


def titles(trace: Trace, bars: list[Bar], kinds: list[str]) -> Iterator[str]:
    """Yield for each bar the text that appears when the pointer is on it."""
    for bar in bars:
        if bar.task < 0:
            yield kinds[bar.kind]
            continue
        length = (int(trace.end[bar.task]) - int(trace.start[bar.task])) / 1e3
        info = trace.info_of(bar.task)
        estimated = " (estimated: its group's time shared)" if info.estimated else ""
        yield f"{info.name}, step {trace.step[bar.task]}: {length:,.1f} us{estimated}"
