"""The section `optimizer` of a run's YAML: an optimizer's settings and the schedule of its learning rate."""

import functools
from typing import Annotated, Any, Literal, cast

from pydantic import Field, create_model, model_validator

from nntile_py.config.schedules import SCHEDULES, own_schedule
from nntile_py.errors import ConfigError
from nntile_py.models.registry import code_of, resolved
from nntile_py.schema import (
    Natural,
    NonNegative,
    Positive,
    Section,
    only,
    validated,
)  # fmt: skip
from nntile_py.tasks.optimizer import OPTIMIZERS, Optimizer
from nntile_py.yaml_text import one_line


def _schedule(value: Any) -> str | None:
    if isinstance(value, str) and code_of(value):
        value = resolved(value)
        own_schedule(value)
        return str(value)
    return value if isinstance(value, str) and value in SCHEDULES else None


ScheduleName = Annotated[
    str,
    *only(
        f"{', '.join(map(repr, SCHEDULES))} or 'my_file.py:function'", _schedule,
        anyOf=[{"enum": [*SCHEDULES]}, {"type": "string", "pattern": r"\.py:"}],
    ),
]  # fmt: skip
DecaySteps = Annotated[
    float,
    *only(
        "a number of updates of at least 1, or a share of all updates, above 0 and below 1",
        lambda v: v if (type(v) is int and 1 <= v < 2**63) or (type(v) is float and 0 < v < 1) else None,
        anyOf=[{"type": "integer", "minimum": 1}, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}],
    ),
]  # fmt: skip


class Schedule(Section):
    """Learning rate of each update, and the limit of the gradient's norm."""

    name: str = "adamw"
    """The method: AdamW, SGD with momentum or Muon as in torch.optim, or Lion."""
    min_lr: NonNegative | None = None
    """Learning rate at the end of the schedules cosine, linear and wsd; null: a tenth of `lr`."""
    warmup_steps: Natural = 0
    """Updates in which the learning rate rises from 0 to `lr`."""
    schedule: ScheduleName = "cosine"
    """The learning rate after the warm-up: falls to `min_lr` as half a cosine (`cosine`) or on a line (`linear`), stays
    at `lr` (`constant`), stays at `lr` and then falls on a line (`wsd`: warm-up, stable, decay), or falls as
    1 / sqrt(step) (`inverse_sqrt`). `my_file.py:function` is a function(step, steps, lr) of a Python file,
    which returns the rate."""
    decay_steps: DecaySteps = 0.1
    """Length of the fall at the end of the schedule wsd: a number of updates, or a share of `train.steps`."""
    clip_grad_norm: Positive | None = None
    """Largest norm of the gradient; a larger gradient is scaled down to it. Null: no limit."""


class OptimizerSection(Optimizer, Schedule):
    """How the weights are updated."""

    @model_validator(mode="after")
    def _fitting(self) -> "OptimizerSection":
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ConfigError(f"optimizer.min_lr: got {self.min_lr}; allowed: at most optimizer.lr = {self.lr}")
        return self


@functools.cache
def optimizer_section(name: str) -> type[OptimizerSection]:
    """Return the class of the section `optimizer` for a method such as adamw: the method's settings and Schedule."""
    method = OPTIMIZERS[name]
    field = Field(name, description=Schedule.model_fields["name"].description)
    bases: Any = (method, OptimizerSection)
    names = {"__base__": bases, "__doc__": OptimizerSection.__doc__, "name": (Literal[name], field)}
    section: Any = create_model(method.__name__, **names)
    return cast(type[OptimizerSection], section)


def read_optimizer(given: Any) -> Any:
    """Return the section `optimizer` as an instance of its method's class.

    A key that AdamW (the default) has and the chosen method lacks is ignored. Any other key that the chosen method
    lacks is refused, unless its value is the default of a method with this key."""
    if not isinstance(given, dict):
        return given
    chosen = given.get("name", Schedule().name)
    if chosen not in [*OPTIMIZERS]:
        raise ConfigError(f"optimizer.name: got {chosen!r}; allowed: {' or '.join(map(repr, OPTIMIZERS))}")
    section = optimizer_section(chosen)
    for key in given.keys() - section.model_fields.keys():
        fields = {name: of.model_fields[key] for name, of in OPTIMIZERS.items() if key in of.model_fields}
        if not fields:
            continue
        if Schedule().name not in fields and all(given[key] != field.default for field in fields.values()):
            defaults = (one_line(field.default) for field in fields.values())
            default = " or ".join(dict.fromkeys(defaults))
            need = f"{default} unless optimizer.name is {' or '.join(fields)}"
            raise ConfigError(f"optimizer.{key}: got {one_line(given[key])}; allowed: {need}")
        given = {other: value for other, value in given.items() if other != key}
    return validated(section, given, "optimizer.")
