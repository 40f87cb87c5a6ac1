"""The training loop: submit steps, wait for their results, measure the held-out loss, save checkpoints."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nntile_py.checkpoint.run_folder import Metrics
from nntile_py.checkpoint.writer import CheckpointWriter, TileSender
from nntile_py.config.run_config import RunConfig
from nntile_py.config.schedules import learning_rate
from nntile_py.config.table_models import OF_TABLES
from nntile_py.data.dataset import Dataset, Inputs
from nntile_py.errors import NotFinite
from nntile_py.training.collectives import NoOutput, agree, from_rank_0
from nntile_py.training.display import Display
from nntile_py.training.prefetch import Prefetch
from nntile_py.training.step_handle import STEPS_IN_FLIGHT, Pending, StepResult
from nntile_py.training.trainer import Trainer

MAX_SKIPS = 10  # the run ends with NotFinite after this number of skipped steps in a row


def run_steps(
    config: RunConfig, dataset: Dataset, trainer: Trainer, metrics: Metrics | NoOutput, display: Display | NoOutput,
    saver: CheckpointWriter | TileSender, stop: list[str],
) -> tuple[tuple[int, float], dict[str, Any] | None]:  # fmt: skip
    """Train the remaining steps of a run; stop early if a signal comes. A thread makes the batches.

    Returns:
        (start, loss): the first held-out loss that can be compared with the last one, measured after step `start`.
        last: the entries of the last measurement that this process made after a step; None without such a measurement.
    """
    with Prefetch(dataset.train, config.train.steps) as batches:
        return _run_steps(config, dataset, batches, trainer, metrics, display, saver, stop)


def _run_steps(
    config: RunConfig, dataset: Dataset, batches: Prefetch[Inputs], trainer: Trainer, metrics: Metrics | NoOutput,
    display: Display | NoOutput, saver: CheckpointWriter | TileSender, stop: list[str],
) -> tuple[tuple[int, float], dict[str, Any] | None]:  # fmt: skip
    train = config.train
    start, loss_before = _first_measured(metrics, trainer.steps)
    last = None
    if measures_first := math.isnan(loss_before):
        loss_before = _measured(dataset, trainer)["held_out_loss"]
    in_flight: deque[tuple[Pending, float, float]] = deque()
    skips = _SkipCount(train.skip_above_norm)
    clock = time.perf_counter()
    for step in range(trainer.steps + 1, train.steps + 2):  # the last iteration submits no step
        stopped, due = agree(stop, step <= train.steps and saver.due(step))
        ends = step > train.steps or stopped

        # Submit the step; it runs while earlier steps are reported.
        if not ends:
            lr = learning_rate(config.optimizer, step, train.steps)
            in_flight.append((trainer.submit(batches.take(step), lr=lr), lr, batches.waited))

        # Wait for results until one step is in flight; until no step is, if the run measures or ends now, or saves a
        # checkpoint that needs the results of all steps.
        measures = not ends and (step % train.eval_every == 0 or step == train.steps)
        due = due and not ends
        takes_all = ends or measures or (due and saver.needs_report)
        while len(in_flight) >= (1 if takes_all else STEPS_IN_FLIGHT):
            pending, lr, waited = in_flight.popleft()
            line: dict[str, Any] = {"step": pending.step, "loss": math.nan, "lr": lr, "grad_norm": math.nan}
            with _ends_if_not_finite(metrics, line):
                result = pending.result()
                line |= {"loss": result.loss, "grad_norm": result.grad_norm}
                _check_finite(result)
                skips.count(result)
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            line |= _measurements(pending, result, seconds, waited, trainer.memory_bytes())
            if measures_first and result.step == start + 1:
                line["held_out_loss_before"] = loss_before
            if measures and not in_flight:
                with _ends_if_not_finite(metrics, line | {"held_out_loss": math.nan}):
                    last = _measured(dataset, trainer, whole=step == train.steps)
                line |= last
                clock = time.perf_counter()
            metrics.write(line)
            saver.reported(result.step, good=not result.skipped)
            display.show(line)
        if ends:
            break
        if measures and last and config.checkpoint.best:
            # Compare losses on the same part of the held-out data: a classifier's last measurement reads all of it.
            whole = step == train.steps and config.aim in OF_TABLES
            loss = (_measured(dataset, trainer) if whole else last)["held_out_loss"]
            due = bool(from_rank_0(saver.improves(step, loss) or due))
        if due:
            saver.begin(step)
    if skips.in_a_row and stopped:
        _measured(dataset, trainer)  # raises NotFinite if steps were skipped because weights are not finite
    return (start, loss_before), last


def _first_measured(metrics: Metrics | NoOutput, steps: int) -> tuple[int, float]:
    """Return (step, held-out loss after it) of the earliest measurement since the conditions of measurements changed.

    The loss is nan, and the step is `steps`, if it must be measured now: in a new run, if the metrics lack it, and if a
    run resumes with other conditions, see changed_conditions."""
    step, loss = steps, math.nan
    if "changed" not in metrics.first:
        for line in metrics.lines:
            if "held_out_loss_before" in line:
                step, loss = line["step"] - 1, line["held_out_loss_before"]
    return int(from_rank_0(step)), from_rank_0(loss)


def _measurements(
    step: Pending, result: StepResult, seconds: float, waited: float, memory_bytes: int
) -> dict[str, Any]:
    """Return the entries of a step's line besides losses and rates.

    Args:
        step: The step.
        result: The step's result.
        seconds: Seconds from the result of the previous step to this result.
        waited: Seconds that the run waited for the step's batch.
        memory_bytes: Memory that tiles take."""
    line: dict[str, Any] = {"tokens_per_s": step.tokens / seconds, "tflop_per_s": step.flop / seconds / 1e12}
    line |= {"step_time_s": seconds, "data_wait_s": waited, "time": round(time.time(), 3)}
    line["memory_bytes"] = memory_bytes
    if result.skipped:
        line["skipped"] = True
    if result.loss_scale:
        line["loss_scale"] = result.loss_scale
    return line


class _SkipCount:
    """Counts skipped steps in a row, and ends the run after MAX_SKIPS of them."""

    def __init__(self, limit: float | None) -> None:
        self.in_a_row, self._limit = 0, limit

    def count(self, result: StepResult) -> None:
        """Count a step's result. Raises NotFinite after MAX_SKIPS skipped steps in a row.

        A step whose gradients overflow does not count: LossScale handles it."""
        if result.overflow:
            return
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        if self.in_a_row == MAX_SKIPS:
            norms = f"gradient norms not below train.skip_above_norm = {self._limit:g}"
            steps = f"steps {result.step - MAX_SKIPS + 1} to {result.step}"
            raise NotFinite(f"{steps}: {norms}, the last {result.grad_norm:g}")


def _check_finite(result: StepResult) -> None:
    if not (result.skipped or (math.isfinite(result.loss) and math.isfinite(result.grad_norm))):
        raise NotFinite(f"step {result.step}: the loss is {result.loss}, the gradient norm {result.grad_norm}")


@contextmanager
def _ends_if_not_finite(metrics: Metrics | NoOutput, line: dict[str, Any]) -> Iterator[None]:
    """If the block raises NotFinite, write `line` to the metrics and raise the error again with advice added."""
    try:
        yield
    except NotFinite as error:
        metrics.write(line)
        setting = "" if "use precision" in str(error) else "try a smaller optimizer.lr, or optimizer.clip_grad_norm=1.0"
        source = "" if "first such value" in str(error) else "debug.nonfinite=true names the operator that wrote it"
        advice = "; ".join(filter(None, (setting, source)))
        raise NotFinite(f"{error}; stopped, the weights are not written" + f" ({advice})" * bool(advice)) from None


def _measured(dataset: Dataset, trainer: Trainer, whole: bool = False) -> dict[str, Any]:
    measured = dataset.measure(trainer, whole)
    if not math.isfinite(loss := measured["held_out_loss"]):
        raise NotFinite(f"after step {trainer.steps} the held-out loss is {loss}")
    return measured
