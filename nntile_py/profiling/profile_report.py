"""report.html: the profile as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nntile_py.profiling import perfetto
from nntile_py.profiling.gantt import LANES, gantt, lanes, step_starts, titles
from nntile_py.profiling.trace import Trace
from nntile_py.system.folders import replace_file
from nntile_py.system.pages import templates
from nntile_py.system.units import counted, duration, percent, size

SHARES = (("working", "#009e73"), ("communicating", "#e69f00"), ("overhead", "#d55e00"), ("idle", "#d0d4d8"))
POINTS = 600  # largest number of points of a curve


def write(trace: Trace, parts: Trace, summary: dict[str, Any], path: Path, title: str, hardware: str) -> None:
    """Write report.html.

    Args:
        parts: the trace with each fused group split into its tasks, see `trace_analysis.parts`.
        hardware: text on machine and tiles.
    """
    environment = templates(Path(__file__).parent)
    environment.filters |= {"size": size, "duration": duration, "percent": percent, "counted": counted}
    chart = gantt(parts)
    rows = [
        [(bar.left * 1e4, (bar.right - bar.left) * 1e4, chart.colours[bar.kind], text)
         for bar, text in zip(bars, titles(parts, bars, chart.kinds), strict=True)]
        for bars in chart.rows
    ]  # fmt: skip
    messages = [
        [(4 + 32 * k, left * 1e4, (right - left) * 1e4, LANES[name], name)
         for k, (name, spans) in enumerate(of_rank.items()) for left, right in spans]
        for of_rank in lanes(trace)
    ]  # fmt: skip
    curves = [curve(trace, "tasks in flight", *perfetto.in_flight(trace), "")]
    curves += [curve(trace, f"memory of {node}", *points, "B") for node, points in perfetto.memory(trace).items()]
    text = environment.get_template("report.html.j2").render(
        title=title, hardware=hardware, s=summary, rows=rows, shares=SHARES, curves=curves, messages=messages,
        lanes=LANES, kinds=list(zip(chart.kinds, chart.colours, strict=True)),
        steps=[start * 1e4 for start in step_starts(trace)[1:]],
    )  # fmt: skip
    replace_file(path, text)


def curve(trace: Trace, name: str, dates: Any, values: Any, unit: str) -> dict[str, Any]:
    """Return a step curve for the template: name, largest value as text, SVG points in a box of 10000 x 100."""
    t0, t1 = trace.window
    points = perfetto.sampled(dates, values, POINTS)
    top = max((value for _, value in points), default=0) or 1
    line, last = [], 100.0
    for date, value in points:
        x, y = (date - t0) / (t1 - t0) * 1e4, 100 - 96 * value / top
        line.append(f"{x:.0f},{last:.1f} {x:.0f},{y:.1f}")
        last = y
    return {"name": name, "top": size(top) if unit else f"{top:,}", "points": " ".join(line)}
