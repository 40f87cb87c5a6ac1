"""The steps of a run: what each is given, what is told of it, when the run is measured and saved."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nntile_py.config.run_config import RunConfig
from nntile_py.config.sections import OptimizerSection
from nntile_py.data.dataset import Dataset
from nntile_py.errors import NotFinite
from nntile_py.training.checkpoint_writer import Saver
from nntile_py.training.collectives import Giver, Silent, agree, told_by_first
from nntile_py.training.display import Display
from nntile_py.training.run_folder import Metrics
from nntile_py.training.step_handle import Pending
from nntile_py.training.trainer import STEPS_IN_FLIGHT, Trainer

SKIPS = 10  # steps in a row that are skipped: no later one will be better


def learning_rate(optimizer: OptimizerSection, step: int, steps: int) -> float:
    """Of step 1 ... `steps`: a linear warm-up to lr, then constant or a cosine that reaches min_lr at the last step."""
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    low = optimizer.min_lr or 0.0
    part = (step - optimizer.warmup_steps) / (steps - optimizer.warmup_steps)
    return low + (optimizer.lr - low) * 0.5 * (1 + math.cos(math.pi * part))


def run_steps(
    config: RunConfig, dataset: Dataset, trainer: Trainer, metrics: Metrics | Silent,
    display: Display | Silent, saver: Saver | Giver, stop: list[str],
) -> tuple[float, dict[str, Any] | None]:  # fmt: skip
    """All steps that are left, or those up to a signal: the held-out loss before the first, and what was last measured
    since."""
    how = config.train
    in_flight: deque[tuple[Pending, float]] = deque()
    known = (line["held_out_loss_before"] for line in metrics.lines if "held_out_loss_before" in line)
    before, last = told_by_first(next(known, math.nan)), None
    first = _measured(dataset, trainer)["held_out_loss"] if math.isnan(before) else before
    skipped = 0  # in a row, up to now
    clock = time.perf_counter()
    for step in range(trainer.steps + 1, how.steps + 2):
        asked, due = agree(stop, step <= how.steps and saver.due(step))
        ends = step > how.steps or asked
        if not ends:
            lr = learning_rate(config.optimizer, step, how.steps)
            in_flight.append((trainer.submit(dataset.train(step), lr=lr), lr))
        measures = not ends and (step % how.eval_every == 0 or step == how.steps)
        due = due and not ends
        while len(in_flight) >= (1 if ends or measures or (due and saver.needs_report) else STEPS_IN_FLIGHT):
            pending, lr = in_flight.popleft()
            done, line = pending.step, {"step": pending.step, "loss": math.nan, "lr": lr, "grad_norm": math.nan}
            with _ends_where_not_finite(metrics, line):
                result = pending.result()
                line |= {"loss": result.loss, "grad_norm": result.grad_norm}
                if not (result.skipped or (math.isfinite(result.loss) and math.isfinite(result.grad_norm))):
                    raise NotFinite(f"step {done}: the loss is {result.loss}, the gradient norm {result.grad_norm}")
                if not result.overflow:  # of which LossScale counts
                    skipped = skipped + 1 if result.skipped else 0
                if skipped == SKIPS:
                    limit = f"gradient norms not below train.skip_above_norm = {how.skip_above_norm:g}"
                    raise NotFinite(f"steps {done - SKIPS + 1} to {done}: {limit}, the last {result.grad_norm:g}")
            took, clock = time.perf_counter() - clock, time.perf_counter()
            line |= {"tokens_per_s": pending.tokens / took, "step_time_s": took}
            if result.skipped:
                line["skipped"] = True
            if result.loss_scale:
                line["loss_scale"] = result.loss_scale
            if done == 1:
                line["held_out_loss_before"] = first
            if measures and not in_flight:
                with _ends_where_not_finite(metrics, line | {"held_out_loss": math.nan}):
                    last = _measured(dataset, trainer, whole=step == how.steps)
                line |= last
                clock = time.perf_counter()
            metrics.write(line)
            saver.reported(done, good=not result.skipped)
            display.show(line)
        if ends:
            break
        if due:
            saver.begin(step)
    if skipped and asked:
        _measured(dataset, trainer)  # raises if the weights are what is wrong
    return first, last


@contextmanager
def _ends_where_not_finite(metrics: Metrics | Silent, line: dict[str, Any]) -> Iterator[None]:
    """`line`: what the metrics get before the run ends."""
    try:
        yield
    except NotFinite as error:
        metrics.write(line)
        how = "" if "use precision" in str(error) else "try a smaller optimizer.lr, or optimizer.clip_grad_norm=1.0"
        look = "" if "first such value" in str(error) else "debug.nonfinite=true tells where it came from"
        more = "; ".join(filter(None, (how, look)))
        raise NotFinite(f"{error}; stopped, the weights are not written" + f" ({more})" * bool(more)) from None


def _measured(dataset: Dataset, trainer: Trainer, whole: bool = False) -> dict[str, Any]:
    found = dataset.measure(trainer, whole)
    if not math.isfinite(loss := found["held_out_loss"]):
        raise NotFinite(f"after step {trainer.steps} the held-out loss is {loss}")
    return found
