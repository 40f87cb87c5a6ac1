"""Learning rate schedules: functions of the step's number, the number of steps and the section `optimizer`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nntile_py.errors import ConfigError, raised
from nntile_py.models.registry import function_of

TIMESCALE = 10_000  # of inverse_sqrt without warm-up, as in transformers


class RateKeys(Protocol):
    """The keys of the section `optimizer` that schedules read."""

    lr: float
    min_lr: float | None
    warmup_steps: int
    schedule: str
    decay_steps: float


def learning_rate(keys: RateKeys, step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up from 0 to `lr`, then the schedule.

    Args:
        step: Number of the step, 1 to `steps`.
        steps: Number of steps of the run.

    Raises:
        ConfigError: The user's function raises an error, or returns no learning rate.
    """
    if step <= keys.warmup_steps:
        return keys.lr * step / keys.warmup_steps
    if keys.schedule in SCHEDULES:
        return SCHEDULES[keys.schedule](keys, step, steps)
    return _own_rate(keys, step, steps)


def constant(keys: RateKeys, step: int, steps: int) -> float:
    """Return `lr`, as transformers.get_constant_schedule_with_warmup."""
    return keys.lr


def cosine(keys: RateKeys, step: int, steps: int) -> float:
    """Return a rate that falls as half a cosine (Loshchilov and Hutter 2017, eq. 5) to `min_lr` at the last step."""
    part = _part(step, keys.warmup_steps, steps)
    return _falling(keys, 0.5 * (1 + math.cos(math.pi * part)))


def linear(keys: RateKeys, step: int, steps: int) -> float:
    """Return a rate that falls linearly to `min_lr` at the last step."""
    return _falling(keys, 1 - _part(step, keys.warmup_steps, steps))


def wsd(keys: RateKeys, step: int, steps: int) -> float:
    """Return `lr`, and a rate that falls linearly to `min_lr` in the last `decay_steps`.

    Source: Hu et al. (2024), MiniCPM, eq. 1: warm-up, stable, decay."""
    decay = keys.decay_steps if keys.decay_steps >= 1 else max(1, round(keys.decay_steps * steps))
    return _falling(keys, 1 - _part(step, max(keys.warmup_steps, int(steps - decay)), steps))


def inverse_sqrt(keys: RateKeys, step: int, steps: int) -> float:
    """Return the rate that falls as 1 / sqrt(step) (Vaswani et al. 2017, eq. 3); see get_inverse_sqrt_schedule."""
    timescale = keys.warmup_steps or TIMESCALE
    return keys.lr / math.sqrt((step - keys.warmup_steps + timescale) / timescale)


SCHEDULES: dict[str, Callable[[RateKeys, int, int], float]] = {
    function.__name__: function for function in (cosine, linear, constant, wsd, inverse_sqrt)
}


def _part(step: int, begin: int, end: int) -> float:
    """Return the share of the steps from `begin` to `end` that is done after `step`; 0 before `begin`."""
    return max(0, step - begin) / (end - begin)


def _falling(keys: RateKeys, share: float) -> float:
    """Return the rate that lies `share` of the way from `min_lr` to `lr`."""
    least = keys.lr / 10 if keys.min_lr is None else keys.min_lr
    return least + (keys.lr - least) * share


# -- functions of a user's file


def own_schedule(name: str) -> Callable[[int, int, float], Any]:
    """Return the function that a schedule `my_file.py:function` names. Runs the code of the file.

    Raises:
        ConfigError: There is no such function.
    """
    return function_of(name, "optimizer.schedule", "a function(step, steps, lr) that returns a number")


def check_rates(keys: RateKeys, steps: int) -> None:
    """Raise ConfigError before the first step if the user's function returns no learning rate for one of the steps."""
    if keys.schedule not in SCHEDULES:
        for step in range(keys.warmup_steps + 1, steps + 1):
            _own_rate(keys, step, steps)


def _own_rate(keys: RateKeys, step: int, steps: int) -> float:
    call = f"optimizer.schedule: {keys.schedule}({step}, {steps}, {keys.lr:g})"
    try:
        rate = own_schedule(keys.schedule)(step, steps, keys.lr)
    except ConfigError:
        raise
    except Exception as error:  # the user's function may raise anything
        path = str(Path(keys.schedule.rpartition(":")[0]))
        raise ConfigError(f"{call} raises {raised(error, path)}; allowed: a number of at least 0") from error
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(rate, bool) or not math.isfinite(number) or number < 0:
        raise ConfigError(f"{call} returns {rate!r}; allowed: a number of at least 0")
    return number
