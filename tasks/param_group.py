"""Groups of parameters with settings of their own: entries of the key `optimizer.groups`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import ConfigDict

from nntile_py.errors import ConfigError
from nntile_py.schema import Names, NonNegative, Section, only, validated
from nntile_py.typed import plain


def matches(weight: str, patterns: Sequence[str]) -> bool:
    """Return whether the name of a weight matches one of the patterns of Python's fnmatch."""
    return any(fnmatchcase(weight, pattern) for pattern in patterns)


def check_match(key: str, patterns: Sequence[str], weights: Sequence[str]) -> None:
    """Raise ConfigError if one of the patterns matches none of the names `weights`; key: config key of the patterns."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in weights):
            need = f"a pattern of names such as {', '.join(weights[-3:])}"
            raise ConfigError(f"{key}: {pattern!r} matches no weight; allowed: {need}")


class ParamGroup(Section):
    """Weights whose names match a pattern, and their settings."""

    model_config = ConfigDict(frozen=True)

    match: Names
    """Patterns of names of weights in checkpoints, with the wildcards *, ? and [...] of Python's fnmatch."""
    lr_scale: NonNegative | None = None
    """Factor of the learning rate."""
    lr: NonNegative | None = None
    """Learning rate instead of `optimizer.lr`; it follows the warm-up and the schedule in proportion."""
    weight_decay: NonNegative | None = None
    """Weight decay instead of `optimizer.weight_decay`; it applies to all weights of the group."""

    def matches(self, weight: str) -> bool:
        return matches(weight, self.match)

    def scale(self, lr: float) -> float:
        """Return the factor by which this group's learning rate differs from the optimizer's learning rate `lr`."""
        if self.lr is not None:
            return self.lr / lr
        return 1.0 if self.lr_scale is None else self.lr_scale


def _groups(value: Any) -> tuple[ParamGroup, ...] | None:
    if not isinstance(value, list | tuple) or not all(isinstance(one, ParamGroup | Mapping) for one in value):
        return None
    return tuple(_group(one, f"optimizer.groups[{number}]") for number, one in enumerate(value))


def _group(given: ParamGroup | Mapping[str, Any], key: str) -> ParamGroup:
    if isinstance(given, ParamGroup):
        return given
    group = validated(ParamGroup, {name: plain(value) for name, value in given.items()}, f"{key}.")
    if not group.match:
        raise ConfigError(f"{key}.match: got []; allowed: at least one pattern")
    if None not in (group.lr, group.lr_scale):
        raise ConfigError(f"{key}.lr: got {group.lr}; allowed with lr_scale: null")
    return group


Groups = Annotated[
    Sequence[ParamGroup],
    *only(
        f"a list of sections with {', '.join(ParamGroup.model_fields)}", _groups,
        type="array", items=ParamGroup.model_json_schema(),
    ),
]  # fmt: skip
