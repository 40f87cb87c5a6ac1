"""Show a run's progress on the console: printed lines and, on a terminal, a live display."""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from nntile_py.config.run_config import RunConfig
from nntile_py.system.units import clock_text, counted
from nntile_py.training.trainer import Trainer

_LIMIT = "its gradient norm is not below train.skip_above_norm"


class Display:
    """Prints a line every `train.log_every` steps. On a terminal, also shows a live display until the run ends."""

    def __init__(self, console: Console, config: RunConfig, trainer: Trainer) -> None:
        self._console, self._train, self._trainer = console, config.train, trainer
        self._times: deque[tuple[float, ...]] = deque(maxlen=20)  # (seconds, tokens, Tflop) of the last steps
        self._losses: deque[float] = deque(maxlen=20)
        self._held_out = ""
        self._speed = ""
        self._skipped = Counter[str]()  # number of skipped steps, by reason
        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.fields[left]}")
        self._progress = Progress(*columns, expand=True)
        self._task = self._progress.add_task("", total=config.train.steps, left="")
        self._live = Live(self._progress, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._console.is_terminal and self._speed:  # the lines printed on a terminal lack the speed
            say(self._console, self._speed)

    def show(self, line: dict[str, Any]) -> None:
        """Show the metrics of one step. line: the step's entry in metrics.jsonl."""
        step, steps = line["step"], self._train.steps
        rates = line["tokens_per_s"], line["tflop_per_s"]
        self._times.append((line["step_time_s"], *(rate * line["step_time_s"] for rate in rates)))
        seconds, tokens, tflop = (sum(values) for values in zip(*self._times, strict=True))
        if "held_out_loss" in line:
            self._held_out = f"held-out loss {line['held_out_loss']:.4f}  "
            if "accuracy" in line:
                self._held_out += f"accuracy {line['accuracy']:.3f}  "
            if (score := line.get("f1", line.get("f1_macro"))) is not None:
                self._held_out += f"F1 {score:.3f}  "
        left = seconds / len(self._times) * (steps - step)
        left_text = f"{clock_text(left)} left" if left >= 1 else ""
        overflow = "loss_scale" in line and not math.isfinite(line["grad_norm"])
        reason = "gradients overflow, the loss' scale is halved" if overflow else _LIMIT
        skipped = f"skipped, {reason}: " if "skipped" in line else ""
        if skipped:
            self._skipped["gradients that overflowed" if overflow else "train.skip_above_norm"] += 1
        learnt = f"{skipped}loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3g}  lr {line['lr']:.2e}"
        self._speed = speed = (
            f"{tokens / seconds:,.0f} tokens/s"
            f"  {tflop / seconds:.3g} TFLOP/s"
            f"  memory {size(self._trainer.memory_bytes())}"
        )
        self._progress.update(self._task, completed=step, left=left_text)
        if not skipped:
            self._losses.append(line["loss"])
        mean = f"mean loss of {counted(len(self._losses), 'step')} {fmean(self._losses):.4f}  " if self._losses else ""
        prints = step == 1 or step % self._train.log_every == 0 or bool(line.keys() & {"held_out_loss", "skipped"})
        # The live display is updated first: printing a line redraws it.
        self._live.update(Group(self._progress, Text(f"{self._held_out}{learnt}\n{mean}{speed}")), refresh=prints)
        if prints:
            now = self._held_out if "held_out_loss" in line else ""
            # On a terminal, leave out speed and time left: the live display shows them.
            rest = "" if self._console.is_terminal else f"  {speed}  {left_text}".rstrip()
            say(self._console, f"step {step}/{steps}  {now}{learnt}{rest}")

    def skips(self) -> str:
        """Return a sentence with the number of skipped steps and the reasons; an empty string if there are none."""
        count, each = self._skipped.total(), self._skipped.items()
        reasons = ", ".join(name if len(each) == 1 else f"{name}: {steps}" for name, steps in each)
        return f"{count} step{'s were' if count > 1 else ' was'} skipped ({reasons})" if count else ""


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
