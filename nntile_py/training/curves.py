"""Curves of runs from their metrics.jsonl: as a picture, and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntile_py.checkpoint.run_folder import LOSSES, METRICS, read_metrics
from nntile_py.system.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_STEPS = 20  # a shorter run has no picture
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass
class Curves:
    """Values of a run by step. A step without a finite value, such as an infinite gradient norm, is left out.

    Attributes:
        steps: Steps that have a training loss.
        loss: The training loss of each of these steps.
        measured: Steps after which the held-out loss was measured; 0 for the measurement before the first step.
        held_out: These held-out losses.
        values: {name in metrics.jsonl: (steps, values)} of all other numbers, such as `lr` and `tokens_per_s`.
        changes: Changes of the config after which losses cannot be compared with earlier ones.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    values: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def parts(self) -> list[Curves]:
        """Return the losses before, between and after the changes. Losses of one part can be compared."""
        starts = [(0, 0), *((change.losses, change.measurements) for change in self.changes)]
        ends = [*starts[1:], (len(self.steps), len(self.measured))]
        return [
            Curves(self.steps[a:b], self.loss[a:b], self.measured[c:d], self.held_out[c:d])
            for (a, c), (b, d) in zip(starts, ends, strict=True)
        ]


@dataclass(frozen=True)
class Change:
    """A change of a run's config after which losses cannot be compared with earlier ones.

    Attributes:
        step: The last step before the change.
        text: What has changed, such as "train.seq was 64, is 128".
        losses, measurements: Number of training losses and of held-out losses before the change.
    """

    step: int
    text: str
    losses: int
    measurements: int


def curves_of(lines: Sequence[Mapping[str, Any]]) -> Curves:
    """Return the curves of the lines of a metrics.jsonl."""
    curves = Curves()
    for line in lines:
        step = line["step"]
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        if isinstance(changed := line.get("changed"), str):
            curves.changes.append(Change(step - 1, changed, len(curves.steps), len(curves.measured)))
        if (before := numbers.pop("held_out_loss_before", None)) is not None:
            curves.measured.append(step - 1)
            curves.held_out.append(before)
        if "loss" in numbers:
            curves.steps.append(step)
            curves.loss.append(numbers.pop("loss"))
        if "held_out_loss" in numbers:
            curves.measured.append(step)
            curves.held_out.append(numbers.pop("held_out_loss"))
        for key, value in numbers.items():
            steps, values = curves.values.setdefault(key, ([], []))
            steps.append(step)
            values.append(value)
    return curves


def smoothed(values: Sequence[float], share: float = 0.05) -> list[float]:
    """Return moving averages: each result is the mean of about a `share` of all values, half of them before its own.

    The first results are means of fewer values, as many before their own value as after it. The last results are means
    of the values that there are."""
    sums, half, result = [0.0, *accumulate(values)], int(share * len(values) / 2), []
    for at in range(len(values)):
        reach = min(half, at)
        first, end = at - reach, min(at + reach + 1, len(values))
        result.append((sums[end] - sums[first]) / (end - first))
    return result


# -- text


def terminal_curve(curves: Curves, width: int = 78, height: int = 10) -> str:
    """Return the smoothed training loss (dots) and the held-out loss (o) over the steps as text.

    A line below names each change after which losses cannot be compared with earlier ones."""
    smooth = [loss for part in curves.parts() for loss in smoothed(part.loss)]
    points = [(step, loss, "·") for step, loss in zip(curves.steps, smooth, strict=True)]
    points += [(step, loss, "o") for step, loss in zip(curves.measured, curves.held_out, strict=True)]
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return ""
    losses = [loss for _, loss, _ in points]
    first, last = min(step for step, *_ in points), max(step for step, *_ in points)
    low, high = min(losses), max(losses)
    labels = f"{high:.3f}", f"{low:.3f}"
    left = max(map(len, labels))
    columns = width - left - 2
    rows = [[" "] * columns for _ in range(height)]
    for step, loss, mark in points:
        column = round((step - first) / max(last - first, 1) * (columns - 1))
        row = round((high - loss) / ((high - low) or 1.0) * (height - 1))
        rows[row][column] = mark
    names = {0: labels[0], height - 1: labels[1]}
    lines = [f"{names.get(k, ''):>{left}} │{''.join(row).rstrip()}" for k, row in enumerate(rows)]
    ends = f"step {first}", f"{last}"
    middle = "· training loss  o held-out loss"
    gap = columns - len(ends[0]) - len(ends[1])
    no = "losses before and after cannot be compared"
    changes = [f"after step {change.step}: {change.text}; {no}" for change in curves.changes]
    return "\n".join([*lines, " " * (left + 2) + ends[0] + f"{middle:^{gap}}" + ends[1], *changes])


# -- pictures


def draw_losses(runs: Mapping[str, Curves]) -> Figure:
    """Return a figure: losses over the steps, and below them the learning rate. One colour for each run."""
    figure = new_figure((8.0, 6.0))
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for k, (name, curves) in enumerate(runs.items()):
        colour, alone = COLOURS[k % len(COLOURS)], len(runs) == 1
        label = "training loss, smoothed" if alone else f"{name}: training, smoothed"
        for part in curves.parts():
            losses.plot(part.steps, part.loss, color=colour, alpha=0.25, linewidth=0.8)
            losses.plot(part.steps, smoothed(part.loss), color=colour, linewidth=1.6, label=label)
            label = ""  # one entry of the legend for all parts
        for change in curves.changes:
            losses.axvline(change.step, color=colour, linewidth=1.0, linestyle=":")
            at, foot = losses.get_xaxis_transform(), (change.step, 0.02)
            losses.annotate(change.text, foot, (3, 0), at, "offset points", fontsize=8)
        colour = COLOURS[1] if alone else colour
        label = "held-out loss" if alone else f"{name}: held out"
        for part in curves.parts():
            losses.plot(part.measured, part.held_out, "o--", color=colour, markersize=4, linewidth=1.2, label=label)
            label = ""
        steps, values = curves.values.get("lr", ([], []))
        rates.plot(steps, values, color=COLOURS[k % len(COLOURS)], linewidth=1.2)
    finish(losses, "loss")
    limit_to_results(losses, runs)
    losses.legend(fontsize=8, frameon=False)
    finish(rates, "learning rate")
    rates.set_xlabel("step")
    return figure


def finish(axes: Axes, label: str) -> None:
    """Give axes a label, a light grid, and no frame at the top and the right."""
    axes.set_ylabel(label)
    axes.grid(color="#dde1e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def limit_to_results(axes: Axes, runs: Mapping[str, Curves]) -> None:
    """Limit the axis of the loss so that single peaks, which would flatten the curves, are not in the picture."""
    all_losses = (loss for curves in runs.values() for loss in [*curves.loss, *curves.held_out])
    losses = sorted(loss for loss in all_losses if math.isfinite(loss))
    if not losses:
        return
    firsts = (part.held_out[0] for curves in runs.values() for part in curves.parts() if part.held_out)
    most = max([losses[int(0.99 * (len(losses) - 1))], *firsts])
    margin = 0.05 * (most - losses[0]) or 0.1
    axes.set_ylim(losses[0] - margin, most + margin)


def save_curve(folder: Path, report: Callable[[str], None], terminal: bool) -> None:
    """Draw the losses of the run in `folder` into LOSSES. Reports the file, or the error that prevents it.

    A run of fewer than LEAST_STEPS steps has no picture. terminal: Report the curve as text, too."""
    try:
        curves = curves_of(read_metrics(folder / METRICS))
        if len(curves.steps) < LEAST_STEPS:
            return
        if terminal and (text := terminal_curve(curves)):
            report(f"\n{text}\n")
        save_figure(draw_losses({folder.name: curves}), folder / LOSSES.removesuffix(".png"), ["png"])
        report(f"losses drawn in {folder / LOSSES}")
    except OSError as error:
        report(f"no picture of the losses: {error.filename}: {error.strerror}")
